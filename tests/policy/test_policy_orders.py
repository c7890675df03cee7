"""The order of victims: exactly that of a plain reference on generated traffic, and of each policy on a few blocks."""

from __future__ import annotations

from functools import cache
from itertools import islice, takewhile

import pytest
from policy_reference import Reference, replay

from kvfuse.policy import Policy, make_policy
from kvfuse.policy.pace import Pace
from kvfuse_bench.simulate import Setup, simulate
from kvfuse_bench.simulate import store as serve
from kvfuse_bench.traffic import Generator, Request

PACE = Pace(follows_gaps=False)
CAPACITIES = [500, 2_500, 10_000]


@cache
def traffic() -> list[Request]:
    return list(islice(Generator(7), 5_000))


def admit_all(follows: bool, seen: bool, depth: int, age: float) -> bool:
    return True


def admit_adaptive(follows: bool, seen: bool, depth: int, age: float) -> bool:
    return seen or depth == 0 or age > (PACE.continue_age if follows else PACE.begin_age)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_lru_is_exact(capacity: int) -> None:
    reference = Reference(capacity, 0.0, admit_all)
    hits = replay(reference, traffic())
    result = simulate(traffic(), Setup("lru", "all", capacity))
    assert (result.hits, result.written) == (hits, reference.written)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_chain_with_adaptive_admission_is_exact(capacity: int) -> None:
    reference = Reference(capacity, PACE.bonus, admit_adaptive)
    hits = replay(reference, traffic())
    policy = make_policy("chain", "adaptive", follows_gaps=False)
    found = written = 0
    for request in traffic():
        found += sum(1 for _ in takewhile(policy.__contains__, request.block_ids))
        written += serve(policy, request.block_ids, request.arrival_ms / 1000, Setup("chain", "adaptive", capacity))
    assert (found, written) == (hits, reference.written)


def test_the_default_hits_more_than_lru_and_writes_less() -> None:
    """Far more where little fits. Where nearly all fits, both store everything."""
    for capacity, hits_factor, written_factor in ((1_000, 1.1, 0.5), (3_000, 1.1, 0.5), (40_000, 0.99, 1.01)):
        default = simulate(traffic(), Setup("chain", "adaptive", capacity))
        lru = simulate(traffic(), Setup("lru", "all", capacity))
        assert default.hits >= hits_factor * lru.hits
        assert default.written <= written_factor * lru.written


def store(policy: Policy, chain: list[int], now: float) -> None:
    policy.used(chain, now)
    for key in chain:
        if key not in policy:
            policy.added(key, 1, now)


def goes(policy: Policy, size: int, now: float) -> list[int]:
    return [victim.key for victim in policy.victims(size, now)]


def order(policy: Policy, now: float) -> list[int]:
    """All keys, as they go."""
    return [key for _ in range(len(policy)) for key in goes(policy, 1, now)]


@pytest.mark.parametrize("name", ["lru", "chain", "fifo", "lfu", "arc", "s3fifo"])
def test_leaves_go_before_roots(name: str) -> None:
    policy = make_policy(name, "all")
    store(policy, [10, 11, 12, 13], 1.0)
    store(policy, [20, 21, 22], 2.0)
    assert order(policy, 3.0) == [13, 12, 11, 10, 22, 21, 20]


@pytest.mark.parametrize("name", ["lru", "chain"])
def test_leaves_go_before_roots_that_were_there(name: str) -> None:
    """Also where the blocks of two chains are stored in turns, after both were asked for."""
    policy = make_policy(name, "all")
    store(policy, [1, 10], 1.0)
    policy.used([1, 10, 11, 12], 2.0)
    policy.used([5, 6, 7], 3.0)
    for now, key in enumerate((11, 5, 6, 12, 7), start=4):
        policy.added(key, 1, float(now))
    gone = order(policy, 9.0)
    assert [key for key in gone if key in (1, 10, 11, 12)] == [12, 11, 10, 1]
    assert [key for key in gone if key in (5, 6, 7)] == [7, 6, 5]


def test_lru_goes_by_use_and_fifo_by_age() -> None:
    gone = {}
    for name in ("lru", "fifo"):
        policy = make_policy(name, "all")
        for now, key in enumerate((1, 2, 3)):
            store(policy, [key], float(now))
        policy.used([1], 4.0)
        gone[name] = order(policy, 5.0)
    assert gone == {"lru": [2, 3, 1], "fifo": [1, 2, 3]}


def test_lfu_goes_by_use_and_forgets_it_in_time() -> None:
    policy = make_policy("lfu", "all")
    for key in (1, 2, 3):
        store(policy, [key], 0.0)
    for _ in range(3):
        policy.used([1], 1.0)
    policy.used([2], 1.0)
    assert goes(policy, 1, 2.0) == [3]
    for key in range(10, 20):  # each used as often as 2 was: the cache grows older with each that goes
        store(policy, [key], 3.0)
        policy.used([key], 3.0)
        policy.victims(1, 3.0)
    assert 1 not in policy


def test_chain_keeps_those_that_go_on() -> None:
    policy = make_policy("chain", "all")
    store(policy, [1, 10, 11], 0.0)
    store(policy, [1, 10, 11, 12], 10.0)
    store(policy, [2, 20, 21], 100.0)
    assert goes(policy, 3, 101.0) == [21, 20, 2]
    store(policy, [2, 30, 31], 10.0 + PACE.bonus + 1)
    assert order(policy, 300.0) == [12, 11, 10, 1, 31, 30, 2]


@pytest.mark.parametrize("name", ["arc", "s3fifo"])
def test_what_comes_again_stays_longer_than_a_scan(name: str) -> None:
    policy = make_policy(name, "all")
    hot = list(range(50))
    store(policy, hot, 0.0)
    for now in (1.0, 2.0, 3.0):
        policy.used(hot, now)
    for key in range(1000, 3000):
        policy.used([key], 4.0)
        policy.victims(max(0, len(policy) + 1 - 100), 4.0)
        policy.added(key, 1, 4.0)
    assert all(key in policy for key in hot)


@pytest.mark.parametrize("name", ["arc", "s3fifo"])
def test_what_is_stored_again_soon_is_no_longer_new(name: str) -> None:
    policy = make_policy(name, "all")
    for key in range(100):
        store(policy, [key], 0.0)
    (gone,) = goes(policy, 1, 1.0)
    store(policy, [gone], 2.0)
    for key in range(1000, 1150):
        policy.victims(1, 3.0)
        store(policy, [key], 3.0)
    assert gone in policy
