"""Names that are answered without a question are checked before they count: also while no watch tells anything."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import inside
import pytest
import trio
import trio.testing
from shared_lab import exists, hosts, look, make, names_in, open_path, quiet, read, volumes
from volume_lab import CALLER, Chaos, Disk, lab_options

from kvfuse import errors
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.path_beliefs import BELIEF_SECONDS, CONTESTED_SECONDS
from kvfuse.volume.volume import Volume

WRITERS = 8


@asynccontextmanager
async def one_deaf(rng: random.Random) -> AsyncIterator[tuple[Volume, Volume]]:
    """Two clients of one strict volume, the first of which hears of nothing that the other changes.

    At the end it hears of everything, and the volume must be clean.
    """
    options = lab_options(strict=True, capacity=64 << 20)
    disk = Disk.format(options, shared=True)
    chaos = [Chaos(random.Random(rng.random()), delay=0.5) for _ in range(2)]
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        await trio.testing.wait_all_tasks_blocked()
        chaos[0].deaf = trio.Event()
        try:
            yield one, two
        finally:
            chaos[0].deaf.set()


async def write(volume: Volume, parent: int, name: bytes, data: bytes) -> Node:
    """A new file, closed."""
    handle, node = await volume.tree.create(parent, name, 0o644, CALLER, os.O_WRONLY | os.O_EXCL)
    await volume.files.write(handle, 0, data)
    await volume.files.flush(handle)
    await volume.files.release(handle)
    return node


async def store(volume: Volume, parent: int, name: bytes, data: bytes) -> None:
    """A block as engines store it, with what the kernel asks for it."""
    assert not await exists(volume, name + b".part", parent)
    await write(volume, parent, name + b".part", data)
    await volume.tree.lookup(parent, name + b".part")
    assert not await exists(volume, name, parent)
    await volume.tree.rename(parent, name + b".part", parent, name, 0)


@pytest.mark.parametrize("writer_count", [1, WRITERS])
async def test_what_a_block_costs(
    rng: random.Random, autojump_clock: trio.testing.MockClock, writer_count: int
) -> None:
    """Two questions, as two names are absent, and three commits; those of several writers are shared."""
    options = lab_options(strict=True, capacity=64 << 20)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 1, rng, [Chaos(random.Random(rng.random()), delay=1.0)]) as (volume,):
        folder = (await volume.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        await store(volume, folder, b"first", b"bytes")
        await quiet(volume)  # a client that begins asks for more than names
        counters = inside.records(volume).counters
        before = (counters.gets, counters.commits)

        async def store_some(writer: int) -> None:
            for number in range(80 // writer_count):
                await store(volume, folder, b"%d-%d" % (writer, number), rng.randbytes(10_000))

        async with trio.open_nursery() as nursery:
            for writer in range(writer_count):
                nursery.start_soon(store_some, writer)
        gets, commits = (counters.gets - before[0]) / 80, (counters.commits - before[1]) / 80
        assert gets <= (2.0 if writer_count == 1 else 1.5)
        assert commits <= (3.4 if writer_count == 1 else 1.2)  # a directory's times go now and then


async def test_a_file_of_ours_that_another_host_replaced(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with one_deaf(rng) as (one, two):
        for number in range(10):
            name = b"file-%d" % number
            mine = await write(one, ROOT_INODE, name, b"ours")
            assert one.inodes.may_keep_attributes((await look(one, name)).ino)
            await write(two, ROOT_INODE, b"other", b"theirs, longer")
            await two.tree.rename(ROOT_INODE, b"other", ROOT_INODE, name, 0)
            if number % 2:
                assert await read(one, name) == b"theirs, longer"
            found = await look(one, name)
            assert (found.size, found.ino != mine.ino) == (14, True)


async def test_a_file_of_ours_that_another_host_changed(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with one_deaf(rng) as (one, two):
        await write(one, ROOT_INODE, b"file", b"ours")
        handle = await two.files.open(
            (await two.tree.lookup(ROOT_INODE, b"file")).ino, os.O_WRONLY | os.O_TRUNC, CALLER
        )
        await two.files.write(handle, 0, b"theirs, longer")
        await two.files.flush(handle)
        await two.files.release(handle)
        assert (await look(one, b"file")).size == 14
        assert await read(one, b"file") == b"theirs, longer"
        await one.tree.link((await look(one, b"file")).ino, ROOT_INODE, b"link")
        assert (await look(two, b"file")).nlink == 2
        await two.inodes.set_attributes((await look(two, b"file")).ino, Changes(mode=0o600), CALLER)
        assert (await look(one, b"link")).mode & 0o777 == 0o600


async def test_a_directory_above_that_another_host_renamed(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with one_deaf(rng) as (one, two):
        above = (await one.tree.make_directory(ROOT_INODE, b"above", 0o755, CALLER)).ino
        folder = (await one.tree.make_directory(above, b"folder", 0o755, CALLER)).ino
        await write(one, folder, b"file", b"before")
        for number in range(5):
            assert await read(one, b"above", b"folder", b"file") == b"before"
            await two.tree.rename(ROOT_INODE, b"above", ROOT_INODE, b"away", 0)
            with pytest.raises(errors.NotFound):
                await read(one, b"above", b"folder", b"file")
            assert await read(one, b"away", b"folder", b"file") == b"before"
            made = (await two.tree.make_directory(ROOT_INODE, b"above", 0o755, CALLER)).ino
            inner = (await two.tree.make_directory(made, b"folder", 0o755, CALLER)).ino
            await write(two, inner, b"file", b"after")
            assert await read(one, b"above", b"folder", b"file") == b"after", number
            await two.tree.unlink(inner, b"file")
            await two.tree.remove_directory(made, b"folder")
            await two.tree.remove_directory(ROOT_INODE, b"above")
            await two.tree.rename(ROOT_INODE, b"away", ROOT_INODE, b"above", 0)


async def test_nothing_is_removed_or_renamed_by_a_path_that_leads_elsewhere(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """By a descriptor of the directory it is, at the second attempt: so the kernel asks then."""
    async with one_deaf(rng) as (one, two):
        folder = (await one.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        inner = (await one.tree.make_directory(folder, b"inner", 0o755, CALLER)).ino
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: one.tree.unlink(folder, b"file"),
            lambda: one.tree.rename(folder, b"other", folder, b"renamed", 0),
            lambda: one.tree.remove_directory(folder, b"inner"),
            lambda: one.tree.open_directory(folder),
        ]
        for name in (b"file", b"other"):
            await write(one, folder, name, b"bytes")
        for number, call in enumerate(calls):
            here, there = [b"folder", b"away"][:: 1 - 2 * (number % 2)]
            await look(one, here)
            await two.tree.rename(ROOT_INODE, here, ROOT_INODE, there, 0)
            before = await names_in(two, folder)
            with pytest.raises(errors.Stale):
                await call()
            assert await names_in(two, folder) == before
            await call()
        assert await names_in(two, folder) == [b"renamed"]
        assert inner != folder


async def test_a_directory_that_was_renamed_elsewhere_is_believed_by_nobody(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with one_deaf(rng) as (one, two):
        await one.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)
        for _ in range(5):
            await look(one, b"folder")
            await two.tree.rename(ROOT_INODE, b"folder", ROOT_INODE, b"away", 0)
            assert not await exists(one, b"folder")
            assert await exists(one, b"away")
            await two.tree.rename(ROOT_INODE, b"away", ROOT_INODE, b"folder", 0)


class HardOfHearing(Chaos):
    """A client that hears of each change some time after the one before."""

    async def wait_if_unheard(self) -> None:
        await trio.sleep(self.random.choice((0, 0, 0.05)) * self.random.random())


async def questions(volume: Volume, name: bytes) -> int:
    """How many a look for a name takes."""
    counters = inside.records(volume).counters
    before = counters.gets
    await volume.tree.lookup(ROOT_INODE, name)
    return counters.gets - before


async def test_a_commit_of_ours_says_nothing_about_other_names(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Neither when the watch tells of it: changes of different directories come in any order."""
    options = lab_options(strict=True)
    async with volumes(Disk.format(options, shared=True), options, 1, rng, [Chaos(rng)]) as (volume,):
        await volume.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)
        await quiet(volume)
        assert await questions(volume, b"folder") == 1
        assert await questions(volume, b"folder") == 0
        await trio.sleep(BELIEF_SECONDS)
        await write(volume, ROOT_INODE, b"file", b"bytes")
        await trio.testing.wait_all_tasks_blocked()
        assert await questions(volume, b"folder") == 1


