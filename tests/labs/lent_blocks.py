"""A core of the block store that has blocks in memory, without a volume: for what other hosts read of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from blocks_lab import MULTIPLIERS, TOKEN, find, memory_at, put, shared

from kvfuse.native import _blocks
from kvfuse.native import blockforms as blocks
from kvfuse.native.blockforms import PAGE
from kvfuse.volume.views.neighbours import WantedBlocks

DIRECTORY, ROWS, SLABS = 3, 1 << 13, 24
SLAB, HEAD_TABLE = 16 << 20, 256 * PAGE
SIZES = [PAGE << power for power in range(12)]


class LentBlocks:
    """``arenas`` of 64 MiB. Blocks are named by numbers."""

    def __init__(self, arenas: int = 4, arenas_lent: int = 4, first: int = 0) -> None:
        """It has half of the slabs, from that number on."""
        self.states = shared(blocks.SLAB_STATE_SIZE * SLABS)
        self.table = shared(blocks.table_size(1 << 10, ROWS))
        _blocks.begin_table(self.table, MULTIPLIERS, 1 << 10, ROWS, DIRECTORY, 70, 1, 2, 0o444, 99)
        self.core = _blocks.Core(self.states.ctypes.data, SLABS, SLAB, HEAD_TABLE, np.array(SIZES, np.uint32))
        self.core.put_space(0, 70, -1, 1, 1 << 40, 1 << 40)
        self.core.add_table(0, 0, self.table.ctypes.data, len(self.table))
        self.core.add_slabs(np.arange(first, first + SLABS // 2, dtype=np.uint32), TOKEN)
        self.arenas = [shared(64 << 20) for _ in range(arenas)]
        for place, memory in enumerate(self.arenas):
            self.core.add_arena(place, place + 1, memory.ctypes.data, len(memory), -1)
        self.lender = self.core.lender(arenas_lent)
        self._now = 1

    def put(self, blocks_of: dict[int, bytes]) -> None:
        self._now += 1
        items = [(b"%d" % number, data) for number, data in blocks_of.items()]
        results, _ = put(self.core, 0, DIRECTORY, items, self._now)
        assert min(results) >= 0

    def content(self, number: int) -> np.ndarray:
        """Of a block that is in memory."""
        (row,), _ = find(self.core.find, 0, DIRECTORY, [b"%d" % number])
        found = blocks.rows_of(self.table, 1 << 10)[row]
        start = int(found["page"]) * PAGE
        return self.arenas[int(found["arena"]) - 1][start : start + int(found["length"])]

    def is_resident(self, number: int) -> bool:
        (row,), _ = find(self.core.find, 0, DIRECTORY, [b"%d" % number])
        return row >= 0 and bool(blocks.rows_of(self.table, 1 << 10)["arena"][row])

    def reserve_foreign(
        self, other: LentBlocks, numbers: Sequence[int]
    ) -> tuple[_blocks.Landing, np.ndarray, list[np.ndarray]]:
        """Hear of blocks of another host, and reserve memory for them: where it is, too."""
        names = [b"%d" % number for number in numbers]
        found = blocks.rows_of(other.table, 1 << 10)[find(other.core.find, 0, DIRECTORY, names)[0]]
        for low, high in found[["low", "high"]].tolist():
            told = other.core.tell(low, high)
            assert told is not None
            assert self.core.hear(told)
        rows, sequences = find(self.core.find, 0, DIRECTORY, names)
        count = len(names)
        places, sizes = np.zeros(count, np.uint64), np.zeros(count, np.int64)
        slabs, offsets, packed = np.zeros(count, np.uint32), np.zeros(count, np.uint64), np.zeros(count, np.int64)
        landing = self.core.reserve(
            0, *blocks.name_columns(names), np.array(rows), np.array(sequences, np.uint64), places, sizes, slabs,
            offsets, packed,
        )  # fmt: skip
        assert places.all()
        return landing, places, [memory_at(*pair) for pair in zip(places.tolist(), sizes.tolist(), strict=True)]

    def write_all(self) -> None:
        """As if all were on the medium: memory, and slots, can be used again."""
        while not isinstance(batch := self.core.take_dirty(1 << 40, 1000), int):
            batch.runs()
            batch.end()

    def drop(self, number: int) -> None:
        find(self.core.drop, 0, DIRECTORY, [b"%d" % number])

    def pins(self) -> int:
        """Of all arenas."""
        return sum(self.core.arena_facts(place)[2] for place in range(len(self.arenas)))

    def wanted(self, numbers: Sequence[int], memory: np.ndarray) -> WantedBlocks:
        """All of these, to come to memory one behind the other."""
        rows, _ = find(self.core.find, 0, DIRECTORY, [b"%d" % number for number in numbers])
        assert min(rows) >= 0
        found = blocks.rows_of(self.table, 1 << 10)[rows]
        offsets = [self.core.slot_places(int(row["slab"]), int(row["slot"]))[1] for row in found]
        addresses = found["slab"].astype(np.uint64) * np.uint64(SLAB) + np.array(offsets, np.uint64)
        ends = np.cumsum(found["length"], dtype=np.uint64)
        targets = np.uint64(memory.ctypes.data) + ends - found["length"]
        slabs, sequences, lengths, checksums = (
            np.ascontiguousarray(found[name]) for name in ("slab", "sequence", "length", "checksum")
        )
        return WantedBlocks(slabs, addresses, sequences, lengths, checksums, targets)
