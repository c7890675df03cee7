"""Volumes that read from each other by RDMA, from arena to arena. In the machine of scripts/rdma-vm."""

from __future__ import annotations

import random

import pytest
from block_calls import get_bound
from linked_volumes import linked_volumes

from kvfuse.volume.views import neighbours

SIZE = 60_000


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is late: an emulated machine is no slow host."""
    monkeypatch.setattr(neighbours, "HEDGE_MIN", 60.0)
    monkeypatch.setattr("kvfuse.peer.service.LATE_MIN", 60.0)


async def test_batches_and_single_gets_come_by_rdma() -> None:
    """By TCP at first, until the arena of who has the blocks is registered."""
    rng = random.Random(5)
    async with linked_volumes(rng) as pair:
        for number in range(3):
            names = [b"%d-%d" % (number, place) for place in range(8)]
            data = await pair.put(names, SIZE, rng)
            before = pair.rdma
            assert await pair.bring(names) == [True] * 8
            assert pair.kept(names) == data
            after = pair.rdma
        assert {name: after[name] - before[name] for name in ("bytes", "batches", "completions")} == {
            "bytes": 8 * SIZE, "batches": 1, "completions": 1,
        }  # fmt: skip
        data = await pair.put([b"single", b"other"], SIZE, rng)
        assert {name: await get_bound(pair.reader, name) for name in data} == data
        assert pair.rdma["bytes"] - after["bytes"] == 2 * SIZE
        assert pair.peers["asked"]["right"] == pair.peers["asked"]["rows"]
