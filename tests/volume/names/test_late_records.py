"""Answers of the store that come after the watch has told of something newer: what is known never goes back to them."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import inside
import pytest
import trio
import trio.testing
from shared_lab import exists, hosts, make, put, quiet, read
from volume_lab import CALLER, Chaos, Delay

from kvfuse import errors
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume


@asynccontextmanager
async def two_hosts(rng: random.Random, *, strict: bool) -> AsyncIterator[tuple[Volume, Volume, Chaos]]:
    """Both, and how the engines behave for the first. They take no time: what is believed for a moment is believed."""
    chaos = [Chaos(random.Random(rng.random())) for _ in range(2)]
    async with hosts(rng, 2, chaos, strict=strict, capacity=64 << 20) as (one, two):
        await quiet(one, two)
        yield one, two, chaos[0]


async def meanwhile(
    chaos: Chaos, prefix: bytes, ask: Callable[[], Awaitable[object]], change: Callable[[], Awaitable[object]]
) -> None:
    """Host one asks, and ``change``, by the other, is told before the answer comes, which knows nothing of it.

    ``prefix``: of keys that the answer is about.
    """
    chaos.late = late = Delay(prefix)

    async def asking() -> None:
        try:
            await ask()
        except (errors.NotFound, errors.Stale):
            pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(asking)
        await late.given.wait()
        await change()
        await trio.sleep(1)  # the watch tells it
        late.arrives.set()


async def remove(volume: Volume, name: bytes) -> None:
    await volume.tree.lookup(ROOT_INODE, name)
    await volume.tree.unlink(ROOT_INODE, name)
    await volume.sync()


async def have_to_ask(volume: Volume, name: bytes) -> None:
    """All names of the folder are known, but not what this one means."""
    assert not await exists(volume, b"absent")
    inside.dentries(volume).forget(ROOT_INODE, name)


async def commit_something(volume: Volume, number: int = 0) -> None:
    """Then everything that others committed before is known here, as the watch tells of it."""
    await make(volume, b"something-%d" % number)
    await trio.testing.wait_all_tasks_blocked()


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
async def test_a_removed_file_does_not_come_back(
    rng: random.Random, autojump_clock: trio.testing.MockClock, strict: bool
) -> None:
    async with two_hosts(rng, strict=strict) as (one, two, chaos):
        await put(two, b"file", b"bytes")
        await quiet(two)
        await have_to_ask(one, b"file")
        await meanwhile(
            chaos,
            schema.entry_key(ROOT_INODE, b"file"),
            lambda: one.tree.lookup(ROOT_INODE, b"file"),
            lambda: remove(two, b"file"),
        )
        assert not await exists(one, b"file")


async def look_for_folder_while(
    one: Volume, chaos: Chaos, folder: int, change: Callable[[], Awaitable[object]]
) -> None:
    await meanwhile(chaos, schema.inode_key(folder), lambda: one.tree.lookup(ROOT_INODE, b"folder"), change)


async def test_a_removed_directory_does_not_come_back(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with two_hosts(rng, strict=True) as (one, two, chaos):
        folder = (await two.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        await look_for_folder_while(one, chaos, folder, lambda: two.tree.remove_directory(ROOT_INODE, b"folder"))
        for number in range(3):
            await commit_something(one, number)
            assert not await exists(one, b"folder")


async def test_who_may_use_a_directory_is_not_forgotten(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with two_hosts(rng, strict=True) as (one, two, chaos):
        folder = (await two.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        change = Changes(mode=0o700)
        await look_for_folder_while(one, chaos, folder, lambda: two.inodes.set_attributes(folder, change, CALLER))
        for number in range(3):
            await commit_something(one, number)
            assert (await one.tree.lookup(ROOT_INODE, b"folder")).mode & 0o777 == 0o700


async def test_a_file_with_two_names_has_its_newer_content(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with two_hosts(rng, strict=False) as (one, two, chaos):
        await put(two, b"file", b"old")
        ino = (await two.tree.lookup(ROOT_INODE, b"file")).ino
        await two.tree.link(ino, ROOT_INODE, b"link")
        await quiet(two)
        await have_to_ask(one, b"file")

        async def replace() -> None:
            handle = await two.files.open(ino, os.O_WRONLY | os.O_TRUNC, CALLER)
            await two.files.write(handle, 0, b"the newer")
            await two.files.flush(handle)
            await two.files.release(handle)
            await two.sync()

        await meanwhile(chaos, schema.inode_key(ino), lambda: one.tree.lookup(ROOT_INODE, b"file"), replace)
        assert await read(one, b"file") == b"the newer"
