"""Truncation of files, over extents in slots and staged chunks."""

from __future__ import annotations

from dataclasses import dataclass

from kvfuse.checksum import GRANULE_SIZE
from kvfuse.errors import FileTooLarge
from kvfuse.volume.api import FILE_SIZE_MAX
from kvfuse.volume.content.chunks import Bytes, Chunks, extents_within
from kvfuse.volume.content.reader import Reader
from kvfuse.volume.content.writer import Writer
from kvfuse.volume.inodes.chunk import Chunk, Extent
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node, locked


@dataclass
class Cutter:
    """Changes the size of files. One of each membership."""

    core: Core
    chunks: Chunks
    reader: Reader
    writer: Writer

    async def truncate(self, node: Node, size: int) -> None:
        """Shorten or extend; what is cut off is gone for good, what is added reads as zeros."""
        if size > min(FILE_SIZE_MAX, node.chunk_size << 32):
            raise FileTooLarge(f"inode {node.ino}: size {size} is beyond what a file may have")
        if size < node.size:
            async with locked(node):
                await self._cut(node, size)
        else:
            node.set_size(size)
        self.writer.staging.note_change(node)

    async def _cut(self, node: Node, size: int) -> None:
        """Under the lock. Each step is made without a wait: an error leaves the file cut as far as it came."""
        keep, tail = divmod(size, node.chunk_size)
        merges: int | None = None
        while True:
            if merges != node.content_merges:
                await self.chunks.load_all(node, keep)
                merges = node.content_merges
            before = await self._read_before(node, keep, tail)
            if merges != node.content_merges:
                continue
            if not self._drop_behind(node, keep + (tail > 0)):
                await self.writer.commit_so_far(node)
                continue
            if tail:
                node.chunks.setdefault(keep, Chunk())  # what another host may have stored there is cut, too
                self.chunks.cut_chunk(node, keep, tail, before)
            self._end_at(node, size)
            return

    def _drop_behind(self, node: Node, first: int) -> bool:
        """Give up chunks from the last one down to ``first``; False: these were as many as a commit may carry."""
        for index in sorted([index for index in node.chunks if index >= first], reverse=True):
            if not (node.chunks[index].extents or node.chunks[index].staged):
                continue
            if self.writer.is_many(node):
                return False
            self.chunks.drop_chunk(node, index)
            self._end_at(node, index * node.chunk_size)
            self.writer.staging.note_change(node)
        return True

    def _end_at(self, node: Node, size: int) -> None:
        """The file was cut."""
        if node.committing or (node.base is not None and size < node.base.size):
            node.cut_size = size if node.cut_size is None else min(size, node.cut_size)
        node.set_size(size)
        node.flushed_size = min(node.flushed_size, size)

    async def _read_before(self, node: Node, index: int, length: int) -> Bytes:
        """What the chunk's slots have in front of ``length`` in its granule, where they have checksums.

        Not what is staged over them: a commit may say first that the extent was cut. Corrupt.
        Nothing of the chunk is being written, and so it is until the next wait.
        """
        while (chunk := node.chunks.get(index)) is not None and length:
            if chunk.staged is not None and chunk.staged.writing:
                await self.writer.flusher.settled()
                continue
            kept = extents_within(chunk.extents, length)
            if chunk.length <= length or not kept[-1].checksums or kept[-1].packing:
                break
            end = length - chunk.start_of(kept[-1])
            rest = end % GRANULE_SIZE
            if not rest:
                break
            before = await self._read_cut(node, index, chunk, kept[-1], end - rest, rest)
            if before is not None:
                return before
        return b""

    async def _read_cut(
        self, node: Node, index: int, chunk: Chunk, last: Extent, start: int, size: int
    ) -> Bytes | None:
        """Bytes from ``start`` of one of the chunk's extents, in its slot; None where the chunk changed meanwhile."""
        seen = chunk, chunk.staged, chunk.extents, last.checksums

        def is_same() -> bool:
            is_written = chunk.staged is not None and chunk.staged.writing
            return seen == (node.chunks.get(index), chunk.staged, chunk.extents, last.checksums) and not is_written

        if chunk.staged is None:
            offset = index * node.chunk_size + chunk.start_of(last) + start
            before = await self.reader.extents.read(node, offset, last, start, size)
        else:
            before = await self.reader.extents.read_verified(node, last, start, size, is_same)
        return before if is_same() else None
