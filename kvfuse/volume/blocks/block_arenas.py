"""Memory of the block store: arenas that the core fills, made and populated ahead of need.

A page of shared memory costs more when it is first touched than a copy into it. So a thread populates arenas before
blocks need them, and the core uses those that it has again and again.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.errors import NotFound
from kvfuse.kept.keeper import Keeper
from kvfuse.native import blockforms as forms
from kvfuse.native._blocks import Core
from kvfuse.touchpage import fence
from kvfuse.volume.blocks.block_tables import BlockTable, BlockTables, take_all
from kvfuse.volume.tier.placement import Placement
from kvfuse.volume.tier.revocable import RevocableMemory
from kvfuse.volume.tier.shared_tier import SharedTier

log = logging.getLogger(__name__)

ARENA_SIZE = 64 << 20
ARENAS_MAX = 256
PINNED_SHARE = 8
"""one arena in so many may be pinned by blocks that are open in Python, and another one by those that are open in C"""
SPARES = 3
"""arenas that wait to be filled, once blocks are stored"""
FREED_AT_ONCE = 2
"""arenas of a table that has ended: some 20 ms each"""
ARENA_PREFIX = "blocks/arena/"
STEP = 8 << 20
"""bytes that are populated at once"""
_FORM = 1
_FACTS = struct.Struct("<I16sIIQ")
"""form, volume, place, number, size"""
_TAIL = 64
_MADV_POPULATE_WRITE = 23
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class BlockArena:
    """One piece of memory."""

    def __init__(self, place: int, number: int, piece: RevocableMemory, placement: Placement) -> None:
        self.place = place
        self.number = number
        self.piece = piece
        memory = mmap.mmap(piece.descriptor, os.fstat(piece.descriptor).st_size)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self.lent = 0
        """bytes of the tier that it counts as"""
        placement.apply(memory, self.address)

    @property
    def size(self) -> int:
        return len(self.bytes)

    @property
    def memory(self) -> BlockArena:
        """Its pages: all are there."""
        return self

    @property
    def resident(self) -> int:
        return self.size

    @property
    def origin(self) -> int:
        """`BlockTable.origin` of the table whose blocks it has; 0: none."""
        return int(self.bytes[-_TAIL:].view(np.uint64)[1])

    def populate(self) -> None:
        for start in range(0, self.size, STEP):
            _madvise(self.address + start, min(STEP, self.size - start), _MADV_POPULATE_WRITE)


class HeldRow:
    """A block whose bytes stay where they are as long as somebody has this. Any thread."""

    __slots__ = ("__weakref__", "_core", "home", "offset", "size")

    def __init__(self, core: Core, home: BlockArena, offset: int, size: int) -> None:
        """Its arena is pinned already."""
        self._core = core
        self.home = home
        self.offset = offset
        self.size = size

    @property
    def arena(self) -> int:
        return self.home.number

    def __del__(self) -> None:
        self._core.pin_arena(self.home.number, -1)


class BlockArenas:
    """The arenas of a volume, up to the tier's size, which they share with blocks of files. Event loop only, but for
    `hold`."""

    def __init__(
        self, core: Core, tables: BlockTables, tier: SharedTier, keeper: Keeper, volume_id: bytes, least: int
    ) -> None:  # fmt: skip
        """``least``: bytes that the store has where the tier is smaller. Of these at most half of the tier count as
        its: the rest is left to blocks of files."""
        self._core = core
        self._tables = tables
        self._tier = tier
        self._keeper = keeper
        self._volume_id = volume_id
        self.capacity = max(tier.capacity, least)
        self._least = least
        self.arena_size = min(max(ARENA_SIZE, self.capacity // ARENAS_MAX), max(self.capacity // 8, 1 << 20))
        self.arena_size -= self.arena_size % (1 << 20)
        self.by_number: dict[int, BlockArena] = {}
        self._places: dict[int, BlockArena] = {}
        self._left: list[int] = []
        """numbers of arenas of the former daemon, whose clients may hold blocks: pinned until that is known"""

    @property
    def size(self) -> int:
        return sum(arena.size for arena in self._places.values())

    @property
    def block_max(self) -> int:
        """Bytes of the largest block that fits into an arena."""
        return self.arena_size - (64 << 10)

    @property
    def pinned_max(self) -> int:
        """How many blocks that are open in Python may pin, and as many again those that are open in C."""
        return max(1, self.capacity // self.arena_size // PINNED_SHARE)

    async def keep_spares(self) -> bool:
        """Have `SPARES` arenas wait to be filled, and free sealed ones. True: it freed one, made one, or took one from
        a table that needs it less."""
        facts = {place: self._core.arena_facts(place) for place in self._places}
        sealed = (place for place, found in facts.items() if found[0] == forms.SEALED and _is_idle(found))
        if (place := next(sealed, None)) is not None:
            await trio.lowlevel.checkpoint()
            return self._free(place)
        if sum(found[0] == forms.SPARE for found in facts.values()) >= SPARES:
            return False
        if (arena := self._new()) is not None:
            try:
                await trio.to_thread.run_sync(arena.populate)
            finally:  # also if cancelled: the core has all arenas that `leave` frees
                self._add(arena)
            return True
        owners = {found[1] for found in facts.values() if found[0] != forms.SPARE}
        if len(owners) < 2 and not self._tables.ended:
            return False  # a table that is alone uses its own arenas again
        idle = {place: found for place, found in facts.items() if _is_idle(found)}
        if not idle or any(found[0] == forms.SPARE for found in facts.values()):
            return False
        filled = [(found[6], place) for place, found in idle.items() if found[0] == forms.FILLED]
        # Where there are as many tables as arenas, the one that has the least in it waits again.
        return self._free(min(filled or [(found[5], place) for place, found in idle.items()])[1])

    def _new(self) -> BlockArena | None:
        """A new arena, which the core does not have yet. None: there is no memory for it."""
        is_least = self.size + self.arena_size <= self._least  # what the store has in any case
        if self.size + self.arena_size > self.capacity or len(self._places) >= ARENAS_MAX:
            return None
        lent = self._share(self.arena_size) if is_least else self.arena_size
        if not self._tier.lend(lent, always=is_least):
            return None
        if (number := self._tier.take_number()) is None:
            self._tier.take_back(lent)
            return None
        place = next(place for place in range(ARENAS_MAX) if place not in self._places)
        supply = self._tier.supply
        piece = supply.make("kvfuse-blocks", self.arena_size)
        arena = self._places[place] = BlockArena(place, number, piece, supply.placement)
        arena.lent = lent
        return arena

    def _share(self, size: int) -> int:
        """How many bytes of the tier an arena counts as that the store has in any case."""
        return max(0, min(size, self._tier.capacity // 2 - sum([arena.lent for arena in self._places.values()])))

    def make_first(self) -> None:
        """Make an arena at once, without its pages: the first put need not wait."""
        if not self._places and (arena := self._new()) is not None:
            self._add(arena)

    def _add(self, arena: BlockArena) -> None:
        self.by_number[arena.number] = arena
        self._core.hold(arena.address, arena.bytes)
        self._core.add_arena(arena.place, arena.number, arena.address, arena.size, -1)
        facts = _FACTS.pack(_FORM, self._volume_id, arena.place, arena.number, arena.size)
        descriptors = arena.piece.descriptor, arena.piece.readable
        self._keeper.keep(f"{ARENA_PREFIX}{arena.number}", facts, descriptors)

    def _free(self, place: int) -> bool:
        """Take the memory of an arena back, if nobody uses it now."""
        if not self._core.remove_arena(place):
            return False
        arena = self._places.pop(place)
        self._core.hold(arena.address, None)
        del self.by_number[arena.number]
        self._keeper.drop(f"{ARENA_PREFIX}{arena.number}")
        arena.piece.take_back(0, arena.size)
        self._tier.take_back(arena.lent)
        return True

    def forget(self, table: int) -> tuple[int, int]:
        """Free some arenas of a table that has ended: how many, and how many are left."""
        own = [place for place in self._places if place in self._known and self._core.arena_facts(place)[1] == table]
        freed = 0
        for place in own:
            freed += freed < FREED_AT_ONCE and self._free(place)
        return freed, len(own) - freed

    def leave(self) -> None:
        """Free all arenas but those that clients hold, which no daemon goes on with."""
        for place, arena in list(self._places.items()):
            if not self._free(place):
                self._keeper.drop(f"{ARENA_PREFIX}{arena.number}")

    @property
    def _known(self) -> set[int]:
        return {arena.place for arena in self.by_number.values()}

    def descriptor_of(self, number: int) -> int:
        """A new descriptor by which a client can only read. NotFound."""
        arena = self.by_number.get(number)
        if arena is None:
            raise NotFound(f"arena {number} is no more")
        return arena.piece.open_for_others()

    def table_of(self, number: int) -> BlockTable | None:
        """Whose blocks an arena has."""
        arena = self.by_number.get(number)
        origin = arena.origin if arena is not None else 0
        if not origin:
            return None
        return next((table for table in self._tables.all.values() if table.origin == origin), None)

    # -- blocks that clients hold ------------------------------------------------------------------------

    def hold(self, table: BlockTable, row: int, sequence: int) -> HeldRow | None:
        """Hold a block, if it is in memory. None: it is not, or is another one by now. Any thread."""
        rows = table.all_rows
        arena = self.by_number.get(int(rows["arena"][row]))
        if arena is None or not self._core.pin_arena(arena.number, 1):
            return None
        version = int(rows["version"][row])  # from here on, what is in this arena stays
        fence()
        found = rows[row].copy()
        fence()
        held = HeldRow(self._core, arena, int(found["page"]) * forms.PAGE, int(found["length"]))
        is_same = version & 1 == 1 and int(rows["version"][row]) == version
        is_same &= int(found["sequence"]) == sequence and int(found["arena"]) == arena.number
        return held if is_same else None

    def adopt_pin(self, number: int, offset: int, size: int) -> HeldRow | None:
        """What a client of the former daemon goes on to hold. None: there is no such arena any more."""
        arena = self.by_number.get(number)
        if arena is None or offset < 0 or size <= 0 or offset + size > arena.size:
            return None
        return HeldRow(self._core, arena, offset, size) if self._core.pin_arena(number, 1) else None

    def pins_are_known(self) -> None:
        """`adopt_pin` was called for all that clients hold. It may be called again, without effect."""
        while self._left:
            self._core.pin_arena(self._left.pop(), -1)

    # -- from one daemon to the next -----------------------------------------------------------------

    def restore(self) -> None:
        """Take over the arenas of the former daemon, once its tables were."""
        places = {table.origin: table.place for table in self._tables.all.values()}
        for name, kept in take_all(self._keeper, ARENA_PREFIX):
            piece = RevocableMemory(*kept.descriptors) if len(kept.descriptors) == 2 else None
            arena = None
            if piece is not None and len(kept.content) == _FACTS.size:
                form, volume_id, place, number, size = _FACTS.unpack(kept.content)
                is_ours = form == _FORM and volume_id == self._volume_id and place not in self._places
                if is_ours and os.fstat(piece.descriptor).st_size == size and size > forms.PAGE:
                    arena = BlockArena(place, number, piece, self._tier.supply.placement)
            if arena is None or arena.origin not in places:
                self._keeper.drop(name)
                if arena is not None:
                    arena.piece.take_back(0, arena.size)
                continue
            arena.lent = self._share(arena.size) if self.size + arena.size <= self._least else arena.size
            self._tier.lend(arena.lent, always=True)
            self._places[arena.place] = self.by_number[arena.number] = arena
            self._core.hold(arena.address, arena.bytes)
            self._core.add_arena(arena.place, arena.number, arena.address, arena.size, places[arena.origin])
            if self._core.pin_arena(arena.number, 1):
                self._left.append(arena.number)

    def statistics(self) -> dict[str, Any]:
        return {"arenas": len(self._places), "arena_bytes": self.size, "arena_capacity": self.capacity}


def _is_idle(facts: tuple[int, ...]) -> bool:
    state, _, pins, dirty, *_ = facts
    return state != forms.SPARE and not pins and not dirty
