"""Calls that the kernel does for us or that are not offered: copies, allocation, seeking for data, locks."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from posix_calls import fails, fallocate, opened

MIB = 1 << 20
FALLOC_FL_KEEP_SIZE = 1
FALLOC_FL_PUNCH_HOLE = 2


def test_copy_file_range(folder: Path) -> None:
    content = os.urandom(3 * MIB)
    (folder / "source").write_bytes(content)
    with opened(folder / "source", os.O_RDONLY) as source, opened(folder / "copy", os.O_CREAT | os.O_WRONLY) as copy:
        copied = 0
        while copied < len(content):
            copied += os.copy_file_range(source, copy, len(content) - copied)
    assert (folder / "copy").read_bytes() == content


def test_sendfile(folder: Path) -> None:
    content = os.urandom(2 * MIB)
    (folder / "source").write_bytes(content)
    with opened(folder / "source", os.O_RDONLY) as source, opened(folder / "copy", os.O_CREAT | os.O_WRONLY) as copy:
        sent = 0
        while sent < len(content):
            sent += os.sendfile(copy, source, sent, len(content) - sent)
    assert (folder / "copy").read_bytes() == content


@pytest.mark.kvfuse_only
@pytest.mark.parametrize("mode", [0, FALLOC_FL_KEEP_SIZE, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE])
def test_fallocate_says_that_it_is_not_supported(folder: Path, mode: int) -> None:
    (folder / "file").write_bytes(b"content")
    with opened(folder / "file") as fd, fails(errno.EOPNOTSUPP):
        fallocate(fd, mode, 0, MIB)
    assert (folder / "file").read_bytes() == b"content"


def test_posix_fallocate_makes_room(folder: Path) -> None:
    """The C library writes zeros where the file system has no fallocate."""
    with opened(folder / "file", os.O_CREAT | os.O_RDWR) as fd:
        os.write(fd, b"content")
        os.posix_fallocate(fd, 0, MIB)
        assert os.fstat(fd).st_size == MIB
        assert os.pread(fd, 9, 0) == b"content\0\0"


def test_seeking_for_data_and_holes_covers_all_data(folder: Path) -> None:
    with opened(folder / "file", os.O_CREAT | os.O_RDWR) as fd:
        os.pwrite(fd, b"data", 2 * MIB)
        os.ftruncate(fd, 4 * MIB)
        start = os.lseek(fd, 0, os.SEEK_DATA)
        end = os.lseek(fd, start, os.SEEK_HOLE)
        assert start <= 2 * MIB
        assert 2 * MIB + 4 <= end <= 4 * MIB
        with fails(errno.ENXIO):
            os.lseek(fd, 4 * MIB, os.SEEK_DATA)


def test_seeking(folder: Path) -> None:
    (folder / "file").write_bytes(b"0123456789")
    with opened(folder / "file") as fd:
        assert os.lseek(fd, -3, os.SEEK_END) == 7
        assert os.read(fd, 2) == b"78"
        assert os.lseek(fd, 1, os.SEEK_CUR) == 10
        assert os.lseek(fd, 1000, os.SEEK_SET) == 1000
        with fails(errno.EINVAL):
            os.lseek(fd, -1, os.SEEK_SET)


TRY_LOCK = """
import fcntl, sys
how, path = sys.argv[1:]
with open(path, "r+b") as file:
    try:
        if how == "flock":
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 100)
    except BlockingIOError:
        sys.exit(3)
"""


def can_lock(how: str, path: Path) -> bool:
    """Whether another process gets the lock."""
    ended = subprocess.run([sys.executable, "-c", TRY_LOCK, how, str(path)], check=False).returncode
    assert ended in (0, 3)
    return ended == 0


def test_flock_excludes_other_processes(folder: Path) -> None:
    path = folder / "file"
    with opened(path, os.O_CREAT | os.O_RDWR) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert not can_lock("flock", path)
        fcntl.flock(fd, fcntl.LOCK_UN)
        assert can_lock("flock", path)


def test_record_locks_exclude_other_processes(folder: Path) -> None:
    path = folder / "file"
    with opened(path, os.O_CREAT | os.O_RDWR) as fd:
        fcntl.lockf(fd, fcntl.LOCK_EX, 10, 105)
        assert not can_lock("lockf", path)
        fcntl.lockf(fd, fcntl.LOCK_UN, 10, 105)
        assert can_lock("lockf", path)


def test_locks_end_with_the_descriptor(folder: Path) -> None:
    path = folder / "file"
    with opened(path, os.O_CREAT | os.O_RDWR) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        fcntl.lockf(fd, fcntl.LOCK_EX)
    assert can_lock("flock", path)
    assert can_lock("lockf", path)
