"""Memory of devices that an adapter fills: lists, what breaks them, and what is opened when. Without RDMA devices."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import numpy as np
import pytest
import trio
import trio.testing
from adapter_daemon import SoftMemfdDevice
from soft_rdma import SoftNetwork, SoftPair

from kvfuse.errors import InvalidArgument, Unsupported
from kvfuse.peer import rdma_memories, verbs
from kvfuse.peer.rdma_memories import RdmaMemories, RdmaMemory
from kvfuse.peer.verbs import NoDevice

SIZE = 8 << 20
PATIENCE_S = 20.0


class MemfdDevice(SoftMemfdDevice):
    def __init__(self, network: SoftNetwork) -> None:
        super().__init__(network)
        self.lacks = ""
        self.is_open = True

    def lacks_dmabuf(self) -> str:
        return self.lacks

    def close(self) -> None:
        super().close()
        self.is_open = False


class Bench:
    """A network of one device, memory of a "GPU", and the memories of a daemon."""

    def __init__(self) -> None:
        self.network = SoftNetwork()
        self.device = MemfdDevice(self.network)
        self.opened = 0
        self.memories = RdmaMemories(cast(Any, self.open), cast(Any, SoftPair))
        self.descriptor = os.memfd_create("gpu")
        os.ftruncate(self.descriptor, SIZE)
        self.target = np.frombuffer(mmap.mmap(self.descriptor, SIZE), np.uint8)
        self.source = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)

    def open(self) -> MemfdDevice:
        self.opened += 1
        return self.device

    async def add(self, offset: int = 0, size: int = SIZE) -> RdmaMemory:
        return await self.memories.add(self.descriptor, offset, size)


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(rdma_memories, "missing", lambda **_: "")
    bench = Bench()
    async with bench.memories.serving():
        yield bench
    os.close(bench.descriptor)


async def test_a_list_is_read_as_one_and_what_it_wrote_is_read_back(bench: Bench) -> None:
    memory = await bench.add(100, SIZE - 100)
    rows = [(number * 9000, 1 + number * 37, number * 8000) for number in range(200)]
    assert await memory.fill([(bench.source, *row) for row in rows], PATIENCE_S)
    for start, size, offset in rows:
        assert np.array_equal(bench.target[100 + offset :][:size], bench.source[start:][:size])
    pair = cast(SoftPair, memory.pair)
    assert (pair.counters.batches, pair.counters.completions) == (2, 2)
    assert bench.opened == 1
    await memory.aclose()
    assert bench.network.pairs == {}


async def test_a_piece_may_lie_across_registered_ones(bench: Bench) -> None:
    memory = await bench.add()
    size = (4 << 20) + 4
    assert await memory.fill([(bench.source, 3, size, 1)], PATIENCE_S)
    assert np.array_equal(bench.target[1:][:size], bench.source[3:][:size])
    await memory.aclose()


async def test_a_failure_is_no_and_the_pair_is_made_anew(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    memory = await bench.add()
    pieces = [(bench.source, 0, 4096, 0)]
    assert await memory.fill(pieces, PATIENCE_S)
    first = memory.pair
    bench.network.fails = "LOC_LEN_ERR"
    assert not await memory.fill(pieces, PATIENCE_S)
    assert not await memory.fill(pieces, PATIENCE_S)
    assert [record.message for record in caplog.records] == ["1 pieces did not come to memory of a GPU: LOC_LEN_ERR"]
    bench.network.fails = ""
    assert await memory.fill(pieces, PATIENCE_S)
    assert memory.pair is not first
    assert not await memory.fill([(bench.source, 0, 4096, SIZE - 1)], PATIENCE_S)  # beyond the memory
    bench.device.is_failing = True
    assert not await memory.fill([(bench.source.copy(), 0, 4096, 0)], PATIENCE_S)  # cannot be registered
    await memory.aclose()


@pytest.mark.parametrize("how", ["late", "closed", "cancelled"])
async def test_nothing_is_written_later(bench: Bench, how: str) -> None:
    memory = await bench.add()
    pieces = [(bench.source, 0, 4096, 0)]
    bench.network.flowing = trio.Event()
    outcomes = []

    async def fill() -> None:
        outcomes.append(await memory.fill(pieces, 0.02 if how == "late" else PATIENCE_S))

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fill)
            while not (memory.pair is not None and memory.pair.counters.reads):
                await trio.lowlevel.checkpoint()
            if how == "closed":
                await memory.aclose()
            elif how == "cancelled":
                nursery.cancel_scope.cancel()
    assert outcomes == ([] if how == "cancelled" else [False])
    bench.network.flowing.set()
    await trio.testing.wait_all_tasks_blocked(0.02)
    assert not bench.target.any()
    assert await memory.fill(pieces, PATIENCE_S) is (how != "closed")
    await memory.aclose()


async def test_memory_that_cannot_be_registered(bench: Bench) -> None:
    for offset, size in [(1, SIZE), (SIZE, 1), (0, SIZE + 1)]:
        with pytest.raises(InvalidArgument, match=f"of memory of {SIZE} bytes"):
            await bench.add(offset, size)
    bench.device.is_failing = True
    with pytest.raises(Unsupported, match="the driver does not like it"):
        await bench.add()
    with pytest.raises(OSError, match="not one of a dma-buf"):
        bench.memories.check(bench.descriptor)


async def test_a_device_that_cannot_is_closed_and_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.device.lacks = "the driver of soft0 registers no dma-buf"
    for _ in range(2):
        with pytest.raises(Unsupported, match="registers no dma-buf"):
            await bench.add()
        assert not bench.device.is_open
        assert bench.memories.lacks == "the driver of soft0 registers no dma-buf"
    bench.device.lacks = ""
    monkeypatch.setattr(rdma_memories, "monotonic", lambda: time.monotonic() + rdma_memories.REFUSED_SECONDS)
    await (await bench.add()).aclose()
    assert bench.memories.lacks == ""
    assert bench.opened == 3


async def test_the_device_is_closed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma_memories, "missing", lambda **_: "")
    bench = Bench()
    async with bench.memories.serving():
        memory = await bench.add()
        assert await memory.fill([(bench.source, 0, 10, 0)], PATIENCE_S)
        await memory.aclose()
    assert not bench.device.is_open
    with pytest.raises(Unsupported, match="the daemon ends"):
        await bench.add()
    os.close(bench.descriptor)


async def test_a_host_without_rdma_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "find_devices", list)
    monkeypatch.setattr(rdma_memories, "pyverbs", lambda: None)
    monkeypatch.setattr(rdma_memories, "find_spec", lambda _: True)

    def open_none() -> Any:
        raise AssertionError("opened")

    memories = RdmaMemories(open_none)
    async with memories.serving():
        assert memories.lacks == "this host has no RDMA device"
        with pytest.raises(Unsupported, match="no RDMA device"):
            await memories.add(0, 0, 1)
    assert rdma_memories.problem(open_none) == "this host has no RDMA device"

    def no_pyverbs() -> None:
        raise NoDevice("RDMA needs pyverbs")

    monkeypatch.setattr(rdma_memories, "pyverbs", no_pyverbs)
    assert rdma_memories.problem(open_none) == "RDMA needs pyverbs"
    monkeypatch.setattr(rdma_memories, "find_spec", lambda _: None)
    assert "RDMA needs pyverbs for this Python" in RdmaMemories(open_none).lacks
