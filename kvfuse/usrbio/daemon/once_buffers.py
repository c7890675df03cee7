"""Memory of the daemon for reads past the page cache, from which a ring's thread copies."""

from __future__ import annotations

import mmap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import trio

from kvfuse.checksum import GRANULE_SIZE

ONCE_PIECE = 8 << 20
"""Bytes that are read at a time: each costs the event loop as much as a read of a single page."""
ONCE_MIN = GRANULE_SIZE
"""Bytes of a read from which on it goes past the page cache: each reads whole granules, and nothing keeps them."""
COUNT_MAX = 3
"""Buffers of a connection: more pieces side by side bring a disk nothing."""
SIZE = ONCE_PIECE + 2 * GRANULE_SIZE
"""Bytes: a piece, and what its first and last granule have more."""
_MADV_POPULATE_WRITE = 23


class OnceBuffers:
    """Buffers of one connection, used again while reads follow each other: the first touch of memory costs more than
    the read. Event loop only."""

    def __init__(self) -> None:
        self._turns = trio.Semaphore(COUNT_MAX)
        self._spare: list[memoryview] = []
        self.lent_count = 0

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[memoryview]:
        """A buffer for the body, once there is one. A body that is cancelled may leave it to a thread."""
        async with self._turns:
            buffer = self._spare.pop() if self._spare else _new_buffer()
            self.lent_count += 1
            try:
                yield buffer
                self._spare.append(buffer)
            finally:
                self.lent_count -= 1
                if not self.lent_count and not self._turns.statistics().tasks_waiting:
                    self._spare.clear()


def _new_buffer() -> memoryview:
    """With all its pages, huge ones where the system has some."""
    memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
        with suppress(OSError):  # then they come at the first touch
            memory.madvise(advice)
    return memoryview(memory)
