"""A full cache goes on: files are evicted by need and ahead of it, what is open stays, nothing is lost that may not."""

from __future__ import annotations

import os
import random

import inside
import pytest
import trio
import trio.testing
from cache_lab import BLOCK, OPTIONS, cache_disk, checked, fill, statistics, used, write_file
from volume_lab import CALLER, MIB, Disk, opened

from kvfuse.errors import InvalidArgument, NoAttribute, NoSpace, NotAdmitted, NotFound, Stale
from kvfuse.policy import HOLD_SECONDS
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.namespaces.cache import block_key
from kvfuse.volume.namespaces.settings import ROOT
from kvfuse.volume.volume import Volume


@pytest.mark.parametrize("door", ["puts", "files"])
async def test_three_times_its_capacity_goes_in(door: str) -> None:
    disk = cache_disk(admission="all")
    async with opened(disk, OPTIONS) as volume:
        count = 3 * volume.space().size // BLOCK
        for number in range(count):
            name, data = b"%08d" % number, number.to_bytes(8, "big") * (BLOCK // 8)
            if door == "puts":
                await volume.blocks.put(ROOT_INODE, name, memoryview(data), CALLER, 0o644)
            else:
                await write_file(volume, name, data)
            used(volume)
        names = [b"%08d" % number for number in range(count)]
        found = await volume.blocks.exists(ROOT_INODE, names)
        assert 0.85 * volume.space().size < sum(found) * BLOCK <= volume.space().size
        assert found[-1]
        for number in [number for number, there in enumerate(found) if there][::37]:
            node = await volume.blocks.find(ROOT_INODE, names[number])
            assert node is not None
            handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
            assert bytes(await volume.files.read(handle, 0, BLOCK)) == number.to_bytes(8, "big") * (BLOCK // 8)
            await volume.files.release(handle)
    await checked(disk)


async def test_what_is_open_stays_and_is_evicted_later(autojump_clock: object) -> None:
    disk = cache_disk(admission="all", eviction="fifo")
    async with opened(disk, OPTIONS) as volume:
        block_count = volume.space().size // BLOCK
        (name,) = await fill(volume, 0, 1)
        node = await volume.tree.lookup(ROOT_INODE, name)
        handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
        await fill(volume, 1, 2 * block_count)
        assert await volume.blocks.exists(ROOT_INODE, [name]) == [True]
        assert bytes(await volume.files.read(handle, 0, BLOCK)) == name * (BLOCK // 8)
        await volume.files.release(handle)
        await trio.sleep(HOLD_SECONDS)
        await fill(volume, 3 * block_count, 2 * block_count)
        assert await volume.blocks.exists(ROOT_INODE, [name]) == [False]
        with pytest.raises(NotFound):
            await volume.tree.lookup(ROOT_INODE, name)
        with pytest.raises(Stale):
            await volume.files.open(node.ino, os.O_RDONLY, CALLER)
    await checked(disk)


async def test_what_is_being_written_stays() -> None:
    disk = cache_disk(admission="all", eviction="fifo")
    async with opened(disk, OPTIONS) as volume:
        block_count = volume.space().size // BLOCK
        handle, node = await volume.tree.create(ROOT_INODE, b"slow", 0o644, CALLER, os.O_WRONLY)
        await volume.files.write(handle, 0, b"a" * BLOCK)
        await fill(volume, 1, 2 * block_count)
        await volume.files.write(handle, BLOCK, b"b" * BLOCK)
        await volume.files.release(handle)
        handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
        assert bytes(await volume.files.read(handle, 0, 2 * BLOCK)) == b"a" * BLOCK + b"b" * BLOCK
        await volume.files.release(handle)
    await checked(disk)


async def test_a_namespace_of_files_loses_none() -> None:
    disk = Disk.format(OPTIONS)
    async with opened(disk, OPTIONS) as volume:
        block_count = volume.space().size // BLOCK
        names: list[bytes] = []
        with pytest.raises(NoSpace):
            for number in range(block_count + 10):
                names += await fill(volume, number, 1)
        assert all(await volume.blocks.exists(ROOT_INODE, names))
        assert len(names) > 0.9 * block_count
    await checked(disk)


@pytest.mark.parametrize("ends", ["cleanly", "in a crash"])
async def test_a_restart_keeps_the_cache_and_the_order(ends: str) -> None:
    disk = cache_disk(admission="all", eviction="lru")
    async with opened(disk, OPTIONS) as volume:
        block_count = volume.space().size // BLOCK
        names = await fill(volume, 0, block_count // 2)
        await volume.sync()
        crashed = disk.copy()
    disk = crashed if ends == "in a crash" else disk
    async with opened(disk, OPTIONS) as volume:
        assert all(await volume.blocks.exists(ROOT_INODE, names))
        await fill(volume, 1 << 20, block_count)
        assert not any(await volume.blocks.exists(ROOT_INODE, names[: len(names) // 2]))
        assert statistics(volume)["blocks"] == sum(
            await volume.blocks.exists(
                ROOT_INODE, [*names, *[b"%08d" % (number + (1 << 20)) for number in range(block_count)]]
            )
        )
    await checked(disk)


async def test_a_full_cache_stores_what_its_policy_admits() -> None:
    """With "second-touch": what somebody asked for before."""
    disk = cache_disk(admission="second-touch", eviction="lru")
    async with opened(disk, OPTIONS) as volume:
        with pytest.raises(NotAdmitted):
            await fill(volume, 0, volume.space().size // BLOCK)
        for number in range(1 << 20, (1 << 20) + 10):
            name = b"%08d" % number
            with pytest.raises(NotAdmitted):
                await fill(volume, number, 1)
            await volume.blocks.exists(ROOT_INODE, [name])
            await volume.blocks.exists(ROOT_INODE, [name])
            await fill(volume, number, 1)
        assert statistics(volume)["refused"] == 11
    await checked(disk)


def note(volume: Volume, names: list[bytes]) -> None:
    """As the thread of a ring does it."""
    _, uses = volume.blocks.terms(ROOT_INODE)
    assert uses is not None
    uses.note(ROOT_INODE, names)


async def test_uses_are_counted_once_each(autojump_clock: object) -> None:
    disk = cache_disk()
    async with opened(disk, OPTIONS) as volume:
        names = await fill(volume, 0, 4)
        await volume.blocks.exists(ROOT_INODE, [*names, b"absent"])
        note(volume, names)
        await trio.sleep(1.5)
        counted = statistics(volume)
        assert (counted["asked"], counted["present"], counted["absent"]) == (5, 4, 1), "to look and to read is one use"
        note(volume, names)
        await trio.sleep(1.5)
        assert statistics(volume)["asked"] == 9


async def test_names_that_are_about_to_be_made_are_no_misses(autojump_clock: object) -> None:
    """The kernel looks up what it creates and renames to."""
    disk = cache_disk()
    async with opened(disk, OPTIONS) as volume:
        for name in (b"tmp-file", b"file", b"other"):
            with pytest.raises(NotFound):
                await volume.tree.lookup(ROOT_INODE, name)
        await write_file(volume, b"file", b"x" * BLOCK)
        await trio.sleep(3)
        counted = statistics(volume)
        assert (counted["asked"], counted["absent"], counted["stored"]) == (1, 1, 1)


async def test_blocks_expire(autojump_clock: object) -> None:
    """Each so long after it was stored, whether it is used or not; also when the volume was opened again since."""
    disk = cache_disk(ttl=60)
    async with opened(disk, OPTIONS) as volume:
        first = await fill(volume, 0, 10)
        await trio.sleep(40)
        second = await fill(volume, 10, 10)
        await trio.sleep(15)
        assert all(await volume.blocks.exists(ROOT_INODE, [*first, *second]))
        await trio.sleep(7)
        assert await volume.blocks.exists(ROOT_INODE, [*first, *second]) == [False] * 10 + [True] * 10
        await fill(volume, 10, 1)
        await trio.sleep(40)
        assert await volume.blocks.exists(ROOT_INODE, second) == [True] + [False] * 9
        assert statistics(volume)["expired"] == 19
        await volume.sync()
    await checked(disk)


async def test_a_clock_that_is_advanced() -> None:
    async with opened(cache_disk(ttl=3600), OPTIONS) as volume:
        names = await fill(volume, 0, 10)
        advance = b"user.kvfuse.namespace.advance"
        for seconds, left in ((b"3590", 10), (b"11.5", 0)):
            await volume.inodes.set_xattr(ROOT_INODE, advance, seconds)
            await trio.sleep(3)
            assert sum(await volume.blocks.exists(ROOT_INODE, names)) == left
        for wrong in (b"-1", b"soon"):
            with pytest.raises(InvalidArgument, match="advances by seconds"):
                await volume.inodes.set_xattr(ROOT_INODE, advance, wrong)
        folder = await volume.tree.make_directory(ROOT_INODE, b"ordinary", 0o755, CALLER)
        with pytest.raises(InvalidArgument, match="only a cache"):
            await volume.inodes.set_xattr(folder.ino, advance, b"1")
        with pytest.raises(NoAttribute):
            await volume.inodes.get_xattr(ROOT_INODE, advance)


@pytest.mark.parametrize("quota", [{"capacity": 8 * MIB}, {"blocks": 100}])
async def test_a_namespace_at_its_quota_evicts_its_own(quota: dict[str, int]) -> None:
    disk = cache_disk()
    async with opened(disk, OPTIONS) as volume:
        others = await fill(volume, 0, 100)
        folder = await volume.tree.make_directory(ROOT_INODE, b"small", 0o755, CALLER)
        keeper = inside.xattrs(volume).namespaces.keeper
        await keeper.create(folder, {"kind": "cache", "admission": "all", **quota}, None)
        for number in range(300):
            name = b"%08d" % number
            await volume.blocks.put(folder.ino, name, memoryview(name * (BLOCK // 8)), CALLER, 0o644)
            use = inside.namespaces(volume).accounts.use(folder.ino)
            assert use.files <= quota.get("blocks", 300)
            assert use.size <= quota.get("capacity", 300 * BLOCK)
        found = await volume.blocks.exists(folder.ino, [b"%08d" % number for number in range(300)])
        assert found[-1]
        assert 90 <= sum(found) <= 130
        assert all(await volume.blocks.exists(ROOT_INODE, others))
        await keeper.change(folder, {name: value // 2 for name, value in quota.items()}, None)
        while inside.namespaces(volume).accounts.use(folder.ino).files > 64:
            await trio.lowlevel.checkpoint()
        assert all(await volume.blocks.exists(ROOT_INODE, others))
    await checked(disk)


async def test_blocks_of_a_pinned_namespace_go_last() -> None:
    disk = cache_disk(admission="all")
    async with opened(disk, OPTIONS) as volume:
        keeper = inside.xattrs(volume).namespaces.keeper
        folder = await volume.tree.make_directory(ROOT_INODE, b"pinned", 0o755, CALLER)
        await keeper.create(folder, {"kind": "cache", "admission": "all", "soft_pin": "true"}, None)
        pinned = [b"%08d" % number for number in range(200)]  # of which nobody makes use any more
        for name in pinned:
            await volume.blocks.put(folder.ino, name, memoryview(name * (BLOCK // 8)), CALLER, 0o644)
        count = 2 * volume.space().size // BLOCK
        await fill(volume, 0, count)
        assert all(await volume.blocks.exists(folder.ino, pinned))
        await keeper.change(folder, {"soft_pin": "false", "ttl": 1000}, None)
        for number in range(count):  # now the larger cache gives first, and that is this one by and by
            name = b"%08d" % number
            await volume.blocks.put(folder.ino, name, memoryview(name * (BLOCK // 8)), CALLER, 0o644)
        assert not all(await volume.blocks.exists(folder.ino, pinned))
        await keeper.change(folder, {"soft_pin": "true", "capacity": 50 * BLOCK}, None)
        accounts = inside.namespaces(volume).accounts
        while accounts.use(folder.ino).size > 50 * BLOCK:
            await trio.lowlevel.checkpoint()  # its own capacity holds all the same
    await checked(disk)


async def test_files_that_are_published_by_links_are_evicted() -> None:
    disk = cache_disk(admission="all")
    async with opened(disk, OPTIONS) as volume:
        count = 2 * volume.space().size // BLOCK
        names = [b"%08d" % number for number in range(count)]
        for name in names:
            await write_file(volume, b"first", name * (BLOCK // 8))
            node = await volume.tree.lookup(ROOT_INODE, b"first")
            await volume.tree.link(node.ino, ROOT_INODE, name)
            await volume.tree.unlink(ROOT_INODE, b"first")
            volume.tree.forget(node.ino, 2)
        found = await volume.blocks.exists(ROOT_INODE, names)
        assert statistics(volume)["blocks"] == sum(found) > 0.4 * count
    await checked(disk)


@pytest.mark.ring(3)
async def test_a_large_block_takes_whole_slabs_from_small_ones() -> None:
    """Hardly more small blocks go than it is large, and one that is open stays."""
    disk = cache_disk(admission="all", eviction="lru")
    small, size, rng = 4096, 17 * MIB, random.Random(5)
    async with opened(disk, OPTIONS) as volume:
        names = [b"%08d" % number for number in range(volume.space().size // small)]
        for name in names:
            await volume.blocks.put(ROOT_INODE, name, memoryview(name * (small // 8)), CALLER, 0o644)
        await volume.sync()
        there = await volume.blocks.exists(ROOT_INODE, names)
        kept = names[there.index(True)]
        node = await volume.tree.lookup(ROOT_INODE, kept)
        handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
        cache = inside.caches(volume)[ROOT]
        for name in rng.sample(names, len(names)):
            cache.policy.used([block_key(ROOT_INODE, name)], cache.clock())
        before = statistics(volume)["room"]
        await volume.blocks.put(ROOT_INODE, b"large", memoryview(bytes(size)), CALLER, 0o644)
        assert statistics(volume)["room"] - before < 1.3 * size // small
        assert await volume.blocks.exists(ROOT_INODE, [b"large", kept]) == [True, True]
        assert bytes(await volume.files.read(handle, 0, small)) == kept * (small // 8)
        await volume.files.release(handle)
    await checked(disk)
