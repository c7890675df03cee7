"""The books of the shared-memory tier: which blocks it has, which of them go, and what else that changes.

`SharedTier` has them, and calls them under its lock.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

from kvfuse.checksum import extent_checksum, granule_checksums
from kvfuse.policy.hot import Recent
from kvfuse.volume.tier.arena_pool import ARENAS_MAX, ArenaPool
from kvfuse.volume.tier.arenas import Arena, ArenaKind, LeftBlock, LeftBlocks, TierBlock

EVICTIONS_MAX = 16
"""Blocks that make room in one call: those that somebody still holds free nothing yet."""


@dataclass(slots=True)
class TierCounters:
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    adopted: int = 0
    adoption_seconds: float = 0.0


class TierBooks:
    """Of one tier."""

    def __init__(self, pool: ArenaPool, recent: Recent) -> None:
        self.pool = pool
        self.kept: dict[int, TierBlock] = {}
        self.left = LeftBlocks()
        self.recent = recent
        """inodes that were read, or evicted, lately, and have no block"""
        self.evicted: deque[int] = deque()
        self.changes = 0
        """how often something was put into ``evicted``"""
        self.kept_bytes = 0
        self.clock = itertools.count(1)
        self.counters = TierCounters()
        self.pins: dict[tuple[Arena, int], TierBlock] = {}
        """of slots without blocks, while not all are known"""

    def __len__(self) -> int:
        return len(self.kept) + len(self.left)

    # -- blocks --------------------------------------------------------------------------------------

    def enter(self, ino: int, block: TierBlock, name: bytes) -> None:
        """The block of a file, in the place of another one."""
        arena = block.home
        if ino in self.kept or ino in self.left.places:
            self.forget(ino)
        if arena.kind.retired:
            return
        self.kept[ino] = block
        block.name = name
        is_proven = arena.kind.kept.add(ino, block)
        self.kept_bytes += block.size
        arena.kept_count += 1
        block.kept_at = arena.used_at = next(self.clock)
        if arena.rows is not None:
            arena.rows.show(block.slot, block.kept_at, ino, block.size, is_proven)

    def admit(self, ino: int, block: TierBlock, name: bytes) -> bool:
        """What was left is the block of a file. False: it was dropped meanwhile."""
        left = self.left.get(ino)
        if left is None or left.block is not block:
            return False
        del self.left[ino]
        self.counters.hits += 1
        self.kept[ino] = block
        block.name, block.uses = name, left.uses
        block.home.kind.kept.replace(ino, block)
        return True

    def forget(self, ino: int) -> None:
        block = self.kept.pop(ino, None)
        if block is not None:
            self._leave(ino, block.home, block.slot, block.size)
        elif (left := self.left.pop(ino, None)) is not None:
            self._leave(ino, left.home, left.slot, left.size)
            if left.block is None:  # else that has the lease of the slot
                self.pool.returned.append((left.home, left.slot))

    def drop_all(self, inos: list[int]) -> None:
        """Forget these, and have whoever holds them hear of it."""
        for ino in inos:
            self.forget(ino)
        self.evicted.extend(inos)

    def _leave(self, ino: int, home: Arena, slot: int, size: int) -> None:
        if home.rows is not None:
            home.rows.hide(slot)
        home.kind.kept.remove(ino)
        home.kept_count -= 1
        self.kept_bytes -= size

    def note_packed(self, ino: int, token: int) -> None:
        block = self.kept.get(ino)
        if block is not None and block.home.rows is not None:
            granules = block.checksums or granule_checksums(block.buffer.data)
            block.home.rows.add_packed(block.slot, token, extent_checksum(granules, block.size))

    # -- room ----------------------------------------------------------------------------------------

    def make_room(self, kind: ArenaKind) -> tuple[Arena, int] | None:
        """Evict what is used least: blocks of this kind, or a whole arena of another one."""
        pool, evictions_left = self.pool, EVICTIONS_MAX
        while evictions_left:
            ino = kind.kept.next_to_go()
            other = self._idle_arena(kind, self.of(ino).kept_at if ino is not None else None)
            if other is not None:
                evictions_left -= other.leased_count > 0
                self._evict([ino for ino in other.kind.kept if self.of(ino).home is other])
                pool.collect()
                if not other.leased_count and other.number in pool.arenas:
                    pool.reassign(other, kind)
            elif ino is not None:
                evictions_left -= 1
                self._evict([ino])
                pool.collect()
            else:
                return None
            if found := pool.take(kind):
                return found
        return None

    def lend(self, size: int, *, always: bool) -> bool:
        """Count bytes of the block store; blocks of files that nobody holds go for them. False: there is no room."""
        pool = self.pool
        while not pool.has_room(size):
            idle = pool.oldest(None, 1 << 63)
            if idle is None:
                pool.used_bytes += size if always else 0
                return always
            self._evict([ino for ino in idle.kind.kept if self.of(ino).home is idle])
            pool.collect()
            if idle.number in pool.arenas and not idle.leased_count:
                pool.give_back(idle)
        pool.used_bytes += size
        return True

    def of(self, ino: int) -> TierBlock | LeftBlock:
        """What is kept, or left, as the block of an inode."""
        return self.kept.get(ino) or self.left[ino]

    def _idle_arena(self, kind: ArenaKind, before: int | None) -> Arena | None:
        """The arena of another kind that nobody but the cache holds, and that was not used since ``before``.

        One whose blocks were read is spared a few times, so that blocks that are stored and never read go before it.
        """
        for _ in range(ARENAS_MAX):
            found = self.pool.oldest(kind, before)
            if found is None or before is None or not found.uses or not found.leased_count:
                return found
            found.uses -= 1
            found.used_at = next(self.clock)
        return None

    def _evict(self, inos: list[int]) -> None:
        for ino in inos:
            self.forget(ino)
            self.recent.add(ino, len(self))
        self.evicted.extend(inos)
        self.counters.evictions += len(inos)
        self.changes += 1

    # -- what clients hold -----------------------------------------------------------------------------

    def pin(self, number: int, offset: int, size: int) -> TierBlock | None:
        """Hold a slot of the daemon before this one. None: there is none, or it may have other bytes by now."""
        arena = self.pool.arenas.get(number)
        if arena is None or not arena.is_former or arena.rows is None or offset < 0 or size <= 0:
            return None
        slot, start = divmod(offset, arena.kind.slot_size)
        if start + size > arena.kind.slot_size or slot >= arena.touched:
            return None
        ino = int(arena.rows.table["ino"][slot])
        block = self.kept.get(ino) or self.left.get(ino)
        if block is not None and block.home is arena and block.slot == slot and start + size <= block.size:
            return block.made() if isinstance(block, LeftBlock) else block
        self.pool.collect()
        place = arena, slot
        if place not in self.pins and place in self.pool.withheld:
            self.pool.withheld.discard(place)
            arena.leased_count += 1
            self.pins[place] = TierBlock(arena, slot, arena.kind.slot_size)
        return self.pins.get(place)
