"""What is stored: the strategies on a few chains, and what was ever seen in bounded memory."""

from __future__ import annotations

import random

import pytest

from kvfuse.policy import make_policy
from kvfuse.policy.admission import BEGIN_AGE, CONTINUE_AGE
from kvfuse.policy.cache_policy import CachePolicy
from kvfuse.policy.chains import Chains, Note
from kvfuse.policy.seen import WAYS, SeenKeys, mix, mix_one


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
    [(CONTINUE_AGE - 1, False, False), (CONTINUE_AGE + 1, False, True), (BEGIN_AGE + 1, True, True)],
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
    chains = Chains(None, notes_max=100)
    for key in range(1000):
        chains.ask([2 * key, 2 * key + 1], {})
    assert len(chains._young) + len(chains._old) <= 100
    assert chains.take(1999) == Note(1998, False, False, False)
    assert chains.take(1999).parent is None


@pytest.mark.parametrize("batch", [1, 64])
def test_seen_keys_are_those_asked_for(batch: int) -> None:
    rng = random.Random(batch)
    seen, model = SeenKeys(1 << 20), set[int]()
    for _ in range(20_000 // batch):
        keys = list({rng.randrange(5_000) for _ in range(batch)})
        assert seen.ask(keys) == [key in model for key in keys]
        model.update(keys)


def test_seen_keys_forget_those_not_asked_for_longest() -> None:
    seen = SeenKeys(1 << 16)
    assert seen.nbytes == 1 << 16
    places = seen.nbytes // 4
    hot, old, recent = list(range(100)), list(range(1_000, 2_000)), list(range(10_000, 10_000 + places // 4))
    seen.ask(hot)
    seen.ask(old)
    for start in range(1 << 20, (1 << 20) + 4 * places, 1000):
        seen.ask(hot)
        seen.ask(list(range(start, start + 1000)))
    seen.ask(recent)
    assert sum(seen.ask(hot)) >= 95, "few are pushed out early, by others of their row"
    assert sum(seen.ask(recent)) >= 0.99 * len(recent)
    assert sum(seen.ask(old)) < 10


def test_keys_of_one_row_in_one_batch() -> None:
    """The smallest table has two rows: a batch that is as large as both is remembered as far as there are places."""
    seen = SeenKeys(0)
    keys = list(range(WAYS))
    assert seen.ask(keys) == [False] * WAYS
    assert all(seen.ask(keys))


def test_one_key_and_many_have_the_same_hash() -> None:
    keys = [0, 1, (1 << 64) - 1, 0x9E3779B97F4A7C15, 1 << 63]
    assert [mix_one(key) for key in keys] == mix(keys).tolist()
