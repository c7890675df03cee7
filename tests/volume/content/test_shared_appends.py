"""Appends of several hosts to one file: each is there once, behind the others."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import inside
import pytest
import trio
import trio.testing
from shared_lab import get, hosts, put, quiet, write_at
from volume_lab import CALLER, MIB, Chaos

from kvfuse import errors
from kvfuse.remote.segments.api import Transfer
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.content.merge import Merger
from kvfuse.volume.volume import Volume

CHUNK = 64 << 10


async def test_what_two_hosts_changes_were_put_together_to_goes_on_growing(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    data = rng.randbytes(1000)
    async with hosts(rng, 2, strict=False, capacity=16 * MIB, chunk=CHUNK) as (one, two):
        await put(one, b"file", data)
        await quiet(one, two)
        ino = (await two.tree.lookup(ROOT_INODE, b"file")).ino
        handle = await two.files.open(ino, os.O_RDWR, CALLER)
        await two.files.write(handle, 500, b"own")
        await write_at(one, b"file", 0, b"theirs")
        await quiet(one)
        await two.files.release(await two.files.open(ino, os.O_RDONLY, CALLER))
        assert await two.files.write(handle, 1000, b"and more") == 8
        await two.files.release(handle)
        await quiet(two, one)
        assert await get(one, b"file") == b"theirs" + data[6:500] + b"own" + data[503:] + b"and more"


async def test_an_append_stays_one_when_another_host_only_changes_what_was_there(
    rng: random.Random, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is put to that, and before it is stored the other host appends, too."""
    data, merge, merges = rng.randbytes(1000), Merger.merge, count()

    async def merge_and_append(self: Merger, *arguments: Any) -> None:
        await merge(self, *arguments)
        if self.core is inside.core(two) and next(merges) == 0:
            await write_at(one, b"file", 1000, b"one", os.O_RDWR | os.O_APPEND)
            await quiet(one)

    monkeypatch.setattr(Merger, "merge", merge_and_append)
    async with hosts(rng, 2, strict=False, capacity=16 * MIB, chunk=CHUNK) as (one, two):
        await put(one, b"file", data)
        await quiet(one, two)
        handle = await two.files.open((await two.tree.lookup(ROOT_INODE, b"file")).ino, os.O_RDWR | os.O_APPEND, CALLER)
        await two.files.write(handle, 1000, b"two")
        await write_at(one, b"file", 0, b"new")
        await quiet(one)
        await two.files.release(handle)
        await quiet(two, one)
        assert next(merges) > 1
        assert await get(one, b"file") == await get(two, b"file") == b"new" + data[3:] + b"one" + b"two"


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
async def test_appends_of_all_hosts_are_there_once(
    rng: random.Random, autojump_clock: trio.testing.MockClock, strict: bool
) -> None:
    async with hosts(rng, 2, strict=strict, capacity=32 * MIB, chunk=4096) as (one, two):
        await put(one, b"log", b"")
        await quiet(one, two)

        async def append(volume: Volume, title: bytes) -> None:
            for number in range(20):
                line = b"%s %d %s\n" % (title, number, b"x" * rng.choice([1, 500, 5000]))
                node = await volume.tree.lookup(ROOT_INODE, b"log")
                handle = await volume.files.open(node.ino, os.O_WRONLY | os.O_APPEND, CALLER)
                await volume.files.write(handle, node.size, line)  # as the kernel does, by the size it knows
                lines.add(line)
                await volume.files.fsync(handle)
                await volume.files.release(handle)
                volume.tree.forget(node.ino, 1)

        lines: set[bytes] = set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(append, one, b"one")
            nursery.start_soon(append, two, b"two")
        await quiet(one, two)
        for volume in (one, two):
            found = await get(volume, b"log")
            assert found is not None
            assert Counter(found.splitlines(keepends=True)) == Counter(lines)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
