"""The two files that LMDB maps, guarded against a medium that loses their bytes (``mapguard.py``).

After a fault LMDB finds filler. It refuses that with an error, or goes on with whatever it says, but does not end the
process; and the store is used no more. So nothing is read, and nothing is committed, unless `Medium.is_intact`
afterwards, or before.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import weakref
from pathlib import Path

from kvfuse.remote.mapguard import GuardedMap
from kvfuse.remote.records.lmdb import datafile
from kvfuse.remote.records.lmdb.residency import mapped_address

DATA_FILE, LOCK_FILE = "data.mdb", "lock.mdb"
LOCK_SIZE = 8192
"""bytes of the lock file, at least: a table of 126 readers"""

FULL_FREE_BYTES = 1 << 20
"""a disk with less free has no room"""

log = logging.getLogger(__name__)


def check(directory: Path) -> None:
    """EngineError where bytes of the files are missing that LMDB would map; Corrupt where they are none of LMDB's."""
    datafile.check_whole(directory / DATA_FILE)
    datafile.check_readable(directory / LOCK_FILE)


def can_lock(directory: Path) -> bool:
    """LMDB may write to its lock file, which is mapped: SIGBUS, where the file system is full, or refuses writes.

    Then the store does without the file: this process is the only one that writes, and a write transaction never begins
    while it reads. Readers of other processes are not protected then.
    """
    try:
        descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError:
        return False
    try:
        if os.fstat(descriptor).st_size < LOCK_SIZE:
            os.ftruncate(descriptor, LOCK_SIZE)
        memory = mmap.mmap(descriptor, LOCK_SIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        guard = GuardedMap(directory / LOCK_FILE, None, address, LOCK_SIZE, memory, bytes(mmap.PAGESIZE))
        for place in range(0, LOCK_SIZE, mmap.PAGESIZE):
            memory[place] = memory[place]
        guard.close()
    except OSError:
        return False
    finally:
        os.close(descriptor)
    if guard.failed:
        log.warning("%s cannot be written to: the store is used without it", directory / LOCK_FILE)
    return not guard.failed


def drop_cache(directory: Path) -> None:
    """Of a store that is not open: it reads what the disk has. On ext4 pages that could not be written count as blocks
    that were written once: what goes to them later is not found on the disk, though a sync succeeded. OSError.
    """
    descriptor = os.open(directory / DATA_FILE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def is_full(directory: Path) -> bool:
    """LMDB answers EIO to a short write; then it was for lack of space."""
    try:
        free = os.statvfs(directory)
    except OSError:
        return False
    return free.f_bavail * free.f_frsize < FULL_FREE_BYTES


class Medium:
    """Of a store that is open in ``directory``, mapped for ``size`` bytes."""

    def __init__(self, directory: Path, size: int) -> None:
        self.path = directory / DATA_FILE
        self.size = size
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        filler = datafile.filler_page(mmap.PAGESIZE)
        self._data = GuardedMap(self.path, descriptor, mapped_address(self.path), size, None, filler)
        weakref.finalize(self._data, os.close, descriptor)
        self._lock = _guarded_lock(directory / LOCK_FILE)

    @property
    def failed(self) -> bool:
        return self._data.failed or (self._lock is not None and self._lock.failed)

    def is_intact(self) -> bool:
        """All bytes read until now are the files', and none were cut off."""
        return not self.failed and self._data.is_intact()

    def grew(self) -> None:
        """A commit may have made the file longer."""
        self._data.grew()

    def close(self) -> None:
        """LMDB has unmapped them."""
        for guarded in filter(None, (self._data, self._lock)):
            guarded.close()

    def give_up(self) -> None:
        """It is not intact, and never will be again."""
        self._data.failed = True


def _guarded_lock(path: Path) -> GuardedMap | None:
    """A page of zeros in it is a table without readers, whose lock is free. Without a descriptor: LMDB's locks of the
    file would go with it. None where a reader does without the file (a file system that is mounted read-only).
    """
    try:
        address = mapped_address(path)
        return GuardedMap(path, None, address, os.stat(path).st_size, None, bytes(mmap.PAGESIZE))
    except (LookupError, FileNotFoundError):
        return None
