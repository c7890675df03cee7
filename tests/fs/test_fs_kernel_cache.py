"""Changes made behind the kernel's back: seen once the kernel's cache was told, and - so that this says something -
not seen before. Every test changes the volume through a door of its own (`door_daemon`)."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyfuse3
import pytest
from door_daemon import DOOR_DAEMON, Connection, connected, wait_for_door
from mounting import temporary_mount
from posix_calls import opened

from kvfuse.errors import EngineError
from kvfuse.fs.kernel import DIRECTORIES_MAX, CachedNames, FuseKernelCache

LONG = ("entry_timeout=3600", "attr_timeout=3600", "negative_timeout=3600")
WORDS = ("volume.capacity=64MiB", "volume.segment_size=16MiB", *LONG)
PAGE = 4096
TRIES = 10


@pytest.fixture(scope="module")
def point() -> Iterator[Path]:
    with temporary_mount(WORDS, DOOR_DAEMON) as mount:
        wait_for_door(mount.point)
        yield mount.point


@pytest.fixture
def directory(point: Path, request: pytest.FixtureRequest) -> Path:
    made = point / request.node.name
    made.mkdir()
    return made


@pytest.fixture
def door(point: Path) -> Iterator[Connection]:
    with connected(point) as connection:
        yield connection


def inode(path: Path) -> int:
    return os.stat(path).st_ino


# -- content ----------------------------------------------------------------------------------------


def test_written_bytes(directory: Path, door: Connection) -> None:
    tries = (_are_kept_until_told(directory / f"file-{number}", door) for number in range(TRIES))
    assert any(tries), "the kernel never kept a page"


def _are_kept_until_told(path: Path, door: Connection) -> bool:
    """False where the kernel has let go of the page too early, as it may at any time."""
    path.write_bytes(b"a" * 3 * PAGE)
    os.utime(path, (1, 1))
    with opened(path, os.O_RDONLY) as fd, mmap.mmap(fd, 3 * PAGE, prot=mmap.PROT_READ) as mapped:
        assert os.pread(fd, 2, PAGE) == mapped[PAGE : PAGE + 2] == b"aa"
        assert os.fstat(fd).st_mtime == 1
        door.write(inode(path), PAGE, "b")
        is_kept = os.pread(fd, 2, PAGE) == mapped[PAGE : PAGE + 2] == path.read_bytes()[PAGE : PAGE + 2] == b"aa"
        door.drop_content(inode(path))
        assert os.pread(fd, 2, PAGE) == mapped[PAGE : PAGE + 2] == path.read_bytes()[PAGE : PAGE + 2] == b"ba"
        assert os.fstat(fd).st_mtime > 1
    return is_kept


def test_bytes_behind_the_end(directory: Path, door: Connection) -> None:
    path = directory / "file"
    path.write_bytes(b"a" * PAGE)
    with opened(path, os.O_RDONLY) as fd:
        assert os.pread(fd, PAGE, PAGE - 1) == b"a"
        door.write(inode(path), PAGE, "b")
        assert os.fstat(fd).st_size == PAGE
        door.drop_content(inode(path))
        assert os.pread(fd, PAGE, PAGE - 1) == b"ab"
        assert os.fstat(fd).st_size == os.lseek(fd, 0, os.SEEK_END) == PAGE + 1


@pytest.mark.parametrize("size", [PAGE // 2, 3 * PAGE])
def test_another_size(directory: Path, door: Connection, size: int) -> None:
    path = directory / "file"
    path.write_bytes(b"a" * 2 * PAGE)
    with opened(path, os.O_RDONLY) as fd:
        assert os.fstat(fd).st_size == len(os.pread(fd, 4 * PAGE, 0)) == 2 * PAGE
        door.truncate(inode(path), size)
        assert os.fstat(fd).st_size == 2 * PAGE
        door.drop_content(inode(path))
        assert os.fstat(fd).st_size == size
        assert os.pread(fd, 4 * PAGE, 0) == (b"a" * 2 * PAGE).ljust(size, b"\0")[:size]


def test_attributes_alone(directory: Path, door: Connection) -> None:
    os.utime(directory, (1, 1))
    assert os.stat(directory).st_mtime == 1
    door.create(inode(directory), "file", "")
    assert os.stat(directory).st_mtime == 1
    door.drop_attributes(inode(directory))
    assert os.stat(directory).st_mtime > 1


# -- names ------------------------------------------------------------------------------------------


def test_a_name_that_was_absent(directory: Path, door: Connection) -> None:
    path = directory / "file"
    assert not path.exists()
    door.create(inode(directory), "file", "content")
    assert not path.exists()
    door.drop_name(inode(directory), "file")
    assert path.read_bytes() == b"content"


def test_a_name_that_was_removed(directory: Path, door: Connection) -> None:
    path = directory / "file"
    path.write_bytes(b"content")
    with opened(path, os.O_RDONLY) as fd:
        ino = inode(path)
        door.unlink(inode(directory), "file")
        assert path.exists()
        door.drop_name(inode(directory), "file", ino)
        assert not path.exists()
        assert os.pread(fd, 7, 0) == b"content"


def test_a_name_that_means_another_file(directory: Path, door: Connection) -> None:
    """As when a block is put where there was one."""
    path = directory / "file"
    path.write_bytes(b"old")
    old = inode(path)
    door.create(inode(directory), "new", "new content")
    door.rename(inode(directory), "new", "file")
    assert path.read_bytes() == b"old"
    door.drop_name(inode(directory), "file", old)
    assert path.read_bytes() == b"new content"
    assert inode(path) != old


def test_what_the_kernel_never_saw(directory: Path, door: Connection) -> None:
    """It is not told of it, and knows it right when it asks."""
    ino = door.create(inode(directory), "file", "content")
    assert not door.knows(ino)
    door.drop_content(ino)
    door.drop_attributes(ino)
    door.drop_name(inode(directory), "file", 0)
    assert (directory / "file").read_bytes() == b"content"
    assert door.knows(ino)


# -- the kernel waits for the daemon meanwhile ------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "use", "drop"),
    [
        ("files.read", lambda path: path.read_bytes(), lambda path: ("drop_content", inode(path))),
        ("tree.lookup", lambda path: (path.parent / "b").exists(), lambda path: ("drop_name", inode(path.parent), "b")),
        (
            "tree.list_directory",
            lambda path: os.listdir(path.parent),
            lambda path: ("drop_name", inode(path.parent), "absent"),
        ),
    ],
)
def test_a_drop_meets_a_request_that_the_event_loop_has_to_answer(
    directory: Path, door: Connection, point: Path, method: str, use: Callable[[Path], Any], drop: Callable[..., Any]
) -> None:
    """The kernel holds the inode for the request, the drop waits for the kernel: the event loop must go on."""
    path = directory / "file"
    door.create(inode(directory), "file", "content")
    call = drop(path)
    assert not (directory / "absent").exists()
    door.hold(method)
    user = threading.Thread(target=use, args=(path,))
    user.start()
    door.wait_for_held()
    with connected(point) as dropping:
        dropping.send(*call)
        assert door.ino(inode(point), directory.name) if method != "tree.lookup" else door.knows(1)
        door.let_go()
        dropping.receive()
    user.join()
    assert path.read_bytes() == b"content"


def test_a_name_that_is_removed_while_it_is_listed(directory: Path, door: Connection, point: Path) -> None:
    """The kernel is told before it has the name, and waits with it until it has."""
    parent = inode(directory)
    door.create(parent, "file", "content")
    door.hold("tree.list_directory", "answered")
    lister = threading.Thread(target=os.listdir, args=(directory,))
    lister.start()
    door.wait_for_held()
    door.unlink(parent, "file")
    with connected(point) as dropping:
        dropping.send("drop_any_name", parent, "file")
        assert door.knows(1)
        door.let_go()
        dropping.receive()
    lister.join()
    assert not (directory / "file").exists()


# -- what is sent -----------------------------------------------------------------------------------


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(pyfuse3, "invalidate_inode", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(pyfuse3, "invalidate_entry", lambda *arguments: calls.append(arguments))
    return calls


def test_nothing_is_sent_for_what_the_kernel_cannot_have(sent: list[tuple[object, ...]]) -> None:
    names, absences = CachedNames(1.0), CachedNames(1.0)
    kernel = FuseKernelCache({10, 11}.__contains__, names, absences)
    names.note_directory(10)
    kernel.drop_content(1000)
    kernel.drop_attributes(1000)
    kernel.drop_name(10, b"name")
    kernel.drop_name(10, b"name", 1000)
    kernel.drop_name(12, b"name", 11)
    kernel.drop_any_name(12, b"name")
    assert sent == []
    kernel.drop_content(11)
    kernel.drop_attributes(11)
    kernel.drop_name(10, b"name", 11)
    absences.note_directory(10)
    kernel.drop_name(10, b"other")
    kernel.drop_any_name(10, b"any")
    assert sent == [(11, False), (11, True), (10, b"name"), (10, b"other"), (10, b"any")]


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EINVAL, errno.ENOMEM])
def test_only_a_refusal_is_an_error(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(pyfuse3, "invalidate_inode", refuse)
    kernel = FuseKernelCache(lambda ino: True, CachedNames(1.0), CachedNames(1.0))
    if number != errno.ENOMEM:
        kernel.drop_content(11)
        return
    with pytest.raises(EngineError, match="inode 11"):
        kernel.drop_content(11)


def test_what_is_kept_ends_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    absences = CachedNames(5.0)
    absences.note_directory(1)
    assert absences.may_be_cached(1)
    assert not absences.may_be_cached(2)
    now[0] += 7.0
    assert not absences.may_be_cached(1)
    for directory in range(DIRECTORIES_MAX + 1):
        absences.note_directory(directory)
    assert absences.may_be_cached(DIRECTORIES_MAX)
    assert absences.may_be_cached(1)
    assert absences.may_be_cached(1 << 40)  # more than were counted: any
    now[0] += 7.0
    assert not absences.may_be_cached(1)


def test_a_kernel_that_keeps_nothing_needs_no_memory_of_it() -> None:
    absences = CachedNames(0.0)
    assert absences.note_directory(1) == 0.0
    assert not absences.may_be_cached(1)
