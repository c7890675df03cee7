"""What every kind of inode has in common: owner, times, link count, and what each call does to them."""

import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from posix_calls import GROUP, RENAME_EXCHANGE, USER, as_user, opened, renameat2

pytestmark = pytest.mark.root

CLOCK_TICK_NS = 20_000_000
"""Times are stamped by a clock that ticks every few milliseconds."""


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, opened(path.parent, os.O_RDONLY) as fd:
        server.bind(f"/proc/self/fd/{fd}/{path.name}")  # a socket's path has 108 bytes at the most


KINDS: dict[str, tuple[int, Callable[[Path], object]]] = {
    "file": (stat.S_IFREG, lambda path: os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))),
    "node": (stat.S_IFREG, lambda path: os.mknod(path, stat.S_IFREG | 0o666)),
    "directory": (stat.S_IFDIR, os.mkdir),
    "symlink": (stat.S_IFLNK, lambda path: os.symlink("target", path)),
    "fifo": (stat.S_IFIFO, os.mkfifo),
    "socket": (stat.S_IFSOCK, make_socket),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def tick() -> int:
    """Now, which is later than anything that was stamped before; what is stamped from now on is not earlier."""
    before = time.time_ns()
    while (now := time.time_ns()) <= before + CLOCK_TICK_NS:
        os.sched_yield()
    return now - CLOCK_TICK_NS // 2


def stamps(path: Path) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_mtime_ns, status.st_ctime_ns


@EVERY_KIND
def test_what_is_made_is_its_makers_and_of_now(folder: Path, kind: str) -> None:
    type_bits, make = KINDS[kind]
    before = tick()
    with as_user():
        make(folder / "it")
    status = os.lstat(folder / "it")
    assert stat.S_IFMT(status.st_mode) == type_bits
    assert (status.st_uid, status.st_gid) == (USER, GROUP)
    assert status.st_nlink == (2 if kind == "directory" else 1)
    assert kind == "directory" or status.st_size == (len("target") if kind == "symlink" else 0)
    assert before < status.st_mtime_ns <= time.time_ns()
    assert status.st_mtime_ns == status.st_ctime_ns == status.st_atime_ns
    assert min(stamps(folder)) > before


@EVERY_KIND
def test_attributes_of_each_kind(folder: Path, kind: str) -> None:
    path = folder / "it"
    KINDS[kind][1](path)
    if kind != "symlink":
        before, mtime = tick(), stamps(path)[0]
        os.chmod(path, 0o421)
        assert stat.S_IMODE(os.lstat(path).st_mode) == 0o421
        assert stamps(path)[0] == mtime
        assert stamps(path)[1] > before
    before = tick()
    os.lchown(path, USER, GROUP)
    assert (os.lstat(path).st_uid, os.lstat(path).st_gid) == (USER, GROUP)
    assert stamps(path)[1] > before > stamps(path)[0]
    before = tick()
    os.utime(path, ns=(1_000_000_001, 2_999_999_999), follow_symlinks=False)
    assert (os.lstat(path).st_atime_ns, os.lstat(path).st_mtime_ns) == (1_000_000_001, 2_999_999_999)
    assert stamps(path)[1] > before


@EVERY_KIND
def test_names_of_each_kind(folder: Path, kind: str) -> None:
    """A rename, a second name and its end each move ctime, of the inode, and both times of the directory."""
    path, moved = folder / "it", folder / "moved"
    KINDS[kind][1](path)
    ino = os.lstat(path).st_ino
    before = tick()
    os.rename(path, moved)
    assert (os.lstat(moved).st_ino, os.listdir(folder)) == (ino, ["moved"])
    assert min(stamps(folder)) > before
    assert stamps(moved)[0] < before < stamps(moved)[1]
    if kind == "directory":
        os.rmdir(moved)
        return
    before = tick()
    os.link(moved, path, follow_symlinks=False)
    assert os.lstat(path).st_nlink == os.lstat(moved).st_nlink == 2
    assert stamps(path)[0] < before < stamps(path)[1]
    assert min(stamps(folder)) > before
    before = tick()
    os.unlink(moved)
    assert (os.lstat(path).st_nlink, os.lstat(path).st_ino) == (1, ino)
    assert stamps(path)[0] < before < stamps(path)[1]
    assert min(stamps(folder)) > before


