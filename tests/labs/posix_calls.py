"""System calls and callers that the standard library does not offer, for the POSIX tests."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
UTIME_NOW = (1 << 30) - 1
UTIME_OMIT = (1 << 30) - 2
AT_FDCWD = -100
AT_SYMLINK_NOFOLLOW = 0x100

USER, GROUP = 12345, 23456
"""somebody who is not root and owns nothing here"""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.telldir.restype = ctypes.c_long
_libc.opendir.restype = ctypes.c_void_p
_libc.readdir64.restype = ctypes.c_void_p


def _check(result: int, path: Path | str | None = None) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return result


def renameat2(source: Path, target: Path, flags: int) -> None:
    """rename with RENAME_NOREPLACE or RENAME_EXCHANGE."""
    _check(_libc.renameat2(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), flags), source)


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def utimensat(path: Path | str, atime: tuple[int, int], mtime: tuple[int, int], *, follow: bool = True) -> None:
    """Set times given as (seconds, nanoseconds); the latter may be UTIME_NOW or UTIME_OMIT."""
    times = (_Timespec * 2)(_Timespec(*atime), _Timespec(*mtime))
    _check(_libc.utimensat(AT_FDCWD, os.fsencode(path), times, 0 if follow else AT_SYMLINK_NOFOLLOW), path)


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    _check(_libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)))


class Directory:
    """opendir, readdir, telldir, seekdir."""

    def __init__(self, path: Path) -> None:
        self._stream = ctypes.c_void_p(_libc.opendir(os.fsencode(path)))
        assert self._stream.value, path

    def read(self) -> bytes | None:
        """The next name, or None at the end. In ``struct dirent`` of 64 bits the name stands at byte 19."""
        entry = _libc.readdir64(self._stream)
        return ctypes.string_at(entry + 19) if entry else None

    def tell(self) -> int:
        return int(_libc.telldir(self._stream))

    def seek(self, position: int) -> None:
        _libc.seekdir(self._stream, ctypes.c_long(position))

    def close(self) -> None:
        _libc.closedir(self._stream)


@contextmanager
def fails(number: int) -> Iterator[None]:
    """The body must fail with exactly this errno."""
    with pytest.raises(OSError) as caught:
        yield
    found = caught.value.errno or 0
    assert found == number, f"{errno.errorcode[found]}, not {errno.errorcode[number]}"


@contextmanager
def as_user(uid: int = USER, gid: int = GROUP, groups: Sequence[int] = ()) -> Iterator[None]:
    """Run the body as another user (effective ids; needs root)."""
    before = os.getgroups()
    os.setgroups(groups)
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def opened(path: Path, flags: int = os.O_RDWR, mode: int = 0o644) -> Iterator[int]:
    """A descriptor, closed at the end."""
    fd = os.open(path, flags, mode)
    try:
        yield fd
    finally:
        os.close(fd)


def permissions(path: Path) -> int:
    return os.lstat(path).st_mode & 0o7777
