"""Random tasks over slow and failing engines, against a plain model, and a crash at any step: `volume_play`."""

from __future__ import annotations

import os
import random

import pytest
import trio.testing
import volume_play
from packing_lab import compressible, pack_everything
from scale import scaled
from volume_lab import MIB, Chaos, lab_options
from volume_play import CHUNK, play

from kvfuse.volume.content import writer


@pytest.fixture
def small_rewrites(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of this test are small: let them be changed in place all the same."""
    monkeypatch.setattr(writer, "REWRITE_SIZE_MAX", 8192)


@pytest.mark.parametrize("strict", [False, True], ids=["relaxed", "strict"])
@pytest.mark.parametrize("faults", [0.0, 0.05], ids=["reliable", "failing"])
@pytest.mark.parametrize("round_number", range(int(os.environ.get("KVFUSE_MODEL_ROUNDS", scaled(2)))))
async def test_concurrent_work_and_crashes(
    seed: int,
    small_rewrites: None,
    autojump_clock: trio.testing.MockClock,
    strict: bool,
    faults: float,
    round_number: int,
) -> None:
    rng = random.Random(seed)
    options = lab_options(capacity=24 * MIB, strict=strict, nodes=rng.choice([1000, 8]), chunk=CHUNK)
    chaos = Chaos(random.Random(rng.random()), delay=rng.choice([0.1, 0.5]))
    await play(rng, options, chaos, faults=faults, steps=25, crashes=12)


@pytest.mark.parametrize("strict", [False, True], ids=["relaxed", "strict"])
async def test_the_same_with_chunks_that_are_compressed(
    seed: int,
    small_rewrites: None,
    autojump_clock: trio.testing.MockClock,
    strict: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pack_everything(monkeypatch)
    monkeypatch.setattr(volume_play, "pattern", compressible)
    rng = random.Random(seed)
    options = lab_options(capacity=24 * MIB, strict=strict, nodes=rng.choice([1000, 8]), chunk=CHUNK)
    await play(rng, options, Chaos(random.Random(rng.random()), delay=0.1), faults=0.05, steps=25, crashes=12)
