"""The few calls of the C library that Python does not wrap.

Each raises ``OSError`` with the call's errno. ctypes releases the interpreter lock around them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Callable

MREMAP_MAYMOVE, MREMAP_FIXED = 1, 2
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
SA_SIGINFO = 4
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, FALLOC_FL_ZERO_RANGE = 1, 2, 16
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 1 << 14, 1 << 18
_CLONE_NEWNS = 0x20000

_SignalHandler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_handlers: list[object] = []
"""kept as long as the process lives"""


class _Sigaction(ctypes.Structure):
    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint8 * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate64.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap64.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.mmap64.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_libc.mremap.restype = ctypes.c_void_p
_libc.sigaction.argtypes = [ctypes.c_int, ctypes.POINTER(_Sigaction), ctypes.c_void_p]
_libc.syscall.restype = ctypes.c_long
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_MBIND_NUMBERS = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1
_MAP_FAILED = ctypes.c_void_p(-1).value


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2). Unlike ``os.posix_fallocate`` it says EOPNOTSUPP instead of writing into every block."""
    _check(_libc.fallocate64(fd, mode, offset, length))


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Give the pages of a range back, also those that other processes have mapped: they find zeros there."""
    fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, length)


def leave_mounts() -> None:
    """unshare(2): from now on this thread, and no other one, has mounts of its own. It takes CAP_SYS_ADMIN."""
    _check(_libc.unshare(_CLONE_NEWNS))


def mount(source: str, target: str, kind: str, flags: int, words: str = "") -> None:
    """mount(2)."""
    _check(_libc.mount(os.fsencode(source), os.fsencode(target), os.fsencode(kind), flags, os.fsencode(words)))


def is_resident(address: int, length: int) -> bool:
    """Whether all pages of a mapped range are in memory (mincore(2)). ``address`` is page-aligned."""
    page_count = -(-length // mmap.PAGESIZE)
    residency = ctypes.create_string_buffer(page_count)
    _check(_libc.mincore(address, length, residency))
    return residency.raw.count(b"\x01") == page_count


def drop_resident(address: int, length: int) -> None:
    """Unmap the pages of a shared read-only file mapping; the page cache keeps them and they fault in again."""
    _check(_libc.madvise(address, length, mmap.MADV_DONTNEED))


def map_zeros(address: int, length: int) -> None:
    """Have zeros in the place of whatever is mapped there."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE
    _check(_libc.mmap64(address, length, mmap.PROT_READ, flags, -1, 0) == _MAP_FAILED)


def map_filler(address: int, page: bytes) -> None:
    """Have a writable copy of ``page`` in the place of the page that is mapped there. No thread sees a gap."""
    size = mmap.PAGESIZE
    made = _libc.mmap64(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    _check(made == _MAP_FAILED)
    ctypes.memmove(made, page, size)
    _check(_libc.mremap(made, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, address) == _MAP_FAILED)


def prefer_node(address: int, size: int, node: int) -> None:
    """Let pages of a shared mapping that are not there yet come from a NUMA node, if it has room."""
    number = _MBIND_NUMBERS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"mbind is not known on {platform.machine()}")
    word_count = node // 64 + 1
    nodes = (ctypes.c_uint64 * word_count)()
    nodes[node // 64] = 1 << node % 64
    arguments = [ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(_MPOL_PREFERRED), nodes]
    _check(_libc.syscall(ctypes.c_long(number), *arguments, ctypes.c_ulong(64 * word_count + 1), ctypes.c_uint(0)))


def set_signal_handler(number: int, handler: Callable[[int, int, int], None]) -> None:
    """sigaction(2): ``handler(number, info, context)`` runs at once, in the thread of the signal.

    The two are the addresses of a siginfo_t and a ucontext_t.
    """
    made = _SignalHandler(handler)
    _handlers.append(made)
    _check(_libc.sigaction(number, _Sigaction(ctypes.cast(made, ctypes.c_void_p), flags=SA_SIGINFO), None))


def reset_signal_handler(number: int) -> None:
    """As before all handlers."""
    _check(_libc.sigaction(number, _Sigaction(), None))


def _check(status: int) -> None:
    if status != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
