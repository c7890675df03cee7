"""What the door answers without a task (`fusewire.answer_at_once`) is what its tasks answer."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounting import temporary_mount
from posix_calls import opened

ALWAYS_ASKED = ("entry_timeout=0", "attr_timeout=0", "negative_timeout=0")
WORDS = ("volume.capacity=64MiB", "volume.segment_size=16MiB")
TIMES = (1_700_000_000_123_456_789, 1_600_000_000_987_654_321)


@pytest.fixture(scope="module")
def point() -> Iterator[Path]:
    with temporary_mount((*WORDS, *ALWAYS_ASKED)) as mount:
        yield mount.point


def make_kinds(folder: Path) -> dict[str, int]:
    """name -> mode, of one inode of each kind."""
    (folder / "file").write_bytes(bytes(5000))
    (folder / "directory").mkdir()
    os.symlink("target", folder / "symlink")
    os.mkfifo(folder / "fifo")
    os.link(folder / "file", folder / "link")
    modes = {"file": 0o640, "directory": 0o751, "fifo": 0o604, "link": 0o640}
    if os.geteuid() == 0:
        os.mknod(folder / "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        os.chown(folder / "file", 17, 18)
        modes["device"] = 0o600
    for name, mode in modes.items():
        os.chmod(folder / name, mode)
        os.utime(folder / name, ns=TIMES)
    return modes


def test_attributes(point: Path) -> None:
    """Of names by LOOKUP, of open files by GETATTR; the kernel keeps nothing."""
    folder = point / "kinds"
    folder.mkdir()
    for name, mode in make_kinds(folder).items():
        found = os.lstat(folder / name)
        assert stat.S_IMODE(found.st_mode) == mode, name
        assert (found.st_atime_ns, found.st_mtime_ns) == TIMES, name
        assert found.st_nlink == {"file": 2, "link": 2, "directory": 2}.get(name, 1), name
        assert found.st_rdev == (os.makedev(1, 3) if name == "device" else 0), name
        with opened(folder / name, os.O_PATH) as fd:
            again = os.fstat(fd)
        assert again == found, name
    found = os.stat(folder / "file")
    assert (found.st_size, found.st_blocks, found.st_blksize) == (5000, 16, 4096)
    assert (found.st_uid, found.st_gid) == ((17, 18) if os.geteuid() == 0 else (os.geteuid(), os.getegid()))
    assert os.lstat(folder / "symlink").st_size == len("target")


def test_names_that_mean_nothing(point: Path) -> None:
    folder = point / "absent"
    folder.mkdir()
    for name, number in (("nothing", errno.ENOENT), ("n" * 255, errno.ENOENT), ("n" * 256, errno.ENAMETOOLONG)):
        with pytest.raises(OSError) as failed:
            os.lstat(folder / name)
        assert failed.value.errno == number, name
    (folder / "nothing").touch()
    assert os.lstat(folder / "nothing").st_size == 0
    os.unlink(folder / "nothing")
    assert not (folder / "nothing").exists()
    assert os.lstat(folder / "..").st_ino == os.lstat(point).st_ino
    assert not (point / ".kvfuse/nothing").exists()


def test_a_removed_file_lives_until_it_is_closed(point: Path) -> None:
    path = point / "removed"
    path.write_bytes(b"content")
    with opened(path, os.O_RDONLY) as fd, opened(path, os.O_PATH) as known:
        os.unlink(path)
        assert os.read(fd, 100) == b"content"
        assert os.fstat(known).st_nlink == 0
    stats = json.loads((point / ".kvfuse/stats").read_text())["fs"]
    assert stats["requests"]["forget"]
    assert stats["requests"]["release"]
    assert stats["unexpected_error_count"] == 0


def test_a_directory_is_removed_only_when_it_is_empty(point: Path) -> None:
    """What is known of its stored names and of their changes decides; the store is asked where that is not all."""
    folder = point / "emptied"
    for is_stored in (False, True):
        folder.mkdir()
        (folder / "name").touch()
        (folder / "other").touch()
        if is_stored:
            with opened(folder, os.O_RDONLY) as fd:
                os.fsync(fd)
        with pytest.raises(OSError, match="not empty"):
            folder.rmdir()
        os.unlink(folder / "name")
        os.rename(folder / "other", folder / "moved")
        with pytest.raises(OSError, match="not empty"):
            folder.rmdir()
        os.unlink(folder / "moved")
        assert os.listdir(folder) == []
        folder.rmdir()
    assert not folder.exists()