@pytest.mark.parametrize("run", range(5))
async def test_appends_that_were_taken_are_there_once_where_engines_fail(
    rng: random.Random, autojump_clock: trio.testing.MockClock, run: int, strict: bool
) -> None:
    """Of those that failed a part may be there, or all of it, but once."""
    taken: set[bytes] = set()
    failed: set[bytes] = set()
    chaos = [Chaos(random.Random(rng.random()), delay=0.5) for _ in range(3)]

    async def append(volume: Volume, title: bytes) -> None:
        node = await volume.tree.lookup(ROOT_INODE, b"log")
        handle = await volume.files.open(node.ino, os.O_WRONLY | os.O_APPEND, CALLER)
        for number in range(20):
            line = b"%s %d %s\n" % (title, number, b"x" * rng.choice([1, 500, 5000]))
            try:
                await volume.files.write(handle, (await volume.inodes.attributes(node.ino)).size, line)
                taken.add(line)
                if rng.random() < 0.5:
                    await volume.files.fsync(handle)
            except errors.EngineError:
                failed.add(line)
            await trio.sleep(rng.random() * 0.1)
        await volume.files.release(handle)

    async with hosts(rng, 3, chaos, strict=strict, capacity=32 * MIB, chunk=4096) as all_volumes:
        await put(all_volumes[0], b"log", b"")
        await quiet(*all_volumes)
        for one in chaos:
            one.commit_error = one.write_error = one.read_error = 0.1
        async with trio.open_nursery() as nursery:
            for volume, title in zip(all_volumes, (b"one", b"two", b"three"), strict=True):
                nursery.start_soon(append, volume, title)
        for one in chaos:
            one.commit_error = one.write_error = one.read_error = 0.0
        await quiet(*all_volumes)
        await quiet(*all_volumes)
        for volume in all_volumes:
            found = await get(volume, b"log") or b""
            assert [line for line in taken if found.count(line) != 1] == []
            assert [line for line in failed - taken if found.count(line) > 1] == []


@pytest.mark.parametrize("size", [100, CHUNK + 100, 2 * CHUNK, 40 * CHUNK + 100, 40 * CHUNK - 150])
@pytest.mark.parametrize("failing", range(4))
async def test_an_append_outlasts_reads_that_fail_while_it_is_moved_behind_another(
    rng: random.Random,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    failing: int,
) -> None:
    """``size``: of the file before. ``failing``: which read of the commit does."""
    data, numbers = rng.randbytes(size), count()
    async with hosts(rng, 2, strict=False, capacity=16 * MIB, chunk=CHUNK) as (one, two):
        await put(one, b"file", data)
        await quiet(one, two)
        handle = await two.files.open((await two.tree.lookup(ROOT_INODE, b"file")).ino, os.O_RDWR | os.O_APPEND, CALLER)
        await two.files.write(handle, size, b"two" * 50)
        await write_at(one, b"file", size, b"one" * 50, os.O_RDWR | os.O_APPEND)
        read = inside.segments(two).read

        async def read_or_fail(batch: Sequence[Transfer]) -> None:
            if next(numbers) == failing:
                raise errors.EngineError("injected: a read")
            await read(batch)

        with monkeypatch.context() as during, suppress(errors.EngineError):
            during.setattr(inside.segments(two), "read", read_or_fail)
            await two.files.fsync(handle)
        await two.files.release(handle)
        await quiet(two, one)
        for volume in (one, two):
            assert await get(volume, b"file") == data + b"one" * 50 + b"two" * 50


@pytest.mark.parametrize("how", ["write", "write behind", "append"])
async def test_who_syncs_is_told_of_changes_that_there_was_no_room_to_put_together(
    rng: random.Random, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    data = rng.randbytes(CHUNK // 2)
    flags = os.O_RDWR | os.O_APPEND if how == "append" else os.O_RDWR
    offset = 0 if how == "write" else len(data)
    async with hosts(rng, 2, strict=False, capacity=16 * MIB, chunk=CHUNK) as (one, two):
        await put(one, b"file", data)
        await quiet(one, two)
        handle = await two.files.open((await two.tree.lookup(ROOT_INODE, b"file")).ino, flags, CALLER)
        await two.files.write(handle, offset, b"lost" * 50)
        theirs = len(data) if how == "append" else 1000
        await write_at(one, b"file", theirs, b"one" * 50, flags)

        def allocate(length: int, owner: int) -> None:
            raise errors.NoSpace(f"injected: no {length} bytes")

        with monkeypatch.context() as during, pytest.raises(errors.NoSpace, match="changes of two hosts"):
            during.setattr(inside.slabs(two), "allocate", allocate)
            await two.files.fsync(handle)
        await two.files.fsync(handle)
        await two.files.release(handle)
        await quiet(two, one)
        for volume in (one, two):
            assert await get(volume, b"file") == data[:theirs] + b"one" * 50 + data[theirs + 150 :]