@EVERY_KIND
def test_a_replaced_link_counts_one_less(folder: Path, kind: str) -> None:
    if kind == "directory":
        return
    KINDS[kind][1](folder / "it")
    os.link(folder / "it", folder / "second", follow_symlinks=False)
    (folder / "new").touch()
    before = tick()
    os.rename(folder / "new", folder / "it")
    assert os.lstat(folder / "second").st_nlink == 1
    assert stamps(folder / "second")[1] > before


def counts(folder: Path, *names: str) -> list[int]:
    return [os.stat(folder / name).st_nlink for name in names]


def test_directories_count_what_is_in_them(folder: Path) -> None:
    """A directory has a link for its name, its own dot, and the two dots of each directory in it."""
    for name in ("a", "b", "a/one", "a/two", "b/empty"):
        (folder / name).mkdir()
    for name in ("a/file", "b/file"):
        (folder / name).touch()
    assert counts(folder, ".", "a", "b") == [4, 4, 3]
    os.rename(folder / "a" / "one", folder / "b" / "one")
    assert counts(folder, "a", "b") == [3, 4]
    os.rename(folder / "a" / "two", folder / "b" / "empty")
    assert counts(folder, "a", "b", "b/empty") == [2, 4, 2]
    renameat2(folder / "a" / "file", folder / "b" / "one", RENAME_EXCHANGE)
    assert counts(folder, "a", "b", "a/file") == [3, 3, 2]
    renameat2(folder / "a", folder / "b" / "empty", RENAME_EXCHANGE)
    assert counts(folder, ".", "a", "b", "b/empty") == [4, 2, 3, 3]
    os.rmdir(folder / "b" / "empty" / "file")
    os.rename(folder / "b", folder / "a" / "b")
    assert counts(folder, ".", "a", "a/b", "a/b/empty") == [3, 3, 3, 2]


@pytest.mark.parametrize("how", ["rmdir", "rename"])
def test_a_removed_directory_that_is_open_has_no_links(folder: Path, how: str) -> None:
    (folder / "it").mkdir()
    (folder / "new").mkdir()
    with opened(folder / "it", os.O_RDONLY) as fd:
        if how == "rmdir":
            os.rmdir(folder / "it")
        else:
            os.rename(folder / "new", folder / "it")
        assert os.fstat(fd).st_nlink == 0
        assert os.listdir(fd) == []


def test_a_file_without_names_keeps_its_attributes(folder: Path) -> None:
    with opened(folder / "it", os.O_CREAT | os.O_RDWR, 0o640) as fd:
        os.write(fd, b"content")
        before = tick()
        os.unlink(folder / "it")
        assert os.fstat(fd).st_nlink == 0
        assert os.fstat(fd).st_mtime_ns < before < os.fstat(fd).st_ctime_ns
        os.fchmod(fd, 0o600)
        os.fchown(fd, USER, GROUP)
        os.utime(fd, ns=(5, 7))
        status = os.fstat(fd)
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (0o600, USER, GROUP)
    assert (status.st_atime_ns, status.st_mtime_ns, status.st_size) == (5, 7, 7)


def test_opening_what_is_there_moves_no_time(folder: Path) -> None:
    (folder / "it").write_bytes(b"content")
    before = stamps(folder / "it"), stamps(folder)
    tick()
    for flags in (os.O_RDWR, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_APPEND):
        os.close(os.open(folder / "it", flags))
    assert (stamps(folder / "it"), stamps(folder)) == before
