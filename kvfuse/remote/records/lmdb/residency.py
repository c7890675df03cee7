"""Keeps a large read-only file mapping from counting as this process's memory.

Every page read through the mapping stays in the process's resident size (the kernel maps 16 around
each), so a million records would show as hundreds of MiB although they are only page cache. Dropping
them costs microseconds; a page that is needed again is a minor fault.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from kvfuse.remote.libc import drop_resident

RESIDENT_GROWTH_MAX = 64 << 20
"""bytes of file-backed memory this process may gain before the mapping is dropped"""
TOUCHES_PER_CHECK = 256
"""records touched between two looks at the resident size: at most 16 MiB of faults"""


class MappedFile:
    """The mapping that some library made of ``path`` in this process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.address = mapped_address(path)
        """where its first byte is"""
        self._touch_count = 0
        self._resident_floor = _resident_file_bytes()

    def touched(self, record_count: int) -> None:
        """Account for records that were read; drop the resident pages when they have grown too many."""
        self._touch_count += record_count
        if self._touch_count < TOUCHES_PER_CHECK:
            return
        self._touch_count = 0
        if _resident_file_bytes() > self._resident_floor + RESIDENT_GROWTH_MAX:
            self.drop()

    def drop(self) -> None:
        """Give the mapping's pages back to the page cache. Safe beside readers in other threads."""
        length = -(-os.stat(self._path).st_size // mmap.PAGESIZE) * mmap.PAGESIZE
        drop_resident(self.address, length)
        self._resident_floor = _resident_file_bytes()


def _resident_file_bytes() -> int:
    """RssFile + RssShmem of this process."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[2]) * mmap.PAGESIZE


def mapped_address(path: Path) -> int:
    """Where the file is mapped from its first byte on. By inode: the path is shown escaped."""
    inode = str(os.stat(path).st_ino)
    with open("/proc/self/maps", newline="\n", errors="surrogateescape") as maps:
        for line in maps:
            columns = line.split(maxsplit=5)
            if columns[4] == inode and int(columns[2], 16) == 0 and line.rstrip("\n").endswith(path.name):
                return int(columns[0].split("-")[0], 16)
    raise LookupError(f"{path} is not mapped")
