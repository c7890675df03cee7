"""Arenas of the shared-memory tier that the next daemon finds: what is in them, where there is room, and who may."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Iterator

import pytest
from kept_memory import after_kill, free, let_go

from kvfuse.kept.alive import ALIVE_SECONDS, Alive, seconds_to_wait
from kvfuse.kept.keeper import MemoryKeeper
from kvfuse.volume.running import end_indexes
from kvfuse.volume.tier.arena_pool import ARENA_PREFIX, NO_REGIME
from kvfuse.volume.tier.arenas import LeftBlock
from kvfuse.volume.tier.kept_arenas import find_left
from kvfuse.volume.tier.placement import ANYWHERE, Placement
from kvfuse.volume.tier.shared_tier import ReadClass, SharedTier, TierBlock
from kvfuse.volume.tier.validity import Validity

KIB = 1 << 10
MIB = 1 << 20
HERE = ReadClass(1, 0, 0, 0o444)
THERE = ReadClass(2, 0, 0, 0o444)
REGIME = b"who may use it.."


@pytest.fixture
def keeper() -> Iterator[MemoryKeeper]:
    keeper = MemoryKeeper()
    yield keeper
    let_go(keeper)
    while TIERS:
        free(TIERS.pop())


TIERS: list[SharedTier] = []
"""of this test"""


def tier_of(
    keeper: MemoryKeeper, capacity: int = MIB, regime: bytes = REGIME, *, has_clients: bool = False
) -> SharedTier:
    """As the next daemon makes it. ``has_clients``: they may hold something."""
    tier = SharedTier(capacity, ANYWHERE, keeper)
    TIERS.append(tier)
    tier.adopt(find_left(keeper, ANYWHERE), lambda _, found: found == regime)
    if not has_clients:
        tier.pins_are_known()
        settle(tier)
    return tier


def settle(tier: SharedTier) -> None:
    """As the event loop does."""
    news = [True]
    tier.on_news = lambda: news.append(True)
    while news:
        news.clear()
        tier.tell_keeper(lambda _: REGIME)
        tier.settle()


def allocate(tier: SharedTier, size: int, read_class: ReadClass = HERE) -> TierBlock:
    block = tier.allocate(size, read_class)
    assert block is not None
    tier.tell_keeper(lambda _: REGIME)
    return block


def keep(tier: SharedTier, ino: int, size: int = 64 * KIB, read_class: ReadClass = HERE) -> None:
    block = allocate(tier, size, read_class)
    block.buffer[:] = ino % 251
    tier.keep(ino, block)


def admit(tier: SharedTier, ino: int) -> TierBlock | None:
    """The block of a file, found right; None: there is none."""
    block = tier.look_at_left(ino)
    if block is not None:
        assert set(block.buffer.tolist()) == {ino % 251}
        assert tier.admit(ino, block)
    return tier.find(ino)


def share(tier: SharedTier, number: int) -> None:
    os.close(tier.arena_descriptor(number))


@pytest.mark.parametrize("is_shared", [False, True], ids=["not shared", "shared"])
def test_blocks_are_found_by_the_next_daemon_and_the_one_after_it(keeper: MemoryKeeper, is_shared: bool) -> None:
    tier = tier_of(keeper)
    for ino in (1, 2, 3):
        keep(tier, ino)
    keep(tier, 4, 5000, THERE)
    keep(tier, 2, 100)
    tier.drop(3)
    allocate(tier, 64 * KIB).buffer[:] = 9
    if is_shared:
        for number in tier._pool.arenas:
            share(tier, number)
    for _ in range(2):
        keeper, former = after_kill(keeper), keeper
        let_go(former)
        tier = tier_of(keeper)
        assert set(tier.left) == {1, 2, 4}
        assert tier.statistics().adopted == tier.statistics().blocks == 3
        assert tier.statistics().kept_bytes == 64 * KIB + 5000 + 100
        assert tier.find(1) is None, "nobody has looked at it"
        assert 1 in tier
        for ino, read_class in ((1, HERE), (2, HERE), (4, THERE)):
            block = admit(tier, ino)
            assert block is not None
            assert block.read_class == read_class
        assert not tier.left
    let_go(keeper)


def test_what_nobody_asks_for_is_not_made(keeper: MemoryKeeper) -> None:
    """There may be a million of them, and calls wait."""
    tier = tier_of(keeper)
    for ino in range(1, 11):
        keep(tier, ino)
    former = after_kill(keeper)
    of_other_tests = [thing for thing in gc.get_objects() if isinstance(thing, LeftBlock)]

    def made() -> set[int]:
        found = [thing for thing in gc.get_objects() if isinstance(thing, LeftBlock)]
        return {thing.slot for thing in found if not any(thing is other for other in of_other_tests)}

    adopted = tier_of(former)
    assert len(adopted.left) == 10
    assert made() == set()
    assert admit(adopted, 3) is not None
    adopted.drop(7)
    assert len(adopted.left) == 8
    assert made() == set()
    let_go(former)


@pytest.mark.parametrize("is_shared", [False, True], ids=["not shared", "shared"])
def test_slots_of_an_arena_are_used_again(keeper: MemoryKeeper, is_shared: bool) -> None:
    tier = tier_of(keeper)
    for ino in range(16):
        keep(tier, ino + 1)
    if is_shared:
        share(tier, tier.kept[1].arena)
    tier.drop(5)
    used = tier.statistics().used_bytes
    tier = tier_of(keeper)
    assert tier.statistics().used_bytes == used == MIB
    keep(tier, 100)
    assert tier.statistics().evictions == 0
    keep(tier, 101)
    assert tier.statistics().evictions == 1
    assert tier.statistics().used_bytes == MIB
    assert (1 in tier, 2 in tier) == (False, True), "the first one went"


def test_numbers_of_arenas_are_never_used_again(keeper: MemoryKeeper) -> None:
    numbers: list[int] = []
    for _ in range(3):
        tier = tier_of(keeper)
        for read_class in (HERE, THERE):
            numbers.append(allocate(tier, 4 * KIB, read_class).arena)
            tier.retire([read_class.directory])
        numbers.append(tier.allocate(4 * KIB, HERE).arena)  # and nobody hears of it
    assert len(set(numbers)) == 9


def test_more_arenas_than_numbers_that_were_announced(keeper: MemoryKeeper) -> None:
    tier = tier_of(keeper)
    numbers = {allocate(tier, 4 * KIB, ReadClass(directory, 0, 0, 0o444)).arena for directory in range(3000)}
    assert len(numbers) == 3000
    assert tier_of(keeper).allocate(4 * KIB, HERE).arena not in numbers


def test_a_smaller_tier_adopts_what_was_used_last(keeper: MemoryKeeper) -> None:
    tier = tier_of(keeper, 2 * MIB)
    for directory in range(4):
        for ino in range(8):
            keep(tier, 1 + 10 * directory + ino, 64 * KIB, ReadClass(directory, 0, 0, 0o444))
    tier = tier_of(keeper, MIB)
    assert {ino // 10 for ino in tier.left} == {2, 3}
    assert tier.statistics().used_bytes == MIB
    assert len(keeper.list_names(ARENA_PREFIX)) == 2
    assert not tier_of(keeper, 0).left
    assert keeper.list_names(ARENA_PREFIX) == []


def test_other_people_than_before_get_other_arenas(keeper: MemoryKeeper) -> None:
    keep(tier_of(keeper), 1)
    assert not tier_of(keeper, regime=b"others may use it").left
    assert keeper.list_names(ARENA_PREFIX) == []


def test_a_retired_directory_leaves_nothing(keeper: MemoryKeeper) -> None:
    tier = tier_of(keeper)
    keep(tier, 1)
    keep(tier, 2, read_class=THERE)
    held = tier.find(1)
    assert held is not None
    tier.retire([HERE.directory])
    assert set(tier_of(after_kill(keeper)).left) == {2}
    del held
    settle(tier)
    assert len(keeper.list_names(ARENA_PREFIX)) == 1


def test_an_arena_that_other_readers_got_is_not_found_by_its_former_ones(keeper: MemoryKeeper) -> None:
    tier = tier_of(keeper, 64 * KIB)
    keep(tier, 1)
    assert tier.allocate(4 * KIB, THERE) is not None  # and nobody hears of it
    tier = tier_of(after_kill(keeper), 64 * KIB)
    assert not tier._pool.arenas


def test_what_is_used_stays_longer_also_after_a_daemon(keeper: MemoryKeeper) -> None:
    tier = tier_of(keeper, MIB)
    for ino in range(1, 17):
        keep(tier, ino)
    for _ in range(2):
        tier.kept[1].note_use()
    tier = tier_of(keeper, MIB)
    for ino in range(100, 104):
        keep(tier, ino)
    assert [ino in tier for ino in (1, 2, 3, 4, 5, 6)] == [True, False, False, False, False, True]


def zipf(rng: random.Random, count: int) -> list[int]:
    """Requests for 2000 blocks, of which few are asked for often."""
    weights = [1 / rank for rank in range(1, 2001)]
    return rng.choices(range(1, 2001), weights, k=count)


def hit_ratio(tier: SharedTier, requests: list[int]) -> float:
    hits = 0
    for ino in requests:
        block = admit(tier, ino)
        if block is not None:
            block.note_use()
            hits += 1
        elif tier.is_wanted(ino):
            keep(tier, ino, 4 * KIB)
        block = None
    return hits / len(requests)


@pytest.mark.parametrize("is_shared", [False, True], ids=["not shared", "shared"])
def test_the_hit_ratio_is_the_same_before_and_after(
    keeper: MemoryKeeper, rng: random.Random, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    monkeypatch.setattr("kvfuse.volume.tier.arena_pool.ARENA_SIZE", 64 * KIB)
    capacity = 400 * 4 * KIB
    tier = tier_of(keeper, capacity)
    hit_ratio(tier, zipf(rng, 20000))
    for number in tier._pool.arenas if is_shared else ():
        share(tier, number)
    copy = after_kill(keeper)
    requests = zipf(rng, 20000)
    before = hit_ratio(tier, requests)
    tier = tier_of(copy, capacity)
    after = [hit_ratio(tier, requests[start : start + 5000]) for start in range(0, 20000, 5000)]
    print(before, after, tier.statistics())
    let_go(copy)
    assert sum(after) / 4 >= before - 0.01
    assert tier.statistics().used_bytes <= capacity + 64 * KIB


def test_pins_of_clients_hold_their_arena(keeper: MemoryKeeper) -> None:
    tier = tier_of(keeper)
    keep(tier, 1)
    keep(tier, 2)
    number, offset = tier.kept[2].arena, tier.kept[2].offset
    share(tier, number)
    tier.drop(1)
    tier.drop(2)
    tier = tier_of(keeper, has_clients=True)
    assert list(tier._pool.arenas) == [number], "clients may hold something there"
    pin = tier.adopt_pin(number, offset, 64 * KIB)
    assert pin is not None
    assert set(pin.buffer.tolist()) == {2}
    for wrong in ((number + 1, 0, 10), (number, offset, 64 * KIB + 1), (number, -1, 10), (number, 1 << 40, 1)):
        assert tier.adopt_pin(*wrong) is None
    tier.pins_are_known()
    assert list(tier._pool.arenas) == [number]
    del pin
    tier.retire([HERE.directory])
    allocate(tier, 4 * KIB, THERE)
    settle(tier)
    assert number not in tier._pool.arenas
    assert tier.statistics().used_bytes == 4 * KIB


def test_a_slot_that_a_client_is_about_to_map_has_its_bytes(keeper: MemoryKeeper) -> None:
    """It was told where its view is, and the daemon was killed before it asked for the arena."""
    tier = tier_of(keeper, 256 * KIB)
    for ino in (1, 2, 3, 4):
        keep(tier, ino)
    places = {ino: (block.arena, block.offset, 64 * KIB) for ino, block in tier.kept.items()}
    tier.drop(1)
    tier.drop(2)
    tier = tier_of(keeper, 256 * KIB, has_clients=True)
    assert tier.allocate(64 * KIB, HERE) is None, "nobody knows which of them a client holds"
    pins = {ino: [tier.adopt_pin(*places[ino]) for _ in range(2)] for ino in (1, 3)}
    assert pins[1][0] is pins[1][1] is not None
    assert pins[3][0] is pins[3][1] is not None
    assert tier.adopt_pin(places[1][0], 4 << 20, 10) is None, "it was never used"
    tier.pins_are_known()
    assert tier.adopt_pin(*places[2]) is None, "it may be used now"
    others = [tier.allocate(64 * KIB, HERE) for _ in range(3)]
    for ino, both in pins.items():
        assert both[0] is not None
        assert set(both[0].buffer.tolist()) == {ino}
        assert both[0].offset not in [other.offset for other in others if other is not None]
        both.clear()
    others.clear()
    assert None not in [tier.allocate(64 * KIB, HERE) for _ in range(4)]


def test_an_arena_without_pins_goes_when_all_clients_were_heard(keeper: MemoryKeeper) -> None:
    tier = tier_of(keeper)
    keep(tier, 1)
    share(tier, tier.kept[1].arena)
    tier.drop(1)
    tier = tier_of(keeper, has_clients=True)
    assert tier._pool.arenas
    tier.pins_are_known()
    assert not tier._pool.arenas
    settle(tier)
    assert tier.statistics().used_bytes == 0
    assert keeper.list_names(ARENA_PREFIX) == []


def test_an_arena_is_kept_until_its_memory_was_taken_back(
    keeper: MemoryKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that is killed before leaves the rest to the next one."""
    monkeypatch.setattr("kvfuse.volume.tier.shared_tier.FREED_IN_TURN", 64 * KIB)
    tier = tier_of(keeper)
    blocks = [tier.allocate(64 * KIB, HERE) for _ in range(3)]
    tier.tell_keeper(lambda _: NO_REGIME)  # whose it is has to be told again
    share(tier, next(iter(tier._pool.arenas)))
    blocks.clear()
    tier.retire([HERE.directory])
    tier.tell_keeper(lambda _: REGIME)
    tier.settle()
    assert tier.statistics().used_bytes == 128 * KIB
    copy = after_kill(keeper)
    assert len(copy.list_names(ARENA_PREFIX)) == 1
    after = tier_of(copy)
    assert after.statistics().used_bytes == 0
    assert copy.list_names(ARENA_PREFIX) == []
    settle(tier)
    assert keeper.list_names(ARENA_PREFIX) == []
    let_go(copy)


