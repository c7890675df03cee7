"""Files and blocks share one room: blocks go where a file needs it, and together they never exceed a limit."""

from __future__ import annotations

import os
import random

import inside
import numpy as np
import pytest
import trio
import trio.testing
from namespace_lab import make_namespace
from volume_lab import CALLER, MIB, Chaos, Disk, lab_options, opened

from kvfuse.errors import NoSpace, QuotaExceeded
from kvfuse.native.blockforms import name_columns
from kvfuse.options.config import Options
from kvfuse.volume.api import ROOT_INODE, RowTerms
from kvfuse.volume.blocks import block_eviction
from kvfuse.volume.blocks.block_engine import BlockEngine
from kvfuse.volume.blocks.block_tables import BlockTable
from kvfuse.volume.volume import Volume

BLOCK = 64 << 10


@pytest.fixture
def options() -> Options:
    return lab_options(capacity=24 * MIB, tier_size=8 * MIB, staging_size=8 * MIB)


def engine_of(volume: Volume) -> BlockEngine:
    engine = volume.rows
    assert isinstance(engine, BlockEngine)
    return engine


async def fill(engine: BlockEngine, table: BlockTable, count: int) -> None:
    for number in range(count):
        await engine.put(
            table, [b"block-%d" % number], [memoryview(random.Random(number).randbytes(BLOCK))], RowTerms()
        )


async def write_file(volume: Volume, directory: int, name: bytes, data: bytes) -> None:
    """An ordinary file, also where files become blocks."""
    node = await volume.tree.make_node(directory, name, 0o100644, 0, CALLER)
    handle = await volume.files.open(node.ino, os.O_WRONLY, CALLER)
    try:
        await volume.files.write(handle, 0, data)
        await volume.files.fsync(handle)
    finally:
        await volume.files.release(handle)


