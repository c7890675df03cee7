"""What a look-up can say of blocks that are there: which tier has them, and when their bytes are expected.

Where a namespace says how fast its blocks are computed, a chain of blocks is there for a look-up only as far as reading
it is sooner than computing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.measures.speeds import Tier, worth_reading
from kvfuse.volume.namespaces.namespace_registry import Namespace
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import get_sound


@dataclass
class Outlook:
    """Of one membership. Event loop only."""

    core: Core

    async def arrivals(
        self, directory: int, names: Sequence[bytes], found: Sequence[bool]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
        """(`Tier`, seconds until it and all before it are there) of each block; NONE where it was not ``found``."""
        tiers, sizes = await self._places(directory, names, found)
        return np.array(tiers, np.uint8), self.core.reads.speeds.arrivals(tiers, sizes)

    async def worth(
        self, directory: int, names: Sequence[bytes], found: list[bool], namespace: Namespace
    ) -> list[bool]:
        """``found``, without those blocks that take longer to read than to compute."""
        tiers, sizes = await self._places(directory, names, found)
        count = worth_reading(self.core.reads.speeds.arrivals(tiers, sizes), sizes, namespace.settings.recompute_rate)
        return found[:count] + [False] * (len(found) - count)

    async def _places(
        self, directory: int, names: Sequence[bytes], found: Sequence[bool]
    ) -> tuple[list[Tier], list[int]]:
        """Tier and bytes of each block. What was removed since it was found may have either."""
        tiers, sizes = [Tier.NONE] * len(names), [0] * len(names)
        unknown = []
        for number, name in enumerate(names):
            if not found[number]:
                continue
            node = self._node(directory, name)
            if node is None:
                unknown.append(number)
            else:
                tiers[number], sizes[number] = self._tier(node), node.size
        if unknown:
            rows = await get_sound(self.core.records, [schema.entry_key(directory, names[one]) for one in unknown])
            for number, row in zip(unknown, rows, strict=True):
                entry = schema.decode_entry(row.value) if row is not None else 0
                tiers[number] = Tier.REMOTE
                sizes[number] = entry.size if isinstance(entry, schema.InodeRecord) else 0
        return tiers, sizes

    def _node(self, directory: int, name: bytes) -> Node | None:
        dentry = self.core.dentries.get(directory, name)
        if dentry.change is not None:
            return dentry.change.node
        return self.core.nodes.get(dentry.ino) if dentry.ino else None

    def _tier(self, node: Node) -> Tier:
        chunk = node.chunks.get(0)
        if node.ino in self.core.tier or (chunk is not None and chunk.staged is not None):
            return Tier.DRAM
        return Tier.DISK if self._is_on_disk(node) else Tier.REMOTE

    def _is_on_disk(self, node: Node) -> bool:
        """The disk tier has the start of a file, as far as memory knows where that is."""
        disk, chunk = self.core.disk, node.chunks.get(0)
        if disk is None or chunk is None or not chunk.extents:
            return False
        return disk.have_copies([chunk.extents[0].addr], [chunk.extents[0].generation])[0]
