"""The few calls of the C library that Python does not wrap.

Each raises ``OSError`` with the call's errno. ctypes releases the interpreter lock around them.
"""

from __future__ import annotations

import ctypes
import mmap
import os

FALLOC_FL_KEEP_SIZE = 0x01
FALLOC_FL_PUNCH_HOLE = 0x02
FALLOC_FL_ZERO_RANGE = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate64.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2). Unlike ``os.posix_fallocate`` it says EOPNOTSUPP instead of writing into every block."""
    _check(_libc.fallocate64(fd, mode, offset, length))


def is_resident(address: int, length: int) -> bool:
    """Whether all pages of a mapped range are in memory (mincore(2)). ``address`` is page-aligned."""
    page_count = -(-length // mmap.PAGESIZE)
    residency = ctypes.create_string_buffer(page_count)
    _check(_libc.mincore(address, length, residency))
    return residency.raw.count(b"\x01") == page_count


def drop_resident(address: int, length: int) -> None:
    """Unmap the pages of a shared read-only file mapping; the page cache keeps them and they fault in again."""
    _check(_libc.madvise(address, length, mmap.MADV_DONTNEED))


def _check(status: int) -> None:
    if status != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
