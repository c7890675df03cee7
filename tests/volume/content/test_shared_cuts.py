"""Files of a shared volume that are cut, while other clients change them: what was cut off does not come back."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest
import trio
import trio.testing
from records_audit import Audit
from shared_lab import as_by_path, get, put, quiet, read, until, volumes, write_at
from shared_walk import EVERY_TIME, sync
from volume_lab import CALLER, MIB, Chaos, Disk, lab_options

from kvfuse import errors
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.volume import Volume

CHUNK = 64 << 10
SMALL_CHUNK = 4096
WORD = 8


@asynccontextmanager
async def audited(rng: random.Random, chaos: list[Chaos], *, strict: bool, chunk: int) -> AsyncIterator[list[Volume]]:
    """As `shared_lab.hosts`, with a look at the records after every commit."""
    options = lab_options(strict=strict, capacity=64 * MIB, chunk=chunk)
    disk = Disk.format(options, shared=True)
    Audit.attach(disk)
    async with volumes(disk, options, len(chaos), rng, chaos) as all_volumes:
        yield all_volumes


async def cut(volume: Volume, size: int, name: bytes = b"file") -> None:
    """As truncate(2)."""

    async def walk() -> None:
        node = await volume.tree.lookup(ROOT_INODE, name)
        await volume.inodes.set_attributes(node.ino, Changes(size=size), CALLER)

    await as_by_path(walk)


# -- one after the other ------------------------------------------------------------------------------


async def changed_by_both(
    rng: random.Random,
    before: bytes,
    late: Callable[[Volume], Awaitable[None]],
    early: Callable[[Volume], Awaitable[None]],
    chunk: int = CHUNK,
) -> bytes:
    """What a file has in the end that two hosts change: ``late`` does so first, but its change is stored second."""
    chaos = [Chaos(random.Random(rng.random())) for _ in range(2)]
    async with audited(rng, chaos, strict=False, chunk=chunk) as (one, two):
        await put(one, b"file", before)
        await quiet(one, two)
        handle = await two.files.open((await two.tree.lookup(ROOT_INODE, b"file")).ino, os.O_RDWR, CALLER)
        await two.files.read(handle, 0, len(before))
        await late(two)
        chaos[1].stalled = trio.Event()
        await early(one)
        await one.sync()
        chaos[1].stalled.set()
        await two.files.release(handle)
        await quiet(two, one)
        found = await read(one, b"file")
        assert await read(two, b"file") == found
        return found


async def test_a_host_that_only_changed_the_mode_undoes_no_cut(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async def change_mode(volume: Volume) -> None:
        node = await volume.tree.lookup(ROOT_INODE, b"file")
        await volume.inodes.set_attributes(node.ino, Changes(mode=0o600), CALLER)

    data = rng.randbytes(1000)
    assert await changed_by_both(rng, data, change_mode, lambda volume: cut(volume, 10)) == data[:10]


async def test_a_host_that_wrote_at_the_start_undoes_no_cut(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    data = rng.randbytes(1000)
    found = await changed_by_both(
        rng, data, lambda volume: write_into(volume, 0, b"own"), lambda volume: cut(volume, 100)
    )
    assert found == b"own" + data[3:100]


@pytest.mark.parametrize("start", [0, 20 * SMALL_CHUNK], ids=["inline", "records of their own"])
async def test_what_was_cut_off_is_no_part_of_what_grows_there_again(
    rng: random.Random, autojump_clock: trio.testing.MockClock, start: int
) -> None:
    async def cut_and_write(volume: Volume) -> None:
        await cut(volume, start + 100)
        await write_into(volume, start + 3 * SMALL_CHUNK + 500, b"own")

    data = rng.randbytes(start + 5 * SMALL_CHUNK)
    theirs = rng.randbytes(4 * SMALL_CHUNK)
    found = await changed_by_both(
        rng, data, cut_and_write, lambda volume: write_into(volume, start + 50, theirs), SMALL_CHUNK
    )
    assert found == data[: start + 50] + theirs[:50] + bytes(3 * SMALL_CHUNK + 400) + b"own"


@pytest.mark.parametrize("size", [60, 20 * SMALL_CHUNK], ids=["inline", "records of their own"])
async def test_of_two_that_write_a_file_anew_the_last_one_has_it_as_a_whole(
    rng: random.Random, autojump_clock: trio.testing.MockClock, size: int
) -> None:
    async def write_anew(volume: Volume, data: bytes) -> None:
        await cut(volume, 0)
        await write_into(volume, 0, data)

    before, early, late = rng.randbytes(size // 2), rng.randbytes(size), rng.randbytes(size * 3 // 4)
    found = await changed_by_both(
        rng, before, lambda volume: write_anew(volume, late), lambda volume: write_anew(volume, early), SMALL_CHUNK
    )
    assert found == late


async def test_bytes_are_appended_where_another_host_has_cut_the_file(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    data = rng.randbytes(2 * SMALL_CHUNK)
    found = await changed_by_both(
        rng,
        data,
        lambda volume: write_into(volume, len(data), b"appended", os.O_WRONLY | os.O_APPEND),
        lambda volume: cut(volume, 20),
        SMALL_CHUNK,
    )
    assert found == data[:20] + b"appended"


async def write_into(volume: Volume, offset: int, data: bytes, flags: int = os.O_RDWR) -> None:
    """Without a word to other hosts."""
    node = await volume.tree.lookup(ROOT_INODE, b"file")
    handle = await volume.files.open(node.ino, flags, CALLER)
    await volume.files.write(handle, offset, data)
    await volume.files.release(handle)


# -- in the middle of something -----------------------------------------------------------------------


@pytest.mark.parametrize("is_refused", [True, False], ids=["refused", "done"])
@pytest.mark.parametrize("run", range(5))
async def test_a_file_is_cut_while_a_commit_of_it_is_under_way(
    rng: random.Random, autojump_clock: trio.testing.MockClock, run: int, is_refused: bool
) -> None:
    chaos = [Chaos(random.Random(0)), Chaos(rng, delay=1.0)]
    data = rng.randbytes(3 * CHUNK)

    async with audited(rng, chaos, strict=False, chunk=CHUNK) as (one, two):
        await put(one, b"file", data)
        await quiet(one, two)
        node = await two.tree.lookup(ROOT_INODE, b"file")
        await write_into(two, 100, b"own")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.sync)
            await until(lambda: node.committing)
            await two.inodes.set_attributes(node.ino, Changes(size=CHUNK), CALLER)
            if not is_refused:
                await until(lambda: not node.committing)
            chaos[1].stalled = trio.Event()
            await write_at(one, b"file", 200, b"theirs")
            chaos[1].stalled.set()
        await quiet(two, one)
        for volume in (one, two):
            assert await get(volume, b"file") == data[:100] + b"own" + data[103:200] + b"theirs" + data[206:CHUNK]


@pytest.mark.parametrize("size", [CHUNK, CHUNK + 50], ids=["whole chunks", "part of one"])
@pytest.mark.parametrize("run", range(10))
async def test_a_file_is_cut_while_two_hosts_changes_are_put_together(
    rng: random.Random, autojump_clock: trio.testing.MockClock, run: int, size: int
) -> None:
    options = lab_options(capacity=16 * MIB, chunk=CHUNK)
    disk = Disk.format(options, shared=True)
    Audit.attach(disk)
    data = rng.randbytes(4 * CHUNK)
    theirs = b"".join(b"theirs" + data[start + 6 : start + CHUNK] for start in range(0, 4 * CHUNK, CHUNK))
    async with volumes(disk, options, 2, rng, [Chaos(random.Random(0)), Chaos(rng, delay=1.0)]) as (one, two):
        await put(one, b"file", data)
        await quiet(one, two)
        ino = (await two.tree.lookup(ROOT_INODE, b"file")).ino
        handle = await two.files.open(ino, os.O_RDWR, CALLER)
        for index in range(4):
            await two.files.write(handle, index * CHUNK + 100, b"own")
        await write_at(one, b"file", 0, theirs)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.sync)
            await trio.sleep(rng.random() * 0.1)
            await two.inodes.set_attributes(ino, Changes(size=size), CALLER)
        await two.files.release(handle)
        await quiet(two, one)
        expected = b"theirs" + data[6:100] + b"own" + data[103:CHUNK] + theirs[CHUNK:size]
        for volume in (one, two):
            assert await get(volume, b"file") == expected


@pytest.mark.parametrize("run", range(10))
async def test_what_is_cut_off_while_changes_are_put_together_does_not_come_back(
    rng: random.Random, autojump_clock: trio.testing.MockClock, run: int
) -> None:
    data = rng.randbytes(CHUNK)
    async with audited(rng, [Chaos(random.Random(0)), Chaos(rng, delay=1.0)], strict=False, chunk=CHUNK) as (one, two):
        await put(one, b"file", data)
        await quiet(one, two)
        node = await two.tree.lookup(ROOT_INODE, b"file")
        await cut(two, 30_000)
        await write_into(two, 0, b"own")
        await write_at(one, b"file", 100, b"theirs")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.sync)
            await trio.sleep(rng.random() * 0.1)
            await two.inodes.set_attributes(node.ino, Changes(size=10_000), CALLER)
            await two.inodes.set_attributes(node.ino, Changes(size=50_000), CALLER)
        await quiet(two, one)
        expected = b"own" + data[3:100] + b"theirs" + data[106:10_000] + bytes(40_000)
        for volume in (one, two):
            assert await get(volume, b"file") == expected


@pytest.mark.parametrize("run", range(10))
async def test_what_another_host_wrote_where_a_file_is_just_being_cut_is_freed_once(
    rng: random.Random, autojump_clock: trio.testing.MockClock, run: int
) -> None:
    options = lab_options(capacity=16 * MIB, chunk=CHUNK)
    disk = Disk.format(options, shared=True)
    Audit.attach(disk)
    data = rng.randbytes(4 * CHUNK)
    async with volumes(disk, options, 2, rng, [Chaos(random.Random(0)), Chaos(rng, delay=1.0)]) as (one, two):
        await put(one, b"file", data)
        await quiet(one, two)
        ino = (await two.tree.lookup(ROOT_INODE, b"file")).ino
        await two.inodes.set_attributes(ino, Changes(mode=0o600), CALLER)
        await write_at(one, b"file", 2 * CHUNK, b"theirs")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.sync)
            await trio.sleep(rng.random() * 0.05)
            await two.inodes.set_attributes(ino, Changes(size=CHUNK + 50), CALLER)
        await quiet(two, one)
        for volume in (one, two):
            assert await get(volume, b"file") == data[: CHUNK + 50]


# -- at random ----------------------------------------------------------------------------------------


@dataclass
class Cutter:
    """One of several programs that change one file as they like. Each word of it says when it was written."""

    volume: Volume
    rng: random.Random
    clock: Iterator[int]
    size: int

    async def run(self, step_count: int) -> None:
        for _ in range(step_count):
            await trio.sleep(self.rng.random() * 0.1)
            with suppress(errors.EngineError, errors.Stale):
                await self.step(await self.volume.tree.lookup(ROOT_INODE, b"file"))

    async def step(self, node: Node) -> None:
        volume, rng = self.volume, self.rng
        what = rng.choice(("write", "write", "append", "cut", "cut", "grow", "read", "chmod", "forget"))
        if what == "read":
            await read(volume, b"file")
        elif what == "forget":
            if rng.random() < 0.3:
                volume.tree.forget(node.ino, EVERY_TIME)
        elif what in ("write", "append"):
            handle = await volume.files.open(node.ino, os.O_RDWR | (os.O_APPEND if what == "append" else 0), CALLER)
            try:
                start = handle.node.size if what == "append" else self.place()
                await volume.files.write(handle, start, words(self.clock, rng.randrange(1, 700)))
                if rng.random() < 0.3:
                    await volume.files.fsync(handle)
            finally:
                await volume.files.release(handle)
        else:
            changes = {
                "cut": Changes(size=self.place()),
                "grow": Changes(size=node.size + rng.randrange(1000) * WORD),
                "chmod": Changes(mode=rng.choice((0o600, 0o644))),
            }
            await volume.inodes.set_attributes(node.ino, changes[what], CALLER)

    def place(self) -> int:
        return self.rng.randrange(self.size // WORD) * WORD


def words(clock: Iterator[int], count: int) -> bytes:
    return b"".join([next(clock).to_bytes(WORD) for _ in range(count)])


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
@pytest.mark.parametrize("faults", [0.0, 0.1], ids=["reliable", "failing"])
@pytest.mark.parametrize("count", [2, 3])
async def test_all_agree_on_a_file_that_all_cut(
    rng: random.Random, autojump_clock: trio.testing.MockClock, count: int, faults: float, strict: bool
) -> None:
    """In each round everybody hears of a cut first: nothing that was written behind there before comes back."""
    chaos = [Chaos(random.Random(rng.random()), delay=0.5) for _ in range(count)]
    clock, size = itertools.count(1), 30 * SMALL_CHUNK
    async with audited(rng, chaos, strict=strict, chunk=SMALL_CHUNK) as all_volumes:
        cutters = [Cutter(volume, random.Random(rng.random()), clock, size) for volume in all_volumes]
        await put(all_volumes[0], b"file", words(clock, size // WORD))
        for _ in range(4):
            await quiet(*all_volumes)
            await quiet(*all_volumes)
            cut_size = cutters[0].place()
            await cut(rng.choice(all_volumes), cut_size)
            await quiet(*all_volumes)
            began = next(clock)
            for one in chaos:
                one.commit_error = one.write_error = one.read_error = faults
            async with trio.open_nursery() as nursery:
                for cutter in cutters:
                    nursery.start_soon(cutter.run, 25)
            for one in chaos:
                one.commit_error = one.write_error = one.read_error = 0.0
            for volume in all_volumes:
                await sync(volume)
            found = [await read(volume, b"file") for volume in all_volumes]
            assert all(data == found[0] for data in found)
            ended = next(clock)
            for start in range(0, len(found[0]) // WORD * WORD, WORD):
                word = int.from_bytes(found[0][start : start + WORD])
                assert word == 0 or (began if start >= cut_size else 0) < word < ended, start
