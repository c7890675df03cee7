"""Copies a segment to another place while it is in use.

Chunks that were written since they were copied are copied again, until few are left. Then calls wait until the last of
them are copied, and the map says where the segment is; a wait ends with the deadline of the store, as of a device that
stalls. A write that was late may still happen at the former place: it was unknown, and nobody reads there any more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

import trio

from kvfuse.remote.segments.block.block_device import HEAD_SIZE
from kvfuse.remote.segments.block.pieces import Located, cut, write_page
from kvfuse.remote.segments.block.places import pack_page
from kvfuse.remote.segments.block.set_device import SetDevice
from kvfuse.remote.segments.users import UsedSegment

CHUNK_SIZE = 256 << 10
RUN_CHUNKS = 16
"""neighbours that are copied at once"""
PASSES_MAX = 8
"""over what is written faster than it is copied"""
LAST_CHUNKS = 64
"""that are copied while calls wait, if it is to be had"""

Place: TypeAlias = tuple[SetDevice, int]
"""device, offset of the page"""


class SegmentMove:
    """Of one segment, from a place to another. ``check`` raises where writing is not allowed any more."""

    def __init__(self, known: UsedSegment, source: Place, target: Place, check: Callable[[], None]) -> None:
        self._known = known
        self._source, self._target = source, target
        self._check = check

    async def copy(self) -> None:
        """Copy all but what is written meanwhile. EngineError, EngineTimeout; the source alone counts then."""
        self._known.changed = set(range(-(-self._known.size // CHUNK_SIZE)))
        try:
            for _ in range(PASSES_MAX):
                await self._copy_changed()
                if len(self._known.changed) <= LAST_CHUNKS:
                    break
        except BaseException:
            self._known.changed = None
            raise

    @asynccontextmanager
    async def stopped(self, volume_id: bytes, segment: int) -> AsyncIterator[None]:
        """All is copied, and no call uses the segment in the body; a cancellation waits for that to end."""
        known = self._known
        known.gate = trio.Event()
        try:
            with trio.CancelScope(shield=True):
                await known.idle.wait()  # each ends within its deadline
                await self._copy_changed()
                device, offset = self._target
                image = pack_page(volume_id, segment, known.size)
                await device.run(lambda fd: write_page(fd, offset, image))
                yield
        finally:
            known.gate.set()
            known.gate = known.changed = None

    async def _copy_changed(self) -> None:
        """What was written until now. A write that ends later says so after the chunk was taken: it comes again."""
        changed = self._known.changed
        assert changed is not None
        for run in _runs(sorted(changed)):
            changed.difference_update(run)
            start = run.start * CHUNK_SIZE
            await self._copy_run(start, min(run.stop * CHUNK_SIZE, self._known.size) - start)

    async def _copy_run(self, start: int, length: int) -> None:
        (source, source_offset), (target, target_offset) = self._source, self._target
        buffer = memoryview(bytearray(length))
        await source.read(cut([Located(source_offset + HEAD_SIZE + start, buffer)]))
        self._check()
        await target.write(cut([Located(target_offset + HEAD_SIZE + start, buffer)]))


def _runs(chunks: Sequence[int]) -> Iterator[range]:
    """Neighbours among ascending numbers, up to `RUN_CHUNKS`."""
    start = 0
    for index in range(1, len(chunks) + 1):
        if index - start == RUN_CHUNKS or index == len(chunks) or chunks[index] != chunks[index - 1] + 1:
            yield range(chunks[start], chunks[index - 1] + 1)
            start = index
