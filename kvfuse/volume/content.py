"""Bytes of files: truncation and removal, over extents in slots and staged chunks. See `reading` and `writing`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from kvfuse.checksum import CHECKSUM_SIZE, GRANULE_SIZE, granule_checksums
from kvfuse.errors import FileTooLarge
from kvfuse.volume import schema
from kvfuse.volume.api import FILE_SIZE_MAX
from kvfuse.volume.chunk import COMMITTED, Chunk, Extent
from kvfuse.volume.node import Node
from kvfuse.volume.writing import ContentWriter, locked, start_of


@dataclass
class Content(ContentWriter):
    """See the module."""

    # -- size ----------------------------------------------------------------------------------------

    async def truncate(self, node: Node, size: int) -> None:
        """Shorten or extend; what is cut off is gone for good, what is added reads as zeros."""
        if size > min(FILE_SIZE_MAX, node.chunk_size << 32):
            raise FileTooLarge(f"inode {node.ino}: size {size} is beyond what a file may have")
        if size < node.size:
            size_before, cut_before = node.size, node.cut_size
            if self.core.shared:
                node.cut_size = min(size, node.size if node.cut_size is None else node.cut_size)
            try:
                async with locked(node):
                    await self._cut(node, size)
            except BaseException:  # a cancellation, too
                if node.size == size_before:
                    node.cut_size = cut_before  # else what other hosts have there would be given up
                else:
                    self._changed(node)
                raise
        node.set_size(size)
        self._changed(node)

    async def _cut(self, node: Node, size: int) -> None:
        keep, tail = divmod(size, node.chunk_size)
        await self.load_all(node, keep)
        if tail:
            await self._cut_chunk(node, keep, tail)
            keep += 1
        for index in sorted([index for index in node.chunks if index >= keep], reverse=True):
            node.set_size(min(node.size, (index + 1) * node.chunk_size))
            node.flushed_size = min(node.flushed_size, node.size)
            if self._is_many(node):
                await self._commit_so_far(node)
            if index in node.chunks:
                self.drop_chunk(node, index)
        node.set_size(size)
        node.flushed_size = min(node.flushed_size, size)

    def drop_chunk(self, node: Node, index: int) -> None:
        """Give up a chunk: the inode's next record frees its slots."""
        node.changing(index)
        chunk = node.chunks[index]
        self.unstage(node, chunk)
        if self.core.shared:
            chunk.changes()
        for extent in chunk.extents:
            self.core.discard(node, extent)
        node.set_extents(index, [])
        if index < schema.INLINE_CHUNKS:
            del node.chunks[index]  # of the others the empty chunk stays, until the store knows that it is gone

    def unstage(self, node: Node, chunk: Chunk) -> None:
        """What is staged of the chunk is given up, and so are its slots."""
        staged = chunk.staged
        if chunk.writing is not None:
            self.flusher.drop(chunk.writing)
        if staged is not None:
            self.flusher.unstage(node, chunk)
            if not staged.writing:
                self.flusher.cancel(staged, staged.slots)

    async def _cut_chunk(self, node: Node, index: int, length: int) -> None:
        """Shorten one chunk to ``length`` > 0 bytes, in its slots. An error leaves it as it was."""
        while (chunk := node.chunks.get(index)) is not None:
            staged, extents = chunk.staged, chunk.extents
            if staged is not None and staged.writing:
                await self.flusher.settled()
                continue
            kept = _within(extents, length)
            last_length = length - start_of(kept) if kept else 0
            is_cut = chunk.length > length
            checksums = kept[-1].checksums if is_cut and last_length < kept[-1].length else b""
            if checksums:
                whole = last_length // GRANULE_SIZE * GRANULE_SIZE
                tail: bytes | bytearray | memoryview = b""
                if last_length > whole:
                    tail = await self._read_extent(node, index, kept[-1], whole, last_length - whole)
                is_same = chunk.staged is staged and chunk.extents is extents and kept[-1].checksums is checksums
                if not is_same or (staged is not None and staged.writing):
                    continue
            node.changing(index)  # nothing waits from here on
            if self.core.shared:
                chunk.changes()
            if staged is not None and staged.length > length:
                self.flusher.grew(length - staged.length)
                staged.truncate(length)
            if checksums:
                kept[-1].checksums = checksums[: whole // GRANULE_SIZE * CHECKSUM_SIZE] + granule_checksums(tail)
                kept[-1].verified &= (1 << whole // GRANULE_SIZE) - 1
            if is_cut:
                node.resize(index, kept[-1], last_length)
                for extent in extents[len(kept) :]:
                    self.core.discard(node, extent)
                node.set_extents(index, kept)
            return

    # -- removal -------------------------------------------------------------------------------------

    def drop_all(self, node: Node) -> dict[bytes, bytes | None]:
        """The inode is no more: its extents are dead, its staged bytes gone. Every chunk must be loaded (`load_all`).

        Returns the records that go with them.
        """
        records: dict[bytes, bytes | None] = {}
        for index in list(node.chunks):
            self.drop_chunk(node, index)
            if index >= schema.INLINE_CHUNKS:
                records[schema.chunk_key(node.ino, index)] = None
        node.born = []
        node.dirty_chunks = frozenset()
        node.end_map()
        return records

    def forget_lost(self, node: Node) -> None:
        """Of an inode found after a crash: leave out extents that never were in a commit."""
        for chunk in node.chunks.values():
            chunk.extents = [extent for extent in chunk.extents if extent.state == COMMITTED]

    def describe_chunk(self, node: Node, index: int) -> list[dict[str, object]]:
        """Rows about a chunk's extents, and what is staged over them, for people."""
        chunk = node.chunks[index]
        if chunk.staged is not None:
            return [{"chunk": index, "piece": 0, "staged": True, "length": chunk.staged.length}]
        rows: list[dict[str, object]] = []
        for piece, extent in enumerate(chunk.extents):
            segment, offset = self.core.locate(extent.addr)
            rows.append(
                {
                    "chunk": index,
                    "piece": piece,
                    "staged": False,
                    "segment": segment,
                    "offset": offset,
                    "slab": self.core.geometry.slab_of(extent.addr),
                    "slot_size": extent.slot_size,
                    "length": extent.length,
                    "sealed": bool(extent.checksums),
                    "granules": len(extent.checksums) // CHECKSUM_SIZE,
                    "generation": extent.generation,
                }
            )
        return rows


def _within(extents: list[Extent], length: int) -> list[Extent]:
    """Those that have some of the first ``length`` bytes."""
    starts = accumulate([extent.length for extent in extents], initial=0)
    return [extent for extent, start in zip(extents, starts, strict=False) if start < length]
