"""What every policy keeps, whatever its order: the books are exact, victims are its own, what is held stays."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvfuse.policy import ADMISSIONS, HOLD_SECONDS, POLICIES, Policy, make_policy

TAG = 1 << 63
SEEN_SIZE = 1 << 12
COMBINATIONS = list(product(POLICIES, ADMISSIONS))

sizes = st.integers(1, 1 << 20)
keys = st.one_of(st.integers(0, 30), st.integers(0, (1 << 64) - 1))
chains = st.one_of(
    st.lists(keys, max_size=12, unique=True),
    st.integers(0, 12).map(lambda length: list(range(length))),  # a prefix of what others use, too
)


class Books(RuleBasedStateMachine):
    """A cache that does with its blocks what a policy says, beside a dict of what it has."""

    names = ("lru", "all")

    def __init__(self) -> None:
        super().__init__()
        self.policy: Policy = make_policy(*self.names, seen_size=SEEN_SIZE)
        self.blocks: dict[int, int] = {}
        self.held_until: dict[int, float] = {}
        self.born: dict[int, float] = {}
        self.now = 0.0

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 300.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(chain=chains, size=sizes, has_room=st.booleans())
    def ask_and_store(self, chain: list[int], size: int, has_room: bool) -> None:
        self.policy.used(chain, self.now)
        self._store([key for key in chain if key not in self.blocks], size, has_room)

    @rule(chain=chains, size=sizes, has_room=st.booleans())
    def store_unasked(self, chain: list[int], size: int, has_room: bool) -> None:
        self._store([key for key in chain if key not in self.blocks], size, has_room)

    def _store(self, absent: list[int], size: int, has_room: bool) -> None:
        answers = self.policy.admits(absent, self.now, has_room)
        assert len(answers) == len(absent)
        assert not has_room or all(answers)
        for key, admitted in zip(absent, answers, strict=True):
            if admitted:
                self._add(key, size)

    @rule(key=keys, size=sizes)
    def store_one(self, key: int, size: int) -> None:
        """Also one that is there, with another size."""
        self._add(key, size)

    def _add(self, key: int, size: int) -> None:
        self.policy.added(key, size, self.now, key ^ TAG)
        self.blocks[key] = size
        self.born[key] = self.now
        self.held_until.pop(key, None)

    @rule(chain=chains)
    def use(self, chain: list[int]) -> None:
        self.policy.used(chain, self.now)

    @rule(key=keys)
    def lose(self, key: int) -> None:
        self.policy.removed(key)
        self.blocks.pop(key, None)
        self.held_until.pop(key, None)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), size=st.integers(0, 1 << 22))
    def make_room(self, data: st.DataObject, size: int) -> None:
        """The caller keeps some of the victims."""
        victims = self.policy.victims(size, self.now)
        self._check_victims([victim.key for victim in victims], size)
        for victim in victims:
            assert victim.size == self.blocks.pop(victim.key)
            assert victim.tag == victim.key ^ TAG
            assert victim.born == self.born[victim.key]
        for victim in data.draw(st.lists(st.sampled_from(victims), unique=True)) if victims else ():
            self.policy.keep(victim, self.now)
            self.blocks[victim.key] = victim.size
            self.held_until[victim.key] = self.now + HOLD_SECONDS

    def _check_victims(self, victims: list[int], size: int) -> None:
        assert len(set(victims)) == len(victims)
        assert set(victims) <= self.blocks.keys()
        assert not any(self.held_until.get(key, 0.0) > self.now for key in victims)
        taken = [self.blocks[key] for key in victims]
        may_go = {key for key in self.blocks if self.held_until.get(key, 0.0) <= self.now}
        assert sum(taken) >= size or may_go == set(victims)
        assert not taken or sum(taken[:-1]) < size, "no more than is needed"
        for key in victims:
            self.held_until.pop(key, None)

    @invariant()
    def the_books_are_exact(self) -> None:
        assert len(self.policy) == len(self.blocks)
        assert self.policy.size == sum(self.blocks.values())
        assert all(key in self.policy for key in self.blocks)
        assert all(self.born[key] <= (self.policy.last_use(key) or 0.0) <= self.now for key in self.blocks)
        assert self.policy.last_use(-1) is None

    def teardown(self) -> None:
        """Everything can go in the end, each block once."""
        victims = self.policy.victims(1 << 62, self.now + HOLD_SECONDS)
        assert sorted(victim.key for victim in victims) == sorted(self.blocks)
        assert len(self.policy) == self.policy.size == 0


@pytest.mark.parametrize("names", COMBINATIONS, ids="-".join)
def test_the_books_are_exact(names: tuple[str, str]) -> None:
    machine = type("Books", (Books,), {"names": names}).TestCase
    machine.settings = settings(max_examples=8, stateful_step_count=40, deadline=None)
    machine("runTest").runTest()


def fill(policy: Policy, chain: list[int], now: float) -> None:
    policy.used(chain, now)
    for key in chain:
        policy.added(key, 1, now)


@pytest.mark.parametrize("names", COMBINATIONS, ids="-".join)
def test_a_caller_that_can_remove_nothing_comes_to_an_end(names: tuple[str, str]) -> None:
    policy = make_policy(*names, seen_size=SEEN_SIZE)
    fill(policy, list(range(100)), 1.0)
    while victims := policy.victims(10, 2.0):
        for victim in victims:
            policy.keep(victim, 2.0)
    assert policy.size == len(policy) == 100
    assert sorted(victim.key for victim in policy.victims(1000, 2.0 + HOLD_SECONDS)) == list(range(100))


def test_the_last_use_of_a_block_is_known() -> None:
    policy = make_policy(seen_size=SEEN_SIZE)
    fill(policy, [1, 2], 1.0)
    policy.used([2, 3], 5.0)
    assert [policy.last_use(key) for key in (1, 2, 3)] == [1.0, 5.0, None]


@pytest.mark.parametrize("names", COMBINATIONS, ids="-".join)
def test_rows_are_used_again(names: tuple[str, str]) -> None:
    """Memory follows the blocks that are there, not those that ever were."""
    policy = make_policy(*names, seen_size=SEEN_SIZE)
    for turn in range(200):
        fill(policy, list(range(100 * turn, 100 * turn + 100)), float(turn))
        policy.victims(policy.size - 300, float(turn))
    assert len(policy._books.keys) < 2000


@pytest.mark.parametrize("size", [0, -1])
def test_a_block_has_bytes(size: int) -> None:
    policy = make_policy()
    with pytest.raises(ValueError, match="bytes"):
        policy.added(1, size, 0.0)
    assert 1 not in policy


def test_names_that_are_none() -> None:
    with pytest.raises(KeyError):
        make_policy("least")
    with pytest.raises(KeyError):
        make_policy("lru", "none")
