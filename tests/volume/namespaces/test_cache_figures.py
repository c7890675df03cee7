"""What a cache counts of its blocks: each request once, by what became of it, and how long blocks stay."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from block_calls import get, put
from volume_lab import Disk, lab_options, opened

from kvfuse.errors import Corrupt
from kvfuse.options.options import NamespaceOptions
from kvfuse.volume.measures.measures import AGE_BOUNDS, Histogram
from kvfuse.volume.namespaces.cache import Cache, block_key
from kvfuse.volume.namespaces.settings import Settings

FOLDER = 1
SAMPLED = next(b"%d" % number for number in range(1000) if block_key(FOLDER, b"%d" % number) % 16 == 0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(clock: Clock) -> Cache:
    return Cache(Settings(kind="cache", eviction="lru", admission="all"), clock)


def count_at(found: dict[str, Any], value: float) -> int:
    """How many values lie where ``value`` does."""
    index = sum(bound < value for bound in found["bounds"])
    counts: list[int] = found["counts"]
    return counts[index]


def test_each_request_has_one_result(cache: Cache) -> None:
    for name in (b"a", b"b", b"e"):
        cache.stored(FOLDER, name, 100, 0)
    tiers = {b"a": "dram", b"c": "disk", b"e": "disk"}
    cache.asked(FOLDER, [b"a", b"b", b"c", b"e"], lambda folder, name: tiers.get(name, ""))
    cache.read(FOLDER, [b"a", b"b", b"d"], lambda folder, name: tiers.get(name, ""))
    cache.read(FOLDER, [b"a"], lambda folder, name: tiers.get(name, ""))
    found = cache.statistics()
    assert found["hits"] == {"dram": 2, "disk": 1, "remote": 1}
    assert found["misses"] == {"absent": 2, "evicted": 0, "expired": 0, "cleared": 0, "slow": 0}
    assert found["asked"] == sum(found["hits"].values()) + sum(found["misses"].values()) == 6


@pytest.mark.parametrize(("reason", "result"), [("room", "evicted"), ("expired", "expired"), ("cleared", "cleared")])
def test_a_miss_says_why_the_block_went(cache: Cache, reason: str, result: str) -> None:
    cache.stored(FOLDER, b"a", 100, 0)
    (candidate,) = cache.candidates(1)
    cache.evicted(candidate.victim, reason)
    cache.asked(FOLDER, [b"a", b"b"])
    found = cache.statistics()
    assert found["misses"] == {"absent": 1, "evicted": 0, "expired": 0, "cleared": 0, "slow": 0} | {result: 1}
    assert found[reason] == 1


async def test_a_block_that_was_not_read_is_a_miss() -> None:
    options = msgspec.structs.replace(lab_options(), namespace=NamespaceOptions(kind="cache"))
    disk = Disk.format(options)
    async with opened(disk, options) as volume:
        for name in (b"good", b"bad"):
            await put(volume, name, name * 10_000)
        await volume.sync()
    for image in disk.segments.values():
        if (place := image.find(b"badbad")) >= 0:
            image[place] ^= 1
    async with opened(disk, options) as volume:
        assert await get(volume, b"good") == b"good" * 10_000
        with pytest.raises(Corrupt):
            await get(volume, b"bad")
        (row,) = volume.stats()["namespaces"]
        found = row["cache"]
        assert found["hits"] == {"dram": 0, "disk": 1, "remote": 0}, "the segments are on this host's own disk"
        assert {result: count for result, count in found["misses"].items() if count} == {"corrupt": 1}
        assert found["asked"] == sum(found["hits"].values()) + sum(found["misses"].values()) == 2


def test_who_may_not_read_misses(cache: Cache) -> None:
    cache.stored(FOLDER, b"a", 100, 0)
    cache.read(FOLDER, [b"a"])
    found = cache.statistics({"refused": 3})
    assert (found["asked"], found["present"], found["misses"]["refused"]) == (4, 1, 3)


def test_a_read_after_the_block_was_stored_is_another_use(cache: Cache) -> None:
    cache.asked(FOLDER, [b"a"])
    cache.stored(FOLDER, b"a", 100, 0)
    cache.read(FOLDER, [b"a"])
    found = cache.statistics()
    assert (found["asked"], found["present"], found["absent"]) == (2, 1, 1)


def test_residence_is_from_the_first_storing(cache: Cache, clock: Clock) -> None:
    """Also of a block that could not go at first."""
    cache.stored(FOLDER, b"a", 100, 0)
    clock.now = 50.0
    cache.kept(cache.candidates(1))
    clock.now = 200.0
    (candidate,) = cache.candidates(1)
    cache.evicted(candidate.victim)
    found = cache.statistics()["residence"]
    assert count_at(found, 200.0) == sum(found["counts"]) == 1
    assert found["sum"] == 200.0


def test_gaps_between_uses_are_those_of_a_sample(cache: Cache, clock: Clock) -> None:
    names = [SAMPLED, *(b"other%d" % number for number in range(100))]
    for name in names:
        cache.stored(FOLDER, name, 100, 0)
    for clock.now in (5.0, 45.0):
        cache.asked(FOLDER, names)
    found = cache.statistics()["reuse_gap"]
    sampled = sum(block_key(FOLDER, name) % 16 == 0 for name in names)
    assert 0 < sampled < 20
    assert count_at(found, 5.0) == count_at(found, 40.0) == sampled
    assert sum(found["counts"]) == 2 * sampled


def test_a_value_at_a_bound_is_below_it() -> None:
    found = Histogram(AGE_BOUNDS)
    for value in (0.0, 1.0, 1.1, 3.0, 1e9):
        found.add(value)
    assert found.statistics()["counts"] == [2, 2, *[0] * (len(AGE_BOUNDS) - 2), 1]