async def test_a_file_gets_the_slabs_of_blocks(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        directory = await make_namespace(volume, ROOT_INODE, b"kv", kind="blocks", admission="all")
        engine = engine_of(volume)
        table = engine.table(directory, directory, 0, 0, 0o644)
        await fill(engine, table, 2 * 24 * MIB // BLOCK)
        assert volume.space().free < 4 * MIB, "it is full of blocks"
        data = random.Random(1).randbytes(MIB)
        for number in range(18):
            await write_file(volume, ROOT_INODE, b"file-%d" % number, data)
        with pytest.raises(NoSpace):
            for number in range(18, 30):
                await write_file(volume, ROOT_INODE, b"file-%d" % number, data)


@pytest.mark.parametrize("by", ["policy", "slabs"])
async def test_a_file_that_was_closed_stays_until_it_has_its_name(
    disk: Disk, options: Options, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines write a file, close it, and rename it: it goes in between only where nothing else is left."""
    monkeypatch.setattr(block_eviction, "FRESH_SECONDS", 60.0)
    async with opened(disk, options) as volume:
        directory = await make_namespace(volume, ROOT_INODE, b"kv", kind="blocks", admission="all", eviction="lfu")
        engine = engine_of(volume)
        await fill(engine, table := engine.table(directory, directory, 0, 0, 0o644), 100)
        for _ in range(3):
            engine.eviction.note_use(table, np.arange(100))

        async def close_file(name: bytes, size: int) -> None:
            handle, node = await volume.tree.create(directory, name, 0o644, CALLER, os.O_WRONLY)
            await volume.files.write(handle, 0, name * size)
            await volume.files.release(handle)
            volume.tree.forget(node.ino, 1)

        await close_file(b"temporary", 1000)
        await close_file(b"other", 1000)
        for _ in range(3):
            assert engine.eviction.make_room_in(directory, BLOCK) if by == "policy" else engine.eviction.empty_slabs()
        await volume.tree.rename(directory, b"temporary", directory, b"name", 0)
        found = engine.find(directory, b"name")
        assert found is not None
        assert bytes(await engine.read(found[0], b"name") or b"") == b"temporary" * 1000
        while engine.eviction.make_room_in(directory, 24 * MIB) if by == "policy" else engine.eviction.empty_slabs():
            pass
        assert engine.use(directory) == (0, 0)


@pytest.mark.parametrize("quota", ["capacity", "blocks"])
async def test_files_and_blocks_share_a_quota(disk: Disk, options: Options, quota: str) -> None:
    limits = {"capacity": "4MiB"} if quota == "capacity" else {"blocks": "40"}
    async with opened(disk, options) as volume:
        directory = await make_namespace(volume, ROOT_INODE, b"kv", kind="blocks", admission="all", **limits)
        engine, accounts = engine_of(volume), inside.namespaces(volume).accounts
        table = engine.table(directory, directory, 0, 0, 0o644)
        is_over = False

        def check_sum() -> None:
            (size, count), files = engine.use(directory), accounts.use(directory)
            assert size + files.size <= 4 * MIB or quota == "blocks"
            assert count + files.files <= 40 or quota == "capacity"

        async def watch() -> None:
            while not is_over:
                check_sum()
                await trio.lowlevel.checkpoint()

        async def store_files() -> None:
            nonlocal is_over
            stored = 0
            with pytest.raises(QuotaExceeded):
                while True:
                    await write_file(volume, directory, b"file-%d" % stored, bytes(256 << 10))
                    stored += 1
            assert stored >= (15 if quota == "capacity" else 36), "of 16 and 40: puts take some of what became free"
            is_over = True

        await fill(engine, table, 100)
        assert engine.use(directory)[1] > 20
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            nursery.start_soon(store_files)
            number = 1000
            while not is_over:
                number += 1
                try:
                    await engine.put(table, [b"more-%d" % number], [memoryview(bytes(BLOCK))], RowTerms())
                except QuotaExceeded:
                    assert accounts.use(directory).files > 1
                check_sum()
                await trio.lowlevel.checkpoint()


async def test_a_block_comes_ahead_of_need_where_all_memory_is_in_use(disk: Disk, options: Options) -> None:
    """Memory of folders that are not used goes to the one whose blocks are prefetched."""
    async with opened(disk, options) as volume:
        engine = engine_of(volume)
        directory = await make_namespace(volume, ROOT_INODE, b"kv", kind="blocks", admission="all")
        modes = range(0o600, 0o600 + 16)  # a table each
        tables = [engine.table(directory, directory, 0, 0, mode) for mode in modes]
        for number, table in enumerate(tables):
            await engine.put(table, [b"%d" % number], [memoryview(random.Random(number).randbytes(BLOCK))], RowTerms())
        await engine.writer.flush()
        was_here = []
        for number, table in enumerate(tables):
            rows, sequences = table.find([b"%d" % number], 0)
            was_here.append(bool(table.rows["arena"][rows[0]]))
            for _ in range(2):  # one that is there is there
                assert (await engine.fetch(table, [b"%d" % number], rows, sequences, is_ahead=True)).tolist() == [1]
        assert not all(was_here)


async def test_memory_whose_making_was_cut_short_is_given_back(disk: Disk, options: Options) -> None:
    """As where a host lost its lease just then."""
    async with opened(disk, options) as volume:
        engine = engine_of(volume)
        with trio.CancelScope() as scope:
            scope.cancel()
            await engine.arenas.keep_spares()
        assert scope.cancelled_caught
        engine.arenas.leave()
        assert engine.arenas.size == 0


async def test_a_slow_medium_does_not_empty_the_volume(chaos: Chaos) -> None:
    """Slots of blocks that went while they were written are free later: until then no others go in their place."""
    options = lab_options(capacity=24 * MIB, tier_size=64 * MIB, staging_size=8 * MIB)
    async with opened(Disk.format(options), options, chaos) as volume:
        waters = {"high_water": "0.9", "low_water": "0.8"}
        directory = await make_namespace(
            volume, ROOT_INODE, b"kv", kind="blocks", admission="all", eviction="lru", **waters
        )
        engine = engine_of(volume)
        table = engine.table(directory, directory, 0, 0, 0o644)
        await fill(engine, table, 2 * 24 * MIB // BLOCK)
        await engine.writer.flush()
        before, names = engine.native.statistics()["blocks"], [b"new-%d" % number for number in range(400)]
        chaos.stalled_writes = stalled = trio.Event()

        async def put_more() -> None:
            for name in names:
                await engine.put(table, [name], [memoryview(name * (BLOCK // len(name)))], RowTerms())

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(put_more)
                for _ in range(300):
                    engine.eviction.look()
                    await trio.testing.wait_all_tasks_blocked(0.001)
                count, chaos.stalled_writes = engine.native.statistics()["blocks"], None
                stalled.set()
        assert count > 0.7 * before
        assert engine.has(directory, name_columns(names))[-100:].all()
