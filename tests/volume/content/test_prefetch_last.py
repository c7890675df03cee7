"""Read-ahead, prefetched blocks and copies on disk give way to reads and stores that somebody waits for."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import inside
import pytest
import trio
import trio.testing
from disk_lab import filled, held_disk, tier_of, tier_options, with_tier
from held_reads import HeldReads
from shared_lab import check_disk, eventually, open_path, put, quiet, volumes
from shared_lab import read as read_file
from volume_lab import MIB, Disk, lab_options

from kvfuse.remote.segments.api import Transfer
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.measures import demand
from kvfuse.volume.volume import Volume

KIB = 1 << 10
SIZE = 128 * KIB
"""of a file: one extent"""
READERS = 3
OTHERS = 2


@pytest.fixture(autouse=True)
def small_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few readers are enough; and no test waits until patience ends, but one."""
    monkeypatch.setattr(demand, "CALLS_MAX", READERS)
    monkeypatch.setattr(demand, "PATIENCE_SECONDS", 1e6)


@dataclass
class Host:
    """Of whom READERS wait for their reads, in ``volume``; its other files are ``names``."""

    volume: Volume
    reads: HeldReads
    got: list[bytes]
    names: list[bytes]
    stored: dict[bytes, bytes]

    async def begun(self) -> int:
        """How many reads of segments have begun, once nothing moves any more."""
        await trio.testing.wait_all_tasks_blocked()
        return len(self.reads.begun)

    async def open(self, name: bytes) -> FileHandle:
        return await open_path(self.volume, name)


async def until(is_so: Callable[[], bool]) -> None:
    async def ask() -> bool:
        return is_so()

    await eventually(ask)


Busy = Callable[[], AbstractAsyncContextManager[Host]]


@pytest.fixture
def busy(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> Busy:
    """A host with READERS that wait, until the end of the body."""

    @asynccontextmanager
    async def busy() -> AsyncIterator[Host]:
        options = lab_options(strict=True, capacity=64 * MIB, chunk=MIB)
        stored = {b"%d" % number: rng.randbytes(SIZE) for number in range(READERS + OTHERS)}
        async with volumes(Disk.format(options, shared=True), options, 2, rng) as (one, two):
            for name, data in stored.items():
                await put(one, name, data)
            await quiet(one, two)
            reads, got, names = HeldReads(two, monkeypatch), list[bytes](), list(stored)
            reads.gates[0] = trio.Event()

            async def read(name: bytes) -> None:
                got.append(await read_file(two, name))

            async with trio.open_nursery() as nursery:
                for name in names[:READERS]:
                    nursery.start_soon(read, name)
                host = Host(two, reads, got, names[READERS:], stored)
                await until(lambda: len(reads.begun) >= READERS)
                assert await host.begun() == READERS
                yield host
                reads.gates[0].set()
                reads.gate.set()
            assert sorted(got) == sorted(stored[name] for name in names[:READERS])

    return busy


async def test_read_ahead_begins_when_a_reader_is_done(busy: Busy, autojump_clock: trio.testing.MockClock) -> None:
    async with busy() as host:
        first = host.reads.gates[0]
        handles = [await host.open(name) for name in host.names]
        assert await host.begun() == READERS
        assert not host.got
        first.set()
        await until(lambda: len(host.reads.begun) == READERS + OTHERS)
        for handle in handles:
            await host.volume.files.release(handle)


async def test_what_a_reader_asks_for_is_read_at_once(busy: Busy, autojump_clock: trio.testing.MockClock) -> None:
    async with busy() as host:
        handle = await host.open(host.names[0])
        assert await host.begun() == READERS
        async with trio.open_nursery() as nursery:
            nursery.start_soon(host.volume.files.read, handle, 0, SIZE)
            assert await host.begun() == READERS + 1
            host.reads.gate.set()
        assert await host.volume.files.read(handle, 0, SIZE) == host.stored[host.names[0]]
        await host.volume.files.release(handle)


async def test_read_ahead_does_not_wait_for_ever(
    busy: Busy, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setattr(demand, "PATIENCE_SECONDS", 5.0)
    async with busy() as host:
        handle = await host.open(host.names[0])
        assert await host.begun() == READERS
        await trio.sleep(5.1)
        assert await host.begun() == READERS + 1
        assert not host.got
        await host.volume.files.release(handle)


async def test_blocks_are_prefetched_when_readers_are_done(busy: Busy, autojump_clock: trio.testing.MockClock) -> None:
    async with busy() as host:
        loaded: list[bool] = []

        async def prefetch() -> None:
            loaded.extend(await host.volume.blocks.prefetch(ROOT_INODE, host.names))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(prefetch)
            await trio.sleep(1)
            assert await host.begun() == READERS
            host.reads.gate.set()
        assert loaded == [True] * OTHERS
        for name in host.names:
            block = inside.tier(host.volume).find((await host.volume.tree.lookup(ROOT_INODE, name)).ino)
            assert block is not None
            assert bytes(block.buffer) == host.stored[name]


async def test_read_ahead_gives_way_to_a_store_that_is_waited_for(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setattr(demand, "CALLS_MAX", 1)
    options = lab_options(strict=True, capacity=64 * MIB, chunk=MIB)
    data, writes, gate = rng.randbytes(SIZE), trio.Event(), trio.Event()
    async with volumes(Disk.format(options, shared=True), options, 2, rng) as (one, two):
        await put(one, b"read", data)
        await quiet(one, two)
        segments, reads = inside.segments(two), HeldReads(two, monkeypatch)
        reads.gate.set()
        write_some = segments.servers.write_some

        async def held_write(batch: Sequence[Transfer]) -> set[int]:
            writes.set()
            await gate.wait()
            return await write_some(batch)

        monkeypatch.setattr(segments.servers, "write_some", held_write)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(put, two, b"stored", data)
            await writes.wait()
            handle = await open_path(two, b"read")
            await trio.testing.wait_all_tasks_blocked()
            assert not reads.begun
            gate.set()
        await until(lambda: bool(reads.begun))
        assert await two.files.read(handle, 0, SIZE) == data
        await two.files.release(handle)


async def test_copies_are_written_when_reads_of_the_disk_are_done(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demand, "CALLS_MAX", 1)
    options = tier_options(tmp_path / "tier")
    disk = Disk.format(options, shared=True)
    stored = {name: rng.randbytes(SIZE) for name in (b"copied", b"new")}
    async with with_tier(disk, options) as volume:
        for name, data in stored.items():
            await put(volume, name, data)
        assert await read_file(volume, b"copied") == stored[b"copied"]
        await filled(volume)
        written = tier_of(volume).filler.written
        with held_disk(volume, "read", monkeypatch):
            assert await read_file(volume, b"copied") == stored[b"copied"]  # the engine's: the disk is late
            assert await read_file(volume, b"new") == stored[b"new"]
            await trio.testing.wait_all_tasks_blocked()
            assert tier_of(volume).filler.queued_bytes == SIZE
            assert tier_of(volume).filler.written == written
        await filled(volume)
        assert tier_of(volume).filler.written == written + 1
    await check_disk(disk)
