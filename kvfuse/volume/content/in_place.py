"""Writes into slots that a file has already, where nobody but this host reads them.

The extents are *unsealed* before: the records say that they have no checksums before the first byte changes, so a torn
write is never taken for what was committed. They are sealed again when the last writer has closed the file.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvfuse.checksum import granule_checksums
from kvfuse.remote.segments.api import Transfer
from kvfuse.volume.api import Numbers, SlotSource, WritePlaces
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.inodes.chunk import FRESH, Chunk
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node, locked
from kvfuse.volume.slots.heads import HeaderWriter
from kvfuse.volume.views import clock

NO_PLACE = -1, 0, -1


@dataclass
class InPlaceWriter:
    """Unseals, changes and seals the extents of files. One of each membership."""

    core: Core
    journal: Journal
    headers: HeaderWriter

    async def write(self, node: Node, index: int, chunk: Chunk, start: int, data: bytes | memoryview) -> bool:
        """Write into the chunk's own slots; False when they were replaced meanwhile."""
        extents, end = chunk.extents, start + len(data)
        await self._keep_clear(chunk, end)
        await self._unseal(node, index, chunk)
        if chunk.staged is not None or chunk.extents is not extents:
            return False
        growth = end - chunk.length
        transfers = self._transfers(chunk, start, data)
        node.changing(index)
        with self.core.reads.reading():
            await self.core.segments.write(transfers)
        if growth > 0:
            node.resize(index, extents[-1], extents[-1].length + growth)
        if node.map is not None:
            node.map.is_in_place = True
        return True

    async def write_in_slots(self, node: Node, offsets: Numbers, lengths: Numbers, source: SlotSource) -> Numbers:
        """Write where the bytes have unsealed slots; see `api.FileApi`. Of writes that overlap only the first is done.

        EngineError: each of them may have been written or not.
        """
        async with locked(node):
            numbers, segments, places = self._places(node, offsets, lengths)
            if node.map is not None:
                node.map.is_in_place = len(numbers) == len(offsets)
            if not len(numbers):
                return numbers
            with self.core.segments.writing(set(segments.tolist())) as targets, self.core.reads.reading():
                if callable(source) and not targets:
                    return numbers[:0]
                for index in np.unique(offsets[numbers] // node.chunk_size).tolist():
                    node.changing(index)
                node.mtime = node.ctime = clock.now()
                self.journal.pending.touch(node)
                if callable(source):
                    self._keep()  # who writes answers for it, too
                    await source(WritePlaces(numbers, segments, places, targets))
                else:
                    rows = zip(segments.tolist(), places.tolist(), numbers.tolist(), strict=True)
                    await self.core.segments.write([Transfer(*row[:2], source[row[2]]) for row in rows])
        return numbers

    def _places(self, node: Node, offsets: Numbers, lengths: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """(numbers, segments, offsets there) of writes into slots that may be written to as they are, in file order."""
        order = np.argsort(offsets, kind="stable")
        starts, sizes = offsets[order], lengths[order]
        if bool((starts[1:] < (starts + sizes)[:-1]).any()):
            order = order[_apart(starts.tolist(), sizes.tolist())]
            starts, sizes = offsets[order], lengths[order]
        indices, inverse = np.unique(starts // node.chunk_size, return_inverse=True)
        rows = np.array([self._slot(node, index) for index in indices.tolist()], np.int64).reshape(-1, 3)[inverse]
        starts %= node.chunk_size
        fits = np.flatnonzero(starts + sizes <= rows[:, 2])
        return order[fits], rows[fits, 0], rows[fits, 1] + starts[fits]

    def _slot(self, node: Node, index: int) -> tuple[int, int, int]:
        """(segment, offset, bytes) of a chunk's first extent, as far as it may be written to; else `NO_PLACE`."""
        chunk = node.chunks.get(index)
        if chunk is None or chunk.staged is not None or not chunk.extents or chunk.extents[0].checksums:
            return NO_PLACE
        extent = chunk.extents[0]
        return *self.core.locate(extent.addr), min(extent.length, node.size - index * node.chunk_size)

    def _transfers(self, chunk: Chunk, start: int, data: bytes | memoryview) -> list[Transfer]:
        """What writes ``data``, and zeros from the chunk's end up to there, into the slots of its extents."""
        transfers = []
        gap = bytes(max(0, start - chunk.length))
        low, view = start - len(gap), memoryview(gap + data if gap else data)
        extent_start = 0
        for extent in chunk.extents:
            size = extent.slot_size if extent is chunk.extents[-1] else extent.length
            part_low, part_high = max(low, extent_start), min(low + len(view), extent_start + size)
            if part_low < part_high:
                segment, offset = self.core.locate(extent.addr + part_low - extent_start)
                transfers.append(Transfer(segment, offset, view[part_low - low : part_high - low]))
            extent_start += extent.length
        return transfers

    async def _keep_clear(self, chunk: Chunk, end: int) -> None:
        """Have no description of the file at the last slot's end, before bytes up to ``end`` of the chunk go there."""
        last = chunk.extents[-1]
        reach = min(end - chunk.start_of(last), last.slot_size)
        if reach > last.reach:
            last.reach = reach
            await self.headers.settle_descriptions()

    async def _unseal(self, node: Node, index: int, chunk: Chunk) -> None:
        """Have it in the records that the chunk's extents are no longer what their checksums say."""
        sealed = [(extent, extent.checksums) for extent in chunk.extents if extent.checksums]
        if not sealed:
            return
        for extent, _ in sealed:
            extent.checksums, extent.verified = b"", 0
        node.chunk_changed(index)
        if all(extent.state == FRESH for extent, _ in sealed):
            self._keep()
            return
        self.journal.pending.touch(node, forced=True)
        try:
            await self.journal.commit(node, durable=True)
        except BaseException:
            node.changing(index)  # it may have been shown without checksums
            for extent, checksums in sealed:  # no byte was changed: the next write has to ask again
                extent.checksums = checksums
            node.chunk_changed(index)
            self.journal.pending.touch(node)
            raise

    def _keep(self) -> None:
        """What is kept for a daemon after this one is as things are now."""
        if self.core.unstored is not None:
            self.core.unstored.seal()

    async def seal(self, node: Node) -> None:
        """Checksum what was changed in place, when nobody writes any more."""
        for index, chunk in list(node.chunks.items()):
            for extent in chunk.extents:
                if extent.checksums or chunk.staged is not None:
                    continue
                async with locked(node):
                    segment, offset = self.core.locate(extent.addr)
                    buffer = bytearray(extent.length)
                    with self.core.reads.reading():
                        await self.core.segments.read([Transfer(segment, offset, buffer)])
                    if node.writers or extent not in chunk.extents or extent.length != len(buffer):
                        return
                    if self.core.doubt.covers(node.ino, [chunk]):
                        return  # these may not be the bytes that were written: see `names.rewriting`
                    self.core.doubt.sealed(node.ino)
                    node.changing(index)
                    extent.checksums, extent.verified = granule_checksums(buffer), 0
                    node.chunk_changed(index)
                    self.journal.pending.touch(node)
                    await self.headers.write_header(node, index, extent)


def _apart(starts: list[int], sizes: list[int]) -> npt.NDArray[np.intp]:
    """Of ordered ranges: indices of those that do not overlap one that was chosen before."""
    chosen, reach = [], 0
    for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if start >= reach:
            chosen.append(number)
            reach = start + size
    return np.array(chosen, np.intp)


def has_unsealed(node: Node) -> bool:
    for chunk in node.chunks.values():
        for extent in chunk.extents:
            if not extent.checksums:
                return True
    return False
