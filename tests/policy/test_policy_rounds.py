"""Whole rounds of S3-FIFO's queues choose what candidates one after the other do, and look at few of these."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from kvfuse.policy import ghost_orders
from kvfuse.policy.blockrows import FIRST, ROW, SECOND
from kvfuse.policy.blockset import BlockSet
from kvfuse.policy.column_policy import ColumnPolicy
from kvfuse_bench.columncache import ColumnCache

COUNT = 20_000


def make_rows(rng: random.Random, count: int, lists: list[int], uses: list[int], sizes: list[int]) -> np.ndarray:
    rows = np.zeros(count, ROW)
    rows["version"], rows["sequence"] = 1, np.arange(count)
    rows["fingerprint"][:, 0] = [rng.getrandbits(64) for _ in range(count)]
    rows["due"] = np.array(rng.sample(range(1, 50 * count), count))
    rows["list"], rows["uses"] = rng.choices(lists, k=count), rng.choices(uses, k=count)
    rows["length"] = rng.choices(sizes, k=count)
    return rows


def victims(rows: np.ndarray, sizes: list[int], spared_max: float, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    monkeypatch.setattr(ghost_orders, "SPARED_MAX", spared_max)
    policy = ColumnPolicy("s3fifo", "all")
    own = rows.copy()
    policy.add_table(1, own, is_known=True)
    found = []
    for size in sizes:
        gone = policy.victims(size, 1e4)
        assert size <= int(gone.sizes.sum()) < size + int(rows["length"].max()) or len(gone.rows) == len(rows)
        found.append(sorted(gone.rows.tolist()))
        own["version"][gone.rows] += np.uint64(1)
    return found


@pytest.mark.parametrize("uses", [[3], [0, 1, 2, 3], [2, 3, 3, 3, 3], [0, 3]], ids=str)
@pytest.mark.parametrize("sizes", [[1], [1, 5, 17]], ids=str)
@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_the_same_blocks_of_the_main_queue_go(
    uses: list[int], sizes: list[int], share: float, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(rng, COUNT, [SECOND], uses, sizes)
    wanted = [max(1, int(rows["length"].sum() * share))]
    assert victims(rows, wanted, 1, monkeypatch) == victims(rows, wanted, math.inf, monkeypatch)


@pytest.mark.parametrize("uses", [[3], [2]], ids=str)
def test_nearly_the_same_blocks_of_the_small_queue_go(
    uses: list[int], rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(rng, COUNT, [FIRST], uses, [1])
    (whole,), (plain,) = [victims(rows, [COUNT // 10], most, monkeypatch) for most in (1000, 1 << 40)]
    assert len(set(whole) ^ set(plain)) < 0.01 * len(plain)  # blocks that get new places together may have the same


@pytest.mark.parametrize("lists", [[FIRST], [SECOND], [FIRST, SECOND]], ids=str)
def test_few_candidates_are_looked_at(lists: list[int], rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = 0
    check = BlockSet.check

    def count(self: BlockSet, queue: int, candidates: np.ndarray, skip: int) -> object:
        nonlocal seen
        seen += candidates.shape[1]
        return check(self, queue, candidates, skip)

    monkeypatch.setattr(BlockSet, "check", count)
    rows = make_rows(rng, 300_000, lists, [3], [1])
    (gone,) = victims(rows, [30_000], ghost_orders.SPARED_MAX, monkeypatch)
    assert len(gone) == 30_000
    assert seen < 6 * ghost_orders.SPARED_MAX  # and not each block four times


def test_hits_are_those_of_candidates(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [int(rng.paretovariate(0.8)) % 3000 for _ in range(40_000)]
    hits = []
    for most in (200, 1 << 40):
        monkeypatch.setattr(ghost_orders, "SPARED_MAX", most)
        cache, count = ColumnCache(ColumnPolicy("s3fifo", "all"), 1 << 14), 0
        for number, key in enumerate(requests):
            count += key in cache
            cache.used([key], number * 0.01)
            if key not in cache:
                if len(cache) >= 500:
                    cache.victims(25, number * 0.01)
                cache.put([key], number * 0.01)
        hits.append(count)
    assert abs(hits[0] - hits[1]) < 0.01 * len(requests)
