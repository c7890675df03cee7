"""Which slots of which slabs are free, taken, durable or waiting: decides where bytes go, does no I/O.

The life of a slot, each arrow one call::

    free --allocate--> allocated --commit--> durable --release--> pending --reclaim--> free
                           '------cancel-----> free

The *durable image* of a slab - its slot size and a bit for each durable slot - is what a restart needs; it
is recorded in the same transaction as the names that use the slots. A slot that left the image stays
pending, so that nobody writes over bytes that somebody may still read, until the caller says that its
release is recorded and the last reader is gone.

An allocator decides for the slabs that it was *granted*: all of them, or those that come and go one by one. It lends
whole slabs to the block store, which decides about their slots.

A slot may have an *owner*, whose `Ledger` is charged with its size from when it is allocated until it is free again.

A call that names a slot in a state from which it cannot go that way is the caller's mistake: ValueError,
with the slots before it in that call already moved.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Set
from typing import NamedTuple

import numpy as np

from kvfuse.errors import NoSpace, VolumeError
from kvfuse.slab.classes import LEARNED_MAX, SizeClasses
from kvfuse.slab.free_slabs import FreeSlabs, Spread
from kvfuse.slab.image import LENT, TOKEN_SIZE, SlabState, durable_slots
from kvfuse.slab.layout import Geometry
from kvfuse.slab.ledger import Ledger
from kvfuse.slab.pool import ALLOCATED, DURABLE, FREE, PENDING, STATE_NAMES, WITHHELD, Pool, Slab, largest_free
from kvfuse.slab.statistics import Statistics, account

PIECES_MAX = 16
"""Pieces an extent is put into at most, where the planned ones are not to be had."""
LEARNED_SLABS_MIN = 16
"""Slabs a volume has for each class it may learn: many classes would leave a small one in half-empty slabs."""


class Slot(NamedTuple):
    """A place for a piece of an extent."""

    addr: int
    """volume address, bytes"""
    size: int
    """of the slot, bytes"""
    owner: int = 0
    """whom it is charged to; 0: nobody"""


class Allocator:
    """The slots of the slabs it was granted. Every method is immediate; lengths, sizes and addresses in bytes."""

    def __init__(self, geometry: Geometry, exact_sizes: Iterable[int] = (), *, granted: bool = True) -> None:
        """All slabs granted and free, or none granted.

        ``exact_sizes``: slot sizes besides the geometric ones (ValueError if not legal).
        """
        self.geometry = geometry
        learned_max = min(LEARNED_MAX, geometry.slab_count // LEARNED_SLABS_MIN)
        self.classes = SizeClasses(geometry.slab_size, exact_sizes, learned_max)
        self._slab_shift = geometry.slab_size.bit_length() - 1
        self._offset_mask = geometry.slab_size - 1
        self._slabs: dict[int, Slab] = {}
        """slabs that have a slot size; all others are free, or lent"""
        self.lent: dict[int, bytes] = {}
        """slab -> token of its loan"""
        self._pools: dict[int, Pool] = {}
        self._free_slabs = FreeSlabs(0 if granted else sys.maxsize)
        self._used_bytes = 0
        self._tail_bytes = 0
        self._dirty: set[int] = set()
        self._has_all = granted
        self._kept_count = sys.maxsize
        """slabs from this one on are given up, see `keep_to`"""
        self._going: set[int] = set()
        """those of them that are in use"""
        self._granted: set[int] = set()
        """where it has not all"""
        self._surrendered: set[int] = set()
        """granted ones that are given up, and free"""
        self.refused = 0
        """length of the last extent for which there were no slots; who makes room for it sets it to 0"""
        self.ledger: Ledger | None = None
        """None: nobody is charged"""
        self.slab_opened: Callable[[], object] = lambda: None
        """called when a slot size took a free slab: there may soon be none left"""
        self.lent_granted: Callable[[int], object] = lambda slab: None
        """called when a slab was granted that is lent already: blocks are in it"""

    # -- taking and giving back --------------------------------------------------------------------

    def allocate(self, length: int, owner: int = 0) -> list[Slot]:
        """Slots for an extent of ``length`` bytes (1..slab_size), in order, all but the last to be filled wholly.

        NoSpace, with nothing changed, where not even ``PIECES_MAX`` pieces of other sizes hold it, or the owner may
        not have it.
        """
        slots: list[Slot] = []
        rest = length
        for slot_size in self.classes.request(length):
            pool = self._pools.get(slot_size)
            if (pool is None or not pool.free_count) and (pool := self._open_slab(slot_size)) is None:
                self.cancel(slots)
                slots = self._allocate_anywhere(length)
                break
            slots.append(Slot(pool.take(min(rest, slot_size)), slot_size))
            self._used_bytes += slot_size
            rest -= slot_size
        return self._charged(slots, owner) if owner else slots

    def take(self, length: int, owner: int = 0) -> Slot | None:
        """One slot for ``length`` bytes (1..slab_size), of the smallest size that holds them.

        None: none is free, or the owner may not have it.
        """
        self.classes.request(length)
        slot_size = self.classes.class_for(length)
        pool = self._pools.get(slot_size)
        if (pool is None or not pool.free_count) and (pool := self._open_slab(slot_size)) is None:
            return None
        self._used_bytes += slot_size
        slot = Slot(pool.take(length), slot_size)
        try:
            return self._charged([slot], owner)[0] if owner else slot
        except NoSpace:
            return None

    def exchange(self, slots: list[Slot], length: int) -> None:
        """Replace allocated slots by those for ``length`` bytes, of which they may be what is missing.

        NoSpace: they are replaced by slots of the same sizes.
        """
        before, owner = list(slots), slots[0].owner
        if any(slot.addr >> self._slab_shift in self._going for slot in before):  # those are not to be had again
            slots[:] = self.allocate(length, owner)
            self.cancel(before)
            return
        self.cancel(before)
        try:
            slots[:] = self.allocate(length, owner)
        except NoSpace:
            slots[:] = [self._take_again(slot) for slot in before]
            raise

    def _take_again(self, slot: Slot) -> Slot:
        """A slot of the size and owner of one that was free until now."""
        pool = self._pool(slot.size)
        if not pool.free_count:
            self._open_slab(slot.size)
        self._used_bytes += slot.size
        if slot.owner and self.ledger is not None:
            self.ledger.charge(slot.owner, slot.size)
        return slot._replace(addr=pool.take(slot.size))

    def _charged(self, slots: list[Slot], owner: int) -> list[Slot]:
        """Slots that are the owner's. NoSpace: they are free again."""
        if self.ledger is not None:
            size = sum([size for _, size, _ in slots])
            try:
                self.ledger.check(owner, size)
            except NoSpace:
                self.cancel(slots)
                raise
            self.ledger.charge(owner, size)
        return [Slot(addr, size, owner) for addr, size, _ in slots]

    def cancel(self, slots: Iterable[Slot]) -> None:
        """Allocated slots that will not be used are free at once."""
        for slab, index, owner in self._checked(slots, ALLOCATED):
            self._free(slab, index, owner)

    def commit(self, slots: Iterable[Slot]) -> None:
        """Allocated slots enter the durable image."""
        slabs, shift, mask, dirty = self._slabs, self._slab_shift, self._offset_mask, self._dirty
        for slot in slots:
            slab = slabs.get(slot.addr >> shift)
            index, rest = divmod(slot.addr & mask, slab.slot_size) if slab is not None else (0, 1)
            if slab is None or rest or index >= len(slab.states) or slab.states[index] != ALLOCATED:
                slab, index, _ = next(self._checked([slot], ALLOCATED))  # says what is wrong
            slab.states[index] = DURABLE
            dirty.add(slab.index)

    def release(self, slots: Iterable[Slot]) -> None:
        """Durable slots leave the durable image; they are pending."""
        for slab, index, _ in self._checked(slots, DURABLE):
            slab.states[index] = PENDING
            slab.pool.pending_count += 1
            self._dirty.add(slab.index)

    def reclaim(self, slots: Iterable[Slot]) -> None:
        """Pending slots are free; a slab without other slots may then be given to any size."""
        for slab, index, owner in self._checked(slots, PENDING):
            slab.pool.pending_count -= 1
            self._free(slab, index, owner)

    def recall(self, committed: Iterable[Slot], released: Iterable[Slot], images: Iterable[int]) -> None:
        """No record has the changes that `commit` and `release` announced: the slots are as they were before.

        ``images``: slabs whose images were taken for that, lent ones and their returns, too. All are due again.
        """
        for slab, index, _ in self._checked(committed, DURABLE):
            slab.states[index] = ALLOCATED
            self._dirty.add(slab.index)
        for slab, index, _ in self._checked(released, PENDING):
            slab.states[index] = DURABLE
            slab.pool.pending_count -= 1
            self._dirty.add(slab.index)
        self._dirty.update([slab for slab in images if self.holds(slab)])

    def spread_by(self, spread: Spread) -> None:
        """Take free slabs of all devices in turn."""
        self._free_slabs.spread = spread
        self._free_slabs.replace(list(self._free_slabs))

    # -- slabs that are lent -------------------------------------------------------------------------

    def next_free(self, count: int) -> list[int]:
        """The slabs that `lend` of so many would lend now."""
        return self._free_slabs.next(count, self._kept_end)

    def lend(self, count: int, token: bytes) -> list[int]:
        """Lend up to ``count`` free slabs. Their images are `LENT`, with the token, from the next commit on."""
        found: list[int] = []
        while len(found) < count and self.free_slab_count:
            found.append(self._free_slabs.take(self._kept_end))
            self._note_lent(found[-1], token)
            self._dirty.add(found[-1])
            self.slab_opened()
        return found

    def take_lent(self, slab: int) -> None:
        """Take a lent slab back: it is free. ValueError for one that is not lent."""
        if slab not in self.lent:
            raise ValueError(f"slab {slab} is not lent")
        del self.lent[slab]
        self._used_bytes -= self.geometry.slab_size
        self._return_slab(slab)
        self._dirty.add(slab)

    def _note_lent(self, slab: int, token: bytes) -> None:
        self.lent[slab] = token
        self._used_bytes += self.geometry.slab_size

    # -- slabs that are given up ---------------------------------------------------------------------

    def keep_to(self, slab_count: int | None) -> None:
        """Allocate in no slab from this one on, and lend none of them. None: in all of them again.

        What is free in such a slab is *withheld*: it counts as used until all of the slab is free.
        """
        for index in self._going & self._slabs.keys():
            slab = self._slabs[index]
            self._used_bytes -= slab.pool.offer(slab) * slab.slot_size
        free, unused_start = [*self._free_slabs, *self._surrendered], self._free_slabs.unused_start
        if self._has_all and self._kept_count < unused_start:
            given_up = range(self._kept_count, min(unused_start, self.geometry.slab_count))
            free += [slab for slab in given_up if slab not in self._slabs and slab not in self.lent]
        self._kept_count = slab_count if slab_count is not None else sys.maxsize
        self._free_slabs.replace(slab for slab in free if slab < self._kept_count)
        self._surrendered = set() if self._has_all else {slab for slab in free if slab >= self._kept_count}
        self._going = {slab for slab in (*self._slabs, *self.lent) if slab >= self._kept_count}
        for index in self._going & self._slabs.keys():
            slab = self._slabs[index]
            self._used_bytes += slab.pool.withhold(slab) * slab.slot_size

    @property
    def has_given_up(self) -> bool:
        """No slab that is given up is in use, and the images that were taken say so."""
        return not self._going and all(slab < self._kept_count for slab in self._dirty)

    @property
    def going(self) -> Set[int]:
        """Slabs that are given up, and in use."""
        return self._going

    @property
    def surrendered(self) -> Set[int]:
        """Slabs that were granted one by one, are given up, and free: to be withdrawn."""
        return self._surrendered

    def _return_slab(self, index: int) -> None:
        """A slab is free."""
        if index < self._kept_count:
            self._free_slabs.add(index)
        else:
            self._going.discard(index)
            if not self._has_all:
                self._surrendered.add(index)

    # -- slabs that come and go ----------------------------------------------------------------------

    def holds(self, slab: int) -> bool:
        """The slab was granted: its slots are this allocator's business."""
        return self._has_all or slab in self._granted

    def grant(self, state: SlabState) -> None:
        """Decide for this slab from now on. VolumeError if its image is wrong, ValueError if it is granted already."""
        if self.holds(state.slab):
            raise ValueError(f"slab {state.slab} is granted already")
        if state.slot_size:
            self._restore_slab(state)
        self._granted.add(state.slab)
        if state.slab >= self._kept_count and (state.slab in self._slabs or state.slab in self.lent):
            self._going.add(state.slab)
            if (slab := self._slabs.get(state.slab)) is not None:
                self._used_bytes += slab.pool.withhold(slab) * slab.slot_size
        if state.slab in self.lent:
            self.lent_granted(state.slab)
        if state.slab not in self._slabs and state.slab not in self.lent:
            self._return_slab(state.slab)

    def withdraw(self, slab: int) -> SlabState:
        """Decide for this slab no longer: its durable image.

        ValueError while a slot in it is allocated or pending, or `take_dirty` has not given its image.
        """
        if slab not in self._granted or slab in self._dirty:
            raise ValueError(f"slab {slab} is {'not recorded' if slab in self._dirty else 'not granted'}")
        if slab in self.lent:
            raise ValueError(f"slab {slab} is lent")
        state = self._image(slab)
        held = self._slabs.get(slab)
        if slab in self._surrendered:
            self._surrendered.remove(slab)
        elif held is None:
            self._free_slabs.remove(slab)
        elif ALLOCATED in held.states or PENDING in held.states:
            raise ValueError(f"slab {slab} has slots that are allocated or pending")
        else:
            held.pool.slack_bytes -= sum(held.slack)
            self._used_bytes -= (len(held.states) - held.free_count) * held.slot_size
            self._drop_slab(held)
        self._granted.remove(slab)
        self._going.discard(slab)
        return state

    def may_withdraw(self, slab: int) -> bool:
        """`withdraw` takes the slab."""
        if slab not in self._granted or slab in self._dirty or slab in self.lent:
            return False
        held = self._slabs.get(slab)
        return held is None or not (ALLOCATED in held.states or PENDING in held.states)

    def part_with(self, slab: int) -> None:
        """Decide no longer for a slab that is lent: the block store has ended, and its blocks stay.

        ValueError for one that is not lent, or of which `take_dirty` has not given the image.
        """
        if slab not in self._granted or slab not in self.lent or slab in self._dirty:
            raise ValueError(f"slab {slab} is {'not recorded' if slab in self._dirty else 'not lent'}")
        del self.lent[slab]
        self._used_bytes -= self.geometry.slab_size
        self._granted.remove(slab)
        self._going.discard(slab)

    def may_part_with(self, slab: int) -> bool:
        """`part_with` takes the slab."""
        return slab in self.lent and slab in self._granted and slab not in self._dirty

    @property
    def slab_count(self) -> int:
        """Slabs that were granted; without those that are given up, and not in use."""
        return self._kept_end + len(self._going) if self._has_all else len(self._granted) - len(self._surrendered)

    @property
    def _kept_end(self) -> int:
        return min(self._kept_count, self.geometry.slab_count)

    @property
    def free_slab_count(self) -> int:
        """Granted slabs that have no slot size."""
        return self._free_slabs.count(self._kept_end)

    def free_slabs(self) -> list[int]:
        """Free slabs that were granted one by one, and may be withdrawn; ascending."""
        return [slab for slab in self._free_slabs if slab not in self._dirty]

    def partly_free(self) -> dict[int, int]:
        """Slabs in use that were granted one by one, have free slots and may be withdrawn -> free bytes in them.

        Looks at every slab in use.
        """
        return {
            slab.index: slab.free_count * slab.slot_size
            for slab in self._slabs.values()
            if slab.free_count and self.may_withdraw(slab.index)
        }

    # -- the durable image -------------------------------------------------------------------------

    def take_dirty(self, wanted: Set[int] = frozenset(), others_max: int | None = None) -> list[SlabState]:
        """The images of slabs whose durable slots changed since theirs was given, ordered by slab.

        All those of ``wanted``, and of the others ``others_max`` at most (None: all).
        """
        others = sorted(self._dirty - wanted)[:others_max]
        given = sorted([*(self._dirty & wanted), *others])
        self._dirty.difference_update(given)
        return [self._image(slab) for slab in given]

    def durable_images(self) -> Iterator[SlabState]:
        """The images of all slabs with durable slots, ordered by slab."""
        return (state for state in map(self._image, sorted([*self._slabs, *self.lent])) if state.slot_size)

    def restore(self, states: Iterable[SlabState]) -> None:
        """Begin, on an allocator nobody used yet, with the recorded images. VolumeError naming a slab that is wrong."""
        if self._free_slabs.unused_start:
            raise ValueError("restore is for a fresh allocator")
        for state in states:
            if state.slot_size:
                self._restore_slab(state)
        if used := self._slabs.keys() | self.lent.keys():
            self._free_slabs.unused_start = max(used) + 1
            self._free_slabs.replace(slab for slab in range(max(used) + 1) if slab not in used)

    def claim(self, slot: Slot) -> None:
        """Allocate this very slot. ValueError where it is not free, or in a slab that was not granted."""
        index, offset = slot.addr >> self._slab_shift, slot.addr & self._offset_mask
        self.classes.adopt(slot.size)
        if not (self.holds(index) and 0 <= index < self.geometry.slab_count):
            raise ValueError(f"no slab of this allocator has a slot at {slot.addr}")
        if index in self.lent:
            raise ValueError(f"slot {slot.addr} is in a slab that is lent")
        if offset % slot.size or offset + slot.size > self.geometry.slab_size:
            raise ValueError(f"no slot of {slot.size} bytes begins at {slot.addr}")
        slab = self._slabs.get(index)
        if slab is None:
            slab = self._begin_slab(index, slot.size)
        elif slab.slot_size != slot.size or slab.states[offset // slot.size] != FREE:
            raise ValueError(f"slot {slot.addr} of {slot.size} bytes is not free")
        slab.pool.claim(slab, offset // slot.size)
        self._used_bytes += slot.size
        if slot.owner and self.ledger is not None:
            self.ledger.charge(slot.owner, slot.size)

    def free_slots(self, slot_size: int) -> Iterator[int]:
        """Addresses of free slots of this size: in slabs that have it, then those that free slabs would have."""
        yield from self._pool(slot_size).free_slots()
        for slab in [*self._free_slabs, *range(self._free_slabs.unused_start, self._kept_end)]:
            yield from range(slab << self._slab_shift, (slab + 1 << self._slab_shift) - slot_size + 1, slot_size)

    def _begin_slab(self, index: int, slot_size: int) -> Slab:
        """Give this free slab to a slot size."""
        self._free_slabs.remove(index)
        slab = self._new_slab(index, slot_size)
        slab.pool.add(slab)
        self.slab_opened()
        return slab

    # -- questions ---------------------------------------------------------------------------------

    def slot_size(self, addr: int) -> int:
        """Of the slab that holds ``addr``; 0 if that is free."""
        slab = self._slabs.get(addr >> self._slab_shift)
        return slab.slot_size if slab else 0

    def is_durable(self, addr: int) -> bool:
        """A durable slot begins at ``addr``."""
        slab = self._slabs.get(addr >> self._slab_shift)
        index, rest = divmod(addr & self._offset_mask, slab.slot_size) if slab else (0, 1)
        return slab is not None and not rest and index < len(slab.states) and slab.states[index] == DURABLE

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that are not free; pending ones among them."""
        return self._used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of free slabs and free slots."""
        return self.slab_count * self.geometry.slab_size - self._used_bytes - self._tail_bytes

    @property
    def pending_bytes(self) -> int:
        """Bytes of pending slots."""
        return sum(pool.pending_count * pool.slot_size for pool in self._pools.values())

    def statistics(self) -> Statistics:
        """The whole account; looks at every slab in use."""
        return account(self.geometry.slab_size, self.slab_count, self._slabs.values(), self._pools, len(self.lent))

    # -- inside ------------------------------------------------------------------------------------

    def _checked(self, slots: Iterable[Slot], state: int) -> Iterator[tuple[Slab, int, int]]:
        """The slab, index and owner of each of these slots, which must be in ``state``."""
        for addr, _, owner in slots:
            slab = self._slabs.get(addr >> self._slab_shift)
            if slab is None:
                raise ValueError(f"slot {addr} is not {STATE_NAMES[state]}: its slab is free")
            index, rest = divmod(addr & self._offset_mask, slab.slot_size)
            if rest or index >= len(slab.states):
                raise ValueError(f"no slot begins at {addr}: its slab has slots of {slab.slot_size} bytes")
            if slab.states[index] != state:
                raise ValueError(f"slot {addr} is {STATE_NAMES[slab.states[index]]}, not {STATE_NAMES[state]}")
            yield slab, index, owner

    def _free(self, slab: Slab, index: int, owner: int) -> None:
        """Free a slot, and with the last one its slab."""
        pool = slab.pool
        pool.put_back(slab, index)
        self._used_bytes -= pool.slot_size
        if owner and self.ledger is not None:
            self.ledger.charge(owner, -pool.slot_size)
        if slab.index in self._going:
            self._used_bytes += pool.withhold(slab) * pool.slot_size
            if slab.states.count(WITHHELD) == pool.slots_per_slab:
                self._used_bytes -= pool.offer(slab) * pool.slot_size
        if slab.free_count == pool.slots_per_slab:
            self._drop_slab(slab)
            self._return_slab(slab.index)

    def _drop_slab(self, slab: Slab) -> None:
        slab.pool.remove(slab)
        del self._slabs[slab.index]
        self._tail_bytes -= self._slab_tail(slab.pool)

    def _open_slab(self, slot_size: int) -> Pool | None:
        """Give the next free slab to ``slot_size``: the size's pool, or None where no slab is free."""
        if not self.free_slab_count:
            return None
        slab = self._new_slab(self._free_slabs.take(self._kept_end), slot_size)
        slab.pool.add(slab)
        self.slab_opened()
        return slab.pool

    def _new_slab(self, index: int, slot_size: int) -> Slab:
        pool = self._pool(slot_size)
        slab = self._slabs[index] = Slab(index, index << self._slab_shift, pool)
        self._tail_bytes += self._slab_tail(pool)
        return slab

    def _pool(self, slot_size: int) -> Pool:
        pool = self._pools.get(slot_size)
        if pool is None:
            pool = self._pools[slot_size] = Pool(slot_size, self.geometry.slab_size)
        return pool

    def _slab_tail(self, pool: Pool) -> int:
        return self.geometry.slab_size - pool.slots_per_slab * pool.slot_size

    def _allocate_anywhere(self, length: int) -> list[Slot]:
        """Slots for ``length`` bytes where the planned sizes are not to be had. NoSpace, with nothing changed."""
        if not self._fits_anywhere(length):
            self.refused = length
            raise NoSpace(f"no room for {length} bytes in {PIECES_MAX} slots: {self.free_bytes} bytes are free")
        slots: list[Slot] = []
        rest = length
        while rest > 0:
            slot_size = self._best_available(rest)
            pool = self._pool(slot_size)
            if not pool.free_count:
                self._open_slab(slot_size)
            slots.append(Slot(pool.take(min(rest, slot_size)), slot_size))
            self._used_bytes += slot_size
            rest -= slot_size
        return slots

    def _fits_anywhere(self, length: int) -> bool:
        """The largest free slots, as many as there may be pieces, hold ``length`` bytes."""
        if self.free_slab_count:
            return True
        return length <= self.free_bytes and length <= largest_free(self._pools.values(), PIECES_MAX)

    def _best_available(self, rest: int) -> int:
        """The slot size to put the next piece of ``rest`` bytes in.

        The smallest slot that holds the rest, else the largest there is: the small ones are left to small extents,
        which would otherwise waste large ones. There is always one, if all of it ``_fits_anywhere``.
        """
        sizes = [slot_size for slot_size, pool in self._pools.items() if pool.free_count]
        if self.free_slab_count:
            sizes.append(self.classes.class_for(rest))
        return min((size for size in sizes if size >= rest), default=max(sizes))

    def _image(self, index: int) -> SlabState:
        if index in self.lent:
            return SlabState(index, LENT, self.lent[index])
        slab = self._slabs.get(index)
        return slab.image() if slab and DURABLE in slab.states else SlabState(index, 0, b"")

    def _restore_slab(self, state: SlabState) -> None:
        if not 0 <= state.slab < self.geometry.slab_count:
            raise VolumeError(f"slab {state.slab} is recorded, but the volume has {self.geometry.slab_count}")
        if state.slot_size == LENT and len(state.bitmap) == TOKEN_SIZE:
            self._note_lent(state.slab, state.bitmap)
            return
        durable = durable_slots(state, self.geometry)
        index, slot_size, _ = state
        if index in self._slabs:
            raise VolumeError(f"slab {index} is recorded twice")
        used_count = int(np.count_nonzero(durable))
        if not used_count:
            return
        self.classes.adopt(slot_size)
        slab = self._new_slab(index, slot_size)
        slab.states[:] = (durable * DURABLE).tobytes()
        slab.free_count -= used_count
        slab.pool.add(slab)
        self._used_bytes += used_count * slot_size
