"""The books of the shared-memory tier: which blocks it has, which of them go, and what else that changes.

`SharedTier` has them, and calls them under its lock.

**Frozen arenas** are those that clients of the daemon before this one had mapped: nobody can write there any more, so
a slot that gets free there is of no use. Where their kind needs room, one of them *melts*: the half of its blocks that
was used least goes at once, the others are moved to new slots, a few with each block that is allocated, and then it is
given back. Until then its memory is used beyond the capacity. So the tier loses not more blocks than it gets.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

import numpy as np

from kvfuse.checksum import extent_checksum, granule_checksums
from kvfuse.policy.hot import Recent
from kvfuse.volume.views.arena_pool import ARENAS_MAX, ArenaPool
from kvfuse.volume.views.arenas import Arena, Kind, LeftBlock, LeftBlocks, TierBlock
from kvfuse.volume.views.resident import Residents

EVICTIONS_MAX = 16
"""Blocks that make room in one call: those that somebody still holds free nothing yet."""
MOVES = 2
"""Blocks that leave an arena that melts, with each that is allocated."""


@dataclass(slots=True)
class Counters:
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    moves: int = 0
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
        self.counters = Counters()
        self.pins: dict[tuple[Arena, int], TierBlock] = {}
        """of slots without blocks, while not all are known"""
        self._melting: Arena | None = None
        self._survivors: list[int] = []
        """inodes whose blocks are to leave it, those that were used most last"""

        def note_use(ino: int) -> None:
            if (block := self.kept.get(ino)) is not None:
                block.note_use()

        self.residents = Residents(note_use)

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
        self.residents.show(name, ino, block)
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
        self.residents.show(name, ino, block)
        return True

    def forget(self, ino: int) -> None:
        block = self.kept.pop(ino, None)
        if block is not None:
            self.residents.hide(ino)
            self._leave(ino, block.home, block.slot, block.size)
        elif (left := self.left.pop(ino, None)) is not None:
            self._leave(ino, left.home, left.slot, left.size)
            if left.block is None:  # else that has the lease of the slot
                self.pool.returned.append((left.home, left.slot))

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

    def make_room(self, kind: Kind) -> tuple[Arena, int] | None:
        """Evict what is used least: blocks of this kind, or a whole arena of another one, or melt a frozen one."""
        self.residents.sample()
        pool, evictions_left = self.pool, EVICTIONS_MAX
        while evictions_left:
            if self._melting is not None and (found := self._melt(kind)):
                return found
            ino = kind.kept.next_to_go()
            home, kept_at = self._place(ino) if ino is not None else (None, None)
            other = self._idle_arena(kind, kept_at)
            if other is not None:
                evictions_left -= other.leased_count > 0
                self._evict([ino for ino in other.kind.kept if self.of(ino).home is other])
                pool.collect()
                if not other.leased_count and other.number in pool.arenas:
                    pool.reassign(other, kind)
            elif home is not None and home.is_frozen and home.is_idle:
                evictions_left -= 1
                self._begin_to_melt(home)
                continue
            elif ino is not None:
                evictions_left -= 1
                self._evict([ino])
                pool.collect()
            else:
                return None
            if found := pool.take(kind):
                return found
        return None

    def _place(self, ino: int) -> tuple[Arena, int]:
        """Where the block of an inode is, and since when: nobody holds it by that."""
        block = self.kept.get(ino) or self.left[ino]
        return block.home, block.kept_at

    def of(self, ino: int) -> TierBlock | LeftBlock:
        """What is kept, or left, as the block of an inode."""
        return self.kept.get(ino) or self.left[ino]

    def _idle_arena(self, kind: Kind, before: int | None) -> Arena | None:
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
        if place not in self.pins and (arena.is_frozen or place in self.pool.withheld):
            self.pool.withheld.discard(place)
            arena.leased_count += 1
            self.pins[place] = TierBlock(arena, slot, arena.kind.slot_size)
        return self.pins.get(place)

    # -- frozen arenas -------------------------------------------------------------------------------

    def _begin_to_melt(self, arena: Arena) -> None:
        inos = [ino for ino in self._inos_in(arena) if ino in arena.kind.kept]
        inos.sort(key=lambda ino: (arena.kind.kept.is_proven(ino), self.of(ino).uses, self.of(ino).kept_at))
        half = (len(inos) + 1) // 2
        self._melting, self._survivors = arena, inos[half:]
        self._evict(inos[:half])

    def _inos_in(self, arena: Arena) -> list[int]:
        """Of all blocks in a frozen arena."""
        assert arena.rows is not None
        table = arena.rows.table
        inos: list[int] = table["ino"][np.flatnonzero(table["kept_at"])].tolist()
        return inos

    def _melt(self, kind: Kind) -> tuple[Arena, int] | None:
        """Go on with the arena that melts, if there is one of this kind; a slot for somebody else."""
        arena = self._melting
        if arena is None or arena.kind is not kind:
            return None
        found = None
        if arena.number in self.pool.arenas:
            self.pool.allowance = arena.memory.resident
            for _ in range(min(MOVES, len(self._survivors))):
                self._move(self._survivors.pop(), arena)
            found = self.pool.take(kind)
            self.pool.allowance = 0
        if not self._survivors or arena.number not in self.pool.arenas:
            self._melting, self._survivors = None, []
            self.pool.collect()
            if not arena.leased_count and arena.number in self.pool.arenas:
                self.pool.give_back(arena)
        return found

    def _move(self, ino: int, arena: Arena) -> None:
        """Move the block of an inode to another slot of its kind, if it is still in this arena; or evict it."""
        former = self.kept.get(ino) or self.left.get(ino)
        if former is None or former.home is not arena:
            return
        is_looked_at = isinstance(former, LeftBlock) and former.block is not None
        place = self.pool.take(arena.kind) if not is_looked_at else None
        if place is None:
            self._evict([ino])
            return
        block = TierBlock(*place, former.size)
        start = former.slot * arena.kind.slot_size
        block.buffer[:] = arena.memory.bytes[start : start + former.size]
        block.kept_at, block.uses, home = former.kept_at, former.uses, block.home
        assert home.rows is not None
        assert arena.rows is not None
        home.rows.show_as(block.slot, arena.rows, former.slot)
        arena.rows.hide(former.slot)
        arena.kept_count -= 1
        home.kept_count += 1
        home.used_at = max(home.used_at, block.kept_at)
        self.counters.moves += 1
        if isinstance(former, LeftBlock):
            self.pool.returned.append((arena, former.slot))
            left = LeftBlock(home, block.slot, block.size, block.uses, block.kept_at)
            left.block = block
            self.left[ino] = left
            arena.kind.kept.replace(ino, left)
        else:
            block.checksums, block.name = former.checksums, former.name
            self.residents.hide(ino)
            self.kept[ino] = block
            arena.kind.kept.replace(ino, block)
            self.residents.show(block.name, ino, block)
            self.changes += 1
            self.evicted.append(ino)  # whoever shows the former place is to look again
