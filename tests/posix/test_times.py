"""Which call moves which time of the file and of its directory."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mounting import KvfuseMount
from posix_calls import UTIME_NOW, UTIME_OMIT, opened, utimensat

CLOCK_TICK_NS = 20_000_000
"""File systems stamp with a clock that ticks every few milliseconds, so an hour is not older by less."""


def times(path: Path) -> tuple[int, int]:
    """(mtime, ctime) in nanoseconds."""
    status = os.lstat(path)
    return status.st_mtime_ns, status.st_ctime_ns


def wait_for_a_tick(path: Path) -> None:
    """Return once the file system would stamp ``path`` with a later time than it bears now."""
    while time.time_ns() <= max(times(path)) + CLOCK_TICK_NS:
        os.sched_yield()


def test_nanoseconds_are_kept(folder: Path) -> None:
    (folder / "file").touch()
    os.utime(folder / "file", ns=(1_234_567_890_123_456_789, 987_654_321_987_654_321))
    status = os.stat(folder / "file")
    assert (status.st_atime_ns, status.st_mtime_ns) == (1_234_567_890_123_456_789, 987_654_321_987_654_321)


@pytest.mark.parametrize("seconds", [-1, -2_000_000_000, 0, (1 << 31) + 5, 4_000_000_000])
def test_times_before_1970_and_after_2038(folder: Path, seconds: int) -> None:
    (folder / "file").touch()
    os.utime(folder / "file", ns=(seconds * 10**9 + 5, seconds * 10**9 + 7))
    status = os.stat(folder / "file")
    assert (status.st_atime_ns, status.st_mtime_ns) == (seconds * 10**9 + 5, seconds * 10**9 + 7)


READS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "file": (lambda path: path.write_bytes(b"content"), Path.read_bytes),
    "symlink": (lambda path: path.symlink_to("target"), os.readlink),
    "directory": (os.mkdir, os.listdir),
}
"""what is read -> how it is made, and read"""
SECONDS_MAX = (1 << 63) // 10**9
"""the last second, and before 1970 the first, that nanoseconds in 64 bits have room for"""


@pytest.mark.root
@pytest.mark.kvfuse_only
@pytest.mark.parametrize("kind", READS)
def test_times_of_any_range_are_stored(mount: KvfuseMount, kind: str) -> None:
    """What no record has room for becomes the nearest time that one has."""
    make, _ = READS[kind]
    moments = [-1, -2_000_000_000, (1 << 32) + 1, SECONDS_MAX, SECONDS_MAX + 1, 1 << 62, -SECONDS_MAX - 2, -(1 << 62)]
    for seconds in moments:
        path = mount.point / f"{seconds}"
        make(path)
        utimensat(path, (seconds, 7), (seconds, 9), follow=False)
        with opened(mount.point, os.O_RDONLY) as fd:
            os.fsync(fd)
    mount.unmount()
    mount.mount()
    for seconds in moments:
        status = os.lstat(mount.point / f"{seconds}")
        found = status.st_atime_ns, status.st_mtime_ns
        if abs(seconds) < SECONDS_MAX:
            assert found == (seconds * 10**9 + 7, seconds * 10**9 + 9)
        else:
            assert {moment // 10**9 for moment in found} <= {SECONDS_MAX, -SECONDS_MAX - 1}


def test_one_time_can_be_left_alone(folder: Path) -> None:
    path = folder / "file"
    path.touch()
    os.utime(path, (1000, 2000))
    utimensat(path, (0, UTIME_OMIT), (3000, 0))
    assert (path.stat().st_atime, path.stat().st_mtime) == (1000, 3000)
    utimensat(path, (4000, 0), (0, UTIME_OMIT))
    assert (path.stat().st_atime, path.stat().st_mtime) == (4000, 3000)


def test_one_time_can_be_set_to_now(folder: Path) -> None:
    path = folder / "file"
    path.touch()
    os.utime(path, (1000, 2000))
    before = time.time() - 1
    utimensat(path, (0, UTIME_OMIT), (0, UTIME_NOW))
    assert path.stat().st_atime == 1000
    assert before <= path.stat().st_mtime <= time.time() + 1


def test_setting_times_moves_ctime(folder: Path) -> None:
    path = folder / "file"
    path.touch()
    wait_for_a_tick(path)
    before = times(path)
    os.utime(path, (1, 1))
    assert times(path)[1] > before[1]


def test_times_of_a_symlink_are_its_own(folder: Path) -> None:
    (folder / "file").touch()
    (folder / "link").symlink_to("file")
    os.utime(folder / "link", (1, 2), follow_symlinks=False)
    assert os.lstat(folder / "link").st_mtime == 2
    assert os.stat(folder / "file").st_mtime > 2


def write_descriptor(path: Path) -> None:
    with opened(path, os.O_WRONLY) as fd:
        os.write(fd, b"written")


CHANGES: dict[str, tuple[Callable[[Path], object], bool]] = {
    "write": (write_descriptor, True),
    "truncate": (lambda path: os.truncate(path, 3), True),
    "truncate to the same size": (lambda path: os.truncate(path, 7), True),
    "open with O_TRUNC": (lambda path: path.write_bytes(b""), True),
    "chmod": (lambda path: os.chmod(path, 0o600), False),
    "chown": (lambda path: os.chown(path, os.geteuid(), os.getegid()), False),
    "link": (lambda path: os.link(path, path.with_name("link")), False),
    "rename": (lambda path: os.rename(path, path.with_name("renamed")), False),
    "setxattr": (lambda path: os.setxattr(path, "user.name", b"value"), False),
}
"""what is done -> (how, whether it moves mtime); each moves ctime"""


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_moves_the_times_of_the_file(folder: Path, name: str) -> None:
    change, moves_mtime = CHANGES[name]
    path = folder / "file"
    path.write_bytes(b"content")
    wait_for_a_tick(path)
    mtime, ctime = times(path)
    change(path)
    after = times(path if path.exists() else folder / "renamed")
    assert after[1] > ctime
    assert (after[0] > mtime) == moves_mtime


ENTRIES: dict[str, Callable[[Path], object]] = {
    "create": lambda parent: (parent / "new").touch(),
    "mkdir": lambda parent: (parent / "new").mkdir(),
    "symlink": lambda parent: (parent / "new").symlink_to("x"),
    "mkfifo": lambda parent: os.mkfifo(parent / "new"),
    "link": lambda parent: os.link(parent / "file", parent / "new"),
    "unlink": lambda parent: os.unlink(parent / "file"),
    "rmdir": lambda parent: os.rmdir(parent / "directory"),
    "rename within": lambda parent: os.rename(parent / "file", parent / "new"),
    "rename away": lambda parent: os.rename(parent / "file", parent.parent / "moved"),
    "rename to here": lambda parent: os.rename(parent.parent / "outside", parent / "new"),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_change_of_names_moves_the_times_of_the_directory(folder: Path, name: str) -> None:
    parent = folder / "parent"
    parent.mkdir()
    (parent / "file").touch()
    (parent / "directory").mkdir()
    (folder / "outside").touch()
    wait_for_a_tick(parent)
    before = times(parent)
    ENTRIES[name](parent)
    after = times(parent)
    assert after[0] > before[0]
    assert after[1] > before[1]


def test_writing_a_file_leaves_its_directory_alone(folder: Path) -> None:
    path = folder / "file"
    path.touch()
    wait_for_a_tick(folder)
    before = times(folder)
    path.write_bytes(b"x" * 100_000)
    os.chmod(path, 0o600)
    assert times(folder) == before


def test_unlinking_one_of_two_names_moves_ctime(folder: Path) -> None:
    (folder / "one").touch()
    os.link(folder / "one", folder / "two")
    wait_for_a_tick(folder / "two")
    _, before = times(folder / "two")
    os.unlink(folder / "one")
    assert times(folder / "two")[1] > before


def test_reading_moves_neither_mtime_nor_ctime(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(b"content")
    wait_for_a_tick(path)
    before = times(path)
    path.read_bytes()
    assert times(path) == before


@pytest.mark.parametrize("kind", READS)
@pytest.mark.parametrize("of_old", ["mtime", "ctime"])
def test_reading_moves_an_access_time_that_is_not_the_latest(folder: Path, kind: str, of_old: str) -> None:
    make, read = READS[kind]
    path = folder / "it"
    make(path)
    mtime = 3_000_000_000 if of_old == "mtime" else 1_000_000_000
    os.utime(path, ns=(2_000_000_000, mtime), follow_symlinks=False)
    if kind == "file":
        with opened(path) as fd:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # what the kernel has cached tells no file system
    before = time.time_ns() - CLOCK_TICK_NS
    changed = times(path)
    read(path)
    assert os.lstat(path).st_atime_ns >= before
    assert times(path) == changed


def test_a_touched_file_does_not_become_older(folder: Path) -> None:
    """A touch stamps by the kernel's clock, so everything else has to as well."""
    for number in range(50):
        path = folder / f"file{number}"
        path.write_bytes(b"content")
        written = times(path)
        os.utime(path)
        touched = times(path)
        assert touched >= written
        os.setxattr(path, "user.name", b"value")
        assert times(path)[1] >= touched[1]
