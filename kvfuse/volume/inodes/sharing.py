"""The differences between a volume of one host and a shared one: a strategy, which `Core` has and all rooms use.

A volume's only host owns all slots, and nobody else changes stored files. In a shared volume each host
frees slots in its own slabs alone, and puts f records for others' slots that it gives up; and it keeps
the stored state of each chunk that it changes, so that another host's change can be merged (`content.merge`).
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
    """Decides about slots and changed chunks. The core owns it."""

    def __init__(self, slabs: Allocator, geometry: Geometry) -> None:
        self._slabs = slabs
        self._geometry = geometry

    @abstractmethod
    def extent_of(self, record: schema.ExtentRecord, namespace: int) -> Extent:
        """The extent of a record of an inode in a namespace."""

    @abstractmethod
    def own_extents(self, extents: list[Extent]) -> list[Extent]:
        """Those whose slots this host frees itself."""

    @abstractmethod
    def freed(self, extents: Iterable[Extent]) -> dict[bytes, bytes]:
        """key -> value of f records, which tell holders of other slabs which of their slots these give up."""

    @abstractmethod
    def release(self, dead: list[Extent], born: set[int]) -> list[Extent]:
        """Remove slots from the durable image. Returns those removed. ``born``: addresses that the commit adds."""

    @abstractmethod
    def changes(self, chunk: Chunk) -> None:
        """Before a chunk changes from its stored state."""

    @abstractmethod
    def wrote(self, chunk: Chunk, start: int, end: int) -> None:
        """Before bytes from ``start`` to before ``end`` of a chunk are written."""

    def may_write_in(self, chunk: Chunk, end: int) -> bool:
        """The chunk's slots may be written to, up to ``end``. Never where other hosts may be reading them."""
        return False


class Alone(Sharing):
    """The strategy of a volume of one host."""

    def extent_of(self, record: schema.ExtentRecord, namespace: int) -> Extent:
        addr, state = record.addr, COMMITTED
        if not self._slabs.is_durable(addr):
            log.error("the slot at %d belongs to a file but is marked free: unmount and run 'kvfuse fsck'", addr)
            state = DISCARDED  # it is not ours to free
        slot_size = self._slabs.slot_size(addr)
        return Extent(
            addr, slot_size, record.length, record.generation, record.checksums, state, namespace, record.packing
        )

    def own_extents(self, extents: list[Extent]) -> list[Extent]:
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

    def may_write_in(self, chunk: Chunk, end: int) -> bool:
        is_packed = any(extent.packing for extent in chunk.extents)
        return not is_packed and end <= sum([extent.slot_size for extent in chunk.extents])


class Shared(Sharing):
    """The strategy of a shared volume."""

    def extent_of(self, record: schema.ExtentRecord, namespace: int) -> Extent:
        slot_size = self._slabs.slot_size(record.addr)
        return Extent(
            record.addr,
            slot_size,
            record.length,
            record.generation,
            record.checksums,
            COMMITTED,
            namespace,
            record.packing,
        )

    def own_extents(self, extents: list[Extent]) -> list[Extent]:
        return [extent for extent in extents if self._slabs.holds(self._geometry.slab_of(extent.addr))]

    def freed(self, extents: Iterable[Extent]) -> dict[bytes, bytes]:
        puts = {}
        for extent in extents:
            slab = self._geometry.slab_of(extent.addr)
            if not self._slabs.holds(slab):
                key = schema.freed_key(slab, extent.addr, extent.generation)
                puts[key] = schema.encode_freed(extent.owner, has_rested=extent.state == RESTED)
        return puts

    def release(self, dead: list[Extent], born: set[int]) -> list[Extent]:
        """Skips slots that are released already, because another host gave up the extent, too."""
        released = []
        for extent in self.own_extents(dead):
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
