"""Volumes that read from each other by what is like RDMA, from arena to arena. With devices: `rdma_volumes`."""

from __future__ import annotations

import random

import pytest
import trio
from block_calls import get_bound, put_shared
from linked_volumes import linked_volumes
from soft_rdma import SoftNetwork

from kvfuse.volume.views import neighbours

KIB = 1 << 10


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is late: a busy machine is no slow host."""
    monkeypatch.setattr(neighbours, "HEDGE_MIN", 20.0)
    monkeypatch.setattr("kvfuse.peer.service.LATE_MIN", 20.0)


@pytest.mark.parametrize("size", [4 * KIB, 60_000, 300_000])
async def test_a_batch_of_gets_comes_straight_into_the_tier(size: int, rng: random.Random) -> None:
    """By TCP at first, until the arena of who has the blocks is registered."""
    async with linked_volumes(rng, SoftNetwork()) as pair:
        for number in range(5):
            names = [b"%d-%d" % (number, place) for place in range(8)]
            data = await pair.put(names, size, rng)
            before = pair.peers
            assert await pair.bring(names) == [True] * 8
            after = pair.peers
            assert pair.kept(names) == data
            assert after["asked"]["right"] - before["asked"]["right"] >= 8
            assert {name: await get_bound(pair.reader, name) for name in names} == data
        assert after["rdma"]["bytes"] - before["rdma"]["bytes"] == 8 * size
        assert after["rdma"]["batches"] - before["rdma"]["batches"] == 1


async def test_gets_of_single_blocks_and_files_come_so_too(rng: random.Random) -> None:
    async with linked_volumes(rng, SoftNetwork()) as pair:
        names = [b"%d" % place for place in range(8)]
        data = await pair.put(names, 60_000, rng)
        for name in names:
            assert await get_bound(pair.reader, name) == data[name]
        assert pair.rdma["bytes"] >= 60_000 * 4


async def test_a_read_that_fails_is_the_engines(rng: random.Random) -> None:
    network = SoftNetwork()
    async with linked_volumes(rng, network) as pair:
        names = [b"%d" % place for place in range(8)]
        data = await pair.put(names, 60_000, rng)
        await pair.bring(names[:4])
        network.fails = "RETRY_EXC_ERR"
        assert {name: await get_bound(pair.reader, name) for name in names} == data
        network.fails = ""


async def test_a_batch_that_is_given_up_leaves_the_tier_as_it_is(rng: random.Random) -> None:
    """Its slots are used by other blocks at once, which nobody writes to."""
    network = SoftNetwork()
    async with linked_volumes(rng, network) as pair:
        for number in range(2):
            names = [b"%d-%d" % (number, place) for place in range(8)]
            data = await pair.put(names, 60_000, rng)
            if not number:
                await pair.bring(names)
        network.flowing = trio.Event()
        before = pair.rdma["batches"]
        with trio.move_on_after(0.5):
            await pair.bring(names)
        assert pair.rdma["batches"] > before
        own = {b"own-%d" % place: rng.randbytes(60_000) for place in range(8)}
        for name, content in own.items():
            await put_shared(pair.reader, name, content)
        network.flowing.set()
        await trio.sleep(0.05)
        assert {name: await get_bound(pair.reader, name) for name in own} == own
        assert {name: await get_bound(pair.reader, name) for name in names} == data
        assert pair.rdma["errors"].get("ABANDONED") == 1
