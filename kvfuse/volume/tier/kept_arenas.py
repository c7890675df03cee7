"""Arenas that the daemon before this one left: found with who keeps them, checked, and taken into the tier.

Nothing here looks at the bytes of a block, or at records: what is taken in is candidates, which `SharedTier.left` has.
All work for each block is done with arrays, but for its entries in two tables; what else is known of it stays in
columns until it is asked for. So a million and a half of them, 100 GB of small ones, take less than a second.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfuse.kept.keeper import Keeper
from kvfuse.policy.hot import USES_MAX, Recent
from kvfuse.volume.tier.arena_pool import ARENA_PREFIX, SLOT_ALIGNMENT, ArenaFacts, ArenaPool
from kvfuse.volume.tier.arena_rows import ArenaRows
from kvfuse.volume.tier.arenas import (
    Arena,
    ArenaKind,
    ArenaMemory,
    LeftBlock,
    LeftBlocks,
    LeftColumns,
    ReadClass,
    TierBlock,
)
from kvfuse.volume.tier.placement import Placement
from kvfuse.volume.tier.revocable import RevocableMemory

log = logging.getLogger(__name__)

VOLUME_NAME = "tier/volume"
"""whose files the blocks are of"""

MayAdopt = Callable[[ReadClass, bytes], bool]
"""(read class of an arena, regime of its directory when it was kept) -> nobody else may use the directory now"""


@dataclass
class KeptArena:
    """An arena of the daemon before this one, with its valid rows."""

    facts: ArenaFacts
    memory: ArenaMemory
    rows: ArenaRows
    slots: npt.NDArray[np.int64]
    """that have valid rows"""

    @property
    def has_ended(self) -> bool:
        """Nobody holds any of it: its memory was taken back, or is that of another arena by now."""
        return not self.rows.touched

    @property
    def used_at(self) -> int:
        """When a block in it was last kept; 0: it has none."""
        return int(self.rows.table["kept_at"][self.slots].max(initial=0))


def check_volume(keeper: Keeper, identity: bytes) -> bool:
    """What is left is of this volume: a service may be started anew with another one. Event loop only."""
    kept = keeper.take(VOLUME_NAME)
    keeper.keep(VOLUME_NAME, identity)
    if kept is not None and kept.content != identity:
        log.info("shared memory of another volume is not used")
        return False
    return True


def find_left(keeper: Keeper, placement: Placement) -> list[KeptArena]:
    """All of them, those used last first. What is none of this version is dropped. Event loop only."""
    found = []
    for name in keeper.list_names(ARENA_PREFIX):
        kept = keeper.take(name)
        if kept is None:
            continue
        descriptors = list(kept.descriptors)
        try:
            found.append(_open(kept.content, descriptors, placement))
        except (ValueError, OSError) as error:
            log.warning("shared memory of the daemon before this one is not used: %s", error)
            keeper.drop(name)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
    return sorted(found, key=lambda left: -left.used_at)


def _open(content: bytes, descriptors: list[int], placement: Placement) -> KeptArena:
    """Takes descriptors that it goes on to hold out of the list."""
    facts = ArenaFacts.unpack(content)
    if len(descriptors) != 3 or os.fstat(descriptors[0]).st_size != facts.size:
        raise ValueError(f"arena {facts.number} has another size than was kept")
    piece = RevocableMemory(*descriptors[:2])
    del descriptors[:2]
    memory = ArenaMemory(piece, placement)
    rows = ArenaRows(facts.size // facts.slot_size, descriptors[0])
    del descriptors[0]
    table = rows.table
    is_valid = (table["kept_at"] > 0) & (table["ino"] > 0)
    is_valid &= (table["size"] <= facts.slot_size) & (table["size"] + SLOT_ALIGNMENT > facts.slot_size)
    return KeptArena(facts, memory, rows, np.flatnonzero(is_valid))


class ArenaRestoration:
    """Takes arenas into a pool, in the order of the calls of `add`; then `end` gives what is in them."""

    def __init__(self, pool: ArenaPool) -> None:
        self._pool = pool
        self._arenas: list[Arena] = []
        self._columns: list[dict[str, Any]] = []

    def add(self, left: KeptArena) -> bool:
        """False: there is no room for it, or nothing of use in it."""
        facts = left.facts
        if not len(left.slots):
            return False
        kind = self._pool.kind(facts.slot_size, facts.read_class)
        arena = self._pool.add_left(facts.number, kind, left.memory, left.rows)
        if arena is None:
            self._pool.drop_if_empty(kind)
            return False
        kind.is_left = True
        rows = left.rows.table[left.slots]
        arena.leased_count = len(rows)
        is_free = np.ones(arena.touched, np.bool_)
        is_free[left.slots] = False
        self._pool.withheld |= {(arena, slot) for slot in np.flatnonzero(is_free).tolist()}
        self._columns.append(
            {
                **{field: rows[field] for field in ("kept_at", "ino", "size", "uses", "is_proven")},
                "slot": left.slots,
                "arena": np.full(len(rows), len(self._arenas)),
            }
        )
        self._arenas.append(arena)
        return True

    def hold(self, left: KeptArena, on_return: Callable[[], object]) -> None:
        """Nothing is found in it any more; its memory is counted until no client can hold any of it.

        ``on_return``: see `ArenaKind`.
        """
        facts = left.facts
        left.rows.table["kept_at"] = 0
        kind = ArenaKind(facts.slot_size, facts.read_class, Recent())
        kind.retired, kind.on_return = True, on_return
        arena = self._pool.add_left(facts.number, kind, left.memory, left.rows)
        assert arena is not None
        self._pool.withheld |= {(arena, slot) for slot in range(arena.touched)}

    def end(self, left: LeftBlocks, of: Callable[[int], TierBlock | LeftBlock]) -> int:
        """Put all blocks into ``left``; the arenas' books have them, in the order in which they were kept.

        ``of``: what is the block of an inode at some time. The bytes of all.
        """
        if not self._arenas:
            return 0
        columns = {name: np.concatenate([own[name] for own in self._columns]) for name in self._columns[0]}
        self._columns.clear()
        order = np.argsort(columns["kept_at"], kind="stable")[::-1]
        _, newest = np.unique(columns["ino"][order], return_index=True)  # of several blocks of a file the last one
        chosen = order[np.sort(newest)[::-1]]
        if len(chosen) < len(order):
            self._hide(np.setdiff1d(order, chosen, assume_unique=True), columns)
        columns = {name: column[chosen] for name, column in columns.items()}
        columns["uses"] = np.minimum(columns["uses"], USES_MAX)
        fields = (columns[name] for name in LeftColumns._fields if name != "arenas")
        left.begin_with(columns["ino"].tolist(), LeftColumns(self._arenas, *fields))
        self._enter(columns, of)
        return int(columns["size"].sum())

    def _hide(self, places: npt.NDArray[np.int64], columns: dict[str, Any]) -> None:
        for place in places.tolist():
            arena, slot = self._arenas[columns["arena"][place]], int(columns["slot"][place])
            assert arena.rows is not None
            arena.rows.hide(slot)
            self._pool.returned.append((arena, slot))

    def _enter(self, columns: dict[str, Any], of: Callable[[int], TierBlock | LeftBlock]) -> None:
        count = len(self._arenas)
        counts = np.bincount(columns["arena"], minlength=count).tolist()
        is_hot = (columns["is_proven"] > 0) | (columns["uses"] > 1)
        of_kind = {id(arena.kind): arena.kind for arena in self._arenas}
        numbers_of_kind = np.array([list(of_kind).index(id(arena.kind)) for arena in self._arenas])[columns["arena"]]
        for number, kind in enumerate(of_kind.values()):
            own = numbers_of_kind == number
            new, proven = (columns["ino"][chosen].tolist() for chosen in (own & ~is_hot, own & is_hot))
            kind.kept.begin_with(new, proven, of)
        used_at, uses = np.zeros(count, np.int64), np.zeros(count, np.int64)
        np.maximum.at(used_at, columns["arena"], columns["kept_at"].astype(np.int64))
        np.maximum.at(uses, columns["arena"], columns["uses"].astype(np.int64))
        for number, arena in enumerate(self._arenas):
            arena.kept_count = counts[number]
            arena.used_at, arena.uses = int(used_at[number]), int(uses[number])


def drop_left(keeper: Keeper, arenas: Iterable[KeptArena]) -> None:
    """Nobody is to find these any more. Event loop only."""
    for left in arenas:
        keeper.drop(f"{ARENA_PREFIX}{left.facts.number}")
