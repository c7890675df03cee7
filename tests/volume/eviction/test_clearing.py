"""A namespace that is cleared is empty at once, for everybody; its room returns, also after a crash in the middle."""

from __future__ import annotations

import os

import inside
import pytest
import trio
from cache_lab import BLOCK, OPTIONS, cache_disk, checked, fill, statistics
from namespace_lab import change_namespace, make_namespace
from volume_lab import CALLER, Disk, opened

from kvfuse.errors import InvalidArgument, NotFound, Stale
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.namespaces.settings import ROOT
from kvfuse.volume.volume import Volume


async def clear(volume: Volume, ino: int = ROOT_INODE) -> None:
    await volume.inodes.set_xattr(ino, b"user.kvfuse.clear", b"now")


async def until_swept(volume: Volume) -> None:
    while inside.namespaces(volume).cleared:
        await inside.namespaces(volume).cleared.swept.wait()


async def test_nothing_is_there_from_then_on() -> None:
    disk = cache_disk()
    async with opened(disk, OPTIONS) as volume:
        stored = await fill(volume, 0, 300)
        await volume.sync()
        pending = await fill(volume, 300, 50)
        known = await volume.tree.lookup(ROOT_INODE, stored[0])
        bound = await volume.blocks.bind(ROOT_INODE, stored[1])
        assert bound is not None
        await clear(volume)
        assert not bound.valid
        assert not any(await volume.blocks.exists(ROOT_INODE, [*stored, *pending]))
        assert await volume.tree.list_directory(ROOT_INODE, 0, 1000) == []
        for name in (stored[0], stored[5], pending[7]):
            assert await volume.blocks.bind(ROOT_INODE, name) is None
            with pytest.raises(NotFound):
                await volume.tree.lookup(ROOT_INODE, name)
        with pytest.raises(Stale):
            await volume.files.open(known.ino, os.O_RDONLY, CALLER)
        await fill(volume, 0, 10)
        assert await volume.blocks.exists(ROOT_INODE, stored[:11]) == [True] * 10 + [False]
        await until_swept(volume)
        assert await volume.blocks.exists(ROOT_INODE, stored[:11]) == [True] * 10 + [False]
        assert statistics(volume)["cleared"] == 350
        await volume.sync()
        assert volume.space().size - volume.space().free == 10 * BLOCK
    await checked(disk)


async def test_what_is_open_stays_readable_and_what_is_written_goes() -> None:
    disk = cache_disk()
    async with opened(disk, OPTIONS) as volume:
        (name,) = await fill(volume, 0, 1)
        node = await volume.tree.lookup(ROOT_INODE, name)
        reading = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
        writing, made = await volume.tree.create(ROOT_INODE, b"new", 0o644, CALLER, os.O_WRONLY)
        await volume.files.write(writing, 0, b"x" * BLOCK)
        await clear(volume)
        assert bytes(await volume.files.read(reading, 0, BLOCK)) == name * (BLOCK // 8)
        await volume.files.write(writing, BLOCK, b"y" * BLOCK)
        await until_swept(volume)
        assert bytes(await volume.files.read(reading, 0, BLOCK)) == name * (BLOCK // 8)
        for handle, ino in ((writing, made.ino), (reading, node.ino)):
            await volume.files.release(handle)
            volume.tree.forget(ino, 1)
        assert await volume.tree.list_directory(ROOT_INODE, 0, 10) == []
        await volume.sync()
        assert volume.space().free == volume.space().size
    await checked(disk)


async def test_directories_and_other_namespaces_stay() -> None:
    disk = cache_disk()
    async with opened(disk, OPTIONS) as volume:
        inner = await volume.tree.make_directory(ROOT_INODE, b"inner", 0o755, CALLER)
        plain = await volume.tree.make_directory(ROOT_INODE, b"plain", 0o755, CALLER)
        await volume.inodes.set_xattr(inner.ino, b"user.kvfuse.namespace", b"kind=files")
        for folder in (inner, plain):
            await volume.blocks.put(folder.ino, b"block", memoryview(b"z" * BLOCK), CALLER, 0o644)
        handle, _ = await volume.tree.create(plain.ino, b"linked", 0o644, CALLER, os.O_WRONLY)
        await volume.files.release(handle)
        await volume.tree.link(handle.node.ino, plain.ino, b"again")
        await volume.sync()
        await clear(volume)
        assert await volume.blocks.exists(inner.ino, [b"block"]) == [True]
        assert await volume.blocks.exists(plain.ino, [b"block", b"linked", b"again"]) == [False] * 3
        await volume.tree.remove_directory(ROOT_INODE, b"plain")
        with pytest.raises(InvalidArgument):
            await clear(volume, inner.ino)
    await checked(disk)


@pytest.mark.parametrize("steps", range(0, 60, 6))
async def test_a_crash_in_the_middle(steps: int) -> None:
    disk = cache_disk()
    crashed = disk
    async with opened(disk, OPTIONS) as volume:
        names = await fill(volume, 0, 500)
        await volume.sync()
        await clear(volume)
        new = await fill(volume, 1000, 20)
        await inside.journal(volume).commit()
        for _ in range(steps):
            await trio.lowlevel.checkpoint()
        crashed = disk.copy()
    for one in (disk, crashed):
        await checked(one)
        async with opened(one, OPTIONS) as volume:
            assert not any(await volume.blocks.exists(ROOT_INODE, names))
            assert all(await volume.blocks.exists(ROOT_INODE, new))
            await until_swept(volume)
            assert not any(await volume.blocks.exists(ROOT_INODE, names))
            await volume.sync()
            assert volume.space().size - volume.space().free == 20 * BLOCK
        await checked(one)


async def test_a_full_cache_has_room_after_it() -> None:
    disk = cache_disk(admission="all")
    async with opened(disk, OPTIONS) as volume:
        count = volume.space().size // BLOCK
        await fill(volume, 0, count)
        await clear(volume)
        names = await fill(volume, 10 * count, count)
        assert sum(await volume.blocks.exists(ROOT_INODE, names)) > 0.7 * count
    await checked(disk)


async def test_clearing_again_and_again() -> None:
    disk = cache_disk()
    async with opened(disk, OPTIONS) as volume:
        for turn in range(20):
            names = await fill(volume, 0, 30 + turn)
            if turn % 3:
                await trio.lowlevel.checkpoint()
            await clear(volume)
            assert not any(await volume.blocks.exists(ROOT_INODE, names))
        await until_swept(volume)
        assert inside.namespaces(volume).all[ROOT].cache is not None
        await volume.sync()
        assert volume.space().free == volume.space().size
    await checked(disk)


async def test_what_was_cleared_goes_also_when_there_is_no_cache_any_more() -> None:
    disk = Disk.format(OPTIONS)
    async with opened(disk, OPTIONS) as volume:
        folder = await make_namespace(volume, ROOT_INODE, b"n", kind="cache", admission="all")
        await volume.blocks.put(folder, b"a", memoryview(bytes(BLOCK)), CALLER, 0o644)
        await volume.sync()
        await clear(volume, folder)
        await change_namespace(volume, folder, kind="files")
        with trio.fail_after(10):
            await until_swept(volume)
        assert inside.namespaces(volume).accounts.use(folder).files == 0
    await checked(disk)
