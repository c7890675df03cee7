"""A segment store that does not answer costs a file call one deadline, whatever it waits for; and no byte.

Every attempt times out anew here: the store does not remember, as the rados engine does, who is silent.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import inside
import pytest
import trio
import trio.testing
from shared_lab import check_disk, get, put, quiet, volumes, write_at
from volume_lab import CALLER, MIB, Chaos, Disk, lab_options

from kvfuse.errors import EngineTimeout
from kvfuse.remote.segments.api import Transfer
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.volume import Volume

DEADLINE = 3.0
CHUNK = 64 << 10
SLACK = 0.5
"""for what answers"""


class Segments:
    """A volume's segment engine that lets every call pass its deadline while it is ``away``."""

    def __init__(self, volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
        self.away = False
        self.is_away_for: Callable[[Sequence[Transfer]], bool] = lambda batch: False
        self.reads = self.late = 0
        """calls that were begun; that will not be answered"""
        self.engine = inside.segments(volume)
        self._read, self._write = self.engine.read, self.engine.write
        monkeypatch.setattr(self.engine, "read", self.read)
        monkeypatch.setattr(self.engine, "write", self.write)
        self._write_some = self.engine.servers.write_some
        monkeypatch.setattr(self.engine.servers, "write_some", self.write_some)

    async def read(self, batch: Sequence[Transfer]) -> None:
        self.reads += 1
        await self._wait(batch)
        await self._read(batch)

    async def write(self, batch: Sequence[Transfer]) -> None:
        await self._wait(batch)
        await self._write(batch)

    async def write_some(self, batch: Sequence[Transfer]) -> set[int]:
        await self._wait(batch)
        return await self._write_some(batch)

    async def _wait(self, batch: Sequence[Transfer]) -> None:
        if self.away or self.is_away_for(batch):
            self.late += 1
            await trio.sleep(DEADLINE)
            raise EngineTimeout("injected: no answer")


@asynccontextmanager
async def one_volume(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, *, staging_size: int = 64 * MIB
) -> AsyncIterator[tuple[Volume, Segments]]:
    """Of a shared disk, strict. At the end the store answers, everything is stored, and the disk is clean."""
    options = lab_options(strict=True, capacity=32 * MIB, chunk=CHUNK, staging_size=staging_size)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 1, rng, [Chaos(random.Random(0))]) as (volume,):
        segments = Segments(volume, monkeypatch)
        yield volume, segments
        segments.away, segments.is_away_for = False, lambda batch: False
        await quiet(volume)
    await check_disk(disk)


async def create(volume: Volume, name: bytes) -> FileHandle:
    handle, _ = await volume.tree.create(ROOT_INODE, name, 0o644, CALLER, os.O_RDWR)
    return handle


async def seconds_until_timeout(call: Callable[[], Awaitable[object]]) -> float:
    began = trio.current_time()
    with pytest.raises(EngineTimeout):
        await call()
    return trio.current_time() - began


async def close(volume: Volume, handle: FileHandle) -> None:
    """As close(2): the error is that of the flush."""
    try:
        await volume.files.flush(handle)
    finally:
        await volume.files.release(handle)


async def times_of(calls: Sequence[Callable[[], Awaitable[object]]], apart: float) -> list[float]:
    """How long each took to fail, begun ``apart`` seconds one after the other."""
    times = [0.0] * len(calls)

    async def measure(number: int) -> None:
        times[number] = await seconds_until_timeout(calls[number])

    async with trio.open_nursery() as nursery:
        for number in range(len(calls)):
            nursery.start_soon(measure, number)
            await trio.sleep(apart)
    return times


