"""A write on a full volume waits for whatever space is on its way back, instead of failing."""

from __future__ import annotations

import os
import random

import pytest
import trio
from volume_lab import CALLER, MIB, Chaos, Disk, check, lab_options, opened

from kvfuse.errors import NoSpace
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.volume import Volume


async def write(volume: Volume, name: bytes) -> int:
    """Write a block of 1 MiB; its inode. The kernel is not told to forget it."""
    handle, node = await volume.create(ROOT_INODE, name, 0o644, CALLER, os.O_WRONLY)
    try:
        await volume.write(handle, 0, name * (MIB // len(name)))
    finally:
        await volume.release(handle)
    return node.ino


async def fill(volume: Volume) -> list[bytes]:
    names: list[bytes] = []
    while True:
        name = b"%08d" % len(names)
        try:
            await write(volume, name)
        except NoSpace:
            await volume.unlink(ROOT_INODE, name)
            return names
        names.append(name)


@pytest.mark.parametrize("known", [True, False], ids=["known to the kernel", "forgotten"])
async def test_a_block_that_was_removed_while_it_was_written(seed: int, known: bool) -> None:
    """Its slots are given up only when the write in vain has ended: the next block waits for that."""
    options = lab_options(capacity=16 * MIB)
    disk = Disk.format(options)
    chaos = Chaos(random.Random(seed))
    async with opened(disk, options, chaos) as volume:
        names = await fill(volume)
        await volume.sync()
        await volume.unlink(ROOT_INODE, names.pop())
        ino = await write(volume, b"in vain!")
        chaos.delay, chaos.first_write = 1.0, trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(volume.sync)
            await chaos.first_write.wait()
            await volume.unlink(ROOT_INODE, b"in vain!")
            if not known:
                volume.forget(ino, 1)
            await write(volume, b"new data")
        chaos.delay = 0
    assert (await check(disk)).clean


async def test_a_block_that_was_removed_while_it_was_open(seed: int) -> None:
    """Closing it gives its space to a write that begins in the same moment."""
    options = lab_options(capacity=16 * MIB)
    disk = Disk.format(options)
    async with opened(disk, options, Chaos(random.Random(seed))) as volume:
        names = await fill(volume)
        node = await volume.lookup(ROOT_INODE, names[0])
        handle = await volume.open(node.ino, os.O_RDONLY, CALLER)
        await volume.unlink(ROOT_INODE, names[0])
        with pytest.raises(NoSpace):
            await write(volume, b"too soon")
        await volume.unlink(ROOT_INODE, b"too soon")
        await volume.release(handle)
        await write(volume, b"new data")
    assert (await check(disk)).clean
