"""Many callers of both doors at once: each sees whole blocks, and a name that is replaced is never absent."""

from __future__ import annotations

import os
import random
from functools import partial
from hashlib import blake2b

import inside
import pytest
import trio
from test_block_files import Door, door_of
from volume_lab import MIB, Disk, lab_options

from kvfuse import errors
from kvfuse.options.config import Options

SIZES = 100, 65536, 300_000
ROUNDS = 60


@pytest.fixture
def options() -> Options:
    """Memory for some dozen blocks."""
    return lab_options(capacity=256 * MIB, staging_size=16 * MIB, tier_size=16 * MIB)


@pytest.fixture
def disk(options: Options) -> Disk:
    return Disk.format(options)


def content(number: int, size: int) -> bytes:
    return blake2b(b"%d" % number).digest() * (size // 64 + 1)


def check_whole(data: bytes) -> None:
    assert len(data) % 64 == 0
    assert data == data[:64] * (len(data) // 64), "of one block"


async def write(door: Door, seed: random.Random, task: int) -> None:
    for turn in range(ROUNDS):
        data = content(seed.randrange(1 << 30), seed.choice(SIZES))
        if seed.random() < 0.3:
            await door.put(b"hot", data, uid=seed.randrange(2))
            continue
        name = b"tmp-%d-%d" % (task, turn)
        handle = await door.create(name)
        for start in range(0, len(data), 100_000):
            await door.volume.files.write(handle, start, data[start : start + 100_000], by_kernel=True)
            await trio.lowlevel.checkpoint()
        if seed.random() < 0.3:
            await door.rename(name, b"hot")
            await door.close(handle)
        else:
            await door.close(handle)
            await door.rename(name, b"hot")


async def read(door: Door, seed: random.Random, is_over: trio.Event) -> None:
    held = []
    while not is_over.is_set():
        try:
            handle = await door.open(b"hot")
        except errors.Stale:
            await trio.lowlevel.checkpoint()
            continue
        data = bytes(await door.volume.files.read(handle, 0, 1 << 30))
        if data:
            check_whole(data)
        held.append((handle, data))
        await trio.lowlevel.checkpoint()
        if len(held) > 6:
            handle, before = held.pop(seed.randrange(len(held)))
            if hasattr(handle, "entry"):  # a sketch may have been written since
                assert bytes(await door.volume.files.read(handle, 0, 1 << 30)) == before
            await door.close(handle)
        assert b"hot" in await door.names(limit=100) if seed.random() < 0.1 else True
    for handle, _ in held:
        await door.close(handle)


async def fill(door: Door, is_over: trio.Event) -> None:
    """Push blocks out of memory."""
    number = 0
    while not is_over.is_set():
        await door.put(b"filling-%d" % (number % 100), bytes(300_000))
        number += 1
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("part", range(3))
async def test_readers_see_whole_blocks(disk: Disk, options: Options, part: int) -> None:
    seed = random.Random(f"{os.environ.get('KVFUSE_TEST_SEED', 'races')}-{part}")
    async with door_of(disk, options) as door:
        await door.put(b"hot", content(0, 65536))
        is_over = trio.Event()
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(read, door, random.Random(seed.random()), is_over)
            nursery.start_soon(fill, door, is_over)
            async with trio.open_nursery() as writers:
                for task in range(5):
                    writers.start_soon(partial(write, door, random.Random(seed.random()), task))
            is_over.set()
        assert [name for name in await door.names(limit=1000) if not name.startswith(b"filling")] == [b"hot"]
        files = inside.parts(door.volume).block_names.files.statistics()  # type: ignore[union-attr]
        assert set(files.values()) == {0}
