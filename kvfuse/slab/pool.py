"""The slabs of one slot size: which slot is taken next. Used by the allocator alone.

The state of a slot is a byte of its slab's map, not bits: the first free slot is then found by one search
in C, a transition is one item of a bytearray, and numpy works on whole maps wherever many slots are meant.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

import numpy as np
from sortedcontainers import SortedList

from kvfuse.slab.image import SlabState

FREE, ALLOCATED, DURABLE, PENDING, WITHHELD = range(5)
STATE_NAMES = ("free", "allocated", "durable", "pending", "withheld")
_WITHHOLD = bytes.maketrans(bytes([FREE]), bytes([WITHHELD]))
_OFFER = bytes.maketrans(bytes([WITHHELD]), bytes([FREE]))


class Slab:
    """A slab that was given to a slot size."""

    __slots__ = ("addr", "free_count", "hint", "index", "pool", "rank", "slack", "slot_size", "states")

    def __init__(self, index: int, addr: int, pool: Pool) -> None:
        self.index = index
        self.addr = addr
        self.pool = pool
        self.slot_size = pool.slot_size
        self.states = bytearray(pool.slots_per_slab)
        # Two bytes are enough for small slots, and those are the ones that are many.
        self.slack = array("H" if pool.slot_size <= 1 << 16 else "I", [0]) * pool.slots_per_slab
        """bytes of each slot beyond what was asked for"""
        self.free_count = pool.slots_per_slab
        self.hint = 0
        """no slot before it is free"""
        self.rank: int | None = None
        """the free_count under which it stands in its pool's order, None: it stands not there"""

    def image(self) -> SlabState:
        """Its durable slots."""
        durable = np.frombuffer(self.states, np.uint8) == DURABLE
        return SlabState(self.index, self.slot_size, np.packbits(durable, bitorder="little").tobytes())

    def free_slots(self) -> Iterator[int]:
        """Addresses of free slots, some of which may be taken meanwhile."""
        index = self.states.find(FREE)
        while index >= 0:
            yield self.addr + index * self.slot_size
            index = self.states.find(FREE, index + 1)


class Pool:
    """All slabs of one slot size, fullest first."""

    __slots__ = (
        "_changed",
        "_current",
        "_partial",
        "free_count",
        "pending_count",
        "slab_count",
        "slabs",
        "slack_bytes",
        "slot_size",
        "slots_per_slab",
    )

    def __init__(self, slot_size: int, slab_size: int) -> None:
        self.slot_size = slot_size
        self.slots_per_slab = slab_size // slot_size
        self.slabs: dict[int, Slab] = {}
        self.free_count = 0
        """free slots of all slabs"""
        self.pending_count = 0
        self.slack_bytes = 0
        self._current: Slab | None = None
        """the slab being filled: it stays until it is full, so that filling it sorts nothing"""
        self._partial: SortedList = SortedList()
        """(free_count, slab) of other slabs with free slots"""
        self._changed: dict[int, Slab] = {}
        """slabs whose place in ``_partial`` is to be found anew before the next choice"""

    def add(self, slab: Slab) -> None:
        """Take over a slab, with the states it has."""
        self.slabs[slab.index] = slab
        self.free_count += slab.free_count
        if slab.free_count:
            self._changed[slab.index] = slab

    def remove(self, slab: Slab) -> None:
        """Give up a slab without pending slots; the slack of its others is the caller's to take away."""
        del self.slabs[slab.index]
        self.free_count -= slab.free_count
        if slab.rank is not None:
            self._partial.remove((slab.rank, slab.index))
        self._changed.pop(slab.index, None)
        if self._current is slab:
            self._current = None

    def take(self, length: int) -> int:
        """The address of a free slot, allocated for ``length`` bytes. There must be one: see ``free_count``."""
        slab = self._current or self._choose()
        index = slab.states.find(FREE, slab.hint)
        slab.states[index] = ALLOCATED
        slab.hint = index + 1
        slab.free_count -= 1
        self.free_count -= 1
        if not slab.free_count:
            self._current = None
        slack = self.slot_size - length
        if slack:
            slab.slack[index] = slack
            self.slack_bytes += slack
        return slab.addr + index * self.slot_size

    def free_slots(self) -> Iterator[int]:
        """Addresses of free slots of its present slabs."""
        for slab in list(self.slabs.values()):
            yield from slab.free_slots()

    def claim(self, slab: Slab, index: int) -> None:
        """Allocate this very slot, which is free, for as many bytes as it has."""
        self.remove(slab)
        slab.states[index] = ALLOCATED
        slab.free_count -= 1
        slab.rank = None
        self.add(slab)

    def withhold(self, slab: Slab) -> int:
        """No free slot of a slab is taken any more. How many there were."""
        self.remove(slab)
        count, slab.states[:] = slab.free_count, slab.states.translate(_WITHHOLD)
        slab.free_count, slab.rank = 0, None
        self.add(slab)
        return count

    def offer(self, slab: Slab) -> int:
        """Undo that."""
        self.remove(slab)
        slab.states[:] = slab.states.translate(_OFFER)
        slab.free_count, slab.hint, slab.rank = slab.states.count(FREE), 0, None
        self.add(slab)
        return slab.free_count

    def put_back(self, slab: Slab, index: int) -> None:
        """Make a slot free."""
        slab.states[index] = FREE
        slack = slab.slack[index]
        if slack:
            slab.slack[index] = 0
            self.slack_bytes -= slack
        if index < slab.hint:
            slab.hint = index
        slab.free_count += 1
        self.free_count += 1
        if slab is not self._current:
            self._changed[slab.index] = slab

    def _choose(self) -> Slab:
        """Make the fullest slab with a free slot the current one."""
        for slab in self._changed.values():
            if slab.rank is not None:
                self._partial.remove((slab.rank, slab.index))
            slab.rank = slab.free_count
            self._partial.add((slab.rank, slab.index))
        self._changed.clear()
        _, index = self._partial.pop(0)
        self._current = slab = self.slabs[index]
        slab.rank = None
        return slab


def largest_free(pools: Iterable[Pool], count: int) -> int:
    """Bytes that the largest free slots have, so many of them."""
    size = 0
    for pool in sorted(pools, key=lambda pool: -pool.slot_size):
        taken = min(pool.free_count, count)
        size += taken * pool.slot_size
        count -= taken
    return size
