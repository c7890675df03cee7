"""Answers of one byte that say where a block is and when it is expected."""

from __future__ import annotations

import numpy as np

from kvfuse.usrbio.protocol import costs
from kvfuse.volume.measures import speeds


def test_tiers_are_the_volumes() -> None:
    told = {tier.name: int(tier) for tier in costs.Tier}
    assert {tier.name: int(tier) for tier in speeds.Tier} == {**told, "COLD": len(told)}


def test_cold_blocks_are_told_as_remote_ones() -> None:
    encoded = costs.encode_costs(np.array([speeds.Tier.COLD], np.uint8), np.array([0.04], np.float32))
    found = costs.decode_costs(np.frombuffer(encoded, np.uint8))
    assert found.tiers.tolist() == [costs.Tier.REMOTE]
    assert 39 < found.milliseconds[0] < 40 * costs.FACTOR * 1.01


def test_times_are_rounded_up_by_one_step_at_most() -> None:
    seconds = np.geomspace(1e-5, 12, 1000, dtype=np.float32)
    tiers = np.resize(np.array([1, 2, 3], np.uint8), 1000)
    found = costs.decode_costs(np.frombuffer(costs.encode_costs(tiers, seconds), np.uint8))
    assert (found.tiers == tiers).all()
    ratios = found.milliseconds / 1000 / seconds
    assert ratios.min() > 0.99
    assert ratios.max() < costs.FACTOR * 1.01


def test_extremes() -> None:
    tiers = np.array([costs.Tier.NONE, costs.Tier.DRAM, costs.Tier.REMOTE], np.uint8)
    encoded = costs.encode_costs(tiers, np.array([1.0, 0.0, 1e6], np.float32))
    assert encoded[0] == 0
    assert all(encoded[1:])
    found = costs.decode_costs(np.frombuffer(encoded, np.uint8))
    assert found.milliseconds[0] == np.inf
    assert found.milliseconds[1] == np.float32(costs.BASE_MS)
    assert 12_000 < found.milliseconds[2] < 14_000
    assert len(costs.decode_costs(np.zeros(0, np.uint8)).tiers) == 0
