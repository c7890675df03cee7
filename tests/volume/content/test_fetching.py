"""Extents that are fetched before they are asked for: never wrong bytes, few engine calls, bounded memory."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import inside
import pytest
import trio
import trio.testing
from held_reads import HeldReads
from shared_lab import eventually, put, quiet, volumes
from volume_lab import CALLER, MIB, Chaos, Disk, check, lab_options, opened

from kvfuse import errors
from kvfuse.options.config import Options
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.content import read_ahead
from kvfuse.volume.content.read_ahead import Fetcher
from kvfuse.volume.content.shared_extents import SharedExtents
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.measures import read_turns
from kvfuse.volume.volume import Volume

KIB = 1 << 10
CHUNK = MIB
PART = 256 * KIB


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small volume has no extents of several parts, as these usually are."""
    monkeypatch.setattr(read_ahead, "PART_SIZE", PART)
    monkeypatch.setattr(read_ahead, "WINDOW_SIZE", CHUNK)
    monkeypatch.setattr(read_ahead, "EAGER_SIZE_MIN", 32 * KIB)


@pytest.fixture
def options() -> Options:
    return lab_options(strict=False, capacity=64 * MIB, chunk=CHUNK)


@pytest.fixture
def disk(options: Options) -> Disk:
    return Disk.format(options, shared=True)


async def open_known(volume: Volume, name: bytes) -> FileHandle:
    """Open a file of another client, when it is heard of."""
    found: list[Any] = []

    async def is_there() -> bool:
        try:
            found.append(await volume.tree.lookup(ROOT_INODE, name))
        except errors.NotFound:
            return False
        return True

    await eventually(is_there)
    return await volume.files.open(found[-1].ino, os.O_RDONLY, CALLER)


def fetcher_of(volume: Volume) -> Fetcher:
    assert isinstance(inside.reader(volume).extents, SharedExtents)
    return inside.reader(volume).extents.fetcher


@dataclass
class File:
    """A file that ``one`` stored and ``two`` has open; what ``two`` reads of its segments waits for ``reads``."""

    data: bytes
    one: Volume
    two: Volume
    reads: HeldReads
    handle: FileHandle

    async def read(self, start: int = 0, length: int = MIB) -> bytes:
        return bytes(await self.two.files.read(self.handle, start, length))

    @asynccontextmanager
    async def being_read(self) -> AsyncIterator[list[bytes]]:
        """All of it was asked for, and is waited for at the end; the list has it then."""
        got: list[bytes] = []

        async def read() -> None:
            got.append(await self.read())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            yield got

    async def rewrite(self, data: bytes) -> None:
        """By ``one``; ``two`` has heard of it."""
        writer = await self.one.files.open(self.handle.node.ino, os.O_WRONLY, CALLER)
        await self.one.files.write(writer, 0, data)
        await self.one.files.release(writer)
        await quiet(self.one, self.two)


OpenFile = Callable[..., AbstractAsyncContextManager[File]]


