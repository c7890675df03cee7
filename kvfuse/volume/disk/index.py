"""Which copies the tier has, where they are, and which of them go: in memory, synchronous.

A copy has one slot. Where no slot of a size is free, the least recently used copy goes; where that has another slot
size, all copies of its slab go, so that the slab may be given to the size that is needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from kvfuse.policy import make_policy
from kvfuse.slab.allocator import Allocator, Slot
from kvfuse.slab.image import SlabState
from kvfuse.slab.layout import Geometry
from kvfuse.volume.disk.copies import Copy, Granule, Rows


class Index:
    """The copies of one tier. For the event loop alone."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.slabs = Allocator(geometry)
        self.policy = make_policy("lru", "adaptive")
        self.copies: dict[int, Copy] = {}
        """by key"""
        self.kept_bytes = 0
        """of granules, without what their slots have beyond"""
        self.saved_bytes = 0
        """that compression saves, without regard to slots"""
        self.evicted = 0
        self._keys: dict[int, array[int]] = {}
        """slab -> the key in each of its slots, plus 1; 0: none"""

    def find(self, granule: Granule) -> Copy | None:
        """The copy of a granule. One of another generation goes: most likely its bytes are no file's any more."""
        copy = self.copies.get(granule.key)
        if copy is not None and (copy.generation, copy.length, copy.checksum) != granule[1:]:
            self.drop(granule.key)
            return None
        return copy

    def used(self, granules: Sequence[Granule], now: float) -> None:
        """They are asked for. Each is a block of its own for the policy: all of one extent have the same past."""
        for granule in granules:
            self.policy.used([granule.key], now)

    def admits(self, granule: Granule, now: float) -> bool:
        """The granule, which was just asked for, is worth a slot."""
        return self.policy.admits([granule.key], now, self.slabs.free_slab_count > 0)[0]

    def take(self, length: int, now: float) -> Slot | None:
        """A slot for a copy that is about to be written; others go for it. None: all slots are being written.

        `add` or `cancel` follows.
        """
        while (slot := self.slabs.take(length)) is None:
            victims = self.policy.victims(1, now)
            if not victims:
                return None
            place = victims[0].tag
            slot_size = self.slabs.slot_size(place)
            self.drop(victims[0].key)
            self.evicted += 1
            if slot_size != self.slabs.classes.class_for(length):
                self._clear_slab(self.geometry.slab_of(place))
        return slot

    def cancel(self, slot: Slot) -> None:
        """Nothing is in the slot."""
        self.slabs.cancel([slot])
        self._forget_slab(slot.addr)

    def add(self, granule: Granule, stored: int, slot: Slot, now: float) -> None:
        """The slot has a copy of the granule, of ``stored`` bytes. A former one of the same key goes."""
        self.drop(granule.key)
        self.slabs.commit([slot])
        self._enter(Copy(slot.addr, *granule[1:], stored), granule.key, slot.size, now)

    def drop(self, key: int) -> bool:
        """Whether there was a copy to be dropped."""
        copy = self.copies.pop(key, None)
        if copy is None:
            return False
        self.policy.removed(key)
        self.kept_bytes -= copy.length
        self.saved_bytes -= copy.length - copy.stored
        slab, offset = divmod(copy.place, self.geometry.slab_size)
        slot = Slot(copy.place, self.slabs.slot_size(copy.place))
        self._keys[slab][offset // slot.size] = 0
        self.slabs.release([slot])
        self.slabs.reclaim([slot])
        self._forget_slab(copy.place)
        return True

    def drop_all(self) -> None:
        """Forget everything; slots stay as they are: nothing is to be added any more."""
        self.copies.clear()
        self._keys.clear()
        self.policy = make_policy("lru", "adaptive")
        self.kept_bytes = self.saved_bytes = 0

    def restore(self, rows: Rows) -> None:
        """Begin, before anything else, with slots that have copies; `restore_copies` follows for all of them."""
        if not len(rows):
            return
        slab_numbers = rows["place"] // self.geometry.slab_size
        order = np.argsort(slab_numbers, kind="stable")
        slabs, starts = np.unique(slab_numbers[order], return_index=True)
        states = []
        for slab, of_slab in zip(slabs.tolist(), np.split(rows[order], starts[1:]), strict=True):
            slot_size = int(of_slab["slot_size"][0])
            taken = np.zeros(self.geometry.slots_per_slab(slot_size), np.uint8)
            taken[(of_slab["place"] % self.geometry.slab_size) // slot_size] = 1
            states.append(SlabState(slab, slot_size, np.packbits(taken, bitorder="little").tobytes()))
        self.slabs.restore(states)

    def restore_copies(self, rows: Rows, now: float) -> None:
        """A part of the rows of `restore`; those that are to go first come first."""
        for row in rows.tolist():
            key, place, generation, length, checksum, stored, _, slot_size = row
            self._enter(Copy(place, generation, length, checksum, stored), key, slot_size, now)

    def _enter(self, copy: Copy, key: int, slot_size: int, now: float) -> None:
        self.copies[key] = copy
        self.kept_bytes += copy.length
        self.saved_bytes += copy.length - copy.stored
        self.policy.added(key, slot_size, now, copy.place)
        slab, offset = divmod(copy.place, self.geometry.slab_size)
        keys = self._keys.get(slab)
        if keys is None:
            keys = self._keys[slab] = array("Q", bytes(8 * self.geometry.slots_per_slab(slot_size)))
        keys[offset // slot_size] = key + 1

    def _forget_slab(self, place: int) -> None:
        """Forget the size of a slab whose last slot was freed."""
        if not self.slabs.slot_size(place):
            self._keys.pop(self.geometry.slab_of(place), None)

    def _clear_slab(self, slab: int) -> None:
        """Drop all copies in a slab."""
        for key in list(self._keys.get(slab, ())):
            if key:
                self.evicted += self.drop(key - 1)
