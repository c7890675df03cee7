"""The life of slots and slabs, durable images, what a full volume answers, and how much of it is usable."""

import itertools
import math
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvfuse.errors import NoSpace, VolumeError
from kvfuse.slab.allocator import PIECES_MAX, Allocator, Slot
from kvfuse.slab.image import LENT, SlabState
from kvfuse.slab.layout import Geometry

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CHUNK = 4 * MIB


def small() -> Allocator:
    """63 slabs of 1 MiB."""
    return Allocator(Geometry.choose(64 * MIB))


def flat(extents: list[list[Slot]]) -> list[Slot]:
    return [slot for slots in extents for slot in slots]


def fill(allocator: Allocator, length: int) -> list[Slot]:
    """Allocate until NoSpace."""
    slots: list[Slot] = []
    while True:
        try:
            slots += allocator.allocate(length)
        except NoSpace:
            return slots


# -- the life of a slot ------------------------------------------------------------------------------


def test_allocations_are_disjoint_low_slabs_first() -> None:
    allocator = small()
    slots = flat([allocator.allocate(MIB // 2) for _ in range(10)])
    assert slots == [Slot(index * MIB // 2, MIB // 2) for index in range(10)]


def test_each_state_allows_its_own_calls_only() -> None:
    allocator = small()
    calls = {name: getattr(allocator, name) for name in ("cancel", "commit", "release", "reclaim")}
    slots = allocator.allocate(4096)

    def refused(*names: str) -> None:
        for name in names:
            with pytest.raises(ValueError, match=f"slot {slots[0].addr} is "):
                calls[name](slots)

    refused("release", "reclaim")
    allocator.commit(slots)
    refused("commit", "cancel", "reclaim")
    allocator.release(slots)
    refused("commit", "cancel", "release")
    allocator.reclaim(slots)
    refused("commit", "cancel", "release", "reclaim")
    slots = allocator.allocate(4096)
    allocator.cancel(slots)
    refused("commit", "cancel", "release", "reclaim")


def test_addresses_that_are_no_slot_are_refused() -> None:
    allocator = small()
    allocator.allocate(300 * KIB)
    for addr in (4096, 100, MIB - 4096, 5 * MIB, 1 << 60, -MIB):
        with pytest.raises(ValueError, match=f"{addr}"):
            allocator.commit([Slot(addr, 4096)])
    assert not allocator.is_durable(MIB + 48 * KIB * 21)  # the slab's tail, behind its last slot


def test_a_pending_slot_is_not_reused() -> None:
    allocator = small()
    slots = fill(allocator, MIB)
    allocator.commit(slots)
    allocator.release(slots[7:8])
    with pytest.raises(NoSpace):
        allocator.allocate(4096)
    assert allocator.pending_bytes == MIB
    allocator.reclaim(slots[7:8])
    assert allocator.pending_bytes == 0
    assert allocator.allocate(4096)[0].addr == slots[7].addr


def test_a_wholly_free_slab_may_change_its_size() -> None:
    allocator = small()
    slots = fill(allocator, 4096)
    assert allocator.slot_size(0) == 4096
    allocator.cancel(slots[:256])
    assert allocator.slot_size(0) == 0
    assert allocator.allocate(MIB) == [Slot(0, MIB)]


def test_the_fullest_slab_is_filled_first() -> None:
    allocator = small()
    slots = fill(allocator, 128 * KIB)
    slabs = [slots[start : start + 8] for start in range(0, len(slots), 8)]
    allocator.cancel([*slabs[3][:6], *slabs[9][:2], *slabs[5][:4]])
    taken = [allocator.allocate(128 * KIB)[0].addr // MIB for _ in range(12)]
    assert taken == [9] * 2 + [5] * 4 + [3] * 6


# -- durable images ----------------------------------------------------------------------------------


def test_the_durable_image_follows_commit_and_release() -> None:
    allocator = small()
    slots = flat([allocator.allocate(64 * KIB) for _ in range(16)])
    assert allocator.take_dirty() == []
    allocator.commit(slots[1:3])
    allocator.commit(slots[9:10])
    assert allocator.take_dirty() == [SlabState(0, 64 * KIB, bytes([0b110, 0b10]))]
    assert [allocator.is_durable(slot.addr) for slot in slots[:4]] == [False, True, True, False]
    assert not allocator.is_durable(slots[1].addr + 4096)
    assert allocator.take_dirty() == []
    allocator.release(slots[1:2])
    assert allocator.take_dirty() == [SlabState(0, 64 * KIB, bytes([0b100, 0b10]))]
    allocator.release([slots[2], slots[9]])
    assert allocator.take_dirty() == [SlabState(0, 0, b"")]
    allocator.reclaim([slots[1], slots[2], slots[9]])
    assert allocator.take_dirty() == []


def test_a_slab_that_changed_its_size_between_takes_shows_the_last() -> None:
    allocator = small()
    slots = allocator.allocate(MIB)
    allocator.commit(slots)
    allocator.release(slots)
    allocator.reclaim(slots)
    allocator.commit(allocator.allocate(512 * KIB))
    assert allocator.take_dirty() == [SlabState(0, 512 * KIB, b"\1")]


def test_restore_gives_back_what_was_durable_and_nothing_else() -> None:
    allocator = small()
    extents = [allocator.allocate(length) for length in (300 * KIB, 4096, MIB, 5000, 64 * KIB) for _ in range(5)]
    allocator.commit(flat(extents[::2]))
    images = allocator.take_dirty()
    restored = small()
    restored.restore(images)
    assert list(restored.durable_images()) == images
    assert restored.take_dirty() == []
    assert restored.used_bytes == sum(slot.size for slot in flat(extents[::2]))
    again = flat([restored.allocate(4096) for _ in range(300)])
    assert not {slot.addr for slot in again} & {slot.addr for slot in flat(extents[::2])}


def test_restore_adopts_slot_sizes_that_were_learned() -> None:
    restored = small()
    restored.restore([SlabState(5, 44 * KIB, b"\1\0\0"), SlabState(6, 0, b""), SlabState(7, MIB, b"\0")])
    assert 44 * KIB in restored.classes.sizes
    assert restored.slot_size(5 * MIB) == 44 * KIB
    assert restored.allocate(MIB) == [Slot(0, MIB)]
    assert restored.statistics().slabs_free == 61


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([SlabState(63, 4096, bytes(32))], "slab 63 is recorded, but the volume has 63"),
        ([SlabState(-1, 4096, bytes(32))], "slab -1 "),
        ([SlabState(2, 5000, bytes(32))], "slab 2 is recorded with slots of 5000 bytes"),
        ([SlabState(2, 2 * MIB, b"\1")], "slab 2 is recorded with slots of 2097152 bytes"),
        ([SlabState(2, -4096, b"\1")], "slab 2 is recorded with slots of -4096 bytes"),
        ([SlabState(2, 4096, bytes(31))], "slab 2 is recorded with a bitmap that does not fit 256 slots"),
        ([SlabState(2, 4096, bytes(33))], "slab 2 is recorded with a bitmap that does not fit 256 slots"),
        ([SlabState(2, 300 * KIB, b"\x08")], "slab 2 is recorded with a bitmap that does not fit 3 slots"),
        ([SlabState(2, MIB, b"\1"), SlabState(2, 4096, b"\1" * 32)], "slab 2 is recorded twice"),
    ],
)
def test_restore_refuses_what_cannot_be(states: list[SlabState], message: str) -> None:
    with pytest.raises(VolumeError, match=message):
        small().restore(states)


def test_restore_is_for_a_fresh_allocator() -> None:
    allocator = small()
    allocator.allocate(1)
    with pytest.raises(ValueError, match="fresh"):
        allocator.restore([])


# -- a full volume -----------------------------------------------------------------------------------


def test_a_failed_allocation_changes_nothing() -> None:
    allocator = small()
    fill(allocator, 300 * KIB)
    before = allocator.statistics()
    with pytest.raises(NoSpace, match=f"no room for {MIB} bytes"):
        allocator.allocate(MIB)
    assert allocator.statistics() == before


def test_other_sizes_are_used_when_the_planned_ones_are_gone() -> None:
    allocator = small()
    slots = fill(allocator, 64 * KIB)
    allocator.cancel(slots[3::20])  # never two neighbours: no slab becomes free
    pieces = allocator.allocate(300 * KIB)
    assert [piece.size for piece in pieces] == [64 * KIB] * 5
    assert not {piece.addr for piece in pieces} - {slot.addr for slot in slots[3::20]}


def test_no_extent_has_more_pieces_than_it_may() -> None:
    allocator = small()
    slots = fill(allocator, 4096)
    allocator.cancel(slots[::3])
    assert len(allocator.allocate(PIECES_MAX * 4096)) == PIECES_MAX
    with pytest.raises(NoSpace):
        allocator.allocate(PIECES_MAX * 4096 + 1)


@pytest.mark.parametrize("length", [0, -1, MIB + 1])
def test_impossible_lengths_are_refused(length: int) -> None:
    allocator = small()
    with pytest.raises(ValueError, match=f"no slots for {length} bytes"):
        allocator.allocate(length)


def fill_with_files(allocator: Allocator, sizes: Iterator[int]) -> tuple[int, list[Slot]]:
    """(bytes of whole files, their slots) until one does not fit; a file is cut into chunks."""
    chunk = min(CHUNK, allocator.geometry.slab_size)
    total, kept = 0, []
    for size in sizes:
        try:
            slots = flat([allocator.allocate(min(chunk, size - start)) for start in range(0, size, chunk)])
        except NoSpace:
            break
        total += size
        kept += slots
    return total, kept


@pytest.mark.parametrize("capacity", [64 * MIB, GIB, 64 * GIB], ids=["64MiB", "1GiB", "64GiB"])
@pytest.mark.parametrize("size", [64 * KIB, 300 * KIB, 500 * KIB, 700 * KIB, MIB, MIB + 28, 2 * MIB])
def test_one_size_uses_95_percent(capacity: int, size: int) -> None:
    total, _ = fill_with_files(Allocator(Geometry.choose(capacity)), itertools.repeat(size))
    assert total >= 0.95 * capacity


def log_uniform(rng: random.Random, low: int, high: int) -> Iterator[int]:
    while True:
        yield int(math.exp(rng.uniform(math.log(low), math.log(high))))


def uniform(rng: random.Random, low: int, high: int) -> Iterator[int]:
    while True:
        yield rng.randint(low, high)


def some(rng: random.Random, *sizes: int) -> Iterator[int]:
    while True:
        yield rng.choice(sizes)


@pytest.mark.parametrize("capacity", [256 * MIB, GIB, 64 * GIB], ids=["256MiB", "1GiB", "64GiB"])
@pytest.mark.parametrize("mix", ["log", "uniform", "blocks"])
def test_wide_mixes_use_85_percent(capacity: int, mix: str, rng: random.Random) -> None:
    sizes = {
        "log": log_uniform(rng, 4 * KIB, 4 * MIB),
        "uniform": uniform(rng, 16 * KIB, 2 * MIB),
        "blocks": some(rng, 64 * KIB, 300 * KIB, MIB, MIB + 28, 1310720, 2 * MIB, 2 * MIB + 28),
    }[mix]
    total, _ = fill_with_files(Allocator(Geometry.choose(capacity)), sizes)
    assert total >= 0.85 * capacity


def test_churn_of_a_wide_mix_keeps_holes_usable(rng: random.Random) -> None:
    """Files of all sizes are dropped at random, one by one, until the next fits: the worst for fixed slot sizes."""
    allocator = Allocator(Geometry.choose(256 * MIB))
    files: list[tuple[int, list[Slot]]] = []
    total, shares = 0, []
    for size in itertools.islice(log_uniform(rng, 4 * KIB, MIB), 20_000):
        while True:
            try:
                files.append((size, allocator.allocate(size)))
                break
            except NoSpace:
                shares.append(total / allocator.geometry.capacity)
                index = rng.randrange(len(files))
                files[index], files[-1] = files[-1], files[index]
                dropped, slots = files.pop()
                total -= dropped
                allocator.cancel(slots)
        total += size
    assert sum(shares) / len(shares) >= 0.7


def test_nothing_leaks_through_50_fills(rng: random.Random) -> None:
    allocator = Allocator(Geometry.choose(128 * MIB))
    fresh = allocator.free_bytes
    for cycle in range(50):
        low = rng.randint(1, 64 * KIB)
        total, slots = fill_with_files(allocator, log_uniform(rng, low, MIB))
        allocator.commit(slots)
        allocator.release(slots)
        rng.shuffle(slots)
        allocator.reclaim(slots)
        assert allocator.used_bytes == 0, cycle
        assert total > 0.8 * allocator.geometry.capacity
    assert allocator.free_bytes == fresh
    assert allocator.statistics().slabs_free == allocator.geometry.slab_count
    assert {state.slot_size for state in allocator.take_dirty()} == {0}


# -- statistics and memory ---------------------------------------------------------------------------


def test_statistics_say_where_every_byte_is() -> None:
    allocator = small()
    slots = flat([allocator.allocate(62_000) for _ in range(20)])  # slots of 64 KiB
    odd = allocator.allocate(300 * KIB)  # 256 + 48 KiB
    allocator.commit(slots[:3])
    allocator.release(slots[:2])
    statistics = allocator.statistics()
    assert statistics.used_bytes == 20 * 64 * KIB + sum(slot.size for slot in odd)
    assert statistics.pending_bytes == 2 * 64 * KIB
    assert statistics.used_bytes + statistics.free_bytes + statistics.tail_bytes == 63 * MIB
    assert (statistics.slabs_full, statistics.slabs_partial) == (1, 1 + len(odd))
    assert statistics.slabs_free == 63 - 2 - len(odd)
    row = next(row for row in statistics.classes if row.slot_size == 64 * KIB)
    assert (row.slabs, row.slots_used, row.slots_free, row.slots_pending) == (2, 20, 12, 2)
    assert row.internal_bytes == 20 * (64 * KIB - 62_000)
    assert row.external_bytes == 12 * 64 * KIB
    assert row.tail_bytes == 0
    assert sum(row.tail_bytes for row in statistics.classes) == statistics.tail_bytes


def test_a_quarter_million_slots_cost_less_than_1_mb() -> None:
    geometry = Geometry.choose(5 * GIB)
    tracemalloc.start()
    allocator = Allocator(geometry)
    for _ in range(250_000):
        allocator.allocate(4000)
    bytes_used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert allocator.used_bytes == 250_000 * 4096
    assert bytes_used < 1_000_000


# -- claimed slots -----------------------------------------------------------------------------------


def test_slots_are_claimed_wherever_they_were() -> None:
    allocator, former = small(), small()
    slots = flat([former.allocate(length) for length in (MIB // 2, 4096, 4096, 300 * KIB, MIB)])
    for slot in reversed(slots):
        allocator.claim(slot)
    assert allocator.used_bytes == former.used_bytes
    assert allocator.free_bytes == former.free_bytes
    assert allocator.statistics().slabs_free == former.statistics().slabs_free
    assert not {slot.addr for slot in fill(allocator, 4096)} & {slot.addr for slot in slots}
    allocator.commit(slots)
    allocator.release(slots)
    allocator.reclaim(slots)


@pytest.mark.parametrize(
    ("addr", "size"),
    [(-MIB, 4096), (63 * MIB, 4096), (100, 4096), (4096, 8192), (0, 0), (0, -4096), (0, 5000), (0, 2 * MIB), (0, 4096)],
)
def test_what_is_no_free_slot_is_not_claimed(addr: int, size: int) -> None:
    allocator = small()
    allocator.claim(Slot(0, 4096))
    before = allocator.statistics()
    with pytest.raises(ValueError, match="slot"):
        allocator.claim(Slot(addr, size))
    assert allocator.statistics() == before


def test_slabs_that_are_given_up_are_emptied_and_no_slot_in_them_is_taken() -> None:
    """Beside a model: all slots that are taken, in any order of calls."""
    rng = random.Random(7)
    for _ in range(20):
        slabs, taken, kept = small(), list[Slot](), None
        geometry = slabs.geometry
        for _ in range(400):
            step = rng.random()
            if step < 0.02:
                kept = rng.choice([None, *range(1, geometry.slab_count)])
                slabs.keep_to(kept)
            elif step < 0.6:
                with suppress(NoSpace):
                    made = slabs.allocate(rng.choice([4096, 70_000, 300_000, MIB]))
                    assert all(slot.addr < (kept or geometry.slab_count) * geometry.slab_size for slot in made)
                    taken += made
            elif taken:
                gone = taken.pop(rng.randrange(len(taken)))
                slabs.cancel([gone])
            used = {slot.addr // geometry.slab_size for slot in taken}
            end = geometry.slab_count if kept is None else kept
            assert slabs.going == {slab for slab in used if slab >= end}
            assert slabs.free_slab_count == end - len([slab for slab in used if slab < end])
            size = sum(slot.size for slot in taken)
            withheld = slabs.used_bytes - size
            assert 0 <= withheld < max(len(slabs.going), 1) * geometry.slab_size
            figures = slabs.statistics()
            assert figures.used_bytes == slabs.used_bytes
            assert figures.free_bytes == slabs.free_bytes >= 0
        for slot in taken:
            slabs.cancel([slot])
        assert not slabs.going
        slabs.keep_to(None)
        assert (slabs.used_bytes, slabs.free_slab_count) == (0, geometry.slab_count)


def test_slots_that_are_given_up_are_exchanged_or_stay() -> None:
    slabs = small()
    (slot,) = slabs.allocate(MIB)
    others = [slabs.allocate(MIB)[0] for _ in range(slabs.geometry.slab_count - 1)]
    last = max([slot, *others])
    slabs.keep_to(slabs.geometry.slab_count - 1)
    slots, before = [last], slabs.used_bytes
    with pytest.raises(NoSpace):
        slabs.exchange(slots, 4096)
    assert (slots, slabs.used_bytes) == ([last], before)
    slabs.cancel([next(one for one in (slot, *others) if one != last)])
    slabs.exchange(slots, 4096)
    assert slots[0].addr < last.addr
    assert not slabs.going


def test_granted_slabs_that_are_given_up_are_surrendered_once_they_are_free() -> None:
    """Beside a model: all slots that are taken, and all slabs that are granted."""
    rng = random.Random(11)
    geometry = small().geometry
    for _ in range(20):
        slabs, taken, granted, end = Allocator(geometry, granted=False), list[Slot](), set[int](), geometry.slab_count
        for _ in range(400):
            step = rng.random()
            if step < 0.03:
                kept = rng.choice([None, *range(1, geometry.slab_count)])
                end = geometry.slab_count if kept is None else kept
                slabs.keep_to(kept)
            elif step < 0.2:
                slab = rng.randrange(geometry.slab_count)
                if slab not in granted:
                    is_used = rng.random() < 0.3
                    slabs.grant(SlabState(slab, MIB, b"\1") if is_used else SlabState(slab, 0, b""))
                    taken += [Slot(slab * geometry.slab_size, MIB)] * is_used
                    if is_used:
                        slabs.release(taken[-1:])
                        slabs.take_dirty()
                        slabs.reclaim([taken.pop()])
                    granted.add(slab)
            elif step < 0.3:
                gone = [*slabs.surrendered, *slabs.free_slabs()]
                if gone and slabs.may_withdraw(slab := rng.choice(gone)):
                    slabs.withdraw(slab)
                    granted.remove(slab)
            elif step < 0.7:
                with suppress(NoSpace):
                    made = slabs.allocate(rng.choice([4096, 70_000, 300_000, MIB]))
                    assert all(slot.addr < end * geometry.slab_size for slot in made)
                    taken += made
            elif taken:
                slabs.cancel([taken.pop(rng.randrange(len(taken)))])
            used = {slot.addr // geometry.slab_size for slot in taken}
            assert slabs.going == {slab for slab in used if slab >= end}
            assert slabs.surrendered == {slab for slab in granted - used if slab >= end}
            assert slabs.free_slab_count == len([slab for slab in granted - used if slab < end])
            assert slabs.slab_count == len(granted) - len(slabs.surrendered)
            assert slabs.statistics().free_bytes == slabs.free_bytes >= 0


def test_a_lent_slab_goes_with_its_loan_once_that_is_recorded() -> None:
    """As its holder ends: the next one finds it lent."""
    allocator = Allocator(small().geometry, granted=False)
    allocator.grant(SlabState(3, 0, b""))
    (slab,) = allocator.lend(1, b"four")
    assert not allocator.may_part_with(slab)
    with pytest.raises(ValueError, match="not recorded"):
        allocator.part_with(slab)
    assert allocator.take_dirty() == [SlabState(slab, LENT, b"four")]
    assert allocator.may_part_with(slab)
    allocator.part_with(slab)
    assert not allocator.holds(slab)
    assert not allocator.lent
    assert (allocator.used_bytes, allocator.slab_count, allocator.free_slab_count) == (0, 0, 0)
    assert allocator.take_dirty() == []
    with pytest.raises(ValueError, match="not lent"):
        allocator.part_with(slab)


def test_images_of_a_commit_that_did_not_happen_are_due_again() -> None:
    """Also of slabs that were lent, no slot of which was committed."""
    allocator = small()
    (slab,) = allocator.lend(1, b"four")
    slots = allocator.allocate(4096)
    allocator.commit(slots)
    images = allocator.take_dirty()
    allocator.recall(slots, [], [state.slab for state in images])
    assert allocator.take_dirty() == [SlabState(slab, LENT, b"four"), SlabState(slots[0].addr // MIB, 0, b"")]