@pytest.mark.parametrize("damage", ["content", "size", "rows", "two descriptors"])
def test_what_is_none_of_this_version_is_dropped(keeper: MemoryKeeper, damage: str) -> None:
    keep(tier_of(keeper), 1)
    (name,) = keeper.list_names(ARENA_PREFIX)
    kept = keeper.take(name)
    assert kept is not None
    memory, readable, rows = kept.descriptors
    other = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(other, os.fstat(rows if damage == "rows" else memory).st_size)
    content, descriptors = {
        "content": (b"other", (memory, readable, rows)),
        "size": (kept.content, (rows, readable, rows)),
        "rows": (kept.content, (memory, readable, other)),
        "two descriptors": (kept.content, (memory, rows)),
    }[damage]
    keeper.keep(name, content, descriptors)
    for descriptor in (*kept.descriptors, other):
        os.close(descriptor)
    tier = tier_of(keeper)
    assert not tier.left
    assert keeper.list_names(ARENA_PREFIX) == []
    keep(tier, 2)


def test_nobody_finds_other_bytes_whenever_the_daemon_is_killed(keeper: MemoryKeeper, rng: random.Random) -> None:
    """Against a plain model: after each step what is left are the blocks that were kept, with their bytes; or fewer."""
    for _ in range(4):
        tier = tier_of(keeper, rng.choice([MIB, 512 * KIB]))
        held: list[TierBlock] = []
        for step in range(150):
            ino = rng.randrange(1, 60)
            choice = rng.random()
            if choice < 0.5:
                if (block := tier.allocate(rng.randrange(1, 100 * KIB), rng.choice([HERE, THERE]))) is not None:
                    tier.tell_keeper(lambda _: REGIME)
                    block.buffer[:] = ino
                    tier.keep(ino, block)
            elif choice < 0.6:
                tier.drop(ino)
            elif choice < 0.7:
                admit(tier, ino)
            elif choice < 0.8 and ino in tier.kept:
                held = [*held[-3:], tier.kept[ino]]
            elif choice < 0.82 and (numbers := list(tier._pool.arenas)):
                share(tier, rng.choice(numbers))
            elif choice < 0.84:
                tier.retire([rng.choice([1, 2])])
            if step % 10 == 0:
                check_left(tier, keeper)
        check_left(tier, keeper)
        held.clear()


