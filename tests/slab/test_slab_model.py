"""The allocator against a plain model, through a million random operations.

The model is a dict: slot -> state and what was asked for it. After every operation the counters are
compared, every few thousand everything is: states, durable images, statistics. Now and then the volume
restarts from the images that were taken, or a commit of them fails.
"""

import random
from collections import Counter

import pytest

from kvfuse.errors import NoSpace, QuotaExceeded
from kvfuse.slab.allocator import PIECES_MAX, Allocator, Slot
from kvfuse.slab.image import SlabState
from kvfuse.slab.layout import Geometry

KIB, MIB = 1 << 10, 1 << 20
OPERATIONS = 1_000_000
FULL_CHECK_EVERY = 4_000

ALLOCATED, DURABLE, PENDING = "allocated", "durable", "pending"
CALLS = {  # call -> the state it starts from, the state it leads to
    "cancel": (ALLOCATED, None),
    "commit": (ALLOCATED, DURABLE),
    "release": (DURABLE, PENDING),
    "reclaim": (PENDING, None),
}


class Ledger:
    """One of two owners is bounded."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.used: Counter[int] = Counter()

    def check(self, owner: int, size: int) -> None:
        if owner == 1 and self.used[owner] + size > self.bound:
            raise QuotaExceeded("owner 1 may not have more")

    def charge(self, owner: int, size: int) -> None:
        self.used[owner] += size


class Bag:
    """Slots in one state; a random one in constant time."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.places: dict[Slot, int] = {}

    def add(self, slot: Slot) -> None:
        self.places[slot] = len(self.slots)
        self.slots.append(slot)

    def remove(self, slot: Slot) -> None:
        place, last = self.places.pop(slot), self.slots.pop()
        if last != slot:
            self.slots[place] = last
            self.places[last] = place


