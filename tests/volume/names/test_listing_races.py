"""Listings, while names that are listed change."""

from __future__ import annotations

import os
import random
import stat

import trio
import trio.testing
from volume_lab import CALLER, Chaos, Delay, Disk, lab_options, opened

from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.store import schema


async def test_a_directory_that_moves_while_it_is_listed_stays_where_it_moved(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options, chaos = lab_options(), Chaos(rng)
    disk = Disk.format(options)
    slow, moved = sorted([b"one", b"two"], key=schema.name_hash)
    async with opened(disk, options, chaos) as volume:
        inodes = {
            name: (await volume.tree.make_directory(ROOT_INODE, name, 0o755, CALLER)).ino for name in (slow, moved)
        }
        other = (await volume.tree.make_directory(ROOT_INODE, b"other", 0o755, CALLER)).ino
    async with opened(disk, options, chaos) as volume:
        await volume.tree.lookup(ROOT_INODE, moved)
        chaos.late = late = Delay(schema.inode_key(inodes[slow]))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(volume.tree.list_directory, ROOT_INODE, 0, 100)
            await late.given.wait()
            await volume.tree.rename(ROOT_INODE, moved, other, moved, 0)
            late.arrives.set()
        assert (await volume.tree.lookup(inodes[moved], b"..")).ino == other
        await volume.sync()
    assert schema.decode_inode(disk.records[schema.inode_key(inodes[moved])].value).parent == other


async def test_a_page_has_not_all_that_is_not_stored(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Files that are open for writing are not stored: a folder may have thousands of them."""
    options = lab_options(strict=False)
    async with opened(Disk.format(options), options) as volume:
        folder = (await volume.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        stored, names, handles = (
            [b"stored %d" % number for number in range(50)],
            [b"%d" % number for number in range(500)],
            [],
        )
        for name in stored:
            await volume.tree.make_node(folder, name, stat.S_IFREG | 0o644, 0, CALLER)
        await volume.sync()
        for name in names:
            handles.append((await volume.tree.create(folder, name, 0o644, CALLER, os.O_WRONLY))[0])
        listed: list[bytes] = []
        cookie = 0
        while page := await volume.tree.list_directory(folder, cookie, 20):
            assert len(page) <= 20
            listed += [entry.name for entry in page]
            cookie = page[-1].cookie
        assert sorted(listed) == sorted(stored + names)
        for handle in handles:
            await volume.files.release(handle)
