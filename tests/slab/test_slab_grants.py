"""Slabs that move between allocators, against a plain model: no slot is owned twice, none is lost."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvfuse.errors import NoSpace, VolumeError
from kvfuse.slab.allocator import Allocator, Slot
from kvfuse.slab.image import SlabState
from kvfuse.slab.layout import Geometry

KIB, MIB = 1 << 10, 1 << 20
GEOMETRY = Geometry.choose(40 * MIB, MIB)
ALLOCATED, DURABLE, PENDING = "allocated", "durable", "pending"
CALLS = {
    "cancel": (ALLOCATED, None),
    "commit": (ALLOCATED, DURABLE),
    "release": (DURABLE, PENDING),
    "reclaim": (PENDING, None),
}


class Clients:
    """Allocators that share the slabs of one volume, and what each of them was given and gave back."""

    def __init__(self, rng: random.Random, count: int) -> None:
        self.rng = rng
        self.allocators = [Allocator(GEOMETRY, granted=False) for _ in range(count)]
        self.holders: dict[int, int | None] = dict.fromkeys(range(GEOMETRY.slab_count))
        """slab -> the allocator that has it"""
        self.recorded = {slab: SlabState(slab, 0, b"") for slab in self.holders}
        self.states: dict[Slot, str] = {}
        self.events: Counter[str] = Counter()

    def slab_of(self, slot: Slot) -> int:
        return slot.addr // GEOMETRY.slab_size

    def step(self) -> None:
        client = self.rng.randrange(len(self.allocators))
        chance = self.rng.random()
        if chance < 0.45:
            self.allocate(client)
        elif chance < 0.85:
            self.move(client, self.rng.choice(tuple(CALLS)))
        elif chance < 0.9:
            self.record(client)
        elif chance < 0.95:
            self.grant(client)
        else:
            self.withdraw(client)

    def slots_of(self, client: int, state: str) -> list[Slot]:
        return [
            slot for slot, is_in in self.states.items() if is_in == state and self.holders[self.slab_of(slot)] == client
        ]

    def allocate(self, client: int) -> None:
        length = int(GEOMETRY.slab_size ** self.rng.random())
        try:
            slots = self.allocators[client].allocate(length)
        except NoSpace:
            self.events["no space"] += 1
            return
        for slot in slots:
            assert slot not in self.states, f"{slot} is owned twice"
            assert self.holders[self.slab_of(slot)] == client, f"{slot} is in a slab of another"
            self.states[slot] = ALLOCATED

    def move(self, client: int, call: str) -> None:
        before, after = CALLS[call]
        slots = self.slots_of(client, before)
        slots = self.rng.sample(slots, self.rng.randint(0, len(slots)))
        getattr(self.allocators[client], call)(slots)
        for slot in slots:
            if after is None:
                del self.states[slot]
            else:
                self.states[slot] = after

    def record(self, client: int) -> None:
        for state in self.allocators[client].take_dirty():
            assert self.holders[state.slab] == client
            self.recorded[state.slab] = state

    def grant(self, client: int) -> None:
        free = [slab for slab, holder in self.holders.items() if holder is None]
        if free:
            slab = self.rng.choice(free)
            self.allocators[client].grant(self.recorded[slab])
            self.holders[slab] = client
            self.events["granted"] += bool(self.recorded[slab].slot_size)
            with pytest.raises(ValueError, match="granted already"):
                self.allocators[client].grant(self.recorded[slab])

    def withdraw(self, client: int) -> None:
        held = [slab for slab, holder in self.holders.items() if holder == client]
        if not held:
            return
        slab = self.rng.choice(held)
        self.record(client)
        if any(state != DURABLE for slot, state in self.states.items() if self.slab_of(slot) == slab):
            with pytest.raises(ValueError, match="allocated or pending"):
                self.allocators[client].withdraw(slab)
        else:
            state = self.allocators[client].withdraw(slab)
            assert state == self.recorded[slab]
            self.holders[slab] = None
            self.events["withdrawn"] += bool(state.slot_size)

    def is_partly_free(self, slab: int) -> bool:
        """It is in use, with some slots free and all others durable."""
        slots = {slot: state for slot, state in self.states.items() if self.slab_of(slot) == slab}
        if not slots or any(state != DURABLE for state in slots.values()):
            return False
        return len(slots) < GEOMETRY.slots_per_slab(next(iter(slots)).size)

    def check(self) -> None:
        for client, allocator in enumerate(self.allocators):
            self.record(client)
            slabs = [slab for slab, holder in self.holders.items() if holder == client]
            used = sum(slot.size for slot in self.states if self.holders[self.slab_of(slot)] == client)
            may_go = allocator.partly_free()
            assert may_go.keys() == {slab for slab in slabs if self.is_partly_free(slab)}
            assert sum(may_go.values()) <= allocator.free_bytes
            statistics = allocator.statistics()
            assert allocator.slab_count == len(slabs)
            assert allocator.used_bytes == statistics.used_bytes == used
            assert allocator.free_bytes == statistics.free_bytes
            assert used + allocator.free_bytes + statistics.tail_bytes == len(slabs) * GEOMETRY.slab_size
            assert allocator.free_slab_count == len(allocator.free_slabs()) == statistics.slabs_free
            assert all(allocator.holds(slab) == (holder == client) for slab, holder in self.holders.items())
        for slot, state in self.states.items():
            holder = self.holders[self.slab_of(slot)]
            assert holder is None or self.allocators[holder].is_durable(slot.addr) == (state == DURABLE)


def test_slabs_move_between_three_allocators(rng: random.Random) -> None:
    clients = Clients(rng, 3)
    for number in range(20_000):
        clients.step()
        if number % 50 == 0:
            clients.check()
    print(dict(clients.events))
    assert min(clients.events[name] for name in ("no space", "granted", "withdrawn")) > 10
    for client in range(3):
        for call in ("cancel", "reclaim", "release", "reclaim"):
            slots = clients.slots_of(client, CALLS[call][0])
            getattr(clients.allocators[client], call)(slots)
            clients.states = {slot: state for slot, state in clients.states.items() if slot not in slots}
            clients.states |= dict.fromkeys(slots, PENDING) if call == "release" else {}
        allocator = clients.allocators[client]
        assert allocator.free_bytes == allocator.slab_count * GEOMETRY.slab_size
        assert not allocator.statistics().classes, "no slack, no tail and no class is left over"


def test_nothing_is_to_be_had_before_a_slab_is_granted() -> None:
    allocator = Allocator(GEOMETRY, granted=False)
    assert (allocator.free_bytes, allocator.free_slab_count) == (0, 0)
    with pytest.raises(NoSpace):
        allocator.allocate(1)
    allocator.grant(SlabState(7, 0, b""))
    assert allocator.allocate(MIB) == [Slot(7 * MIB, MIB)]


def test_a_slab_that_is_not_recorded_is_not_withdrawn() -> None:
    allocator = Allocator(GEOMETRY, granted=False)
    allocator.grant(SlabState(7, 0, b""))
    slots = allocator.allocate(64 * KIB)
    allocator.commit(slots)
    with pytest.raises(ValueError, match="not recorded"):
        allocator.withdraw(7)
    (state,) = allocator.take_dirty()
    assert allocator.withdraw(7) == state
    with pytest.raises(ValueError, match="not granted"):
        allocator.withdraw(7)
    other = Allocator(GEOMETRY, granted=False)
    other.grant(state)
    assert other.is_durable(slots[0].addr)
    other.release(slots)


def test_a_wrong_image_is_not_granted() -> None:
    allocator = Allocator(GEOMETRY, granted=False)
    with pytest.raises(VolumeError, match="does not fit"):
        allocator.grant(SlabState(7, 64 * KIB, b"\1\2\3"))
    assert not allocator.holds(7)
    assert allocator.slab_count == 0


def test_who_was_granted_all_slabs_has_them_for_good() -> None:
    allocator = Allocator(GEOMETRY)
    assert allocator.holds(GEOMETRY.slab_count - 1)
    with pytest.raises(ValueError, match="granted already"):
        allocator.grant(SlabState(0, 0, b""))
    with pytest.raises(ValueError, match="not granted"):
        allocator.withdraw(0)


def test_it_is_told_when_a_free_slab_is_opened() -> None:
    allocator = Allocator(GEOMETRY, granted=False)
    for slab in range(3):
        allocator.grant(SlabState(slab, 0, b""))
    left: list[int] = []
    allocator.slab_opened = lambda: left.append(allocator.free_slab_count)
    allocator.allocate(64 * KIB)
    allocator.allocate(64 * KIB)
    for _ in range(2):
        allocator.allocate(MIB)
    assert left == [2, 1, 0]
