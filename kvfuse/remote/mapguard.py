"""Maps of files whose medium may fail: a fault (SIGBUS) becomes filler that nobody uses, and a mark that it is there.

A page that cannot be read - its file was truncated, its sector is bad - raises SIGBUS in the thread that touches it,
which kills the process. A handler marks the map as failed, puts filler in the page's place and returns: the processor
repeats the instruction and reads filler. Code that copies from a `GuardedMap` therefore asks `is_intact` before it uses
the copy. The mark stands before the filler is there, it is set under the interpreter lock, and it stays: a thread that
copied filler, after its own fault or another thread's, sees the mark when it has the lock again.

**Why a handler in Python is right here.** Python runs what ``signal.signal`` sets later, between two bytecodes: after a
fault there is no later. This handler is a C function that ctypes makes; it takes the interpreter lock and runs at once,
inside of the instruction that faulted. Most signal handlers may not do that: their signal may interrupt anything, a
malloc that holds its lock for one. A fault interrupts one thing only, an instruction that reads a guarded map. Those
are in memcpy, in numpy's loops, in the checksum and in LMDB, and none of them holds a lock of the C library or of the
interpreter's memory then. To the interpreter it looks like a callback, as qsort makes one: ctypes goes on with the
interpreter lock where the thread has it, and waits for it where the thread let go of it.

Copies by the kernel (a mapped buffer given to write(2)) raise no signal: they say EFAULT. A SIGBUS at any other
address, or one that a process sent, kills as it did before.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import signal
import weakref
from functools import lru_cache
from pathlib import Path

from kvfuse.remote import libc

log = logging.getLogger(__name__)

_SI_CODE, _SI_ADDRESS = 8, 16
"""offsets in siginfo_t of 64-bit systems"""


class GuardedMap:
    """A read-only map of a file, guarded for as long as this object lives."""

    __slots__ = ("__weakref__", "_filler", "_memory", "address", "descriptor", "failed", "file_size", "path", "size")

    def __init__(
        self, path: Path, descriptor: int | None, address: int, size: int, memory: object, filler: bytes = b""
    ) -> None:
        """Of ``size`` bytes mapped at ``address``, which ``memory`` keeps mapped. The file may be shorter.

        ``filler`` is a page that takes the place of one that cannot be read; without it zeros take that of the whole
        map, so that it fails once.
        """
        self.path = path
        self.descriptor = descriptor
        """of the file, open as long as it is mapped; None: its size does not matter"""
        self.address = address
        self.size = size
        self.file_size = 0 if descriptor is None else min(size, os.fstat(descriptor).st_size)
        """bytes that the file had, and did not lose as long as it is intact"""
        self.failed = False
        """a page could not be read"""
        self._memory = memory
        self._filler = filler
        _install()
        _guarded[id(self)] = weakref.ref(self)
        weakref.finalize(self, _guarded.pop, id(self), None).atexit = False  # before ``memory`` is unmapped

    def is_intact(self) -> bool:
        """All bytes copied until now are the file's, which still has all of them.

        Behind the end of a file its last page reads as zeros, without a fault.
        """
        return not self.failed and self._size_now() >= self.file_size

    def grew(self) -> None:
        """This process made the file longer. It is intact."""
        self.file_size = max(self.file_size, self._size_now())

    def _size_now(self) -> int:
        return 0 if self.descriptor is None else os.lseek(self.descriptor, 0, os.SEEK_END)

    def close(self) -> None:
        """It is not mapped any more: what has its addresses next is another's."""
        _guarded.pop(id(self), None)

    def holds(self, address: int) -> bool:
        return self.address <= address < self.address + self.size

    def fail(self, address: int) -> None:
        """The page at ``address`` cannot be read."""
        self.failed = True
        page = address - address % mmap.PAGESIZE
        log.error(
            "%s at %d: the medium does not give the bytes; its map is not used any more", self.path, page - self.address
        )
        if self._filler:
            libc.map_filler(page, self._filler)
        else:
            libc.map_zeros(self.address, self.size)


_guarded: dict[int, weakref.ref[GuardedMap]] = {}
"""by id"""


def _on_fault(number: int, info: int, _: int) -> None:
    """In the thread that faulted, or that the signal was sent to."""
    is_fault = ctypes.c_int.from_address(info + _SI_CODE).value > 0
    address = ctypes.c_uint64.from_address(info + _SI_ADDRESS).value
    for reference in list(_guarded.values()) if is_fault else ():
        guarded = reference()
        if guarded is not None and guarded.holds(address):
            guarded.fail(address)
            return
    libc.reset_signal_handler(number)  # a fault repeats itself
    if not is_fault:
        os.kill(os.getpid(), number)


@lru_cache(maxsize=1)
def _install() -> None:
    """Once."""
    libc.set_signal_handler(signal.SIGBUS, _on_fault)
