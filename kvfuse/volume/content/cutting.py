"""Bytes of files: truncation and removal, over extents in slots and staged chunks. See `reading` and `writing`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from kvfuse.checksum import CHECKSUM_SIZE, GRANULE_SIZE, granule_checksums
from kvfuse.errors import FileTooLarge
from kvfuse.volume.api import FILE_SIZE_MAX
from kvfuse.volume.content.writer import ContentWriter, locked, start_of
from kvfuse.volume.inodes.chunk import COMMITTED, Chunk, Extent
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store import schema

Bytes = bytes | bytearray | memoryview


@dataclass
class Content(ContentWriter):
    """See the module."""

    # -- size ----------------------------------------------------------------------------------------

    async def truncate(self, node: Node, size: int) -> None:
        """Shorten or extend; what is cut off is gone for good, what is added reads as zeros."""
        if size > min(FILE_SIZE_MAX, node.chunk_size << 32):
            raise FileTooLarge(f"inode {node.ino}: size {size} is beyond what a file may have")
        if size < node.size:
            async with locked(node):
                await self._cut(node, size)
        else:
            node.set_size(size)
        self._changed(node)

    async def _cut(self, node: Node, size: int) -> None:
        """Under the lock. Each step is made without a wait: an error leaves the file cut as far as it came."""
        keep, tail = divmod(size, node.chunk_size)
        merges: int | None = None
        while True:
            if merges != node.content_merges:
                await self.load_all(node, keep)
                merges = node.content_merges
            before = await self._before(node, keep, tail)
            if merges != node.content_merges:
                continue
            if not self._drop_behind(node, keep + (tail > 0)):
                await self._commit_so_far(node)
                continue
            if self.core.shared and tail:
                node.chunks.setdefault(keep, Chunk())  # what another host may have stored there is cut, too
            if keep in node.chunks and tail:
                self.cut_chunk(node, keep, tail, before)
            self._end_at(node, size)
            return

    def _drop_behind(self, node: Node, first: int) -> bool:
        """Give up chunks from the last one down to ``first``; False: these were as many as a commit may carry."""
        for index in sorted([index for index in node.chunks if index >= first], reverse=True):
            if not (node.chunks[index].extents or node.chunks[index].staged):
                continue
            if self._is_many(node):
                return False
            self.drop_chunk(node, index)
            self._end_at(node, index * node.chunk_size)
            self._changed(node)
        return True

    def _end_at(self, node: Node, size: int) -> None:
        """The file was cut."""
        if self.core.shared and (node.committing or (node.base is not None and size < node.base.size)):
            node.cut_size = size if node.cut_size is None else min(size, node.cut_size)
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

    async def _before(self, node: Node, index: int, length: int) -> Bytes:
        """What is in front of ``length`` in its granule of the chunk's slots, where these have checksums.

        Nothing of the chunk is being written, and so it is until the next wait.
        """
        while (chunk := node.chunks.get(index)) is not None and length:
            staged, extents = chunk.staged, chunk.extents
            if staged is not None and staged.writing:
                await self.flusher.settled()
                continue
            kept = _within(extents, length)
            rest = (length - start_of(kept)) % GRANULE_SIZE
            if chunk.length <= length or not kept[-1].checksums or not rest:
                break
            checksums = kept[-1].checksums
            before = await self._read_extent(node, index, kept[-1], length - start_of(kept) - rest, rest)
            is_same = node.chunks.get(index) is chunk and chunk.staged is staged and chunk.extents is extents
            if is_same and kept[-1].checksums is checksums and not (staged is not None and staged.writing):
                return before
        return b""

    def cut_chunk(self, node: Node, index: int, length: int, before: Bytes) -> None:
        """Shorten one chunk to ``length`` > 0 bytes, in its slots. Nothing waits.

        ``before``: bytes in front of there; all that the granule has in which the chunk is cut, or more.
        """
        chunk = node.chunks[index]
        node.changing(index)
        if self.core.shared:
            chunk.changes()
        staged = chunk.staged
        if staged is not None and staged.length > length:
            self.flusher.grew(length - staged.length)
            staged.truncate(length)
        if chunk.length > length:
            extents, kept = chunk.extents, _within(chunk.extents, length)
            last, last_length = kept[-1], length - start_of(kept)
            if last.checksums and last_length < last.length:
                whole, rest = divmod(last_length, GRANULE_SIZE)
                tail = memoryview(before)[len(before) - rest :]
                last.checksums = last.checksums[: whole * CHECKSUM_SIZE] + granule_checksums(tail)
                last.verified &= (1 << whole) - 1
            node.resize(index, last, last_length)
            for extent in extents[len(kept) :]:
                self.core.discard(node, extent)
            node.set_extents(index, kept)

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