def check_left(tier: SharedTier, keeper: MemoryKeeper) -> None:
    copy = after_kill(keeper)
    found = tier_of(copy, 2 * MIB)
    wanted = {ino: (block.home.number, block.slot, block.size) for ino, block in {**tier.left, **tier.kept}.items()}
    assert {ino: (left.home.number, left.slot, left.size) for ino, left in found.left.items()} == wanted
    for ino in wanted:
        assert admit(found, ino) is not None
    let_go(copy)


# -- what clients were shown --------------------------------------------------------------------------


def validity_of(keeper: MemoryKeeper) -> Validity:
    """As of a daemon that shows tables to clients."""
    validity = Validity()
    validity.alive = Alive(keeper)
    assert seconds_to_wait(keeper) == 0, "no client has a table"
    validity.live_on()
    return validity


def test_tables_of_a_dead_daemon_hold_until_the_next_one_changes_something(keeper: MemoryKeeper) -> None:
    until = validity_of(keeper).until / 1e9
    left = seconds_to_wait(after := after_kill(keeper))
    assert 0 < left <= ALIVE_SECONDS
    assert abs(time.monotonic() + left - until) < 0.2
    time.sleep(max(0.0, until - time.monotonic()))  # a dead daemon's promise ends by the clock: there is no event
    assert seconds_to_wait(after) == 0
    let_go(after)


def test_tables_hold_while_the_daemon_lives(keeper: MemoryKeeper) -> None:
    validity = validity_of(keeper)
    before = validity.until
    validity.live_on()
    assert validity.until > before
    validity.hold(0.1)
    assert validity.until / 1e9 <= time.monotonic() + 0.1, "a lease that ends sooner"


def test_tables_that_ended_keep_nobody_waiting(keeper: MemoryKeeper) -> None:
    tier = tier_of(keeper)
    tier.validity = validity_of(keeper)
    end_indexes(tier)
    assert seconds_to_wait(keeper) == 0


@pytest.mark.parametrize("placement", [Placement(hugepages=True), Placement(node=0)])
def test_memory_of_another_placement_is_adopted(keeper: MemoryKeeper, placement: Placement) -> None:
    keep(tier_of(keeper, 8 * MIB), 1)
    tier = SharedTier(8 * MIB, placement, keeper)
    tier.adopt(find_left(keeper, placement), lambda *_: True)
    assert admit(tier, 1) is not None
    keep(tier, 2)
    assert admit(tier, 2) is not None
    assert tier.statistics().used_bytes <= 8 * MIB
