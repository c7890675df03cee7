"""Handles of files, which NFS servers give to clients, on mounts with ``-o export``: what they mean, and for how long.

An unmount makes the kernel forget all inodes, so a handle is looked up by its number alone then.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from engine_pairs import Engines
from file_handles import FileHandle, handle_of, opened, read_handle
from mounting import KvfuseMount, temporary_mount, wait_until
from outlive_guest import daemon_of
from posix_calls import fails

pytestmark = [pytest.mark.ring(2), pytest.mark.root]

WORDS = ("volume.capacity=512MiB", "volume.segment_size=64MiB")
BOTH = pytest.mark.engines("lmdb+file", "etcd+block")


@pytest.fixture
def mount(engines: Engines) -> Iterator[KvfuseMount]:
    with engines.mounted((*WORDS, "export")) as made:
        yield made


def remount(mount: KvfuseMount) -> None:
    mount.unmount()
    mount.mount()


def kill_daemon(mount: KvfuseMount) -> None:
    """The next one answers when this returns."""
    former = daemon_of(mount.point)
    os.kill(former, signal.SIGKILL)
    wait_until(lambda: daemon_of(mount.point) != former, "the next daemon")


def is_stale(point: Path, handle: FileHandle) -> bool:
    try:
        read_handle(point, handle)
    except OSError as error:
        assert error.errno == errno.ESTALE
        return True
    return False


@BOTH
def test_all_kinds_live_over_a_remount(mount: KvfuseMount) -> None:
    point = mount.point
    (point / "one" / "two").mkdir(parents=True)
    (point / "one" / "two" / "file").write_bytes(b"deep")
    (point / "link").symlink_to("file")
    os.mkfifo(point / "pipe")
    names = ["one", "one/two", "one/two/file", "link", "pipe"]
    seen = {name: (handle_of(point / name), os.lstat(point / name)) for name in names}
    remount(mount)
    for name, (handle, before) in reversed(seen.items()):
        with opened(point, handle, os.O_PATH) as fd:
            now = os.fstat(fd)
            assert (now.st_ino, now.st_mode, now.st_nlink) == (before.st_ino, before.st_mode, before.st_nlink), name
            if stat.S_ISDIR(now.st_mode):
                assert os.readlink(f"/proc/self/fd/{fd}") == str(point / name)
    assert read_handle(point, seen["one/two/file"][0]) == b"deep"


@BOTH
def test_a_file_can_be_written_by_its_handle(mount: KvfuseMount) -> None:
    """Nobody has looked its name up since."""
    point = mount.point
    (point / "file").write_bytes(b"before")
    handle = handle_of(point / "file")
    for content in (b"longer than before", b"short"):
        remount(mount)
        with opened(point, handle, os.O_RDWR | os.O_TRUNC) as fd:
            os.pwrite(fd, content, 0)
            os.fchmod(fd, 0o640)
        remount(mount)
        assert (point / "file").read_bytes() == content
        assert os.stat(point / "file").st_mode & 0o777 == 0o640


@BOTH
def test_a_removed_file_is_stale_before_its_removal_is_stored(mount: KvfuseMount) -> None:
    point = mount.point
    for name in ("plain", "two-names", "replaced", "folder/kept"):
        (point / name).parent.mkdir(exist_ok=True)
        (point / name).write_bytes(name.encode())
    os.link(point / "two-names", point / "second")
    handles = {name: handle_of(point / name) for name in ("plain", "two-names", "replaced")}
    (point / "gone").mkdir()
    folder = handle_of(point / "gone")
    remount(mount)
    for name in ("plain", "two-names", "second"):
        os.unlink(point / name)
    (point / "other").write_bytes(b"other")
    os.rename(point / "other", point / "replaced")
    os.rmdir(point / "gone")
    for handle in (*handles.values(), folder):
        assert is_stale(point, handle)
    remount(mount)
    for handle in (*handles.values(), folder):
        assert is_stale(point, handle)


@pytest.mark.engines("lmdb+file")
def test_files_that_were_there_before_are_found_once_they_were_listed(engines: Engines) -> None:
    with engines.mounted(WORDS) as mount:
        point = mount.point
        (point / "folder").mkdir()
        for number in range(3000):
            (point / "folder" / f"{number}").write_bytes(b"%d" % number)
        handle = handle_of(point / "folder" / "7")
        remount(mount)
        assert is_stale(point, handle), "without export nobody keeps its place"
        mount.words += ("export",)
        remount(mount)
        for name in os.listdir(point / "folder"):
            os.stat(point / "folder" / name)
        remount(mount)
        for number in (7, 0, 2999, 1234):
            assert read_handle(point, handle_of(point / "folder" / f"{number}")) == b"%d" % number
        remount(mount)
        assert read_handle(point, handle) == b"7"
        mount.words = mount.words[:-1]  # renames without export keep what it had stored
        remount(mount)
        os.rename(point / "folder" / "7", point / "elsewhere")
        remount(mount)
        assert read_handle(point, handle) == b"7"


def test_handles_live_over_killed_daemons() -> None:
    """Also over what a daemon had not stored."""
    with temporary_mount(("outlive", "export", "publish.interval=600")) as mount:
        point = mount.point
        (point / "kept").write_bytes(b"kept")
        (point / "removed").write_bytes(b"removed")
        kept, removed = handle_of(point / "kept"), handle_of(point / "removed")
        kill_daemon(mount)
        os.rename(point / "kept", point / "renamed")
        os.unlink(point / "removed")
        kill_daemon(mount)
        assert read_handle(point, kept) == b"kept"
        assert is_stale(point, removed)
        mount.unmount()
        mount.mount()
        assert read_handle(point, kept) == b"kept"
        assert is_stale(point, removed)


def test_a_block_is_found_by_its_handle_while_it_is_mounted() -> None:
    """Also over killed daemons. It is stale after an unmount: blocks have other numbers then."""
    with temporary_mount(("outlive", "export")) as mount:
        folder = mount.point / "kv"
        folder.mkdir()
        os.setxattr(folder, "user.kvfuse.namespace", b"kind=blocks")
        (folder / "block").write_bytes(b"b" * 70_000)
        handle = handle_of(folder / "block")
        forget_all()
        assert read_handle(mount.point, handle) == b"b" * 70_000
        kill_daemon(mount)
        forget_all()
        assert read_handle(mount.point, handle) == b"b" * 70_000
        os.rename(folder / "block", folder / "renamed")
        forget_all()
        assert read_handle(mount.point, handle) == b"b" * 70_000
        (folder / "renamed").write_bytes(b"another")
        handle = handle_of(folder / "renamed")
        assert read_handle(mount.point, handle) == b"another"
        os.unlink(folder / "renamed")
        assert is_stale(mount.point, handle)
        (folder / "block").write_bytes(b"c" * 70_000)
        handle = handle_of(folder / "block")
        remount(mount)
        assert is_stale(mount.point, handle)


def forget_all() -> None:
    """Have the kernel forget inodes that nobody uses."""
    Path("/proc/sys/vm/drop_caches").write_text("2")


@dataclass
class KnownFile:
    handle: FileHandle
    content: bytes
    names: set[Path] = field(default_factory=set)


@BOTH
def test_handles_mean_their_files_whatever_happens_to_names(mount: KvfuseMount, rng: random.Random) -> None:
    point, files = mount.point, list[KnownFile]()
    places = [point / folder / name for folder in ("a", "b") for name in "123456"]
    for folder in ("a", "b"):
        (point / folder).mkdir()

    def at(place: Path) -> KnownFile | None:
        return next((file for file in files if place in file.names), None)

    def make(place: Path) -> None:
        content = rng.randbytes(rng.choice([1, 5000, 300_000]))
        place.write_bytes(content)
        if (known := at(place)) is None:
            files.append(known := KnownFile(handle_of(place), content, {place}))
        known.content = content

    def rename(place: Path) -> None:
        source, target = at(place), rng.choice(places)
        if source is None or at(target) is source:
            return
        os.rename(place, target)
        if (lost := at(target)) is not None:
            lost.names.discard(target)
        source.names.discard(place)
        source.names.add(target)

    def link(place: Path) -> None:
        source, target = at(place), rng.choice(places)
        if source is None or at(target) is not None:
            with fails(errno.ENOENT if source is None else errno.EEXIST):
                os.link(place, target)
            return
        os.link(place, target)
        source.names.add(target)

    def unlink(place: Path) -> None:
        if (known := at(place)) is not None:
            os.unlink(place)
            known.names.discard(place)

    for step in range(400):
        rng.choice([make, rename, link, unlink])(rng.choice(places))
        if step % 100 == 99:
            remount(mount)
        if step % 10 == 9:
            for file in rng.sample(files, min(len(files), 10)):
                if file.names:
                    assert read_handle(point, file.handle) == file.content, file.names
                else:
                    assert is_stale(point, file.handle)
