"""The estimate of the hit ratio at other capacities against simulations of them."""

from __future__ import annotations

from itertools import islice

import pytest

from kvfuse.policy.estimate import FACTORS, HitEstimate
from kvfuse_bench.simulate import Setup, simulate
from kvfuse_bench.traffic import Generator, measure

REQUESTS = 6_000
CAPACITY = 5_000


@pytest.mark.parametrize("seed", [1, 2])
def test_it_is_near_what_lru_would_have(seed: int) -> None:
    requests = list(islice(Generator(seed), REQUESTS))
    estimate = HitEstimate(8_192)
    for request in requests:
        estimate.ask(request.block_ids)
    ratios = estimate.ratios(CAPACITY)
    assert tuple(ratios) == FACTORS
    for factor in FACTORS[:-1]:
        exact = simulate(requests, Setup("lru", "all", int(factor * CAPACITY))).hit_ratio
        assert ratios[factor] == pytest.approx(exact, abs=0.025)
    assert ratios[float("inf")] == pytest.approx(measure(requests).hit_ratio, abs=0.025)


def test_it_is_exact_while_all_keys_are_followed() -> None:
    requests = list(islice(Generator(3), 300))
    estimate = HitEstimate(1 << 14)
    for request in requests:
        estimate.ask(request.block_ids)
    assert estimate.hit_ratio(float("inf")) == pytest.approx(measure(requests).hit_ratio)
    exact = simulate(requests, Setup("lru", "all", 1_000)).hit_ratio
    assert estimate.hit_ratio(1_000) == pytest.approx(exact, abs=0.005)


def test_what_was_stored_unasked_can_be_hit() -> None:
    estimate = HitEstimate()
    for key in range(100):
        estimate.stored(key)
    estimate.ask(range(200))
    assert estimate.hit_ratio(float("inf")) == pytest.approx(0.5)
    assert estimate.hit_ratio(1_000) == pytest.approx(0.5)
    assert estimate.hit_ratio(10) < 0.2


def test_memory_is_fixed() -> None:
    estimate = HitEstimate(100)
    for start in range(0, 10_000, 50):
        estimate.ask(range(start, start + 50))
    assert len(estimate._last_use) == len(estimate._largest) == 100
    assert estimate.hit_ratio(1e9) == pytest.approx(0.0, abs=0.2)


def test_nothing_asked_for_is_no_hit() -> None:
    assert HitEstimate().hit_ratio(10) == 0.0
