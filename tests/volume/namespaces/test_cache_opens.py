"""Files that the kernel opens are used blocks: the books hear of many at once, but of each before what follows."""

from __future__ import annotations

import os

import inside
from cache_lab import BLOCK, OPTIONS, cache_disk, checked, evict, fill, statistics, write_file
from volume_lab import CALLER, opened

from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.inodes.core import USES_AT_ONCE
from kvfuse.volume.volume import Volume


async def read(volume: Volume, ino: int) -> None:
    """The kernel has the bytes already."""
    await volume.files.release(await volume.files.open(ino, os.O_RDONLY, CALLER))


async def test_each_open_is_a_use_and_the_one_after_a_lookup_is_none() -> None:
    disk = cache_disk()
    async with opened(disk, OPTIONS) as volume:
        names = await fill(volume, 0, USES_AT_ONCE)
        for name in names:
            node = await volume.tree.lookup(ROOT_INODE, name)
            for _ in range(3):
                await read(volume, node.ino)
                assert len(inside.namespaces(volume).uses) < USES_AT_ONCE
        assert statistics(volume)["asked"] == statistics(volume)["present"] == 3 * len(names)
    await checked(disk)


async def test_a_file_that_goes_after_it_was_opened_was_there() -> None:
    disk = cache_disk()
    async with opened(disk, OPTIONS) as volume:
        for name in await fill(volume, 0, 5):
            node = await volume.tree.lookup(ROOT_INODE, name)
            await read(volume, node.ino)
            await read(volume, node.ino)
            await volume.tree.unlink(ROOT_INODE, name)
        assert (statistics(volume)["asked"], statistics(volume)["present"]) == (10, 10)
    await checked(disk)


async def test_opens_count_where_the_folder_is_not_in_memory() -> None:
    disk = cache_disk()
    async with opened(disk, OPTIONS) as volume:
        await write_file(volume, b"block", bytes(BLOCK))
        node = await volume.tree.lookup(ROOT_INODE, b"block")
        await volume.sync()
        await read(volume, node.ino)
        before = statistics(volume)["present"]
        inside.nodes(volume).drop(await volume.inodes.attributes(ROOT_INODE))
        await read(volume, node.ino)
        assert statistics(volume)["present"] == before + 1
    await checked(disk)


async def test_a_file_that_was_opened_just_now_does_not_go_first() -> None:
    disk = cache_disk(eviction="lru")
    async with opened(disk, OPTIONS) as volume:
        names = await fill(volume, 0, 100)
        nodes = [await volume.tree.lookup(ROOT_INODE, name) for name in names]
        for node in nodes:
            await read(volume, node.ino)
        await read(volume, nodes[0].ino)
        assert await evict(volume, BLOCK)
        assert await volume.blocks.exists(ROOT_INODE, names[:2]) == [True, False]
    await checked(disk)
