"""Bytes of files, from staged chunks and extents, verified when they are first touched. Nothing here changes a file.

A read that waits for an engine may find, when it is back, that the extent is another's: then it reads again.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
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
from kvfuse.volume.content.slot_checks import READ_ON_MIN, LoadChunk, SlotChecks, needed_of
from kvfuse.volume.inodes.chunk import Chunk, Extent
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.measures.read_turns import ReadTurn
from kvfuse.volume.store import codec, schema
from kvfuse.volume.store.extents import find_frames
from kvfuse.volume.views.content_map import MappedSource, MapRow

log = logging.getLogger(__name__)

UNPACKED_HERE_MAX = 1
"""Frames that are unpacked on the event loop, in about a tenth of a millisecond: a thread costs as much."""

Reads = Sequence[Callable[[], Awaitable[None]]]


class Extents(ABC):
    """Reads extents; the reader of a membership has that which suits its volume."""

    checks: SlotChecks | None = None
    """of what the page cache of the engine is to have; None: it has none, or others free slots, too"""

    def __init__(self, core: Core) -> None:
        self.core = core

    @abstractmethod
    async def read(
        self, node: Node, offset: int, extent: Extent, start: int, length: int, target: memoryview | None = None
    ) -> bytes | bytearray | memoryview | None:
        """Bytes that begin at ``start`` of an extent and at ``offset`` of the file, verified when first touched.

        ``target``: memory of that length for a caller who looks at the bytes himself, and may get no view of a segment.
        It is the answer if they were read into it; else its content is of no use. None where the file has other bytes
        there by now.
        """

    async def read_plain(
        self, node: Node, offset: int, extent: Extent, start: int, length: int, target: memoryview | None = None
    ) -> bytes | bytearray | memoryview | None:
        """As `read`, of the file's bytes, which may be packed in the slot."""
        if not extent.packing:
            return await self.read(node, offset, extent, start, length, target)
        found = find_frames(extent.packing, start, start + length)
        size = found.frames[-1][1]
        packed = await self.read(node, offset, extent, found.low, size, np.empty(size, np.uint8).data)
        if packed is None:
            return None
        plain = np.empty(found.start + length, np.uint8).data
        view = memoryview(packed)
        await self._unpack([view[low:high] for low, high in found.frames], plain)
        return plain[found.start :]

    async def _unpack(self, frames: Sequence[memoryview], plain: memoryview) -> None:
        """Corrupt where they do not hold so many bytes."""
        if len(frames) <= UNPACKED_HERE_MAX:
            is_whole = codec.unpack_all(frames, plain)
        else:
            is_whole = await trio.to_thread.run_sync(codec.unpack_all, frames, plain)
        if not is_whole:
            self.core.counters.checksum_failures += 1
            raise Corrupt("compressed bytes of a file cannot be unpacked, though they match their checksums")

    def row(self, extent: Extent) -> MapRow | None:
        """Shows a chunk that is this extent to other threads; None where each read has to be verified."""
        return None

    async def do_all(self, reads: Reads) -> None:
        """Read several extents for one call, one by one where that costs no round trips."""
        for read in reads:
            await read()

    async def read_slot(
        self, node: Node, extent: Extent, low: int, high: int, target: memoryview | None = None
    ) -> memoryview:
        """What the engine has there of the extent's slot, in memory that nobody else gets meanwhile.

        ``target``: that memory, if it is as long.
        """
        segment, place = self.core.locate(extent.addr)
        buffer = target
        if buffer is None or len(buffer) != high - low:
            buffer = np.empty(high - low, np.uint8).data
        demand = self.core.reads.demand
        async with ReadTurn(self.core.namespaces.measures[node.namespace], high - low):
            demand.calls += 1
            try:
                with self.core.reads.reading(), self.core.reads.speeds.remote.reading(high - low):
                    await self.core.segments.read([Transfer(segment, place + low, buffer)])
            finally:
                demand.calls -= 1
                if demand.behind:
                    demand.ended()
        return buffer

    async def read_verified(
        self, node: Node, extent: Extent, start: int, length: int, is_same: Callable[[], bool]
    ) -> memoryview | None:
        """Bytes of an extent, from the engine. None where it is no longer the same. Corrupt where they are wrong."""
        low = start // GRANULE_SIZE * GRANULE_SIZE
        high = min(-(-(start + length) // GRANULE_SIZE) * GRANULE_SIZE, extent.length)
        buffer = await self.read_slot(node, extent, low, high)
        if not is_same():
            return None
        extent.verified = 0
        self.verify(node, extent, buffer, low)
        return buffer[start - low : start - low + length]

    async def check(self, extent: schema.ExtentRecord, data: memoryview) -> memoryview:
        """The file's bytes in the slot of an extent that has ``data``. Corrupt, unless these are the extent's bytes."""
        if extent.checksums and granule_checksums(data) != extent.checksums:
            self.core.counters.checksum_failures += 1
            raise Corrupt(f"checksum mismatch in the slot at {extent.addr} of generation {extent.generation}")
        if not extent.packing:
            return data
        plain = np.empty(extent.span, np.uint8).data
        frames = find_frames(extent.packing, 0, extent.span).frames
        await self._unpack([data[low:high] for low, high in frames], plain)
        return plain

    def verify(self, node: Node, extent: Extent, view: memoryview, low: int) -> None:
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


class OwnExtents(Extents):
    """Of a volume that one host has: nobody else frees a slot. The kernel gets views of what was verified.

    This process gets none: it would not survive a medium that fails. Where the engine has no views, no page cache
    reads ahead for it either: then the kernel gets what was fetched.
    """

    def __init__(self, core: Core, load_chunk: LoadChunk) -> None:
        super().__init__(core)
        self.fetcher = None if core.segments.limits.mappable else Fetcher(core)
        self.checks = SlotChecks(core, load_chunk) if core.segments.limits.mappable else None
        self._sources: dict[int, MappedSource] = {}
        """of segments that can be mapped: each is mapped once"""

    async def read(
        self, node: Node, offset: int, extent: Extent, start: int, length: int, target: memoryview | None = None
    ) -> bytes | bytearray | memoryview | None:
        core = self.core
        checksums = extent.checksums
        is_large = target is None and length >= READ_ON_MIN
        if is_large and checksums and self.checks is not None and not extent.packing:
            self.checks.expect(node, offset // node.chunk_size, extent, start, length)
            has_waited = needed_of(extent, start, length) and await self.checks.wait(extent)
            if has_waited and not (is_current(node, offset, extent) and extent.checksums is checksums):
                return None
        segment, place = core.locate(extent.addr)
        low, high, needed = start, start + length, 0
        if checksums and (needed := needed_of(extent, start, length)):
            low = start // GRANULE_SIZE * GRANULE_SIZE
            high = min(-(-high // GRANULE_SIZE) * GRANULE_SIZE, extent.length)
        if target is None and self.fetcher is not None:
            data = await self._read_ahead(self.fetcher, node, offset, extent, start, length)
            if not is_current(node, offset, extent) or extent.checksums is not checksums:
                return None
            if data is not None:
                return data
        view = core.segments.view(segment, place + low, high - low) if target is None and not needed else None
        if view is not None:
            return view
        buffer = await self.read_slot(node, extent, low, high, target)
        # Meanwhile it may be unsealed, replaced or shortened.
        if not is_current(node, offset, extent) or extent.checksums is not checksums:
            return None
        if needed:
            self.verify(node, extent, buffer, low)
        return buffer if buffer is target else buffer[start - low : start - low + length]

    async def _read_ahead(
        self, fetcher: Fetcher, node: Node, offset: int, extent: Extent, start: int, length: int
    ) -> memoryview | None:
        """What was fetched. A reader that comes to the end of a chunk is likely to read the next one."""
        if extent.packing:
            return None
        data = await fetcher.read(node, offset - start, extent, start, length)
        if data is not None and fetcher.is_near_end(extent, start + length):
            chunk = node.chunks.get(offset // node.chunk_size + 1)
            if chunk is not None and chunk.staged is None and chunk.extents and not chunk.extents[0].packing:
                fetcher.opened(node, chunk.extents[0])
        return data

    def row(self, extent: Extent) -> MapRow | None:
        if extent.packing:
            return None
        segment, start = self.core.locate(extent.addr)
        source = self._sources.get(segment)
        if source is None and (found := self.core.segments.source(segment)) is not None:
            source = self._sources[segment] = MappedSource(found[0], found[1], guard=found[2])
        if source is None or not source.is_intact():
            return None
        return MapRow(source, start, extent.length, extent.checksums, extent.verified)


@dataclass
class Reader:
    """Reads files of one volume. One of each membership."""

    core: Core
    chunks: Chunks
    extents: Extents

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
            extent = chunk.extents[0] if len(chunk.extents) == 1 else None
            if extent is not None and not extent.packing and start + length <= extent.length:
                data = await self.extents.read(node, offset, extent, start, length)
                if data is not None:
                    if not offset and node.size > node.chunk_size and self.extents.checks is not None:
                        self.extents.checks.begin(node, data)
                    return data
        result = bytearray(length)
        await self.read_into(node, offset, memoryview(result))
        return result

    async def read_into(self, node: Node, offset: int, target: memoryview) -> int:
        """As `read`, but into ``target``; how many bytes."""
        length = max(0, min(len(target), node.size - offset))
        position, parts = 0, []
        while position < length:
            index, start = divmod(offset + position, node.chunk_size)
            part = target[position : min(length, position + node.chunk_size - start)]
            parts.append(partial(self._read_part, node, index, start, part))
            position += len(part)
        await self.extents.do_all(parts)
        return length

    async def _read_part(self, node: Node, index: int, start: int, target: memoryview) -> None:
        """Fill ``target`` from one chunk, or with zeros where there is none."""
        chunk = await self.chunks.load_chunk(node, index)
        if chunk is not None and chunk.staged is not None:
            done = 0
            for part in chunk.staged.parts(start, start + len(target)):
                target[done : done + len(part)] = part
                done += len(part)
            _clear(target[done:])
        elif chunk is not None:
            await self.read_chunk(node, index, chunk, start, target)
        else:
            _clear(target)

    async def read_chunk(self, node: Node, index: int, chunk: Chunk, start: int, target: memoryview) -> None:
        """Fill ``target`` from the extents. While one is read others may be given up: then the file is read anew."""
        piece_start, chunk_offset = 0, index * node.chunk_size
        pieces = []
        for extent in chunk.extents:
            low = max(start, piece_start)
            high = min(start + len(target), piece_start + extent.span)
            if low < high:
                part = target[low - start : high - start]
                pieces.append(partial(self._read_piece, node, chunk_offset + low, extent, low - piece_start, part))
            piece_start += extent.span
        await self.extents.do_all(pieces)
        _clear(target[max(0, piece_start - start) :])

    async def _read_piece(self, node: Node, offset: int, extent: Extent, start: int, target: memoryview) -> None:
        """Fill ``target`` with what begins at ``start`` of an extent, at ``offset`` of the file."""
        if is_current(node, offset, extent):
            data = await self.extents.read_plain(node, offset, extent, start, len(target), target)
            if data is not None:
                if data is not target:
                    target[:] = data
                return
        count = await self.read_into(node, offset, target)
        _clear(target[count:])


def is_current(node: Node, offset: int, extent: Extent) -> bool:
    """The bytes of the chunk at ``offset`` are those of the extent, and of its neighbours."""
    chunk = node.chunks.get(offset // node.chunk_size)
    return chunk is not None and chunk.staged is None and extent in chunk.extents


def _clear(target: memoryview) -> None:
    np.frombuffer(target, np.uint8)[:] = 0
