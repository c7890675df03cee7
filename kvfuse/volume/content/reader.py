"""Bytes of files from their extents: reads, and verification of what was read. Nothing here changes a file.

A read that waits for an engine may find, when it is back, that the extent is another's: then it reads again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import trio

from kvfuse.checksum import GRANULE_SIZE, crc32c, granule_checksums
from kvfuse.errors import Corrupt
from kvfuse.remote.segments.api import Transfer
from kvfuse.volume.content.chunks import Chunks
from kvfuse.volume.content.read_ahead import Fetcher
from kvfuse.volume.inodes.chunk import Chunk, Extent
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store import schema

log = logging.getLogger(__name__)

READS_MAX = 8
"""Extents that one call reads side by side, where each is a round trip."""


@dataclass
class Reader:
    """Reads files of one volume. One of each membership."""

    core: Core
    chunks: Chunks
    renew: Callable[[Node], Awaitable[None]]
    """brings an inode up to what other hosts have stored; Stale, if it is gone"""
    fetcher: Fetcher | None
    """where each read of the engine is a round trip, and nothing is written in place"""

    def opened(self, node: Node) -> None:
        """A file is opened of which the kernel has no bytes: those at its start will be asked for."""
        chunk = node.chunks.get(0)
        if self.fetcher is not None and chunk is not None and chunk.staged is None and chunk.extents:
            self.fetcher.opened(node, chunk.extents[0])

    async def read(self, node: Node, offset: int, size: int) -> bytes | bytearray | memoryview:
        """Bytes at ``offset``, short at the end of the file; a view of the segment where that is possible."""
        end = min(offset + size, node.size)
        if offset >= end:
            return b""
        index, start = divmod(offset, node.chunk_size)
        length = end - offset
        if start + length <= node.chunk_size:
            chunk = node.chunks.get(index) or await self.chunks.load_chunk(node, index)
            if chunk is None:
                return bytes(length)
            if chunk.staged is not None:
                return chunk.staged.read(start, start + length)
            if len(chunk.extents) == 1 and start + length <= chunk.extents[0].length:
                return await self.read_extent(node, offset, chunk.extents[0], start, length)
        result = bytearray(length)
        await self._read_parts(node, offset, memoryview(result))
        return result

    async def read_into(self, node: Node, offset: int, target: memoryview) -> int:
        """As `read`, but into ``target``; how many bytes."""
        length = max(0, min(len(target), node.size - offset))
        await self._read_parts(node, offset, target[:length])
        return length

    async def _read_parts(self, node: Node, offset: int, target: memoryview) -> None:
        """Fill ``target`` from all the chunks and extents that it covers."""
        end = offset + len(target)
        position = offset
        parts = []
        while position < end:
            index, start = divmod(position, node.chunk_size)
            length = min(end - position, node.chunk_size - start)
            part = target[position - offset : position - offset + length]
            parts.append(partial(self._read_part, node, index, start, part))
            position += length
        await self._do_all(parts)

    async def _read_part(self, node: Node, index: int, start: int, target: memoryview) -> None:
        """Fill ``target`` from one chunk, or with zeros where there is none."""
        chunk = await self.chunks.load_chunk(node, index)
        if chunk is not None and chunk.staged is not None:
            target[:] = chunk.staged.read(start, start + len(target))
        elif chunk is not None:
            await self.read_chunk(node, index, chunk, start, target)
        else:
            _clear(target)

    async def _do_all(self, reads: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Side by side, where each may be a round trip: so a call waits for about one, and for one deadline."""
        if self.core.shared and len(reads) > 1:
            await _side_by_side(reads)
        else:
            for read in reads:
                await read()

    async def read_chunk(self, node: Node, index: int, chunk: Chunk, start: int, target: memoryview) -> None:
        """Fill ``target`` from the extents. While one is read others may be given up: then the file is read anew."""
        piece_start, chunk_offset = 0, index * node.chunk_size
        pieces = []
        for extent in chunk.extents:
            low = max(start, piece_start)
            high = min(start + len(target), piece_start + extent.length)
            if low < high:
                part = target[low - start : high - start]
                pieces.append(partial(self._read_piece, node, chunk_offset + low, extent, low - piece_start, part))
            piece_start += extent.length
        await self._do_all(pieces)
        _clear(target[max(0, piece_start - start) :])

    async def _read_piece(self, node: Node, offset: int, extent: Extent, start: int, target: memoryview) -> None:
        """Fill ``target`` with what begins at ``start`` of an extent, at ``offset`` of the file."""
        if _is_current(node, offset, extent):
            target[:] = await self.read_extent(node, offset, extent, start, len(target), may_view=False)
        else:
            count = await self.read_into(node, offset, target)
            _clear(target[count:])

    async def read_extent(
        self, node: Node, offset: int, extent: Extent, start: int, length: int, *, may_view: bool = True
    ) -> bytes | bytearray | memoryview:
        """Bytes that begin at ``start`` of an extent and at ``offset`` of the file, verified when first touched.

        Only what is verified is viewed, and only for the kernel: this process would not survive a medium that fails.
        """
        core = self.core
        if core.shared:
            return await self._read_shared(node, offset, extent, start, length)
        segment, place = core.locate(extent.addr)
        low, high, needed = start, start + length, 0
        if extent.checksums:
            first, last = start // GRANULE_SIZE, (start + length - 1) // GRANULE_SIZE
            needed = ((2 << (last - first)) - 1) << first & ~extent.verified
            if needed:
                low, high = first * GRANULE_SIZE, min((last + 1) * GRANULE_SIZE, extent.length)
        view = core.segments.view(segment, place + low, high - low) if may_view and not needed else None
        if view is not None:
            return view
        return await self._read_engine(node, offset, extent, start, length, (low, high))

    async def _read_engine(
        self, node: Node, offset: int, extent: Extent, start: int, length: int, span: tuple[int, int]
    ) -> memoryview:
        """As above, where the bytes are not resident. Meanwhile the extent may be unsealed, replaced or shortened."""
        low, high = span
        checksums = extent.checksums
        buffer = await self._read_slot(extent, low, high)
        if not _is_current(node, offset, extent) or extent.checksums is not checksums:
            return await self._read_again(node, offset, length)
        if checksums:
            self._verify(node, extent, buffer, low)
        return buffer[start - low : start - low + length]

    async def _read_slot(self, extent: Extent, low: int, high: int) -> memoryview:
        """What the engine has there of the extent's slot, which nobody else gets meanwhile."""
        segment, place = self.core.locate(extent.addr)
        buffer = np.empty(high - low, np.uint8).data
        with self.core.reads.reading():
            await self.core.segments.read([Transfer(segment, place + low, buffer)])
        return buffer

    async def _read_shared(self, node: Node, offset: int, extent: Extent, start: int, length: int) -> memoryview:
        """Where others free slots, too: what was fetched, else from the engine, verified each time.

        Bytes that are wrong may be those of a slot's next life: the inode is read anew once. Meanwhile it may change.
        """
        checksums = extent.checksums

        def is_same() -> bool:
            return _is_current(node, offset, extent) and extent.checksums is checksums

        data = await self.fetcher.read(node, extent, start, length) if self.fetcher is not None else None
        if data is None and is_same():
            try:
                data = await self._read_verified(node, extent, start, length, is_same)
            except Corrupt:
                await self.renew(node)
                data = await self._read_verified(node, extent, start, length, is_same) if is_same() else None
        if data is not None and is_same():
            return data
        return await self._read_again(node, offset, length)

    async def _read_again(self, node: Node, offset: int, length: int) -> memoryview:
        """What the file has there by now; zeros behind its end."""
        buffer = memoryview(bytearray(length))
        await self.read_into(node, offset, buffer)
        return buffer

    async def _read_verified(
        self, node: Node, extent: Extent, start: int, length: int, is_same: Callable[[], bool]
    ) -> memoryview | None:
        """Bytes of an extent, from the engine. None where it is no longer the same. Corrupt where they are wrong."""
        low = start // GRANULE_SIZE * GRANULE_SIZE
        high = min(-(-(start + length) // GRANULE_SIZE) * GRANULE_SIZE, extent.length)
        buffer = await self._read_slot(extent, low, high)
        if not is_same():
            return None
        extent.verified = 0
        self._verify(node, extent, buffer, low)
        return buffer[start - low : start - low + length]

    def check_extent(self, extent: schema.ExtentRecord, data: memoryview) -> None:
        """Corrupt, unless these are the extent's bytes."""
        if extent.checksums and granule_checksums(data) != extent.checksums:
            self.core.counters.checksum_failures += 1
            raise Corrupt(f"checksum mismatch in the slot at {extent.addr} of generation {extent.generation}")

    def _verify(self, node: Node, extent: Extent, view: memoryview, low: int) -> None:
        """Check the granules in ``view``, which begins with the one at ``low``; Corrupt names the first bad one."""
        for position in range(0, len(view), GRANULE_SIZE):
            number = (low + position) // GRANULE_SIZE
            expected = int.from_bytes(extent.checksums[4 * number : 4 * number + 4], "little")
            if not extent.verified >> number & 1:
                found = crc32c(view[position : position + GRANULE_SIZE])
                if found != expected:
                    self.core.counters.checksum_failures += 1
                    segment, file_offset = self.core.locate(extent.addr)
                    message = (
                        f"inode {node.ino}: checksum mismatch in segment {segment} at offset "
                        f"{file_offset + low + position}: expected {expected:#010x}, found {found:#010x}"
                    )
                    log.error(message)
                    raise Corrupt(message)
                extent.verified |= 1 << number


async def _side_by_side(reads: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """The first error ends the others, and is raised."""
    errors: list[Exception] = []
    turns = trio.Semaphore(READS_MAX)
    async with trio.open_nursery() as nursery:

        async def run(read: Callable[[], Awaitable[None]]) -> None:
            async with turns:
                try:
                    await read()
                except Exception as error:  # as the caller would get it, were they done one by one
                    errors.append(error)
                    nursery.cancel_scope.cancel()

        for read in reads:
            nursery.start_soon(run, read)
    if errors:
        raise errors[0]


def _is_current(node: Node, offset: int, extent: Extent) -> bool:
    """The bytes of the chunk at ``offset`` are those of the extent, and of its neighbours."""
    chunk = node.chunks.get(offset // node.chunk_size)
    return chunk is not None and chunk.staged is None and extent in chunk.extents


def _clear(target: memoryview) -> None:
    np.frombuffer(target, np.uint8)[:] = 0
