"""Commits keep to what the record store allows; what does not fit goes in the next one, a crash between them is clean.

The engine of these tests refuses what is larger than its limits, and the disk is copied between any two commits.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import inside
import pytest
import trio
import trio.testing
from publishing_lab import read_file, write_file
from volume_lab import CALLER, MIB, SHARED_LIMITS, Chaos, Disk, check, lab_options, opened
from volume_play import CHUNK, play

from kvfuse.errors import NotFound
from kvfuse.remote.records.api import RecordLimits
from kvfuse.remote.records.lmdb.store import LIMITS
from kvfuse.volume.api import RENAME_EXCHANGE, ROOT_INODE
from kvfuse.volume.commit.batch import Batch
from kvfuse.volume.commit.committer import RESERVED_OPERATIONS
from kvfuse.volume.store import schema
from kvfuse.volume.store.schema import Counts
from kvfuse.volume.volume import Volume

TINY = replace(LIMITS, commit_operations_max=16)
SMALL = replace(LIMITS, commit_operations_max=48)
NARROW = replace(LIMITS, commit_operations_max=128, commit_bytes_max=24 << 10)


@asynccontextmanager
async def watched(limits: RecordLimits, *, capacity: int = 16 * MIB, chunk: int = 4096) -> AsyncIterator[Volume]:
    """A volume whose disk must be clean after every single commit, and is checked so at the end."""
    options = lab_options(capacity=capacity, chunk=chunk)
    disk = Disk.format(options)
    chaos = Chaos(random.Random(1))
    copies: list[Disk] = []
    disk.audit = lambda puts, deletes: copies.append(
        Disk(disk.superblock, dict(disk.records), disk.version, disk.segments)
    )
    async with opened(disk, options, chaos, limits) as volume:
        yield volume
    copies.append(disk.copy())
    for number, copy in enumerate(copies):
        report = await check(copy, verify=False)
        assert report.clean, (number, len(copies), [problem.text for problem in report.problems])
    async with opened(copies[-1], options):  # frees what was left
        pass
    report = await check(copies[-1])
    assert report.clean
    assert not [note for note in report.notes if "unlinked" in note]


@pytest.mark.parametrize("limits", [TINY, SMALL, NARROW], ids=["tiny", "small", "narrow"])
async def test_thousands_of_names_at_once(limits: RecordLimits, autojump_clock: trio.testing.MockClock) -> None:
    async with watched(limits) as volume:
        for number in range(300):
            await write_file(volume, ROOT_INODE, b"tmp", b"%d" % number * 10)
            await volume.tree.rename(ROOT_INODE, b"tmp", ROOT_INODE, b"name%d" % (number % 200), 0)
        await volume.sync()
        for number in range(200):
            await volume.tree.unlink(ROOT_INODE, b"name%d" % number)
        await volume.sync()
        assert await volume.tree.list_directory(ROOT_INODE, 0, 10) == []


@pytest.mark.parametrize("limits", [TINY, SMALL, NARROW], ids=["tiny", "small", "narrow"])
async def test_a_file_with_many_chunk_records(limits: RecordLimits, autojump_clock: trio.testing.MockClock) -> None:
    data = random.Random(2).randbytes(500 * 4096)
    async with watched(limits) as volume:
        ino = await write_file(volume, ROOT_INODE, b"big", data)
        await volume.sync()
        assert await read_file(volume, ROOT_INODE, b"big") == data
        await volume.inodes.set_xattr(ino, b"user.a", b"1")
        handle = await volume.files.open(ino, os.O_RDWR, CALLER)
        await volume.files.write(handle, 100 * 4096, data[: 200 * 4096])
        await volume.files.fsync(handle)
        await volume.files.release(handle)
        changed = data[: 100 * 4096] + data[: 200 * 4096] + data[300 * 4096 :]
        assert await read_file(volume, ROOT_INODE, b"big") == changed
        handle = await volume.files.open(ino, os.O_RDWR | os.O_TRUNC, CALLER)
        await volume.files.write(handle, 5000, b"x")
        await volume.files.release(handle)
        assert await read_file(volume, ROOT_INODE, b"big") == bytes(5000) + b"x"
        await write_file(volume, ROOT_INODE, b"other", data)
        await volume.tree.rename(ROOT_INODE, b"big", ROOT_INODE, b"other", 0)
        await volume.sync()
        await write_file(volume, ROOT_INODE, b"last", data)
        await volume.tree.unlink(ROOT_INODE, b"last")
        await volume.sync()
        with pytest.raises(NotFound):
            await volume.tree.lookup(ROOT_INODE, b"last")


@pytest.mark.parametrize("limits", [TINY, SMALL], ids=["tiny", "small"])
async def test_long_chains_of_names_that_depend_on_each_other(
    limits: RecordLimits, autojump_clock: trio.testing.MockClock
) -> None:
    async with watched(limits) as volume:
        for number in range(40):
            await write_file(volume, ROOT_INODE, b"%d" % number, b"file %d" % number)
        await volume.sync()
        await volume.tree.unlink(ROOT_INODE, b"0")
        for number in range(1, 40):  # each takes the name that the last one left
            await volume.tree.rename(ROOT_INODE, b"%d" % number, ROOT_INODE, b"%d" % (number - 1), 0)
        for number in range(38):
            await volume.tree.rename(ROOT_INODE, b"%d" % number, ROOT_INODE, b"%d" % (number + 1), RENAME_EXCHANGE)
        for number in range(38):
            assert await read_file(volume, ROOT_INODE, b"%d" % number) == b"file %d" % (number + 2)
        assert await read_file(volume, ROOT_INODE, b"38") == b"file 1"


@pytest.mark.parametrize("limits", [TINY, SMALL], ids=["tiny", "small"])
async def test_trees_and_links(limits: RecordLimits, autojump_clock: trio.testing.MockClock) -> None:
    async with watched(limits) as volume:
        here, folders = ROOT_INODE, []
        for number in range(30):
            folders.append((here, b"d%d" % number))
            here = (await volume.tree.make_directory(here, b"d%d" % number, 0o755, CALLER)).ino
            await volume.tree.make_directory(ROOT_INODE, b"e%d" % number, 0o755, CALLER)
        ino = await write_file(volume, here, b"f", b"linked")
        for number in range(30):
            await volume.tree.link(ino, ROOT_INODE, b"l%d" % number)
        for number in range(20):
            await volume.inodes.set_xattr(ino, b"user.%d" % number, bytes(1000))
            await volume.tree.rename(ROOT_INODE, b"e%d" % number, here, b"m%d" % number, 0)
        await volume.sync()
        for number in range(30):
            await volume.tree.unlink(ROOT_INODE, b"l%d" % number)
        assert await read_file(volume, here, b"f") == b"linked"
        for number in range(20):
            await volume.tree.remove_directory(here, b"m%d" % number)
        await volume.tree.unlink(here, b"f")
        for parent, name in reversed(folders):
            await volume.tree.remove_directory(parent, name)
        await volume.sync()


@pytest.mark.parametrize("strict", [False, True], ids=["relaxed", "strict"])
@pytest.mark.parametrize("limits", [SMALL, NARROW], ids=["small", "narrow"])
async def test_concurrent_work_and_crashes(
    seed: int,
    small_rewrites: None,
    autojump_clock: trio.testing.MockClock,
    strict: bool,
    limits: RecordLimits,
) -> None:
    rng = random.Random(seed)
    options = lab_options(capacity=24 * MIB, strict=strict, nodes=rng.choice([1000, 8]), chunk=CHUNK)
    chaos = Chaos(random.Random(rng.random()), delay=rng.choice([0.1, 0.5]))
    await play(rng, options, chaos, faults=0.0, steps=25, crashes=12, limits=limits)


async def test_bitmaps_of_a_recalled_commit_wait_where_there_is_no_room(autojump_clock: trio.testing.MockClock) -> None:
    """They are as they are stored: a commit without them is as good, and one with all of them might be refused."""
    async with watched(SMALL, capacity=64 * MIB, chunk=MIB) as volume:
        for number in range(24):
            await write_file(volume, ROOT_INODE, b"%d" % number, os.urandom(700_000))
        await volume.sync()
        for number in range(40):
            await write_file(volume, ROOT_INODE, b"small %d" % number, b"x")
        slabs = [state.slab for state in inside.slabs(volume).durable_images()]
        assert len(slabs) > 16
        inside.slabs(volume)._dirty.update(slabs)
        await volume.sync()
        for number in range(40):
            assert await read_file(volume, ROOT_INODE, b"small %d" % number) == b"x"


def test_each_part_has_room_for_the_records_of_the_lease_and_frees_come_last() -> None:
    """Without that room the store refuses a part; and other hosts may write to a slot as soon as it is freed."""
    freed = {schema.freed_key(1, 4096 * number, 1): b"" for number in range(300)}
    names = {schema.entry_key(ROOT_INODE, b"%d" % number): b"inode" for number in range(20)}
    batch = Batch(puts={**freed, **names}, deletes={schema.orphan_key(7)}, uses={1: Counts(1, 1), 2: Counts(1, 1)})
    batch.draft.expect = {schema.cleared_key(number): 1 for number in range(3)}
    parts = list(batch.split(SHARED_LIMITS))
    room = SHARED_LIMITS.commit_operations_max - RESERVED_OPERATIONS
    assert all(len(part.puts) + len(part.deletes) + len(part.expect) + len(part.uses) <= room for part in parts)
    assert parts[-1].uses == batch.uses
    homes = {key: number for number, part in enumerate(parts) for key in (*part.puts, *part.deletes)}
    assert homes.keys() == {*batch.puts, *batch.deletes}
    assert max(homes[key] for key in (*names, *batch.deletes)) <= min(homes[key] for key in freed)
