"""What is nearer than the engine: granules of sealed extents in this host's tiers, and in other hosts' memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvfuse.checksum import CHECKSUM_SIZE, GRANULE_SIZE
from kvfuse.volume.disk.copies import Stretch
from kvfuse.volume.inodes.chunk import Extent
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.views.neighbours import NO_BASE, Answer, Wanted


def base_of(extent: Extent, offset: int) -> int:
    """``offset``: where the extent begins in the file; `NO_BASE` where its slot has other bytes than the file."""
    return NO_BASE if extent.packing else offset


def wanted_of(node: Node, base: int, stretch: Stretch) -> Wanted:
    first, last = stretch.low // GRANULE_SIZE, -(-stretch.high // GRANULE_SIZE)
    checksums = stretch.checksums[first * CHECKSUM_SIZE : last * CHECKSUM_SIZE]
    return Wanted(node.ino, base, stretch.addr, stretch.generation, stretch.low, stretch.high, checksums)


@dataclass
class Nearby:
    """For the readers of one membership. Event loop only."""

    core: Core

    @property
    def is_there(self) -> bool:
        return self.core.disk is not None or self.core.reads.neighbours is not None

    def resident(self, wanted: Wanted) -> tuple[Answer, memoryview | None]:
        """From the shared-memory tier. The bytes stay as they are while the view is held."""
        block = self.core.tier.kept.get(wanted.ino)
        if block is None or wanted.base == NO_BASE:
            return Answer.ABSENT, None
        start, end = wanted.base + wanted.low, wanted.base + wanted.high
        node = self.core.nodes.peek(wanted.ino)
        if end > block.size or (node is not None and _has_another(node, wanted)):
            return Answer.MOVED, None
        block.note_use()
        return Answer.HERE, block.buffer[start:end].data

    async def read(
        self, node: Node, base: int, stretch: Stretch, target: memoryview | None = None
    ) -> memoryview | None:
        """All bytes of a stretch, verified; None where the engine has to be asked.

        ``base``: as of `base_of`. ``target``: memory of ``high - low`` bytes that may get them, and does not change
        any more if it did.
        """
        disk = self.core.disk
        _, view = self.resident(wanted_of(node, base, stretch))
        if view is not None:
            return view
        if disk is not None and (data := await disk.read(stretch)) is not None:
            return data
        if target is None:
            if self.core.reads.neighbours is None:
                return None
            target = np.empty(stretch.high - stretch.low, np.uint8).data
        if not await self.read_from_neighbours(node, base, stretch, target):
            return None
        if disk is not None and self._may_keep(node):
            disk.keep(stretch, target)
        return target

    async def read_from_neighbours(self, node: Node, base: int, stretch: Stretch, target: memoryview) -> bool:
        """Whether ``target`` has the bytes now, verified. It may change afterwards."""
        neighbours = self.core.reads.neighbours
        if neighbours is None or not neighbours.may_have(stretch.addr):
            return False
        (is_right,) = await neighbours.read([wanted_of(node, base, stretch)], [target])
        return is_right

    def offer(self, node: Node, stretch: Stretch, data: memoryview, seconds: float) -> None:
        """The engine gave these bytes, in so many seconds; they are right, and do not change any more."""
        if self.core.disk is not None:
            self.core.disk.offer(stretch, data, seconds, wanted=self._may_keep(node))

    def _may_keep(self, node: Node) -> bool:
        return self.core.namespaces.may_keep(node.namespace, "disk")


def _has_another(node: Node, wanted: Wanted) -> bool:
    """Another extent has the bytes of the file by now, as far as is known in memory."""
    chunk = node.chunks.get(wanted.base // node.chunk_size)
    if chunk is None:
        return False
    return chunk.staged is not None or all(
        (extent.addr, extent.generation) != (wanted.addr, wanted.generation) for extent in chunk.extents
    )
