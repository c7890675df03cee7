"""Writes into slots that a file has already, where nobody but this host reads them.

The extents are *unsealed* before: the records say that they have no checksums before the first byte changes, so a torn
write is never taken for what was committed. They are sealed again when the last writer has closed the file.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvfuse.checksum import granule_checksums
from kvfuse.remote.segments.api import Transfer
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.inodes.chunk import FRESH, Chunk
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node, locked
from kvfuse.volume.slots.heads import HeaderWriter


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
        return True

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
                    node.changing(index)
                    extent.checksums, extent.verified = granule_checksums(buffer), 0
                    node.chunk_changed(index)
                    self.journal.pending.touch(node)
                    await self.headers.write_header(node, index, extent)


def has_unsealed(node: Node) -> bool:
    return any(not extent.checksums for chunk in node.chunks.values() for extent in chunk.extents)
