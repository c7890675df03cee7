"""Bytes of a file read past the page cache of the disk, for readers that want them once.

A thread fills memory of this process from the disk and sums it there, without the interpreter: nothing is kept, mapped
or copied on the way. Only sealed extents are read so, of a volume that one host has; their checksums are compared each
time. All else - what the page cache has whole, staged bytes, what does not match - is left to the other ways, which
know what to do about it. Where the page cache has a part, as by its own read-ahead, the rest would come to it, too.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import NamedTuple

import trio

from kvfuse.checksum import CHECKSUM_SIZE, GRANULE_SIZE
from kvfuse.errors import EngineError
from kvfuse.remote.segments.api import Fetch
from kvfuse.volume.content.chunks import Chunks
from kvfuse.volume.content.reader import is_current
from kvfuse.volume.inodes.chunk import Extent
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.measures.read_turns import ReadTurn

log = logging.getLogger(__name__)

THREADS_MAX = 4
"""A disk has enough to do with as many pieces."""


@dataclass
class PastCache:
    """Reads files of one volume. One of each membership of a volume that one host has."""

    core: Core
    chunks: Chunks
    _threads: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(THREADS_MAX))

    async def read(self, node: Node, offset: int, length: int, target: memoryview) -> memoryview | None:
        """``length`` bytes at ``offset``, verified: a part of ``target``. None: another way has to read them.

        ``target``: whole pages of this process, with room for all granules that the bytes are in.
        """
        if not (parts := await self._find(node, offset, length)):
            return None
        base, batch, segments = parts[0].offset, list[Fetch](), self.core.segments
        try:
            for part in parts:
                segment, place = self.core.locate(part.extent.addr)
                batch.append(Fetch(segment, place + part.low, part.length, target[part.offset - base :]))
            if all(segments.view(one.segment, one.offset, one.length) is not None for one in batch):
                return None
            size = sum([part.length for part in parts])
            async with ReadTurn(self.core.namespaces.measures[node.namespace], size):
                with self.core.reads.reading(), self.core.reads.speeds.remote.reading(size):
                    found = await segments.fetch(batch, self._threads)
        except (EngineError, ValueError) as error:  # ValueError: a record names a place that is in no segment
            log.info("inode %d is not read past the page cache: %s", node.ino, error)  # the other way says why
            return None
        if not found or not all(part.has_sums(node, own) for part, own in zip(parts, found, strict=True)):
            return None
        return target[offset - base : offset - base + length]

    async def _find(self, node: Node, offset: int, length: int) -> list[_Granules] | None:
        """The granules of a range, a part for each chunk. None: some are not in a sealed extent."""
        parts, position, end = list[_Granules](), offset, offset + length
        while position < end:
            index, start = divmod(position, node.chunk_size)
            chunk = node.chunks.get(index) or await self.chunks.load_chunk(node, index)
            stop = min(end - position + start, node.chunk_size)
            if chunk is None or chunk.staged is not None or len(chunk.extents) != 1:
                return None
            extent = chunk.extents[0]
            if not extent.checksums or extent.packing or stop > extent.length:
                return None
            low = start // GRANULE_SIZE * GRANULE_SIZE
            high = min(-(-stop // GRANULE_SIZE) * GRANULE_SIZE, extent.length)
            parts.append(_Granules(position - start + low, extent, extent.checksums, low, high - low))
            position += stop - start
        return parts


class _Granules(NamedTuple):
    """Whole granules of an extent."""

    offset: int
    """in the file"""
    extent: Extent
    checksums: bytes
    """of the extent, when the part was found"""
    low: int
    """where the granules begin in the extent"""
    length: int

    def has_sums(self, node: Node, sums: bytes) -> bool:
        """These are the part's checksums, and the extent is the file's, with the same bytes as before."""
        if not is_current(node, self.offset, self.extent) or self.extent.checksums is not self.checksums:
            return False
        place = self.low // GRANULE_SIZE * CHECKSUM_SIZE
        return sums == self.checksums[place : place + -(-self.length // GRANULE_SIZE) * CHECKSUM_SIZE]
