"""What one host synced in a relaxed folder is what another host opens next, however late its watch is."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import inside
import pytest
import trio
import trio.testing
from shared_lab import hosts, quiet
from volume_lab import CALLER, Chaos

from kvfuse import errors
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.names import synced
from kvfuse.volume.volume import Volume


@asynccontextmanager
async def a_deaf_reader(rng: random.Random) -> AsyncIterator[tuple[Volume, Volume, Chaos]]:
    """(writer, reader, how the reader is): a relaxed volume of which both know the file ``old``."""
    chaos = [Chaos(rng), Chaos(rng)]
    async with hosts(rng, 2, chaos) as (writer, reader):
        await put(writer, b"old", b"before")
        await quiet(reader)
        assert await content(reader, b"old") == b"before"
        yield writer, reader, chaos[1]
        if chaos[1].deaf is not None:
            chaos[1].deaf.set()


async def put(volume: Volume, name: bytes, data: bytes, flags: int = 0) -> None:
    """Write a file anew, and sync it."""
    handle, node = await volume.tree.create(ROOT_INODE, name, 0o644, CALLER, os.O_WRONLY | flags)
    try:
        await volume.files.write(handle, 0, data)
        await volume.files.fsync(handle)
    finally:
        await volume.files.release(handle)
        volume.tree.forget(node.ino, 1)


async def rewrite(volume: Volume, ino: int, data: bytes) -> None:
    handle = await volume.files.open(ino, os.O_WRONLY | os.O_TRUNC, CALLER)
    try:
        await volume.files.write(handle, 0, data)
        await volume.files.fsync(handle)
    finally:
        await volume.files.release(handle)


async def read(volume: Volume, ino: int) -> bytes:
    handle = await volume.files.open(ino, os.O_RDONLY, CALLER)
    try:
        return bytes(await volume.files.read(handle, 0, 100))
    finally:
        await volume.files.release(handle)


async def content(volume: Volume, name: bytes) -> bytes:
    """As a path call of the kernel: when what it knew is gone it looks again, once."""
    for attempt in range(2):
        node = await volume.tree.lookup(ROOT_INODE, name)
        try:
            return await read(volume, node.ino)
        except errors.Stale:
            if attempt:
                raise
    raise AssertionError


async def test_a_file_that_was_written_in_place(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    """By its name, and by an inode that the kernel has of before."""
    async with a_deaf_reader(rng) as (writer, reader, chaos):
        ino = (await reader.tree.lookup(ROOT_INODE, b"old")).ino
        chaos.deaf = trio.Event()
        for number in range(3):
            await rewrite(writer, ino, b"after %d" % number)
            assert await read(reader, ino) == b"after %d" % number
            assert await content(reader, b"old") == b"after %d" % number


async def test_a_file_that_is_new(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    async with a_deaf_reader(rng) as (writer, reader, chaos):
        with pytest.raises(errors.NotFound):
            await reader.tree.lookup(ROOT_INODE, b"new")
        chaos.deaf = trio.Event()
        await put(writer, b"new", b"here")
        assert await content(reader, b"new") == b"here"


async def test_a_file_that_took_the_place_of_another(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """As programs do that make sure: the bytes, the new name, and the folder."""
    async with a_deaf_reader(rng) as (writer, reader, chaos):
        ino = (await reader.tree.lookup(ROOT_INODE, b"old")).ino
        chaos.deaf = trio.Event()
        await put(writer, b"tmp", b"after")
        await writer.tree.rename(ROOT_INODE, b"tmp", ROOT_INODE, b"old", 0)
        await writer.inodes.fsync_directory(ROOT_INODE)
        with pytest.raises(errors.Stale):  # the kernel still has the name; it looks anew then
            await read(reader, ino)
        assert await content(reader, b"old") == b"after"


async def test_a_file_that_was_removed(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    async with a_deaf_reader(rng) as (writer, reader, chaos):
        chaos.deaf = trio.Event()
        await writer.tree.unlink(ROOT_INODE, b"old")
        await writer.inodes.fsync_directory(ROOT_INODE)
        with pytest.raises(errors.NotFound):
            await content(reader, b"old")


async def test_what_is_changed_here_is_opened_as_it_is_here(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """A file that this host has not stored yet, and one that it is writing."""
    async with a_deaf_reader(rng) as (writer, reader, chaos):
        ino = (await reader.tree.lookup(ROOT_INODE, b"old")).ino
        handle, new = await reader.tree.create(ROOT_INODE, b"own", 0o644, CALLER, os.O_RDWR)
        await reader.files.write(handle, 0, b"own")
        writing = await reader.files.open(ino, os.O_RDWR, CALLER)
        await reader.files.write(writing, 0, b"BEFORE")
        chaos.deaf = trio.Event()
        await put(writer, b"other", b"other")
        assert await read(reader, new.ino) == b"own"
        assert await read(reader, ino) == b"BEFORE"
        for one in (handle, writing):
            await reader.files.release(one)
        chaos.deaf.set()


async def test_opens_share_their_question(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    """One for all opens within a moment, and none where there is one host."""
    async with a_deaf_reader(rng) as (_, reader, _):
        ino = (await reader.tree.lookup(ROOT_INODE, b"old")).ino
        await trio.sleep(2 * synced.SURE_SECONDS)
        asked = inside.records(reader).counters.gets
        for _ in range(100):
            await read(reader, ino)
        assert inside.records(reader).counters.gets - asked == 1
        await trio.sleep(2 * synced.SURE_SECONDS)
        await read(reader, ino)
        assert inside.records(reader).counters.gets - asked == 2
    async with hosts(rng, 1, [Chaos(rng)]) as (alone,):
        await put(alone, b"old", b"before")
        ino = (await alone.tree.lookup(ROOT_INODE, b"old")).ino
        await trio.sleep(1)
        asked, began = inside.records(alone).counters.gets, trio.current_time()
        await read(alone, ino)
        await rewrite(alone, ino, b"after")
        assert inside.records(alone).counters.gets == asked
        assert trio.current_time() == began


async def test_an_open_does_not_wait_for_a_store_that_is_away(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """It opens what is known here, a second later at most."""
    async with a_deaf_reader(rng) as (_, reader, chaos):
        ino = (await reader.tree.lookup(ROOT_INODE, b"old")).ino
        await trio.sleep(2 * synced.SURE_SECONDS)
        chaos.cut = trio.Event()
        for seconds in (synced.ASK_SECONDS, 0):
            began = trio.current_time()
            handle = await reader.files.open(ino, os.O_RDONLY, CALLER)
            assert trio.current_time() - began == pytest.approx(seconds)
            await reader.files.release(handle)
        chaos.cut.set()
