"""Finds data and holes of a file, as lseek does with SEEK_DATA and SEEK_HOLE, by chunks and extents.

The bytes of a chunk begin at the chunk's start. So each chunk has one run of data, from its start on, and a hole behind
it, or is a hole as a whole. What is found may be stale when the caller has it: writers are not kept out.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import trio

from kvfuse.errors import NoSuchOffset
from kvfuse.volume.content.chunks import Chunks
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store import schema

PAGE = 1000
"""records read at once"""


@dataclass
class Holes:
    """Of one membership. Event loop only."""

    chunks: Chunks

    async def seek(self, node: Node, offset: int, *, data: bool) -> int:
        """The first offset from ``offset`` on, in bytes, that is in data, or else in a hole: the file's end is one.

        NoSuchOffset where there is none; EngineError.
        """
        cache = self.chunks.core.kernel.cache
        if node.writers and cache is not None:  # the kernel may have pages of a mapping that were never written back
            await trio.to_thread.run_sync(cache.drop_content, node.ino)
        if not 0 <= offset < node.size:
            raise NoSuchOffset(f"inode {node.ino} has {node.size} bytes: offset {offset} is not one of them")
        found = await self._data(node, offset) if data else await self._hole(node, offset)
        if found >= node.size and data:
            raise NoSuchOffset(f"inode {node.ino}: no data from offset {offset} on")
        return min(found, node.size)

    async def _data(self, node: Node, offset: int) -> int:
        async with aclosing(self._runs(node, offset // node.chunk_size)) as runs:
            async for start, end in runs:
                if end > offset:
                    return max(start, offset)
        return node.size

    async def _hole(self, node: Node, offset: int) -> int:
        async with aclosing(self._runs(node, offset // node.chunk_size)) as runs:
            async for start, end in runs:
                if start > offset:
                    break
                offset = max(offset, end)
        return offset

    async def _runs(self, node: Node, index: int) -> AsyncGenerator[tuple[int, int]]:
        """(start, end) of the data of each chunk from ``index`` on, in order. It may end behind the file's end."""
        while True:
            merges = node.content_merges
            rows, is_last = await self._stored(node, index)
            if node.content_merges != merges:
                continue  # another host's change was merged meanwhile: memory and records may not fit together
            bound = max(rows, default=index) + 1
            lengths = {number: length for number, length in rows.items() if number not in node.dirty_chunks}
            for number, chunk in node.chunks.items():
                if number >= index and (is_last or number < bound):
                    lengths[number] = chunk.staged.length if chunk.staged is not None else chunk.length
            for number in sorted(lengths):
                if lengths[number]:
                    yield number * node.chunk_size, number * node.chunk_size + lengths[number]
            if is_last:
                return
            index = bound

    async def _stored(self, node: Node, index: int) -> tuple[dict[int, int], bool]:
        """Bytes of chunks from ``index`` on by their records, one page of these; whether no more follow."""
        if not node.flags & schema.FLAG_CHUNK_RECORDS:
            return {}, True
        after = schema.chunk_key(node.ino, index - 1) if index else b""
        rows = await self.chunks.core.records.scan(schema.chunk_prefix(node.ino), after, PAGE)
        found = {
            schema.chunk_index(row.key): sum([extent.span for extent in schema.decode_chunk(row.value)]) for row in rows
        }
        return found, len(rows) < PAGE
