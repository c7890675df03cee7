"""Hosts that read from each other by RDMA. In the machine of scripts/rdma-vm, where `test_virtual_machine` runs this.

`test_peer_links` has more of that, without devices.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from lending_process import OPTIONS, SECRET, SIZE, Lender, block, lending, meet, wanted
from lent_memory import shared_memory
from link_lab import KIB, MIB, LinkedPair, linked
from peer_hosts import PeerHost, peer_hosts, until

from kvfuse.peer import service as service_module
from kvfuse.peer.read_link import ReadLink
from kvfuse.peer.read_plans import Places


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads have until their deadline: an emulated machine is no slow host."""
    monkeypatch.setattr(service_module, "LATE_MIN", 20.0)


async def read_by_one_batch(pair: LinkedPair, inos: list[int]) -> None:
    """One READ for each block, and one completion."""
    pair.memory[:] = 0
    before = pair.rdma
    assert all(await pair.read(inos))
    after = pair.rdma
    found = {name: after[name] - before[name] for name in ("reads", "batches", "completions", "bytes")}
    size = sum(len(pair.writer.neighbourhood.blocks[ino]) for ino in inos)
    assert found == {"reads": len(inos), "batches": 1, "completions": 1, "bytes": size}


async def test_a_batch_is_one_list_of_reads_and_one_completion() -> None:
    async with linked() as pair:
        for count, size in ((128, 4 * KIB), (32, 64 * KIB), (6, MIB), (2, 4 * MIB)):
            inos = pair.put([size] * count)
            await pair.until_by_rdma(inos)
            await read_by_one_batch(pair, inos)
        print(pair.rdma)


async def test_connections_are_spread_over_devices() -> None:
    """Those of this machine do not reach each other: the listener takes the one that is like the caller's."""
    async with linked(rdma_devices=("rxe0", "rxe1"), connections=2) as pair:
        inos = pair.put([64 * KIB] * 8)
        await until(lambda: len(pair.links()) == 2)
        assert {str(link.pair.device.info) for link in pair.links()} == {"rxe0", "rxe1"}
        posts = {link.pair.device.info.name: link.pair.device.calls.longest for link in pair.links()}
        with trio.fail_after(60):
            while not all("post" in longest for longest in posts.values()):
                async with trio.open_nursery() as nursery:
                    for some in (inos[:4], inos[4:]):
                        nursery.start_soon(pair.read, some, [pair.memory[ino << 16 :][: 64 * KIB].data for ino in some])
        await pair.until_by_rdma(inos)


# -- READs that fail ----------------------------------------------------------------------------------


