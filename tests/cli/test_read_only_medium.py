"""A volume in a file system that is mounted read-only: an image, a snapshot, a disk that went bad."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_lab import Place, assert_fails, kvfuse
from posix_calls import fails

CONTENT = b"kept" * 50_000


@pytest.fixture
def frozen(place: Place) -> Iterator[Place]:
    """A place whose volume has a file, and cannot be written any more."""
    place.volume.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m", "frozen", place.volume], check=True)
    try:
        place.mount()
        (place.point / "file").write_bytes(CONTENT)
        assert kvfuse("umount", place.point).returncode == 0
        subprocess.run(["mount", "-o", "remount,ro", place.volume], check=True)
        yield place
    finally:
        kvfuse("umount", place.point)
        subprocess.run(["umount", place.volume], check=True)


def log_of(place: Place) -> Path:
    return Path(f"/var/log/kvfuse-{place.volume.name}.log")


def test_it_is_mounted_read_only(frozen: Place) -> None:
    done = kvfuse("mount", frozen.volume, frozen.point, "-o", "ro")
    assert done.returncode == 0, done.stderr
    assert (frozen.point / "file").read_bytes() == CONTENT
    with fails(errno.EROFS):
        (frozen.point / "other").touch()
    assert "is mounted on" in log_of(frozen).read_text()
    second = frozen.base / "second"
    second.mkdir()
    try:
        assert kvfuse("mount", frozen.volume, second, "-o", "ro").returncode == 0
        assert (second / "file").read_bytes() == CONTENT
    finally:
        assert kvfuse("umount", second).returncode == 0


def test_it_is_not_mounted_for_writing_and_the_remedy_is_said(frozen: Place) -> None:
    done = kvfuse("mount", frozen.volume, frozen.point)
    assert_fails(done, 3, r"is in a read-only file system: mount the volume with -o ro")
    assert not frozen.is_mounted


def test_it_is_checked(frozen: Place) -> None:
    done = kvfuse("fsck", "--verify", frozen.volume)
    assert done.returncode == 0, done.stderr + done.stdout


def test_somebody_who_writes_it_by_another_path_keeps_readers_out(place: Place) -> None:
    place.mount()
    shown, second = place.base / "shown", place.base / "second"
    for folder in (shown, second):
        folder.mkdir()
    subprocess.run(["mount", "--bind", place.volume, shown], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", shown], check=True)
        done = kvfuse("mount", shown, second, "-o", "ro")
        assert_fails(done, 4, rf"is in use by process \d+ on .*, mounted on {place.point}")
    finally:
        subprocess.run(["umount", shown], check=True)
