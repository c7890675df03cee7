"""Hosts join, store, read and leave in order, at random, while servers stand still: what was acknowledged is there."""

from __future__ import annotations

import random
from contextlib import suppress

import inside
import pytest
import trio
import trio.testing
from block_hosts import BlockHost
from namespace_lab import make_namespace
from shared_lab import eventually, get, joined, put, slots_of, write_at
from stopped_servers import Servers
from volume_lab import MIB, Chaos, Disk, check, lab_options

from kvfuse import errors
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.volume import Volume

HOSTS = 3
ROUNDS = 5
OPTIONS = lab_options(capacity=25 * MIB)
SIZES = (4096, 4096, 20_000, 70_000, 300_000, MIB)
STOPPED = 0.4
"""part of the servers, at most now and then, that stands still"""


class Host:
    """One membership, in a task of its own."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.leaves, self.ended = trio.Event(), trio.Event()
        self.volume: Volume

    async def live(self, disk: Disk, rng: random.Random, *, task_status: trio.TaskStatus[None]) -> None:
        try:
            async with joined(disk, OPTIONS, self.number, Chaos(rng, delay=0.2)) as self.volume:
                task_status.started()
                await self.leaves.wait()
        except BaseExceptionGroup as group:
            if group.split(errors.EngineError)[1] is not None:
                raise
            print(f"host {self.number} could not store all: none of the rest was acknowledged")
        self.ended.set()


class Run:
    """A disk, its hosts, and what they acknowledged. ``stops_heads``: servers of slot heads may stand still, too."""

    def __init__(self, rng: random.Random, servers: Servers, nursery: trio.Nursery, *, stops_heads: bool) -> None:
        self.rng, self.servers, self.nursery, self.stops_heads = rng, servers, nursery, stops_heads
        self.disk = Disk.format(OPTIONS, shared=True)
        self.disk.fences = True
        self.hosts: list[Host] = []
        self.folder = 0
        self.files: dict[bytes, bytes] = {}
        self.unknown: set[bytes] = set()
        """files of which a change failed"""
        self.blocks: dict[bytes, bytes] = {}
        self.names, self.numbers, self.hits = iter(range(1 << 20)), iter(range(1, 1 << 20)), 0

    async def join(self) -> None:
        host = Host(next(self.numbers))
        await self.nursery.start(host.live, self.disk, random.Random(self.rng.random()))
        self.hosts.append(host)
        if not self.folder:
            self.folder = await make_namespace(host.volume, ROOT_INODE, b"blocks", kind="blocks")

        async def has_heard() -> bool:
            found = inside.names(host.volume).core.namespaces.all.get(self.folder)
            return found is not None and found.settings.is_blocks

        await eventually(has_heard)

    async def leave(self, host: Host) -> None:
        self.hosts.remove(host)
        host.leaves.set()
        with trio.move_on_after(self.rng.choice((0.5, 20.0, 200.0))):
            await host.ended.wait()
        self.servers.answer()
        await host.ended.wait()

    def stop_some(self) -> None:
        share, parts = self.rng.random() * STOPPED, range(0 if self.stops_heads else 1, 40)
        stopped = {part for part in parts if self.rng.random() < share}
        self.servers.is_stopped = lambda _, part: part in stopped

    # -- changes -----------------------------------------------------------------------------------------

    async def work(self, host: Host, count: int) -> None:
        for _ in range(count):
            change = self.rng.choice((self.store, self.store, self.store, self.write, self.remove, self.put_block))
            with suppress(errors.EngineError, errors.OperationError):
                await change(host.volume)

    def _data(self, name: bytes) -> bytes:
        return (name + b" ") * (self.rng.choice(SIZES) // (len(name) + 1))

    async def store(self, volume: Volume) -> None:
        name = b"file-%d" % next(self.names)
        await put(volume, name, data := self._data(name))
        await volume.sync()
        self.files[name] = data

    async def write(self, volume: Volume) -> None:
        """Over the start of a file."""
        if self.files:
            name = self.rng.choice(sorted(self.files))
            before, data = self.files.pop(name), b"written" * 500
            self.unknown.add(name)
            await write_at(volume, name, 0, data)
            self.files[name] = data + before[len(data) :]

    async def remove(self, volume: Volume) -> None:
        if len(self.files) > 20:
            name = self.rng.choice(sorted(self.files))
            del self.files[name]
            await volume.tree.unlink(ROOT_INODE, name)
            await volume.sync()

    async def put_block(self, volume: Volume) -> None:
        name, host = b"block-%d" % next(self.names), BlockHost(volume, self.folder)
        data = self._data(name)[:200_000]
        await host.put(name, data)
        await host.written()
        self.blocks[name] = data

    # -- checks ------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """No file is another than it was acknowledged; a block may be gone."""
        for host in self.hosts:
            for name, data in self.files.items():
                assert await get(host.volume, name) == data, (host.number, name)
            for name, data in self.blocks.items():
                found = await BlockHost(host.volume, self.folder).get(name)
                assert found in (None, data), (host.number, name)
                self.hits += found is not None

    async def round(self) -> None:
        leaver = self.rng.choice(self.hosts)
        for host in self.hosts:
            await self.work(host, 5)
        self.stop_some()
        await self.work(leaver, 5)
        await self.leave(leaver)
        for host in self.hosts:
            await self.work(host, 10)
        await self.join()
        await trio.sleep(self.rng.choice((0.0, 1.0, 40.0)))
        for host in self.hosts:
            await self.work(host, 10)
        self.servers.go_on()
        await self.check()

    async def end(self) -> None:
        while self.hosts:
            await self.leave(self.hosts[-1])
        assert all(count == 1 for count in slots_of(self.disk).values())
        report = await check(self.disk, verify=not self.stops_heads)  # heads that were late are as they were
        assert report.clean, [problem.text for problem in report.problems]


@pytest.mark.parametrize("number", range(3))
async def test_hosts_that_come_and_go(
    seed: int, number: int, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    rng, servers = random.Random(f"{seed} {number}"), Servers()
    servers.install(monkeypatch)
    async with trio.open_nursery() as nursery:
        run = Run(rng, servers, nursery, stops_heads=bool(number % 2))
        for _ in range(HOSTS):
            await run.join()
        for _ in range(ROUNDS):
            await run.round()
        await run.end()
    assert len(run.files) > 10
    assert run.hits