@pytest.mark.parametrize("call", [close, lambda volume, handle: volume.files.fsync(handle)], ids=["close", "fsync"])
async def test_calls_that_come_one_after_the_other_wait_for_one_deadline(
    rng: random.Random,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[Volume, FileHandle], Awaitable[None]],
) -> None:
    """Whatever is being written, or committed, as they come."""
    data = {b"file-%d" % number: rng.randbytes(CHUNK // 2) for number in range(12)}
    async with one_volume(rng, monkeypatch) as (volume, segments):
        handles = [await create(volume, name) for name in data]
        for handle, content in zip(handles, data.values(), strict=True):
            await volume.files.write(handle, 0, content)
        segments.away = True
        times = await times_of([lambda h=handle: call(volume, h) for handle in handles], 0.7)
        print([round(seconds, 2) for seconds in times])
        assert max(times) < DEADLINE + SLACK
        segments.away = False
        await volume.sync()
        for name, content in data.items():
            assert await get(volume, name) == content


async def test_who_waits_for_room_hears_that_there_will_be_none(
    rng: random.Random, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing that was acknowledged is lost: it is written when the store is back."""
    content = rng.randbytes(16 * CHUNK)
    async with one_volume(rng, monkeypatch, staging_size=4 * CHUNK) as (volume, segments):
        handle = await create(volume, b"file")
        segments.away = True
        written = 0
        while inside.journal(volume).flusher.staged_bytes <= inside.journal(volume).flusher.staging_size:
            written += await volume.files.write(handle, written, content[written : written + CHUNK])
        with trio.fail_after(10 * DEADLINE):
            assert await seconds_until_timeout(lambda: volume.files.write(handle, written, b"more")) < DEADLINE + SLACK
        segments.away = False
        while written < len(content):
            written += await volume.files.write(handle, written, content[written : written + CHUNK])
        await close(volume, handle)
        assert await get(volume, b"file") == content


async def test_a_commit_is_not_waited_for_longer_because_of_slots_that_it_freed(
    rng: random.Random, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the store. That slots are free is said in their headers, for a rebuild, and may take its time."""
    async with one_volume(rng, monkeypatch) as (volume, segments):
        await put(volume, b"file", rng.randbytes(CHUNK))
        node = await volume.tree.lookup(ROOT_INODE, b"file")
        handle = await volume.files.open(node.ino, os.O_WRONLY, CALLER)
        await volume.files.write(handle, 0, rng.randbytes(CHUNK))
        segments.is_away_for = is_freeing
        began = trio.current_time()
        await close(volume, handle)
        assert trio.current_time() - began < SLACK
        await trio.testing.wait_all_tasks_blocked()
        assert segments.late == 1, "no slot was freed: this test tries nothing"
        await volume.sync()
        assert trio.current_time() - began >= DEADLINE  # the volume is as it will stay when this returns
        volume.tree.forget(node.ino, 1)


def is_freeing(batch: Sequence[Transfer]) -> bool:
    return all(transfer.buffer == bytes(len(transfer.buffer)) for transfer in batch)


async def test_extents_are_read_side_by_side(
    rng: random.Random, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = rng.randbytes(6 * CHUNK + 1000)
    async with one_volume(rng, monkeypatch) as (volume, segments):
        await put(volume, b"file", content)
        await quiet(volume)
        node = await volume.tree.lookup(ROOT_INODE, b"file")
        handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
        before = segments.reads
        segments.away = True
        assert await seconds_until_timeout(lambda: volume.files.read(handle, 100, len(content))) < DEADLINE + SLACK
        assert segments.reads - before >= 7
        segments.away = False
        assert bytes(await volume.files.read(handle, 100, len(content))) == content[100:]
        await volume.files.release(handle)
        volume.tree.forget(node.ino, 1)


@contextmanager
def ended(how: str) -> Iterator[None]:
    """A call fails, or is cancelled before it would, as those of rings are."""
    if how == "failed":
        with pytest.raises(EngineTimeout):
            yield
    else:
        with trio.move_on_after(DEADLINE / 2) as scope:
            yield
        assert scope.cancelled_caught


@pytest.mark.parametrize("how", ["failed", "cancelled"])
async def test_what_a_write_took_before_it_ended_is_there_for_all(
    rng: random.Random, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    options = lab_options(capacity=16 * MIB, chunk=CHUNK)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng) as (one, two):
        await put(two, b"file", rng.randbytes(2 * CHUNK))
        await quiet(two, one)
        segments = Segments(one, monkeypatch)
        handle = await one.files.open((await one.tree.lookup(ROOT_INODE, b"file")).ino, os.O_RDWR, CALLER)
        segments.away = True
        with ended(how):
            await one.files.write(handle, 0, rng.randbytes(CHUNK + 100))  # of the second chunk the rest has to be read
        segments.away = False
        await trio.sleep(2 * DEADLINE)  # a commit may have begun before
        await one.files.release(handle)
        await quiet(one, two)
        assert await get(one, b"file") == await get(two, b"file")


@pytest.mark.parametrize("how", ["failed", "cancelled"])
async def test_a_cut_that_did_not_happen_takes_nothing_from_others(
    rng: random.Random, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    options = lab_options(capacity=16 * MIB, chunk=CHUNK)
    disk = Disk.format(options, shared=True)
    data = rng.randbytes(3 * CHUNK)
    async with volumes(disk, options, 2, rng, [Chaos(random.Random(0)) for _ in range(2)]) as (one, two):
        await put(two, b"file", data)
        await quiet(two, one)
        segments = Segments(one, monkeypatch)
        ino = (await one.tree.lookup(ROOT_INODE, b"file")).ino
        segments.away = True
        with ended(how):
            await one.inodes.set_attributes(ino, Changes(size=CHUNK + 50), CALLER)
        segments.away = False
        await one.inodes.set_attributes(ino, Changes(mode=0o600), CALLER)
        await write_at(two, b"file", 3 * CHUNK, b"theirs")
        await quiet(one, two)
        for volume in (one, two):
            assert await get(volume, b"file") == data + b"theirs"


async def test_a_cut_that_failed_leaves_what_was_just_written(
    rng: random.Random, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a chunk that is stored, and to be stored anew."""
    after = rng.randbytes(CHUNK)
    async with one_volume(rng, monkeypatch) as (volume, segments):
        await put(volume, b"file", rng.randbytes(CHUNK))
        await quiet(volume)
        handle = await volume.files.open((await volume.tree.lookup(ROOT_INODE, b"file")).ino, os.O_RDWR, CALLER)
        await volume.files.write(handle, 0, after)
        segments.away = True
        with pytest.raises(EngineTimeout):
            await volume.inodes.set_attributes(handle.node.ino, Changes(size=50), CALLER)
        segments.away = False
        assert bytes(await volume.files.read(handle, 0, 2 * CHUNK)) == after
        await volume.inodes.set_attributes(handle.node.ino, Changes(size=50), CALLER)
        assert bytes(await volume.files.read(handle, 0, 2 * CHUNK)) == after[:50]
        await volume.files.release(handle)
        assert await get(volume, b"file") == after[:50]
        volume.tree.forget(handle.node.ino, 1)