async def test_what_is_renamed_while_we_commit_is_believed_by_nobody(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Commits of ours are told all the time, before and after the one that renames, and told some time after."""
    options = lab_options(strict=True, capacity=64 << 20)
    disk = Disk.format(options, shared=True)
    slow = [kind(random.Random(rng.random()), delay=0.02) for kind in (HardOfHearing, Chaos)]
    async with volumes(disk, options, 2, rng, slow) as (one, two):
        names = [b"folder-%d" % number for number in range(50)]
        folder = (await one.tree.make_directory(ROOT_INODE, names[0], 0o755, CALLER)).ino

        async def write_on() -> None:
            while True:
                await write(one, ROOT_INODE, b"file", b"bytes")
                await one.tree.unlink(ROOT_INODE, b"file")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write_on)
            for here, there in pairwise(names):
                for _ in range(5):
                    await look(one, here)
                    await trio.sleep(0.01 * rng.random())
                await two.tree.rename(ROOT_INODE, here, ROOT_INODE, there, 0)
                assert not await exists(one, here)
                assert (await look(one, there)).ino == folder
            nursery.cancel_scope.cancel()


async def test_an_open_file_goes_with_its_inode(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    async with one_deaf(rng) as (one, two):
        mine = await write(one, ROOT_INODE, b"file", b"ours")
        handle = await open_path(one, b"file")
        await write(two, ROOT_INODE, b"other", b"theirs, longer")
        await two.tree.rename(ROOT_INODE, b"other", ROOT_INODE, b"file", 0)
        assert (await one.inodes.attributes(mine.ino)).size == 4
        assert bytes(await one.files.read(handle, 0, 100)) == b"ours"
        assert (await look(one, b"file")).size == 14
        assert (await one.inodes.attributes(mine.ino)).ino == mine.ino
        await one.files.release(handle)


async def test_of_a_name_that_hosts_contend_for_nothing_is_believed(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """The kernel walks a path twice at most: the second walk must not believe what the first one did."""
    async with one_deaf(rng) as (one, two):

        async def replace(volume: Volume, data: bytes) -> None:
            await write(volume, ROOT_INODE, b"temporary", data)
            await volume.tree.rename(ROOT_INODE, b"temporary", ROOT_INODE, b"name", 0)

        await replace(one, b"1")
        await look(one, b"name")
        await replace(two, b"22")
        ino = (await one.tree.lookup(ROOT_INODE, b"name")).ino
        with pytest.raises(errors.Stale):
            await one.inodes.attributes(ino)
        await replace(one, b"333")
        await replace(two, b"4444")
        assert (await one.tree.lookup(ROOT_INODE, b"name")).size == 4
        await trio.sleep(CONTESTED_SECONDS)
        await replace(one, b"55555")
        assert not one.inodes.may_keep_attributes((await one.tree.lookup(ROOT_INODE, b"name")).ino)


async def test_nothing_stays_of_a_directory_that_another_host_removed(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Its times were still to be stored here: a record of them would belong to nobody."""
    async with one_deaf(rng) as (one, two):
        for number in range(5):
            name = b"folder-%d" % number
            folder = (await one.tree.make_directory(ROOT_INODE, name, 0o755, CALLER)).ino
            await write(one, folder, b"file", b"bytes")
            await one.tree.unlink(folder, b"file")
            await two.tree.remove_directory(ROOT_INODE, name)
            await one.sync()
        await write(one, ROOT_INODE, b"file", b"bytes")
        assert await read(two, b"file") == b"bytes"


async def test_a_path_may_be_longer_than_a_commit(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    """What is at its end is made, moved and removed, at each depth, and not by a name that another host took away."""
    async with hosts(rng, 2, strict=True) as (one, two):
        path = [ROOT_INODE]
        for _ in range(140):
            path.append((await one.tree.make_directory(path[-1], b"folder", 0o755, CALLER)).ino)
        for folder in path:
            await two.tree.lookup(folder, b"folder") if folder != path[-1] else None
        await make(two, b"file", path[-1])
        await two.tree.rename(path[-1], b"file", path[-1], b"other", 0)
        with pytest.raises(errors.TooDeep):
            await two.tree.make_directory(ROOT_INODE, b"deep", 0o755, CALLER)
            await two.tree.rename(ROOT_INODE, b"deep", path[-1], b"deep", 0)
        await one.tree.rename(ROOT_INODE, b"folder", ROOT_INODE, b"moved", 0)
        with pytest.raises(errors.Stale):
            await two.tree.unlink(path[-1], b"other")
        await two.tree.lookup(ROOT_INODE, b"moved")
        await two.tree.unlink(path[-1], b"other")
        for folder in reversed(path[1:-1]):
            await two.tree.remove_directory(folder, b"folder")
        await two.tree.remove_directory(ROOT_INODE, b"moved")
        await quiet(one, two)
        assert await names_in(one, ROOT_INODE) == [b"deep"]
