"""The policy of columns beside plain models: exact orders, what others change meanwhile, and random schedules."""

from __future__ import annotations

import os
import random
from itertools import product

import numpy as np
import pytest

from kvfuse.policy import ADMISSIONS, HOLD_SECONDS, POLICIES
from kvfuse.policy.blockrows import NORMAL, ROW
from kvfuse.policy.column_policy import ORDERS, ColumnPolicy, Victims
from kvfuse_bench.columncache import TABLE, ColumnCache

SEED = int(os.environ.get("KVFUSE_TEST_SEED") or random.randrange(1 << 32))
SEEN_SIZE = 1 << 20
PINNED = 4
BONUS = 180


def make(name: str, admission: str = "all", rows: int = 1 << 14) -> ColumnCache:
    return ColumnCache(ColumnPolicy(name, admission, seen_size=SEEN_SIZE, follows_gaps=False), rows)


def store(cache: ColumnCache, chain: list[int], now: float) -> None:
    cache.used(chain, now)
    cache.put([key for key in chain if key not in cache], now)


def order(cache: ColumnCache, now: float) -> list[int]:
    return [key for _ in range(len(cache)) for key in cache.victims(1, now)]


# -- exact orders ------------------------------------------------------------------------------------------


class Model:
    """Keys in dicts, and each victim the smallest of all."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.due: dict[int, tuple[int, int]] = {}
        """(rank, place in time)"""
        self.uses: dict[int, int] = {}
        self.is_main: dict[int, bool] = {}
        self.seen: set[int] = set()
        self.moment = 0
        self.age = 0

    def ask(self, chain: list[int], now: float) -> None:
        known = next((depth for depth, key in enumerate(chain) if key not in self.seen), len(chain))
        follows = known > 1 or known == len(chain) == 1
        self.seen.update(chain)
        self.moment = max(int(now * 1_000_000), self.moment) + len(chain)
        for depth, key in enumerate(chain):
            self._use(key, self.moment - 1 - depth, follows, key not in self.due)

    def _use(self, key: int, moment: int, follows: bool, is_new: bool) -> None:
        self.uses[key] = 1 if is_new else min(self.uses[key] + 1, 255)
        if is_new:
            self.is_main[key] = False
        if self.name == "chain" and follows:
            self.due[key] = 0, moment + BONUS * 1_000_000
        elif self.name == "chain" and not is_new:
            self.due[key] = max(self.due[key], (0, moment))
        elif self.name == "lfu":
            self.due[key] = self.age + self.uses[key], moment
        elif self.name == "arc":
            self.is_main[key] = not is_new
            self.due[key] = 0, moment
        elif self.name in ("lru", "chain") or is_new:
            self.due[key] = 0, moment

    def victims(self, count: int) -> list[int]:
        found = [self._pick() for _ in range(min(count, len(self.due)))]
        if self.name == "lfu" and found:
            self.age = self.last_rank
        return found

    def _pick(self) -> int:
        small = [key for key in self.due if not self.is_main[key]]
        key = (
            min(small or self.due, key=self.due.__getitem__) if self.name == "arc" else min(self.due, key=self.due.get)
        )
        self.last_rank = self.due.pop(key)[0]
        return key


@pytest.mark.parametrize("name", ["lru", "fifo", "lfu", "chain", "arc"])
def test_victims_are_those_of_a_plain_model(name: str) -> None:
    """In ``arc`` no key comes back, so that nothing moves its target."""
    rng, cache, model = random.Random(SEED), make(name), Model(name)
    print(f"KVFUSE_TEST_SEED={SEED}")
    now, gone = 0.0, set[int]()
    for _ in range(400):
        now += rng.choice([0.0, 0.001, 5.0, 200.0])
        start = rng.randrange(300)
        chain = [
            key for key in range(start * 10, start * 10 + rng.randrange(1, 30)) if name != "arc" or key not in gone
        ]
        if chain:
            store(cache, chain, now)
            model.ask(chain, now)
        if rng.random() < 0.4:
            count = rng.randrange(1, 60)
            found = cache.victims(count, now)
            assert found == model.victims(count)
            gone.update(found)
    assert order(cache, now) == model.victims(1 << 20)


@pytest.mark.parametrize("name", list(ORDERS))
def test_leaves_go_before_roots(name: str) -> None:
    cache = make(name)
    store(cache, [10, 11, 12, 13], 1.0)
    store(cache, [20, 21, 22], 2.0)
    assert order(cache, 3.0) == [13, 12, 11, 10, 22, 21, 20]


@pytest.mark.parametrize("name", ["arc", "s3fifo"])
def test_what_comes_again_stays_longer_than_a_scan(name: str) -> None:
    cache = make(name)
    hot = list(range(50))
    store(cache, hot, 0.0)
    for now in (1.0, 2.0, 3.0):
        cache.used(hot, now)
    for key in range(1000, 3000):
        cache.used([key], 4.0)
        cache.victims(max(0, len(cache) + 1 - 100), 4.0)
        cache.put([key], 4.0)
    assert all(key in cache for key in hot)


@pytest.mark.parametrize("name", ["arc", "s3fifo"])
def test_what_is_stored_again_soon_is_no_longer_new(name: str) -> None:
    cache = make(name)
    for key in range(100):
        store(cache, [key], 0.0)
    (gone,) = cache.victims(1, 1.0)
    store(cache, [gone], 2.0)
    for key in range(1000, 1150):
        cache.victims(1, 3.0)
        store(cache, [key], 3.0)
    assert gone in cache


@pytest.mark.parametrize("name", list(ORDERS))
def test_lower_priorities_go_first(name: str) -> None:
    cache = make(name)
    for key, priority in ((1, 255), (2, NORMAL), (3, 0)):
        cache.used([key], 500.0)
        cache.put([key], 500.0, priority)
    assert order(cache, 501.0) == [3, 2, 1]


@pytest.mark.parametrize("name", list(ORDERS))
def test_a_queue_that_is_shorter_than_the_cache_gives_the_same_order(name: str) -> None:
    """Scans take a few percent of many rows."""
    count = 200_000
    rows = np.zeros(count, dtype=ROW)
    rng = np.random.default_rng(SEED)
    print(f"KVFUSE_TEST_SEED={SEED}")
    rows["version"], rows["length"], rows["priority"] = 1, 10, NORMAL
    rows["sequence"], rows["used"] = np.arange(count), 1 + rng.permutation(count)
    policy = ColumnPolicy(name, "all")
    policy.add_table(1, rows)
    assert (len(policy), policy.size) == (count, 10 * count)
    found = [policy.victims(10_000, count + 200.0).rows for _ in range(30)]
    used = rows["used"][np.concatenate(found)].tolist()
    assert used == list(range(1, 30_001))
    assert (len(policy), policy.size) == (count - 30_000, 10 * (count - 30_000))


# -- what others do meanwhile ------------------------------------------------------------------------------


class Rows:
    """Tables that change with and without the policy being told, beside a model of which blocks there are."""

    def __init__(self, names: tuple[str, str], rng: random.Random) -> None:
        self.rng = rng
        self.policy = ColumnPolicy(*names, seen_size=SEEN_SIZE)
        self.memory = {number: np.zeros(400, dtype=ROW) for number in (3, 70)}
        self.length = dict.fromkeys(self.memory, 200)
        self.blocks: dict[tuple[int, int], tuple[int, int, int]] = {}
        """(table, row) -> (sequence, size, key)"""
        self.held: dict[tuple[int, int], float] = {}
        self.sequence, self.now = 0, 1000.0
        for number, memory in self.memory.items():
            self.policy.add_table(number, memory[:200])

    def ask_and_put(self) -> None:
        number, start = self.rng.choice([3, 70]), 7 * self.rng.randrange(40)
        chain = list(range(start, start + self.rng.randrange(1, 15)))
        there = {key: row for (table, row), (_, _, key) in self.blocks.items() if table == number}
        keys = np.array(chain, dtype=np.uint64)
        self.policy.used(number, keys, np.array([there.get(key, -1) for key in chain]), self.now)
        absent = [key for key in chain if key not in there]
        admitted = self.policy.admits(np.array(absent, dtype=np.uint64), self.now, self.rng.random() < 0.5)
        self.put(number, [key for key, answer in zip(absent, admitted, strict=True) if answer])

    def put(self, number: int, keys: list[int]) -> None:
        free = [row for row in range(self.length[number]) if (number, row) not in self.blocks]
        rows = self.rng.sample(free, min(len(free), len(keys)))
        for row, key in zip(rows, keys, strict=False):
            self.publish(number, row, key)
        if rows and self.rng.random() < 0.9:
            sizes = np.array([self.blocks[number, row][1] for row in rows])
            self.policy.added(number, np.array(rows), np.array(keys[: len(rows)], dtype=np.uint64), sizes, self.now)

    def publish(self, number: int, row: int, key: int) -> None:
        self.sequence += 1
        block = self.memory[number][row : row + 1]
        size = self.rng.randrange(1, 1000)
        block["version"], block["sequence"], block["length"], block["flags"] = (
            2 * self.sequence + 1,
            self.sequence,
            size,
            0,
        )
        block["fingerprint"], block["uses"], block["list"] = key, 0, 0
        block["priority"], block["slab"] = self.rng.choice([0, NORMAL, NORMAL, 255]), row % 7
        block["due"], block["used"], block["stored"] = int(self.now * 1_000_000), int(self.now), int(self.now)
        block["expires"] = self.rng.choice([0, int(self.now) + 30])
        self.blocks[number, row] = self.sequence, size, key
        self.held.pop((number, row), None)

    def lose(self) -> None:
        for place in self.rng.sample(sorted(self.blocks), min(3, len(self.blocks))):
            self.free(place)

    def free(self, place: tuple[int, int]) -> None:
        self.memory[place[0]]["version"][place[1]] += np.uint64(1)
        del self.blocks[place]
        self.held.pop(place, None)

    def replace(self) -> None:
        if self.blocks:
            number, row = self.rng.choice(sorted(self.blocks))
            self.publish(number, row, self.rng.randrange(300))

    def pin(self) -> None:
        for number, row in self.rng.sample(sorted(self.blocks), min(5, len(self.blocks))):
            self.memory[number]["flags"][row] ^= PINNED

    def grow(self) -> None:
        number = self.rng.choice([3, 70])
        self.length[number] = min(400, self.length[number] + 50)
        self.policy.grow_table(number, self.memory[number][: self.length[number]])

    def make_room(self) -> None:
        size = self.rng.randrange(1, 20_000)
        may_go = {place for place in self.blocks if self.may_go(place)}
        found = self.policy.victims(size, self.now, PINNED)
        gone = self.check(found)
        sizes = [self.blocks[place][1] for place in gone]
        assert set(gone) <= may_go
        left = [(self.memory[t][["list", "due", "used", "version"]][r], self.now) for t, r in may_go - set(gone)]
        assert sum(sizes) >= size or not left, left
        assert not sizes or sum(sizes[:-1]) < size
        self.end(found, gone)

    def may_go(self, place: tuple[int, int]) -> bool:
        return not self.memory[place[0]]["flags"][place[1]] & PINNED and self.held.get(place, 0.0) <= self.now

    def expire(self) -> None:
        found = self.policy.expired(self.now)
        gone = self.check(found)
        assert all(0 < self.memory[number]["expires"][row] <= self.now for number, row in gone)
        self.end(found, gone)

    def empty_slabs(self) -> None:
        slabs = {self.rng.randrange(7) for _ in range(2)}
        found = self.policy.in_slabs(slabs, self.now)
        gone = self.check(found)
        assert set(gone) == {place for place in self.blocks if self.memory[place[0]]["slab"][place[1]] in slabs}
        self.end(found, gone)

    def check(self, found: Victims) -> list[tuple[int, int]]:
        places = list(zip(found.tables.tolist(), found.rows.tolist(), strict=True))
        assert len(set(places)) == len(places)
        assert [self.blocks[place][:2] for place in places] == list(
            zip(found.sequences.tolist(), found.sizes.tolist(), strict=True)
        )
        assert (found.ages >= 0).all()
        return places

    def end(self, found: Victims, gone: list[tuple[int, int]]) -> None:
        """Some are kept, the others are freed."""
        kept = np.array([self.rng.random() < 0.2 for _ in gone], dtype=np.bool_)
        self.policy.kept(Victims(*(column[kept] for column in found)), self.now)
        for place, is_kept in zip(gone, kept.tolist(), strict=True):
            if is_kept:
                self.held[place] = self.now + HOLD_SECONDS
            else:
                self.free(place)

    def wait(self) -> None:
        self.now += self.rng.choice([0.001, 1.0, 3.0, 70.0])


@pytest.mark.parametrize("names", list(product(ORDERS, ADMISSIONS)), ids="-".join)
def test_a_random_schedule_with_others(names: tuple[str, str]) -> None:
    print(f"KVFUSE_TEST_SEED={SEED}")
    rows = Rows(names, random.Random(SEED))
    steps = [rows.ask_and_put] * 8 + [rows.lose, rows.replace, rows.pin, rows.wait, rows.wait, rows.expire]
    steps += [rows.make_room] * 3
    for number in range(600):
        rows.rng.choice(steps)()
        if number % 100 == 99:
            rows.grow()
            rows.empty_slabs()
    for memory in rows.memory.values():
        memory["flags"] = 0
    rows.now += 1000.0
    found = rows.policy.victims(1 << 40, rows.now)
    assert sorted(rows.check(found)) == sorted(rows.blocks), "all go in the end, each once"
    assert (len(rows.policy), rows.policy.size) == (0, 0)


@pytest.mark.parametrize("name", list(ORDERS))
def test_counts_are_exact_where_all_is_told(name: str) -> None:
    print(f"KVFUSE_TEST_SEED={SEED}")
    rng, cache = random.Random(SEED), make(name, "adaptive")
    for now in range(300):
        chain = list(range(start := 5 * rng.randrange(100), start + rng.randrange(1, 40)))
        store(cache, chain, float(now))
        assert len(cache.policy) == cache.policy.size == len(cache)
        cache.victims(max(0, len(cache) - 200), float(now))
        assert len(cache.policy) == cache.policy.size == len(cache)


def test_a_removed_block_is_not_counted() -> None:
    cache = make("lru")
    store(cache, [1, 2, 3], 1.0)
    cache.policy.removed(TABLE, np.array([cache.places[2]]), np.ones(1, dtype=np.int64))
    assert len(cache.policy) == cache.policy.size == 2


def test_a_dropped_table_has_no_victims() -> None:
    policy = ColumnPolicy("lru", "all")
    for number in (1, 2):
        rows = np.zeros(10, dtype=ROW)
        rows["version"], rows["length"], rows["sequence"], rows["due"] = 1, 1, np.arange(10), number
        policy.add_table(number, rows)
    assert set(policy.victims(1, 100.0).tables.tolist()) <= {1, 2}
    policy.drop_table(1)
    assert policy.victims(100, 100.0).tables.tolist() == [2] * (len(policy.victims(0, 100.0).rows) or 10)


def test_what_a_policy_before_gave_is_kept_where_it_is_known() -> None:
    for name in ORDERS:
        cache = make(name)
        store(cache, [1, 2, 3], 1.0)
        store(cache, [4, 5], 2.0)
        assert cache.policy.victims(1, 3.0).rows.tolist() == [cache.places[3]], "and the daemon died before it went"
        after = ColumnPolicy(name, "all")
        after.add_table(TABLE, cache.rows, is_known=True)
        assert len(after) == 5, "that one, too"
        assert sorted(after.victims(9, 100.0).rows.tolist()) == sorted(cache.places.values())


def test_use_of_slabs() -> None:
    rows = np.zeros(6, dtype=ROW)
    rows["version"], rows["length"] = [1, 3, 5, 0, 7, 1], 10
    rows["slab"], rows["used"] = [4, 4, 9, 4, 9, 0], [1, 3, 5, 99, 6, 7]
    policy = ColumnPolicy("lru", "all", sizes=lambda slabs, lengths: 2 * lengths.astype(np.int64))
    policy.add_table(1, rows)
    use = policy.by_slab()
    assert (use.slabs.tolist(), use.sizes.tolist(), use.last_uses.tolist()) == (
        [0, 4, 9],
        [20, 40, 40],
        [7.0, 2.0, 5.5],
    )


@pytest.mark.parametrize("admission", list(ADMISSIONS))
def test_admission_is_that_of_the_other_policy(admission: str) -> None:
    from kvfuse.policy import make_policy

    rng, cache, other = random.Random(SEED), make("lru", admission), make_policy("lru", admission, follows_gaps=False)
    print(f"KVFUSE_TEST_SEED={SEED}")
    for now in range(200):
        start = 10 * rng.randrange(60)
        chain = list(range(start, start + rng.randrange(1, 30)))
        age = rng.choice([10.0, 150.0, 1000.0])
        cache.policy.victim_age.mean = other.victim_age.mean = age
        cache.used(chain, float(now))
        other.used(chain, float(now))
        assert cache.admits(chain, float(now), False) == other.admits(chain, float(now), False)


def test_names_and_columns_that_are_none() -> None:
    with pytest.raises(KeyError):
        ColumnPolicy("least")
    with pytest.raises(KeyError):
        ColumnPolicy("lru", "none")
    assert ORDERS.keys() == POLICIES.keys()
    policy = ColumnPolicy()
    with pytest.raises(ValueError, match="96 bytes"):
        policy.add_table(1, np.zeros(3))
    policy.add_table(1, np.zeros(3, dtype=ROW))
    with pytest.raises(ValueError, match="already"):
        policy.add_table(1, np.zeros(3, dtype=ROW))
    with pytest.raises(ValueError, match="grows"):
        policy.grow_table(1, np.zeros(2, dtype=ROW))
    with pytest.raises(ValueError, match="2 keys"):
        policy.used(1, np.zeros(2, dtype=np.uint64), np.zeros(1, dtype=np.intp), 0.0)