class Model:
    """What the allocator promises, said plainly."""

    def __init__(self, geometry: Geometry) -> None:
        self.slab_size = geometry.slab_size
        self.slab_count = geometry.slab_count
        self.bags = {state: Bag() for state in (ALLOCATED, DURABLE, PENDING)}
        self.slack: dict[int, int] = {}
        self.slab_slots: dict[int, tuple[int, int]] = {}
        """slab -> (slot size, slots that are not free)"""
        self.used_bytes = 0
        self.tail_bytes = 0
        self.pending_bytes = 0
        self.owned: Counter[int] = Counter()
        self.recorded: dict[int, SlabState] = {}

    def tail(self, slot_size: int) -> int:
        return self.slab_size % slot_size

    def take(self, slot: Slot, length: int) -> None:
        """A slot nobody has, in a slab of its size."""
        slab, offset = divmod(slot.addr, self.slab_size)
        assert slab < self.slab_count
        assert slot.addr not in self.slack, f"{slot} is owned twice"
        slot_size, used = self.slab_slots.get(slab, (slot.size, 0))
        assert slot_size == slot.size, f"{slot} is in a slab of slots of {slot_size}"
        assert offset % slot.size == 0
        assert offset + slot.size <= self.slab_size
        assert 0 < length <= slot.size
        self.tail_bytes += 0 if used else self.tail(slot_size)
        self.slab_slots[slab] = (slot_size, used + 1)
        self.slack[slot.addr] = slot.size - length
        self.bags[ALLOCATED].add(slot)
        self.used_bytes += slot.size
        self.owned[slot.owner] += slot.size * (slot.owner > 0)

    def take_extent(self, slots: list[Slot], length: int) -> None:
        """All pieces but the last are filled wholly."""
        assert len(slots) <= PIECES_MAX
        for slot in slots:
            self.take(slot, min(slot.size, length))
            length -= slot.size
        assert length <= 0

    def move(self, slots: list[Slot], before: str, after: str | None) -> None:
        for slot in slots:
            self.bags[before].remove(slot)
            self.pending_bytes += slot.size * ((after == PENDING) - (before == PENDING))
            if after is None:
                self.forget(slot)
            else:
                self.bags[after].add(slot)

    def forget(self, slot: Slot) -> None:
        slab = slot.addr // self.slab_size
        slot_size, used = self.slab_slots.pop(slab)
        if used > 1:
            self.slab_slots[slab] = (slot_size, used - 1)
        else:
            self.tail_bytes -= self.tail(slot_size)
        del self.slack[slot.addr]
        self.used_bytes -= slot.size
        self.owned[slot.owner] -= slot.size * (slot.owner > 0)

    def images(self) -> dict[int, SlabState]:
        bits: dict[int, int] = {}
        for slot in self.bags[DURABLE].slots:
            slab, offset = divmod(slot.addr, self.slab_size)
            bits[slab] = bits.get(slab, 0) | 1 << offset // slot.size
        states = {}
        for slab, bitmap in bits.items():
            slot_size, _ = self.slab_slots[slab]
            size = -(-(self.slab_size // slot_size) // 8)
            states[slab] = SlabState(slab, slot_size, bitmap.to_bytes(size, "little"))
        return states

    def could_hold(self, length: int) -> bool:
        """In the largest free slots, as many as an extent may have."""
        free: Counter[int] = Counter()
        for slot_size, used in self.slab_slots.values():
            free[slot_size] += self.slab_size // slot_size - used
        free[self.slab_size] += self.slab_count - len(self.slab_slots)
        largest = [size for size in sorted(free, reverse=True) for _ in range(min(free[size], PIECES_MAX))]
        return sum(largest[:PIECES_MAX]) >= length


class Run:
    """An allocator and its model, driven by one random source."""

    def __init__(self, geometry: Geometry, rng: random.Random, exact: tuple[int, ...]) -> None:
        self.geometry, self.rng, self.exact = geometry, rng, exact
        self.allocator = Allocator(geometry, exact)
        self.ledger = self.allocator.ledger = Ledger(geometry.data_size // 4)
        self.model = Model(geometry)
        self.favourites = [rng.randint(1, geometry.slab_size) for _ in range(4)]
        self.pressure = 0.5
        """how much more is taken than given back"""
        self.events: Counter[str] = Counter()

    def length(self) -> int:
        kind = self.rng.random()
        if kind < 0.4:
            return self.rng.choice(self.favourites)
        if kind < 0.9:
            return int(self.geometry.slab_size ** self.rng.random())
        return self.rng.randint(1, self.geometry.slab_size)

    def step(self) -> None:
        """One random operation, and the comparison after it."""
        chance = self.rng.random()
        if chance < 0.97:
            taking = self.rng.random() < self.pressure
            calls = ("allocate", "commit", "allocate", "exchange") if taking else tuple(CALLS)
            getattr(self, self.rng.choice(calls))()
        elif chance < 0.99:
            self.take_dirty()
        else:
            self.misuse()
        model, allocator = self.model, self.allocator
        assert allocator.used_bytes == model.used_bytes
        assert allocator.pending_bytes == model.pending_bytes
        assert self.ledger.used == model.owned
        assert self.ledger.used[1] <= self.ledger.bound
        assert allocator.free_bytes == self.geometry.data_size - model.used_bytes - model.tail_bytes

    def allocate(self) -> None:
        length, owner = self.length(), self.rng.choice((0, 1, 2))
        try:
            slots = self.allocator.allocate(length, owner)
        except QuotaExceeded:
            self.events["no quota"] += 1
            assert owner == 1
        except NoSpace:
            self.events["no space"] += 1
            assert not self.model.could_hold(length), f"{length} bytes were refused though there is room"
        else:
            self.events["pieces"] += len(slots) > 4
            assert all(slot.owner == owner for slot in slots)
            self.model.take_extent(slots, length)

    def exchange(self) -> None:
        """Where the owner's bound was lowered meanwhile, too."""
        bag = self.model.bags[ALLOCATED].slots
        if bag:
            slots, length = [self.rng.choice(bag)], self.length()
            old, bound = slots[0], self.ledger.bound
            self.ledger.bound = self.rng.choice((bound, 0))
            self.model.move(slots, ALLOCATED, None)
            try:
                self.allocator.exchange(slots, length)
            except NoSpace:
                self.events["not exchanged"] += 1
                assert [slot[1:] for slot in slots] == [old[1:]]
                length = old.size
            self.model.take_extent(slots, length)
            self.ledger.bound = bound

    def move(self, call: str) -> None:
        before, after = CALLS[call]
        bag = self.model.bags[before].slots
        if bag:
            count = min(len(bag), self.rng.choice((1, 1, 2, 3, 8)))
            slots = list(dict.fromkeys(self.rng.choice(bag) for _ in range(count)))
            getattr(self.allocator, call)(slots)
            self.model.move(slots, before, after)

    def cancel(self) -> None:
        self.move("cancel")

    def commit(self) -> None:
        self.move("commit")

    def release(self) -> None:
        self.move("release")

    def reclaim(self) -> None:
        self.move("reclaim")

    def take_dirty(self) -> None:
        """Record the images."""
        self.model.recorded |= {state.slab: state for state in self.allocator.take_dirty()}

    def misuse(self) -> None:
        """A slot that is not in the state a call is for."""
        call = self.rng.choice(tuple(CALLS))
        others = [state for state in self.model.bags if state != CALLS[call][0] and self.model.bags[state].slots]
        if others:
            slot = self.rng.choice(self.model.bags[self.rng.choice(others)].slots)
            with pytest.raises(ValueError, match=f"slot {slot.addr} is"):
                getattr(self.allocator, call)([slot])

    def restart(self) -> None:
        """Only what was recorded as durable is left, and what is claimed."""
        self.take_dirty()
        allocated = list(self.model.bags[ALLOCATED].slots)
        recorded = {slab: state for slab, state in self.model.recorded.items() if state.slot_size}
        self.allocator = Allocator(self.geometry, self.exact)
        self.allocator.restore(self.model.recorded.values())
        self.ledger = self.allocator.ledger = Ledger(self.ledger.bound)
        model = self.model = Model(self.geometry)
        for state in recorded.values():
            bits = int.from_bytes(state.bitmap, "little")
            for index in range(bits.bit_length()):
                if bits >> index & 1:
                    slot = Slot(state.slab * self.geometry.slab_size + index * state.slot_size, state.slot_size)
                    model.take(slot, slot.size)
                    model.move([slot], ALLOCATED, DURABLE)
        model.recorded = recorded
        self.rng.shuffle(allocated)
        for slot in allocated[self.rng.randrange(len(allocated) + 1) // 2 :]:
            self.allocator.claim(slot)
            model.take(slot, slot.size)
            self.events["claimed"] += 1
        taken = [*model.bags[DURABLE].slots, *model.bags[ALLOCATED].slots]
        for slot in self.rng.sample(taken, min(20, len(taken))):
            for other in (slot, slot._replace(addr=slot.addr + 4096), slot._replace(size=slot.size + 4096)):
                if (other.addr not in model.slack and other.size == slot.size > 4096) or other.addr in model.slack:
                    with pytest.raises(ValueError, match="slot"):
                        self.allocator.claim(other)

    def check_wholly(self) -> None:
        model, allocator = self.model, self.allocator
        images = model.images()
        assert {state.slab: state for state in allocator.durable_images()} == images
        model.recorded |= {state.slab: state for state in allocator.take_dirty()}
        assert {slab: state for slab, state in model.recorded.items() if state.slot_size} == images
        for state, bag in model.bags.items():
            for slot in bag.slots[:200]:
                assert allocator.is_durable(slot.addr) == (state == DURABLE)
                assert allocator.slot_size(slot.addr) == slot.size
        self.check_statistics()
        restored = Allocator(self.geometry, self.exact)
        restored.restore(images.values())
        assert {state.slab: state for state in restored.durable_images()} == images

    def check_statistics(self) -> None:
        model, statistics = self.model, self.allocator.statistics()
        slabs = model.slab_slots
        full = sum(used == model.slab_size // size for size, used in slabs.values())
        assert (statistics.slabs_free, statistics.slabs_partial, statistics.slabs_full) == (
            model.slab_count - len(slabs), len(slabs) - full, full,
        )  # fmt: skip
        assert statistics.tail_bytes == model.tail_bytes == sum(row.tail_bytes for row in statistics.classes)
        used: Counter[int] = Counter()
        pending: Counter[int] = Counter()
        slack: Counter[int] = Counter()
        for state, bag in model.bags.items():
            for slot in bag.slots:
                used[slot.size] += 1
                pending[slot.size] += state == PENDING
                slack[slot.size] += model.slack[slot.addr]
        slab_counts = Counter(size for size, _ in slabs.values())
        assert {row.slot_size for row in statistics.classes} == set(used)
        for row in statistics.classes:
            size = row.slot_size
            free = slab_counts[size] * (model.slab_size // size) - used[size]
            assert (row.slabs, row.slots_used, row.slots_free, row.slots_pending) == (
                slab_counts[size], used[size], free, pending[size],
            )  # fmt: skip
            assert (row.internal_bytes, row.external_bytes) == (slack[size], free * size)


@pytest.mark.parametrize(
    ("capacity", "slab_size", "exact", "share"),
    [
        (8 * MIB, MIB, (), 0.3),
        pytest.param(64 * MIB, MIB, (300 * KIB, 44 * KIB), 0.5, marks=pytest.mark.ring(3)),
        pytest.param(600 * MIB, 16 * MIB, (2 * MIB + 4096,), 0.2, marks=pytest.mark.ring(3)),
    ],
    ids=["8MiB", "64MiB", "600MiB"],
)
def test_a_million_operations(
    capacity: int, slab_size: int, exact: tuple[int, ...], share: float, rng: random.Random
) -> None:
    run = Run(Geometry.choose(capacity, slab_size), rng, exact)
    for number in range(1, int(OPERATIONS * share) + 1):
        run.step()
        if number % FULL_CHECK_EVERY == 0:
            run.check_wholly()
            run.pressure = rng.choice((0.2, 0.35, 0.4, 0.5, 0.8))
            if rng.random() < 0.2:
                run.restart()
                run.check_wholly()
    print(dict(run.events))
    assert run.events["no space"] > 100
    assert run.events["pieces"] > 10
    assert run.events["not exchanged"] > 10
    assert run.events["claimed"] > 0
    assert run.events["no quota"] > 10
    for call in ("cancel", "reclaim", "commit", "release", "reclaim"):
        while run.model.bags[CALLS[call][0]].slots:
            run.move(call)
    assert run.allocator.statistics().slabs_free == run.geometry.slab_count
    assert run.allocator.free_bytes == run.geometry.data_size
