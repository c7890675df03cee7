"""Slots that one host reads for all: the same host is chosen everywhere, and each byte is read once."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import inside
import pytest
import trio
import trio.testing
from volume_lab import CALLER, MIB, Disk, check, lab_options, opened

from kvfuse.errors import EngineError
from kvfuse.remote.segments.api import Transfer
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.hosts import feeding
from kvfuse.volume.hosts.feeding import KEPT_SECONDS, Feeding, feeder_of
from kvfuse.volume.hosts.neighbourhood import Neighbourhood
from kvfuse.volume.measures import read_turns
from kvfuse.volume.measures.read_turns import ReadTurn
from kvfuse.volume.namespaces.settings import ROOT
from kvfuse.volume.views.neighbours import Wanted
from kvfuse.volume.volume import Volume


def test_all_hosts_choose_the_same_one_and_share_the_work(rng: random.Random) -> None:
    clients = [rng.getrandbits(64) for _ in range(8)]
    addresses = [number * 4 * MIB for number in range(4000)]
    chosen = [feeder_of(addr, clients) for addr in addresses]
    rng.shuffle(clients)
    assert [feeder_of(addr, clients) for addr in addresses] == chosen
    assert all(300 < chosen.count(client) < 700 for client in clients)
    left = clients.pop()
    for addr, before in zip(addresses, chosen, strict=True):
        assert before == left or feeder_of(addr, clients) == before


class Reads:
    """Of the segment engine: they wait for ``gate``, and are counted."""

    def __init__(self, volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.gate, self.fails = 0, trio.Event(), False
        self.read_at_once = inside.segments(volume).read
        monkeypatch.setattr(inside.segments(volume), "read", self.read)

    async def read(self, batch: Sequence[Transfer]) -> None:
        self.count += 1
        await self.gate.wait()
        if self.fails:
            raise EngineError("injected: a read")
        await self.read_at_once(batch)


Stored = tuple[Volume, feeding.Key, bytes]


@pytest.fixture
async def stored(rng: random.Random, autojump_clock: trio.testing.MockClock) -> AsyncIterator[Stored]:
    """A volume, and the place and the bytes of a slot of it."""
    options, data = lab_options(capacity=24 * MIB), rng.randbytes(MIB)
    disk = Disk.format(options)
    async with opened(disk, options) as volume:
        handle, _ = await volume.tree.create(ROOT_INODE, b"file", 0o644, CALLER, os.O_RDWR)
        await volume.files.write(handle, 0, data)
        await volume.files.fsync(handle)
        extent = handle.node.chunks[0].extents[0]
        yield volume, (extent.addr, extent.generation, 0, MIB), data
        await volume.files.release(handle)
    assert (await check(disk)).clean


async def test_those_who_ask_meanwhile_and_soon_after_share_one_read(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, key, data = stored
    reads, found = Reads(volume, monkeypatch), list[memoryview]()
    feed = Feeding(inside.core(volume))

    async def ask() -> None:
        found.append(await feed.read(key))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        reads.gate.set()
    await ask()
    assert reads.count == 1
    assert len(found) == 3
    assert found == [data] * 3
    await trio.sleep(KEPT_SECONDS + 1)
    await ask()
    assert reads.count == 2
    assert feed.size == MIB


async def test_who_gives_up_leaves_the_others_their_bytes(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    volume, key, data = stored
    reads, feed = Reads(volume, monkeypatch), Feeding(inside.core(volume))
    found: list[memoryview] = []

    async def ask(scope: trio.CancelScope) -> None:
        with scope:
            found.append(await feed.read(key))

    first = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, first)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(ask, trio.CancelScope())
        await trio.testing.wait_all_tasks_blocked()
        first.cancel()
        await trio.testing.wait_all_tasks_blocked()
        reads.gate.set()
    assert found[-1] == data
    assert reads.count == 1


async def test_a_failed_read_is_everybodys_error_and_is_done_again(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, key, data = stored
    reads, feed = Reads(volume, monkeypatch), Feeding(inside.core(volume))
    reads.fails = True
    reads.gate.set()
    with pytest.raises(EngineError):
        await feed.read(key)
    assert feed.size == 0
    reads.fails = False
    assert await feed.read(key) == data


async def test_memory_is_bounded(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    volume, (addr, generation, _, _), _ = stored
    monkeypatch.setattr(feeding, "MEMORY_MAX", 2 * MIB)
    reads, feed = Reads(volume, monkeypatch), Feeding(inside.core(volume))
    reads.gate.set()
    for number in range(6):
        await feed.read((addr, generation + number, 0, MIB))
        assert feed.size <= 3 * MIB
    assert reads.count == 6


async def test_memory_is_bounded_beside_slow_reads(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    volume, (addr, generation, _, _), _ = stored
    monkeypatch.setattr(feeding, "MEMORY_MAX", 2 * MIB)
    monkeypatch.setattr(feeding, "KEPT_SECONDS", 0.5)
    slow, feed = Reads(volume, monkeypatch), Feeding(inside.core(volume))
    keys = [(addr, generation + number, 0, MIB) for number in range(6)]
    sizes: list[int] = []
    async with trio.open_nursery() as nursery:
        for key in keys[:2]:
            nursery.start_soon(feed.read, key)
        await trio.testing.wait_all_tasks_blocked()
        may_read = [feed.may_read(key) for key in keys[1:3]]
        monkeypatch.setattr(inside.segments(volume), "read", slow.read_at_once)
        for key in keys[2:]:
            await feed.read(key)
            sizes.append(feed.size)
        slow.gate.set()
    assert max(sizes) <= 3 * MIB
    assert may_read == [True, False]
    await trio.sleep(0.6)
    feed.make_room()
    assert feed.size == feed.under_way == 0


async def test_bytes_that_are_kept_for_others_wait_for_no_turn(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reads of this host may have all that its namespace may have under way."""
    volume, (addr, generation, low, high), data = stored
    core, anything = inside.core(volume), cast(Any, None)
    host = Neighbourhood(core, cast(Any, SimpleNamespace(client=1)), anything, anything)
    wanted = Wanted(0, MIB, addr, generation, low, high, b"")
    assert await host.stored(wanted) == data
    own, other = core.namespaces.measures[ROOT], core.namespaces.measures[7]
    monkeypatch.setattr(read_turns, "WINDOW", MIB)
    other.begin_reading(1)
    async with ReadTurn(own, MIB):
        with trio.fail_after(1):
            assert await host.stored(wanted) == data
    other.end_reading(1)
    assert host.fed_bytes == MIB
    core.namespaces.remove(7)
