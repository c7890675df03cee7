"""What is stored: the strategies on a few chains, and what was ever seen in bounded memory."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from kvfuse.policy import make_policy
from kvfuse.policy.cache_policy import CachePolicy
from kvfuse.policy.chains import Chains, Note
from kvfuse.policy.pace import GAPS_KEPT, GAPS_NEEDED, Pace
from kvfuse.policy.seen import NEVER, WAYS, SeenKeys, mix, mix_one
from kvfuse_bench.simulate import Setup, simulate
from kvfuse_bench.traffic import Generator

PACE = Pace()


def ask(policy: CachePolicy, chain: list[int], has_room: bool = False) -> list[bool]:
    """What is admitted of a chain of which nothing is there."""
    policy.used(chain, 0.0)
    return policy.admits(chain, 0.0, has_room)


@pytest.mark.parametrize("admission", ["all", "second-touch", "adaptive"])
def test_what_finds_room_is_stored(admission: str) -> None:
    policy = make_policy("lru", admission)
    policy.victim_age.add(1.0)
    assert ask(policy, [1, 2, 3], has_room=True) == [True, True, True]


def test_all() -> None:
    assert ask(make_policy("lru", "all"), [1, 2, 3]) == [True, True, True]


def test_second_touch() -> None:
    policy = make_policy("lru", "second-touch")
    assert ask(policy, [1, 2, 3]) == [False, False, False]
    assert ask(policy, [1, 2, 4]) == [True, True, False]
    assert policy.admits([1, 2, 4], 0.0, False) == [True, True, False], "being stored is no touch"


@pytest.mark.parametrize(
    ("age", "begins", "follows"),
    [(PACE.continue_age - 1, False, False), (PACE.continue_age + 1, False, True), (PACE.begin_age + 1, True, True)],
)
def test_adaptive(age: float, begins: bool, follows: bool) -> None:
    """A root is always stored, and what was asked for before."""
    policy = make_policy("chain", "adaptive")
    policy.victim_age.add(age)
    assert ask(policy, [1, 2, 3]) == [True, begins, begins]
    assert ask(policy, [1, 4, 5]) == [True, begins, begins], "a root alone is no chain"
    assert ask(policy, [1, 2, 3, 6]) == [True, True, True, follows]


def test_blocks_that_come_one_by_one_and_unasked() -> None:
    policy = make_policy("chain", "adaptive")
    policy.victim_age.add(1.0)
    assert policy.admits([7], 0.0, False) == [False]
    policy.used([7], 1.0)
    assert policy.admits([7], 1.0, False) == [True]


def test_notes_are_bounded_and_the_newest_stay() -> None:
    chains = Chains(None, PACE, notes_max=100)
    for key in range(1000):
        chains.ask([2 * key, 2 * key + 1], 0.0, {})
    assert len(chains._young) + len(chains._old) <= 100
    assert chains.take(1999) == Note(1998, False, False, False)
    assert chains.take(1999).parent is None


@pytest.mark.parametrize("batch", [1, 64])
def test_seen_keys_are_those_asked_for(batch: int) -> None:
    rng = random.Random(batch)
    seen, model = SeenKeys(1 << 21), dict[int, int]()
    for now in range(20_000 // batch):
        keys = list({rng.randrange(5_000) for _ in range(batch)})
        assert seen.ask(keys, now + 0.5) == [now - model[key] if key in model else NEVER for key in keys]
        model.update(dict.fromkeys(keys, now))


def seen_of(seen: SeenKeys, keys: list[int]) -> int:
    return sum(gap != NEVER for gap in seen.ask(keys, 0.0))


def test_seen_keys_forget_those_not_asked_for_longest() -> None:
    seen = SeenKeys(1 << 17)
    assert seen.nbytes == 1 << 17
    places = seen.nbytes // 8
    hot, old, recent = list(range(100)), list(range(1_000, 2_000)), list(range(10_000, 10_000 + places // 4))
    seen.ask(hot, 0.0)
    seen.ask(old, 0.0)
    for start in range(1 << 20, (1 << 20) + 4 * places, 1000):
        seen.ask(hot, 0.0)
        seen.ask(list(range(start, start + 1000)), 0.0)
    seen.ask(recent, 0.0)
    assert seen_of(seen, hot) >= 95, "few are pushed out early, by others of their row"
    assert seen_of(seen, recent) >= 0.99 * len(recent)
    assert seen_of(seen, old) < 10


def test_keys_of_one_row_in_one_batch() -> None:
    """The smallest table has two rows: a batch that is as large as one is remembered."""
    seen = SeenKeys(0)
    keys = list(range(WAYS))
    assert seen.ask(keys, 0.0) == [NEVER] * WAYS
    assert seen_of(seen, keys) == WAYS


def test_one_key_and_many_have_the_same_hash() -> None:
    keys = [0, 1, (1 << 64) - 1, 0x9E3779B97F4A7C15, 1 << 63]
    assert [mix_one(key) for key in keys] == mix(keys).tolist()


def test_the_pace_follows_what_is_measured() -> None:
    pace = Pace()
    before = (pace.continue_age, pace.bonus, pace.begin_age)
    for _ in range(1000):
        pace.add(0.0)
    assert (pace.continue_age, pace.bonus, pace.begin_age) == before, "an engine that asks again at once"
    for gap in range(GAPS_NEEDED):
        pace.add(10.0 + gap / GAPS_NEEDED)
    assert (pace.continue_age, pace.bonus, pace.begin_age) == pytest.approx((10.5, 10.63, 10.72), abs=0.02)
    for _ in range(GAPS_KEPT):
        pace.add(600.0)
    assert (pace.continue_age, pace.bonus, pace.begin_age) == (600.0, 600.0, 600.0)


def test_gaps_are_those_between_requests_of_a_chain() -> None:
    policy = make_policy("chain", "adaptive")
    for number in range(GAPS_NEEDED):
        policy.used([1, 2 * number + 10, 2 * number + 11], 0.0)
    for number in range(GAPS_NEEDED):
        policy.used([1, 2 * number + 10, 2 * number + 11, 10_000 + number], 7.0)
    assert policy._chains._pace.continue_age == 7.0


def test_hits_do_not_depend_on_the_pace() -> None:
    """Four times as fast, and a quarter as fast."""
    traffic = list(islice(Generator(5), 5_000))
    ratios = []
    for factor in (0.25, 1.0, 4.0):
        requests = [request._replace(arrival_ms=int(factor * request.arrival_ms)) for request in traffic]
        ratios.append(simulate(requests, Setup("chain", "adaptive", 5_000)).hit_ratio)
    assert max(ratios) - min(ratios) < 0.02
