"""Random work in nested namespaces over slow and failing engines: what each commit records is what is there."""

from __future__ import annotations

import os
import random

import pytest
import trio.testing
from namespace_lab import UseAudit, make_namespace
from volume_lab import MIB, Chaos, Disk, lab_options
from volume_play import CHUNK, play

from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.content import writer
from kvfuse.volume.volume import Volume


@pytest.mark.parametrize("faults", [0.0, 0.05], ids=["reliable", "failing"])
@pytest.mark.parametrize("round_number", range(int(os.environ.get("KVFUSE_MODEL_ROUNDS", "2"))))
async def test_what_is_recorded_is_what_is_there_after_each_commit(
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
    faults: float,
    round_number: int,
) -> None:
    monkeypatch.setattr(writer, "REWRITE_SIZE_MAX", 8192)
    rng = random.Random(seed)
    options = lab_options(capacity=24 * MIB, strict=rng.random() < 0.5, nodes=rng.choice([1000, 8]), chunk=CHUNK)
    capacity = rng.choice([MIB // 4, MIB // 2, 0])
    audits: list[UseAudit] = []

    async def make_home(disk: Disk, volume: Volume) -> int:
        audits.append(UseAudit.attach(disk))
        outer = await make_namespace(volume, ROOT_INODE, b"outer", capacity=rng.choice([MIB, 8 * MIB]))
        return await make_namespace(volume, outer, b"inner", capacity=capacity)

    chaos = Chaos(random.Random(rng.random()), delay=rng.choice([0.1, 0.5]))
    await play(rng, options, chaos, faults=faults, steps=25, crashes=12, make_home=make_home)
    assert audits[0].most
