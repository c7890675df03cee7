"""Shows other threads where the bytes of a file are: makes content maps, and fills them as far as it is asked to."""

from __future__ import annotations

from dataclasses import dataclass

from kvfuse.errors import Stale
from kvfuse.volume.content.access_times import AccessTimes
from kvfuse.volume.content.chunks import Chunks
from kvfuse.volume.content.kept_copies import KeptCopies
from kvfuse.volume.content.reader import Extents
from kvfuse.volume.content.slot_checks import READ_ON_MIN
from kvfuse.volume.inodes.chunk import DISCARDED, Chunk, Extent
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.views.content_map import ContentMap, MapRow


@dataclass
class Mapper:
    """Makes the content maps of inodes. One of each membership."""

    core: Core
    chunks: Chunks
    access: AccessTimes
    extents: Extents

    def __post_init__(self) -> None:
        self.left = KeptCopies(self.core, self.chunks)

    def map_of(self, node: Node) -> ContentMap:
        """The inode's map. Stale for one that was removed."""
        if node.map is None:
            if node.reaped or self.core.nodes.get(node.ino) is not node:  # nobody would end the map with the inode
                raise Stale(f"inode {node.ino} was removed")
            node.map = ContentMap(node.ino, node.chunk_size, node.size, self.access.log_for(node))
        return node.map

    async def show(self, node: Node, first: int, last: int) -> None:
        """Have rows for the chunks ``first``..``last`` of which all bytes in slots are in one place that is mapped.

        Others stay unknown: those with staged bytes, or in pieces, or in segments that cannot be mapped. Rows may be
        gone again when this returns, where the file changes meanwhile. Waits for the records of far chunks.
        """
        if node.ino in self.core.tier.left:
            await self.left.admit(node)
        for index in range(first, min(last, (node.size - 1) // node.chunk_size) + 1):
            shown = self.map_of(node)
            shown_row = shown.rows.get(index)
            if shown_row is not None:
                if shown_row.source is None or shown_row.source.is_intact():
                    continue
                shown.hide(index)
            row = self._copy(node, index)
            if row is None:
                chunk = node.chunks.get(index) or await self.chunks.load_chunk(node, index)
                row = self._row(chunk)
            if row is not None:
                self.map_of(node).add(index, row)  # nothing has waited since the chunk was looked at

    async def verify_ahead(self, node: Node, offset: int, end: int) -> None:
        """Have the slots of a large read, or of one that goes on, verified side by side, and those that follow."""
        checks, waited = self.extents.checks, list[Extent]()
        if checks is None or end - offset < READ_ON_MIN or self.core.tier.find(node.ino) is not None:
            return
        for index in range(offset // node.chunk_size, (min(end, node.size) - 1) // node.chunk_size + 1):
            chunk = await self.chunks.load_chunk(node, index)
            if chunk is not None and chunk.staged is None and len(chunk.extents) == 1 and not chunk.extents[0].packing:
                extent, start = chunk.extents[0], index * node.chunk_size
                low, high = max(offset - start, 0), min(end - start, extent.length)
                if low < high:
                    checks.expect(node, index, extent, low, high - low)
                    waited.append(extent)
        for extent in waited:
            await checks.wait(extent)

    def _copy(self, node: Node, index: int) -> MapRow | None:
        """A row for the copy of the file in the shared-memory tier."""
        block = self.core.tier.find(node.ino)
        if block is None or block.size != node.size:
            return None
        start = index * node.chunk_size
        return MapRow(block.source, block.offset + start, min(node.chunk_size, block.size - start), block=block)

    def _row(self, chunk: Chunk | None) -> MapRow | None:
        if chunk is None or (chunk.staged is None and not chunk.extents):
            return MapRow(None, 0, 0)
        # A discarded one is of a damaged volume: its slot may become another file's, and nobody would hide the row.
        if chunk.staged is not None or len(chunk.extents) > 1 or chunk.extents[0].state == DISCARDED:
            return None
        return self.extents.row(chunk.extents[0])