@asynccontextmanager
async def before_reads(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Something happens, once, between an answer and the READs of what it says."""
    fetch, is_over = ReadLink.fetch, False

    async def late(self: ReadLink, fetched: Any, done: Any) -> None:
        nonlocal is_over
        if not is_over:
            is_over = True
            await happens()
        await fetch(self, fetched, done)

    with monkeypatch.context() as patched:
        patched.setattr(ReadLink, "fetch", late)
        yield
    assert is_over


async def is_by_rdma_again(pair: LinkedPair, inos: list[int]) -> bool:
    """All comes, over TCP first, and by a new queue pair a moment later."""
    assert all(await pair.read(inos))
    await pair.until_by_rdma(inos)
    await read_by_one_batch(pair, inos)
    return True


async def test_a_wrong_key_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked() as pair:
        inos = pair.put([64 * KIB] * 6)
        await pair.until_by_rdma(inos)
        honest = ReadLink.places_of

        def places_of(self: ReadLink, view: memoryview) -> Places | None:
            places = honest(self, view)
            if places is not None and view == pair.writer.neighbourhood.blocks[inos[3]]:
                places["rkey"] ^= 0x5500
            return places

        with monkeypatch.context() as patched:
            patched.setattr(ReadLink, "places_of", places_of)
            assert await pair.read(inos) == [True] * 3 + [False] * 3
        assert pair.rdma["errors"]["REM_ACCESS_ERR"] == 1
        assert pair.reader.peers.counters.lost == 3
        assert await is_by_rdma_again(pair, inos)


async def test_an_arena_that_is_taken_back_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked() as pair:
        inos = pair.put([64 * KIB] * 4)
        await pair.until_by_rdma(inos)
        rdma = pair.writer.listener.rdma
        assert rdma is not None
        async with before_reads(monkeypatch, rdma.adapters[0].registrations.end_all):
            assert await pair.read(inos) == [False] * 4
        assert {"REM_ACCESS_ERR", "RETRY_EXC_ERR"} & pair.rdma["errors"].keys()
        assert await is_by_rdma_again(pair, inos)


async def test_a_block_that_is_replaced_under_a_read_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked() as pair:
        inos = pair.put([64 * KIB] * 4)
        await pair.until_by_rdma(inos)
        wanted, targets = [pair.writer.wanted(ino) for ino in inos], pair.targets(inos)

        async def replace() -> None:
            pair.lent[64 * KIB : 128 * KIB] = 7

        async with before_reads(monkeypatch, replace):
            assert await pair.reader.peers.read(wanted, targets) == [True, False, True, True]
        counters = pair.reader.peers.counters
        assert (counters.moved, counters.wrong, counters.lost) == (1, 0, 0)
        await read_by_one_batch(pair, inos)  # the queue pair is as good as before


async def test_a_read_that_is_given_up_writes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a host that is gone: its TCP connection does not tell, and READs are tried again for a long time."""
    async with linked(rdma_timeout=20, rdma_retries=7) as pair:
        inos = pair.put([64 * KIB] * 4)
        await pair.until_by_rdma(inos)
        pair.memory[:] = 0
        wanted, targets = [pair.writer.wanted(ino) for ino in inos], pair.targets(inos)

        async def end_other_side() -> None:
            (link,) = lent_links
            link.close()

        lent_links = pair.lent_links()
        async with before_reads(monkeypatch, end_other_side):
            assert await pair.reader.peers.read(wanted, targets, 2.0) == [False] * 4
        assert pair.rdma["errors"]["ABANDONED"] == 1
        assert not pair.memory.any()
        assert await is_by_rdma_again(pair, inos)


def test_a_host_that_is_killed_before_its_memory_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 4
    with lending(count) as first, lending(count) as second:
        trio.run(read_from_both, first, second, count, monkeypatch)


async def read_from_both(first: Lender, second: Lender, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second one when the first is killed. It has the same blocks."""
    memory = shared_memory(count * SIZE)
    targets = [memory[place * SIZE : (place + 1) * SIZE].data for place in range(count)]
    rows = [wanted(ino) for ino in range(1, count + 1)]
    async with peer_hosts(1, secret=SECRET, first=2, **OPTIONS) as (reader,):

        async def read() -> list[bool]:
            found = await reader.peers.read(rows, targets)
            for ino, is_right, target in zip(range(1, count + 1), found, targets, strict=True):
                assert not is_right or target == block(ino)
            return found

        async def until_by_rdma() -> None:
            await reader.until_ready(1)
            with trio.fail_after(60):
                while True:
                    before = rdma(reader)["reads"]
                    if all(await read()) and rdma(reader)["reads"] - before == count:
                        return

        async def kill() -> None:
            first.kill()

        meet(reader, first, count)
        await until_by_rdma()
        async with before_reads(monkeypatch, kill):
            assert not any(await read())
        meet(reader, second, count)
        await until(lambda: reader.peers.neighbours[1].place == second.place)
        await until_by_rdma()


def rdma(host: PeerHost) -> dict[str, Any]:
    return dict(host.peers.statistics()["rdma"])


# -- how long others wait -----------------------------------------------------------------------------

CALL_MS_MAX = 5.0
"""for which one call may keep the event loop, on a machine that does `some_work` in 10 ms"""


def some_work() -> float:
    """Milliseconds that it takes."""
    began, total = time.perf_counter(), 0
    for number in range(200_000):
        total += number
    return 1e3 * (time.perf_counter() - began)


async def test_no_call_keeps_the_event_loop_for_long() -> None:
    """On an emulated machine that many share: by the quietest of a few rounds, and by how slow it is."""
    async with linked() as pair:
        inos = pair.put([64 * KIB] * 64)
        pair.memory[:] = 0  # what is there need not be made when it is registered
        adapters = [one.adapters[0] for host in (pair.writer, pair.reader) if (one := host.listener.rdma) is not None]
        quietest: dict[str, float] = {}
        work = []
        for _ in range(3):
            for adapter in adapters:
                await adapter.registrations.end_all()
                adapter.device.calls.longest.clear()
            for link in pair.links():
                link.end("ENDED")
            work.append(some_work())
            await pair.until_by_rdma(inos)
            for kind, milliseconds in pair.rdma["longest_call_ms"].items():
                quietest[kind] = min(milliseconds, quietest.get(kind, milliseconds))
        factor = max(1.0, min(work) / 10)
        print(f"this machine is {factor:.1f} times slower; milliseconds of the longest calls: {quietest}")
        assert quietest.keys() >= {"make", "connect", "register", "post", "end"}
        assert max(quietest.values()) < CALL_MS_MAX * factor
