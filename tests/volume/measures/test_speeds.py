"""What is known of a tier's speed after its reads, and how much of a chain is worth reading."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvfuse.volume.measures.speeds import Speed, Speeds, Tier, worth_reading


@pytest.mark.parametrize(("latency", "bandwidth"), [(0.001, 2e9), (0.02, 1e8), (0.0, 5e8)])
def test_latency_and_bandwidth_are_told_apart(latency: float, bandwidth: float, rng: random.Random) -> None:
    speed = Speed(1.0, 1.0)
    for _ in range(200):
        size = rng.choice([4096, 65536, 1 << 20, 8 << 20])
        speed.note(size, (latency + size / bandwidth) * rng.uniform(0.95, 1.05))
    for size in (65536, 4 << 20):
        assert speed.expect(size) == pytest.approx(latency + size / bandwidth, rel=0.25, abs=0.3 * latency)


def test_of_reads_that_were_all_alike_the_mean_is_known() -> None:
    speed = Speed(1.0, 1.0)
    for _ in range(50):
        speed.note(1 << 20, 0.01)
    assert speed.expect(1 << 20) == pytest.approx(0.01)


def test_what_is_under_way_comes_first() -> None:
    speed = Speed(0.0, 1e6)
    with speed.reading(1_000_000):
        assert speed.expect(500_000) == pytest.approx(1.5)
    assert speed.under_way == 0


def test_a_tier_that_became_slow_is_known_to_be(rng: random.Random) -> None:
    speed = Speed(0.0, 1e9)
    for seconds in [0.001] * 500 + [0.1] * 150:
        speed.note(rng.randrange(1 << 19, 1 << 20), seconds)
    assert speed.expect(1 << 20) > 0.07


def test_tiers_answer_beside_each_other() -> None:
    speeds = Speeds(dram=Speed(0.0, 1e9), disk=Speed(0.0, 1e6), remote=Speed(0.5, 1e6))
    tiers = [Tier.DRAM, Tier.REMOTE, Tier.DRAM, Tier.NONE, Tier.DISK, Tier.REMOTE]
    found = speeds.arrivals(tiers, [1_000_000, 100_000, 1_000_000, 0, 550_000, 100_000])
    assert found == pytest.approx([0.001, 0.6, 0.6, 0.6, 0.6, 0.7])
    assert len(speeds.arrivals([], [])) == 0


def test_as_much_of_a_chain_is_read_as_is_soonest(rng: random.Random) -> None:
    for _ in range(300):
        count = rng.randint(0, 12)
        sizes = [rng.randint(1, 100) for _ in range(count)]
        seconds = np.maximum.accumulate(np.array([rng.uniform(0, 10) for _ in range(count)], np.float32))
        rate = rng.choice([5.0, 50.0, 500.0])
        ends = [(float(seconds[read - 1]) if read else 0.0) + sum(sizes[read:]) / rate for read in range(count + 1)]
        found = worth_reading(seconds, sizes, rate)
        assert ends[found] == pytest.approx(min(ends), abs=1e-4)
