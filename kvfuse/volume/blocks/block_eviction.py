"""Removes blocks where their room is wanted: by the order of each namespace's policy, in columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvfuse.native import blocks as forms
from kvfuse.native._blocks import Core as NativeCore
from kvfuse.volume.blocks.block_tables import BlockTable, BlockTables
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.namespaces.namespace_registry import Namespaces

STEP_SHARE = 0.01
"""of a capacity: what one step of an eviction frees at least"""


@dataclass
class BlockEviction:
    """Of one membership. Event loop only."""

    native: NativeCore
    tables: BlockTables
    namespaces: Namespaces
    ahead: dict[int, int] = field(default_factory=dict)
    """namespace -> seconds by which its clock was moved ahead"""
    counters: Counter[str] = field(default_factory=Counter)
    """blocks by the reason why they went"""

    def expiry(self, namespace: int, now: int) -> int:
        """When a block that is stored now expires; 0: never. Any thread."""
        found = self.namespaces.all.get(namespace)
        ttl = found.settings.ttl if found is not None else 0.0
        return now + max(1, int(ttl)) if ttl else 0

    def make_room_in(self, namespace: int, size: int, use: Callable[[int], tuple[int, int]]) -> bool:
        """Remove blocks of a namespace, or of those in it, for one more of ``size`` bytes. False: it has none."""
        used, _ = use(namespace)
        inner = [number for number in self.namespaces.all if self.namespaces.accounts.is_within(number, namespace)]
        return self._evict([namespace, *inner], max(size, int(used * STEP_SHARE)), "room") > 0

    def make_room(self, size: int) -> bool:
        """Remove blocks of any namespace. False: there is none."""
        total = sum(len(table.rows) for table in self.tables.all.values())
        return self._evict(None, max(size, total and int(self._size() * STEP_SHARE)), "room") > 0

    def keep_below(self, core: Core, use: Callable[[int], tuple[int, int]]) -> None:
        """Keep namespaces with quotas below their high water marks."""
        for account in list(self.namespaces.accounts.all.values()):
            size, count = use(account.number)
            if not size:
                continue
            settings = account.settings
            excess = 0
            if settings.capacity and account.size + size > settings.capacity * settings.high_water:
                excess = account.size + size - int(settings.capacity * settings.low_water)
            if settings.blocks and account.files + count > settings.blocks * settings.high_water:
                more = account.files + count - int(settings.blocks * settings.low_water)
                excess = max(excess, more * size // max(count, 1))
            if excess > 0:
                inner = [one for one in self.namespaces.all if self.namespaces.accounts.is_within(one, account.number)]
                self._evict([account.number, *inner], excess, "room")

    def free_slots(self, core: Core) -> None:
        """The volume has no free slab: have some slots free before blocks need them."""
        if self.native.statistics()["free_slots_bytes"] < STEP_SHARE * core.geometry.data_size:
            self._evict(None, int(STEP_SHARE * core.geometry.data_size), "room")

    def _size(self) -> int:
        return sum(int(table.rows["length"].sum()) for table in self.tables.all.values())

    def _evict(self, numbers: Sequence[int] | None, size: int, reason: str) -> int:
        """Remove the blocks that were used least lately, of so many bytes together. The bytes of their slots."""
        found: list[tuple[BlockTable, npt.NDArray[np.int64], npt.NDArray[np.uint64], npt.NDArray[np.uint32]]] = []
        for table in self.tables.all.values():
            if table.has_ended or (numbers is not None and table.namespace not in numbers):
                continue
            rows = table.rows
            live = np.flatnonzero(rows["version"] & np.uint64(1))
            if len(live):
                found.append((table, live, rows["due"][live], rows["length"][live]))
        if not found:
            return 0
        dues = np.concatenate([due for _, _, due, _ in found])
        lengths = np.concatenate([length for _, _, _, length in found]).astype(np.int64)
        order = np.argsort(dues, kind="stable")
        count = int(np.searchsorted(np.cumsum(lengths[order]), size)) + 1
        chosen = np.zeros(len(dues), np.bool_)
        chosen[order[:count]] = True
        freed, start = 0, 0
        for table, live, due, _ in found:
            own = live[chosen[start : start + len(due)]]
            start += len(due)
            if len(own):
                sequences = table.rows["sequence"][own]
                sizes = np.zeros(len(own), np.int64)
                self.native.drop_rows(table.place, own, sequences, sizes)
                freed += int(sizes.sum())
                self.counters[reason] += int(np.count_nonzero(sizes))
        return freed


__all__ = ["BlockEviction", "forms"]
