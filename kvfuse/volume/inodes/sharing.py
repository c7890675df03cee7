"""What is different where many hosts have a volume: `Core` has one strategy, which all rooms ask instead.

Where one host has the volume, all slots are its own, and what it stored nobody else changes. Where many have it, each
frees slots in its own slabs alone, and says by a record which others it gave up; and of each chunk that is changed here
it is kept what is stored of it, so that another host's change can be put to it (`content.merge`).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvfuse.volume.inodes.chunk import COMMITTED, DISCARDED, RESTED, Chunk, Extent
from kvfuse.volume.store import schema

if TYPE_CHECKING:
    from kvfuse.slab.allocator import Allocator
    from kvfuse.slab.layout import Geometry

log = logging.getLogger(__name__)


class Sharing(ABC):
    """Says what becomes of slots and chunks. The core owns it."""

    def __init__(self, slabs: Allocator, geometry: Geometry) -> None:
        self._slabs = slabs
        self._geometry = geometry

    @abstractmethod
    def extent_of(self, record: schema.ExtentRecord) -> Extent:
        """An extent that a record names."""

    @abstractmethod
    def mine(self, extents: list[Extent]) -> list[Extent]:
        """Those whose slots this host decides about."""

    @abstractmethod
    def freed(self, extents: Iterable[Extent]) -> dict[bytes, bytes]:
        """Records that tell others which of their slots are given up with these."""

    @abstractmethod
    def release(self, dead: list[Extent], born: set[int]) -> list[Extent]:
        """Let slots leave the durable image, and say which did. ``born``: addresses that come into it."""

    @abstractmethod
    def changes(self, chunk: Chunk) -> None:
        """The chunk is about to be other than it is stored."""

    @abstractmethod
    def wrote(self, chunk: Chunk, start: int, end: int) -> None:
        """Bytes of the chunk are about to be written."""


class Alone(Sharing):
    """Of a volume that one host has."""

    def extent_of(self, record: schema.ExtentRecord) -> Extent:
        addr, state = record.addr, COMMITTED
        if not self._slabs.is_durable(addr):
            log.error("slot %d belongs to a file but is free: 'kvfuse fsck' tells more", addr)
            state = DISCARDED  # it is not ours to free
        slot_size = self._slabs.slot_size(addr)
        return Extent(addr, slot_size, record.length, record.generation, record.checksums, state)

    def mine(self, extents: list[Extent]) -> list[Extent]:
        return extents

    def freed(self, extents: Iterable[Extent]) -> dict[bytes, bytes]:
        return {}

    def release(self, dead: list[Extent], born: set[int]) -> list[Extent]:
        self._slabs.release([extent.slot for extent in dead])
        return dead

    def changes(self, chunk: Chunk) -> None:
        pass

    def wrote(self, chunk: Chunk, start: int, end: int) -> None:
        pass


class Shared(Sharing):
    """Of a volume that many hosts have."""

    def extent_of(self, record: schema.ExtentRecord) -> Extent:
        slot_size = self._slabs.slot_size(record.addr)
        return Extent(record.addr, slot_size, record.length, record.generation, record.checksums, COMMITTED)

    def mine(self, extents: list[Extent]) -> list[Extent]:
        return [extent for extent in extents if self._slabs.holds(self._geometry.slab_of(extent.addr))]

    def freed(self, extents: Iterable[Extent]) -> dict[bytes, bytes]:
        puts = {}
        for extent in extents:
            slab = self._geometry.slab_of(extent.addr)
            if not self._slabs.holds(slab):
                key = schema.freed_key(slab, extent.addr, extent.generation)
                puts[key] = schema.RESTED_SLOT if extent.state == RESTED else b""
        return puts

    def release(self, dead: list[Extent], born: set[int]) -> list[Extent]:
        """The slot of an extent that another host gave up, too, may be released already."""
        released = []
        for extent in self.mine(dead):
            if self._slabs.is_durable(extent.addr) and extent.addr not in born:
                extent.slot_size = self._slabs.slot_size(extent.addr)
                self._slabs.release([extent.slot])
                released.append(extent)
        return released

    def changes(self, chunk: Chunk) -> None:
        if chunk.base is None:
            chunk.base = tuple([extent.record() for extent in chunk.extents])

    def wrote(self, chunk: Chunk, start: int, end: int) -> None:
        self.changes(chunk)
        if chunk.dirty and chunk.dirty[-1][1] == start:
            start = chunk.dirty.pop()[0]
        chunk.dirty.append((start, end))
