"""The index of blocks of one read class, as the daemon changes it: `kvfuse/blockindex` says what clients see of it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np

from kvfuse.blockindex import (
    BUCKET,
    ENDED,
    FIELDS,
    HEADER,
    HEADER_SIZE,
    LIVE,
    MAGIC,
    MULTIPLIERS_OFFSET,
    NEIGHBOURS,
    STATE,
    SUMS,
    VALID_UNTIL,
    VERSION,
    WORDS_MAX,
    Fingerprints,
    Numbers,
    Table,
    fence,
    fingerprints_of,
    places,
)
from kvfuse.checksum import extent_checksum
from kvfuse.keys import HASHED, key_of
from kvfuse.volume.tier.arenas import ReadClass, TierBlock
from kvfuse.volume.tier.name_filter import NameFilter
from kvfuse.volume.tier.revocable import Supply

FULL = 0.75
"""of the slots: then a table of twice as many takes the place of this one"""
TIER_DRAM = 1
"""as in answers of EXISTS with COSTS"""

Shown = tuple[bytes, int, TierBlock]
"""name, inode, block"""


class _Memory:
    """A table, which others can only read."""

    def __init__(self, buckets: int, filter_bits: int, directory: int, supply: Supply) -> None:
        fingerprints, slots, bitmap, size = places(buckets, filter_bits)
        self.piece = supply.make("kvfuse-index", size)
        memory = np.frombuffer(mmap.mmap(self.piece.descriptor, size), np.uint8)
        where = fingerprints, slots, size, directory, bitmap, filter_bits
        HEADER.pack_into(memory.data, 0, MAGIC, VERSION, buckets, *where)
        random = os.urandom(SUMS * WORDS_MAX * 8)
        memory[MULTIPLIERS_OFFSET : MULTIPLIERS_OFFSET + len(random)] = np.frombuffer(random, np.uint8)
        memory[:HEADER_SIZE].view(np.uint64)[STATE] = LIVE
        self.table = Table(memory)
        self.fields = self.table.slots.view(np.uint8).data


class BlockIndex:
    """The table of one read class. `Residents` has it, and calls it under its lock."""

    def __init__(
        self, readers: ReadClass, buckets: int, filter_bits: int, valid_until: int, supply: Supply
    ) -> None:  # fmt: skip
        self.readers = readers
        self.user_count = 0
        """connections that have it"""
        self.ancestors: object = None
        """of its directory, see `views.ancestors`"""
        self.names: dict[int, bytes] = {}
        """slot -> file name"""
        self._slots: dict[bytes, int] = {}
        self._inos: dict[int, int] = {}
        """slot -> inode"""
        self._memory = _Memory(buckets, filter_bits, readers.directory, supply)
        self._table = self._memory.table
        self.filter = NameFilter(self._table)
        self.extend_to(valid_until)

    @property
    def size(self) -> int:
        return len(self._table.memory)

    @property
    def buckets(self) -> int:
        return int(self._table.buckets)

    def __len__(self) -> int:
        return len(self._slots)

    def descriptor(self) -> int:
        """A new one, which can only be read."""
        return self._memory.piece.open_for_others()

    def extend_to(self, valid_until: int) -> None:
        self._table.words[VALID_UNTIL] = valid_until

    def tell_of_neighbours(self, are_there: bool) -> None:
        self._table.words[NEIGHBOURS] = are_there

    @property
    def has_ended(self) -> bool:
        return self._table.has_ended

    def end(self) -> None:
        """Nothing of it holds any more, and all but its head is taken back from those who have it mapped."""
        self._table.words[STATE] = ENDED
        self.ancestors = None
        self.filter.give_up()
        fence()
        self._memory.piece.take_back(HEADER_SIZE, self.size)
        self._slots.clear()
        self._inos.clear()
        self.names.clear()

    def ino_of(self, name: bytes) -> int:
        """0: it is not in the table."""
        slot = self._slots.get(name)
        return 0 if slot is None else self._inos[slot]

    def show_first(self, rows: Sequence[Shown]) -> bool:
        """Show blocks in an empty table, many at once. False: some found no place."""
        keys = [key_of(name) if not name.startswith(HASHED) else None for name, _, _ in rows]
        rows = [row for row, key in zip(rows, keys, strict=True) if key is not None]
        wanted = fingerprints_of(self._table.multipliers, [key for key in keys if key is not None])
        slots, free = np.full(len(rows), -1, np.int64), np.zeros(self.buckets, np.int64)
        for half in (0, 1):  # each in its first bucket where that has room, else in the second
            left = np.flatnonzero(slots < 0)
            buckets = (wanted[left, half] & np.uint64(self.buckets - 1)).astype(np.int64)
            order = np.argsort(buckets, kind="stable")
            ordered = buckets[order]
            starts = np.searchsorted(ordered, ordered)  # of the run of its bucket
            places_in = free[ordered] + np.arange(len(ordered)) - starts
            fits = places_in < BUCKET
            slots[left[order[fits]]] = ordered[fits] * BUCKET + places_in[fits]
            np.add.at(free, ordered[fits], 1)
        shown = np.flatnonzero(slots >= 0)
        self._fill(slots[shown], wanted[shown], [rows[row] for row in shown.tolist()])
        return len(shown) == len(rows)

    def _fill(self, slots: Numbers, wanted: Fingerprints, rows: Sequence[Shown]) -> None:
        table = self._table.slots
        blocks = [block for _, _, block in rows]
        table["arena"][slots] = [block.arena for block in blocks]
        table["tier"][slots] = TIER_DRAM
        table["offset"][slots] = [block.offset for block in blocks]
        table["length"][slots] = [block.size for block in blocks]
        table["generation"][slots] = [ino for _, ino, _ in rows]
        self._table.fingerprints[slots] = wanted
        fence()
        table["version"][slots] = 1
        numbers = slots.tolist()
        names, inos = [name for name, _, _ in rows], [ino for _, ino, _ in rows]
        self.names, self._inos = dict(zip(numbers, names, strict=True)), dict(zip(numbers, inos, strict=True))
        self._slots = dict(zip(names, numbers, strict=True))

    def ino_at(self, slot: int) -> int:
        return self._inos[slot]

    def shown(self) -> list[tuple[bytes, int]]:
        """(name, inode) of all blocks."""
        return [(name, self._inos[slot]) for name, slot in self._slots.items()]

    def show(self, name: bytes, ino: int, block: TierBlock) -> bool:
        """The block can be found, if its name has a key. False: there is no place for it."""
        key = key_of(name) if not name.startswith(HASHED) else None
        if key is None:
            return True
        self.hide(name)
        table = self._table
        wanted = fingerprints_of(table.multipliers, [key])
        slot = self._place(wanted[0])
        if slot < 0 or len(self._slots) >= FULL * BUCKET * self.buckets:
            return False
        checksum = (extent_checksum(block.checksums, block.size), 1) if block.checksums else (0, 0)
        start, version = 64 * slot + 8, table.versions[8 * slot]
        FIELDS.pack_into(self._memory.fields, start, block.arena, TIER_DRAM, block.offset, block.size, *checksum, ino)
        table.fingerprints[slot] = wanted[0]
        fence()
        table.versions[8 * slot] = version + 1
        self._slots[name], self._inos[slot], self.names[slot] = slot, ino, name
        return True

    def _place(self, wanted: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> int:
        """A free slot of the emptier of two buckets; -1: both are full."""
        mask, best = self.buckets - 1, (0, -1)
        for half in (0, 1):
            first = (int(wanted[half]) & mask) * BUCKET
            free = [slot for slot in range(first, first + BUCKET) if slot not in self._inos]
            best = max(best, (len(free), free[0] if free else -1))
        return best[1]

    def hide(self, name: bytes) -> None:
        """The name does not mean that block any more, or its bytes are about to change."""
        slot = self._slots.pop(name, None)
        if slot is None:
            return
        table = self._table
        table.versions[8 * slot] = table.versions[8 * slot] + 1
        fence()
        table.fingerprints[slot] = 0
        del self._inos[slot], self.names[slot]