@pytest.fixture
def open_file(disk: Disk, options: Options, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> OpenFile:
    """Of ``size`` random bytes; nothing is kept of it once it is closed. ``fetching``: or ``two`` has no fetcher."""

    @asynccontextmanager
    async def open_file(size: int, *, fetching: bool = True) -> AsyncIterator[File]:
        data = rng.randbytes(size)
        async with volumes(disk, options, 2, rng) as (one, two):
            await put(one, b"file", data)
            await quiet(one, two)
            fetcher = fetcher_of(two)
            if not fetching:
                fetcher._nursery = None  # it begins nothing
            reads = HeldReads(two, monkeypatch)
            handle = await open_known(two, b"file")
            yield File(data, one, two, reads, handle)
            if handle.node.handles:  # the test did not close it
                await two.files.release(handle)
            assert fetcher.memory_size == 0

    return open_file


async def test_a_file_is_fetched_as_it_is_opened_and_read_once(
    open_file: OpenFile, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_file(700 * KIB) as file:
        await trio.testing.wait_all_tasks_blocked()
        assert len(file.reads.begun) == 1
        file.reads.gate.set()
        for start in range(0, len(file.data), 100 * KIB):
            assert await file.read(start, 100 * KIB) == file.data[start : start + 100 * KIB]
        assert sum(size for _, size in file.reads.begun) == len(file.data)
        assert len(file.reads.begun) == 3
        assert fetcher_of(file.two).memory_size == 0  # all of it was given


async def test_parts_share_the_engine_by_weight_beside_another_namespace(
    open_file: OpenFile, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_turns, "WINDOW", 4 * PART)
    async with open_file(CHUNK) as file:
        other = inside.core(file.two).namespaces.measures[1 << 40]
        other.begin_reading(1)
        async with file.being_read() as got:
            assert len(file.reads.begun) == 2  # half of the window
            file.reads.gate.set()
        assert got == [file.data]
        other.reading = 0


async def test_parts_of_a_large_extent_are_fetched_side_by_side(
    open_file: OpenFile, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_file(CHUNK) as file:
        async with trio.open_nursery() as nursery:
            got: dict[int, bytes] = {}

            async def read(start: int) -> None:
                got[start] = await file.read(start, PART)

            nursery.start_soon(read, 0)
            await trio.testing.wait_all_tasks_blocked()
            assert len(file.reads.begun) == 4
            file.reads.gate.set()
            for start in range(PART, CHUNK, PART):
                nursery.start_soon(read, start)
        assert b"".join(got[start] for start in sorted(got)) == file.data
        assert len(file.reads.begun) == 4


async def test_a_random_reader_gets_no_more_than_he_asks_for(
    open_file: OpenFile, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_file(CHUNK) as file:
        file.reads.gate.set()
        for start in (0, 3 * PART, 2 * PART + 128 * KIB, 3 * PART + 175 * KIB):
            assert await file.read(start, 4 * KIB) == file.data[start : start + 4 * KIB]
        assert len(file.reads.begun) == 4  # what came with the opening, and a granule each


async def test_what_was_fetched_and_rewritten_elsewhere_is_not_shown(
    open_file: OpenFile, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    after = rng.randbytes(300 * KIB)
    async with open_file(300 * KIB) as file:
        await trio.testing.wait_all_tasks_blocked()
        assert len(file.reads.begun) == 1
        file.reads.gate.set()
        await trio.testing.wait_all_tasks_blocked()  # it was fetched
        await file.rewrite(after)
        assert await file.read() == after


async def test_what_is_rewritten_elsewhere_while_it_is_fetched_is_read_anew(
    open_file: OpenFile, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    after = rng.randbytes(200 * KIB)
    async with open_file(200 * KIB) as file:
        async with file.being_read() as got:
            await file.rewrite(after)
            file.reads.gate.set()
        assert got == [after]


async def test_a_file_may_be_cut_while_it_is_read(open_file: OpenFile, autojump_clock: trio.testing.MockClock) -> None:
    async with open_file(256 * KIB, fetching=False) as file:
        file.reads.gates[0] = trio.Event()
        file.reads.gate.set()
        async with file.being_read() as got:
            await inside.cutter(file.two).truncate(file.handle.node, 100_000)
            file.reads.gates[0].set()
        assert got == [file.data[:100_000] + bytes(len(file.data) - 100_000)]


async def test_what_is_cut_while_it_is_fetched_is_not_shown(
    open_file: OpenFile, autojump_clock: trio.testing.MockClock
) -> None:
    cut = 300 * KIB + 7
    async with open_file(512 * KIB) as file:
        zeros = bytes(len(file.data) - cut)
        async with file.being_read() as got, trio.open_nursery() as nursery:
            nursery.start_soon(inside.cutter(file.two).truncate, file.handle.node, cut)
            await trio.testing.wait_all_tasks_blocked()
            file.reads.gate.set()
        assert got[0][:cut] == file.data[:cut]
        assert got[0][cut:] in (file.data[cut:], zeros)
        await inside.cutter(file.two).truncate(file.handle.node, len(file.data))
        assert await file.read() == file.data[:cut] + zeros


async def test_a_fetch_that_fails_fails_only_who_waits_for_its_part(
    open_file: OpenFile, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_file(CHUNK) as file:
        fetcher_of(file.two).closed(file.handle.node)  # nothing is under way from its opening
        file.reads.failing = {2}
        outcomes: dict[int, bytes | None] = {}
        async with trio.open_nursery() as nursery:

            async def read(start: int) -> None:
                try:
                    outcomes[start] = await file.read(start, PART)
                except errors.EngineError:
                    outcomes[start] = None

            for start in range(0, CHUNK, PART):
                nursery.start_soon(read, start)
                await trio.testing.wait_all_tasks_blocked()
            file.reads.gate.set()
        failed = [start for start, found in outcomes.items() if found is None]
        assert len(failed) == 1
        for start, found in outcomes.items():
            assert found is None or found == file.data[start : start + PART]
        assert await file.read(failed[0], PART) == file.data[failed[0] : failed[0] + PART]


async def test_wrong_bytes_are_an_error_of_their_granule_alone(
    open_file: OpenFile, disk: Disk, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_file(MIB) as file:
        segment, offset = inside.core(file.two).locate(file.handle.node.chunks[0].extents[0].addr)
        disk.segments[segment][offset + 300 * KIB] ^= 1
        file.reads.gate.set()
        with pytest.raises(errors.Corrupt):
            await file.read()
        assert await file.read(0, 100 * KIB) == file.data[: 100 * KIB]
        assert await file.read(512 * KIB, 512 * KIB) == file.data[512 * KIB :]
        disk.segments[segment][offset + 300 * KIB] ^= 1


async def test_a_file_that_is_closed_is_no_longer_fetched(
    open_file: OpenFile, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_file(CHUNK) as file:
        await trio.testing.wait_all_tasks_blocked()
        assert (len(file.reads.begun), fetcher_of(file.two).memory_size) == (1, CHUNK)
        await file.two.files.release(file.handle)
        await trio.testing.wait_all_tasks_blocked()
        assert (file.reads.cancelled, fetcher_of(file.two).memory_size) == (1, 0)


async def test_a_file_may_be_read_while_fetching_ends(
    open_file: OpenFile, autojump_clock: trio.testing.MockClock
) -> None:
    """As where a lease is lost. Who goes on when the last task has ended finds a nursery that takes no more."""
    async with open_file(CHUNK) as file:
        await trio.testing.wait_all_tasks_blocked()
        node = file.handle.node
        extent = node.chunks[0].extents[0]
        for _ in range(30):  # trio draws who of two goes on first
            fetcher = Fetcher(inside.core(file.two))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fetcher.run)
                await trio.testing.wait_all_tasks_blocked()
                fetcher.opened(node, extent)
                await trio.testing.wait_all_tasks_blocked()
                (part, *_) = fetcher._windows[extent, 0].parts
                assert part is not None
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    await part.done.wait()
                    assert await fetcher.read(node, 0, extent, 0, CHUNK) is None
                fetcher.closed(node)


async def test_who_waits_for_what_is_given_up_reads_for_himself(
    open_file: OpenFile, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_file(MIB) as file:
        await trio.testing.wait_all_tasks_blocked()
        async with file.being_read() as got:
            fetcher_of(file.two).closed(file.handle.node)
            await trio.testing.wait_all_tasks_blocked()
            file.reads.gate.set()
        assert got == [file.data]
        assert file.reads.cancelled == 4


async def test_memory_is_bounded_whatever_is_open(
    disk: Disk, options: Options, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    data = {b"%d" % number: rng.randbytes(MIB) for number in range(6)}
    async with volumes(disk, options, 2, rng) as (one, two):
        for name, content in data.items():
            await put(one, name, content)
        await quiet(one, two)
        fetcher = fetcher_of(two)
        fetcher.memory_max = 2 * MIB
        handles = {name: await open_known(two, name) for name in data}
        assert 0 < fetcher.memory_size <= 2 * MIB
        for name, handle in handles.items():
            assert bytes(await two.files.read(handle, 0, MIB)) == data[name]
            assert fetcher.memory_size <= 2 * MIB
            await two.files.release(handle)
        assert fetcher.memory_size == 0


async def test_windows_of_one_file_are_bounded_too(
    disk: Disk,
    options: Options,
    rng: random.Random,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_ahead, "WINDOW_SIZE", 512 * KIB)
    data = rng.randbytes(CHUNK)
    chaos = [Chaos(random.Random(rng.random()), delay=0.2) for _ in range(2)]
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        await put(one, b"file", data)
        await quiet(one, two)
        fetcher = fetcher_of(two)
        fetcher.memory_max = MIB
        handle = await open_known(two, b"file")
        for start in [*range(0, CHUNK, 512 * KIB), *range(0, CHUNK, 100 * KIB)]:
            length = min(64 * KIB, CHUNK - start)
            assert bytes(await two.files.read(handle, start, length)) == data[start : start + length]
            assert fetcher.memory_size <= MIB
        await two.files.release(handle)
        assert fetcher.memory_size == 0


# -- a volume of one host whose segments no page cache has -------------------------------------------


@asynccontextmanager
async def open_own(options: Options, data: bytes, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[File]:
    """A file that was stored by a former daemon."""
    disk = Disk.format(options)
    disk.is_direct = True
    async with opened(disk, options) as volume:
        await put(volume, b"file", data)
    async with opened(disk, options) as volume:
        reads = HeldReads(volume, monkeypatch)
        reads.gate.set()
        handle = await volume.files.open((await volume.tree.lookup(ROOT_INODE, b"file")).ino, os.O_RDWR, CALLER)
        assert isinstance(handle, FileHandle)
        yield File(data, volume, volume, reads, handle)
        await volume.files.release(handle)
        fetcher = inside.reader(volume).extents.fetcher
        assert fetcher is not None
        assert fetcher.memory_size == 0
    assert (await check(disk)).clean


async def test_a_sequential_reader_waits_for_few_reads_of_a_device(
    options: Options, rng: random.Random, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_own(options, rng.randbytes(3 * CHUNK), monkeypatch) as file:
        for start in range(0, len(file.data), 32 * KIB):
            assert await file.read(start, 32 * KIB) == file.data[start : start + 32 * KIB]
            if start == CHUNK - 32 * KIB:
                await trio.testing.wait_all_tasks_blocked()
                assert len(file.reads.begun) == 5  # the next chunk is begun
        assert sum(size for _, size in file.reads.begun) == len(file.data)
        assert len(file.reads.begun) == len(file.data) // PART


async def test_what_was_fetched_and_changed_in_its_slot_is_not_shown(
    options: Options, rng: random.Random, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_own(options, rng.randbytes(CHUNK), monkeypatch) as file:
        content = bytearray(file.data)
        extent = file.handle.node.chunks[0].extents[0]
        for _ in range(3):
            assert await file.read(0, 32 * KIB) == content[: 32 * KIB]
            await trio.testing.wait_all_tasks_blocked()  # the rest was fetched
            content[100_000:104_096] = rng.randbytes(4096)
            assert await file.two.files.write(file.handle, 100_000, bytes(content[100_000:104_096])) == 4096
            assert await file.read() == content
            await file.two.files.fsync(file.handle)
            await file.two.files.release(await file.two.files.open(file.handle.node.ino, os.O_RDWR, CALLER))
            await trio.testing.wait_all_tasks_blocked()
            assert await file.read() == content
        assert extent in file.handle.node.chunks[0].extents


async def test_what_is_changed_in_its_slot_while_it_is_fetched_is_read_anew(
    options: Options, rng: random.Random, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_own(options, rng.randbytes(CHUNK), monkeypatch) as file:
        content, held = bytearray(file.data), trio.Event()
        content[100_000:104_096] = rng.randbytes(4096)
        file.reads.gates = dict.fromkeys(range(4), held)
        async with file.being_read() as got:
            assert len(file.reads.begun) == 4
            assert await file.two.files.write(file.handle, 100_000, bytes(content[100_000:104_096])) == 4096
            held.set()
        assert got == [content]
        assert await file.read() == content
