"""Servers of some slots stand still: stores go to others, and nothing that happens late does any harm."""

from __future__ import annotations

import os
import random

import inside
import pytest
import trio
import trio.testing
from namespace_lab import make_namespace
from shared_lab import hosts
from stopped_servers import DEADLINE, PATIENCE, Servers
from volume_lab import CALLER, MIB, Chaos

from kvfuse.errors import EngineTimeout
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.slots import elsewhere
from kvfuse.volume.volume import Volume

STOP_MAX = 2 * (2 + elsewhere.ROUNDS_MAX) * PATIENCE
"""A store waits for two writes, of its bytes and of what its new name changes; each is late, or asks a few times."""


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    made = Servers()
    made.install(monkeypatch)
    return made


async def store(volume: Volume, name: bytes, data: bytes, folder: int = ROOT_INODE) -> float:
    """As a client does that makes sure: seconds that it took."""
    began = trio.current_time()
    handle, node = await volume.tree.create(folder, b"." + name, 0o644, CALLER, os.O_WRONLY)
    await volume.files.write(handle, 0, data)
    await volume.files.fsync(handle)
    await volume.files.release(handle)
    await volume.tree.rename(folder, b"." + name, folder, name, 0)
    await volume.sync()
    volume.tree.forget(node.ino, 1)
    return trio.current_time() - began


async def content(volume: Volume, name: bytes) -> bytes:
    node = await volume.tree.lookup(ROOT_INODE, name)
    handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
    try:
        return bytes(await volume.files.read(handle, 0, 8 * MIB))
    finally:
        await volume.files.release(handle)
        volume.tree.forget(node.ino, 1)


def figures(volume: Volume) -> tuple[int, int, int]:
    """(slots that were exchanged, slots that rest, heads that are owed)"""
    found = volume.stats()["segments"]
    return found["moved_slots"], found["resting_slots"], found["owed_heads"]


async def test_more_slabs_are_taken_at_once_the_fewer_servers_answer(
    rng: random.Random, servers: Servers, autojump_clock: trio.testing.MockClock
) -> None:
    """One store finds the part of a segment whose server answers, behind 56 whose servers do not."""
    async with hosts(rng, 1, [Chaos(rng)], capacity=64 * MIB) as (volume,):
        await store(volume, b"first", b"1" * 4096)
        await trio.sleep(2 * elsewhere.LOOK_SECONDS)
        servers.is_stopped = lambda _, part: part < 56
        assert await store(volume, b"second", b"2" * 300_000) < DEADLINE
        servers.go_on()
        await trio.sleep(elsewhere.LOOK_SECONDS + 2)


@pytest.mark.parametrize("number", range(4))
async def test_stores_go_to_slots_whose_servers_answer(
    seed: int, number: int, servers: Servers, autojump_clock: trio.testing.MockClock
) -> None:
    """Two of three servers stand still, the heads' among them or not. What they do late hits no block."""
    rng = random.Random(f"{seed} {number}")
    stored: dict[bytes, bytes] = {}
    async with hosts(rng, 1, [Chaos(rng)], capacity=64 * MIB, strict=bool(number % 2)) as (volume,):

        async def store_some(count: int) -> list[float]:
            seconds = []
            for _ in range(count):
                name = b"block-%d" % rng.randrange(30)
                stored[name] = rng.randbytes(rng.choice([5000, 70_000, 300_000]))
                seconds.append(await store(volume, name, stored[name]))
            return sorted(seconds)

        await store_some(20)
        await trio.sleep(2 * elsewhere.LOOK_SECONDS)  # segments are made ahead
        stopped = {part: rng.random() < 0.67 for part in range(100)}
        servers.is_stopped = lambda segment, part: stopped[part]
        seconds = await store_some(60)
        assert seconds[45] < 2 * PATIENCE, "most stores find what others have learned"
        assert seconds[-1] < STOP_MAX
        assert servers.waits
        assert figures(volume)[0]
        for name, data in stored.items():
            assert await content(volume, name) == data  # the lab's reads do not ask servers
        servers.go_on()
        await store_some(20)
        await trio.sleep(elsewhere.LOOK_SECONDS + 2)
        assert figures(volume)[1:] == (0, 0)
        for name, data in stored.items():
            assert await content(volume, name) == data


async def test_a_slot_whose_write_may_still_happen_is_given_to_nobody(
    rng: random.Random, servers: Servers, autojump_clock: trio.testing.MockClock
) -> None:
    """Not after a grace either, while its server stands still."""
    async with hosts(rng, 1, [Chaos(rng)], capacity=32 * MIB) as (volume,):
        core = inside.core(volume)
        await store(volume, b"first", b"1" * 4096)
        node = await volume.tree.lookup(ROOT_INODE, b"first")
        offset = core.locate(node.chunks[0].extents[0].addr)[1]
        servers.is_stopped = lambda _, part: part == offset // MIB
        await store(volume, b"second", b"2" * 4096)
        (late,) = {(one, at) for one, at, data in servers.late if data == b"2" * 4096}
        await trio.sleep(10 * core.grace.seconds)
        assert figures(volume)[:2] == (1, 1)
        for number in range(280):
            await store(volume, b"more-%d" % number, b"%8d" % number * 512)
        nodes = [node for node in core.nodes if node.chunks]
        assert late not in [core.locate(one.chunks[0].extents[0].addr) for one in nodes]
        servers.go_on()
        await trio.sleep(2 * core.grace.seconds + elsewhere.LOOK_SECONDS)
        assert figures(volume)[1:] == (0, 0)
        assert await content(volume, b"second") == b"2" * 4096


async def test_where_no_server_answers_the_deadline_counts(
    rng: random.Random, servers: Servers, autojump_clock: trio.testing.MockClock
) -> None:
    """The bytes stay staged, and are stored when the servers go on."""
    async with hosts(rng, 1, [Chaos(rng)], capacity=32 * MIB, strict=True) as (volume,):
        await store(volume, b"before", b"before")
        servers.is_stopped = lambda segment, part: True
        began = trio.current_time()
        with pytest.raises(EngineTimeout):
            await store(volume, b"block", b"block")
        assert DEADLINE <= trio.current_time() - began < DEADLINE + STOP_MAX + 1
        servers.go_on()
        await volume.sync()
        assert await content(volume, b".block") == b"block"


async def test_a_quota_is_not_charged_for_slots_that_rest(
    rng: random.Random, servers: Servers, autojump_clock: trio.testing.MockClock
) -> None:
    async with hosts(rng, 1, [Chaos(rng)], capacity=32 * MIB) as (volume,):
        core = inside.core(volume)
        folder = await make_namespace(volume, ROOT_INODE, b"small", capacity="1MiB")
        await store(volume, b"first", b"1" * 4096, folder)
        node = await volume.tree.lookup(folder, b"first")
        part = core.locate(node.chunks[0].extents[0].addr)[1] // MIB
        servers.is_stopped = lambda _, other: other == part
        await store(volume, b"second", b"2" * 4096, folder)
        assert figures(volume)[:2] == (1, 1)
        assert core.namespaces.accounts.all[folder].size == 2 * 4096
        servers.go_on()
