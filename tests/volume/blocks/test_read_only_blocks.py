"""A volume of blocks that is opened read-only shows them all, and not one byte of it changes."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

import pytest
import trio
from block_tree import BlockTree, make_block_tree
from mounting import KvfuseMount
from volume_lab import CALLER, MIB

from kvfuse.errors import ReadOnly
from kvfuse.usrbio.client.block_store import BlockStore
from kvfuse.volume.api import ROOT_INODE


@pytest.fixture
async def blocks(tmp_path: Path, rng: random.Random) -> BlockTree:
    tree = await make_block_tree(tmp_path, rng)
    await tree.begin()
    return tree


async def test_blocks_are_listed_and_read(blocks: BlockTree) -> None:
    before = blocks.image()
    async with blocks.opened(blocks.read_only) as (volume, engine):
        assert (await volume.tree.lookup(ROOT_INODE, b"kv")).ino == blocks.directory
        entries = await volume.tree.list_directory(blocks.directory, 0, 10_000)
        assert {entry.name for entry in entries} == blocks.blocks.keys()
        for name, data in blocks.blocks.items():
            found = await volume.tree.lookup(blocks.directory, name)
            assert (found.size, stat.S_IMODE(found.mode)) == (len(data), 0o644)
            handle = await volume.files.open(found.ino, os.O_RDONLY, CALLER)
            assert bytes(await volume.files.read(handle, 0, 2 * MIB)) == data
            await volume.files.fsync(handle)
            await volume.files.flush(handle)
            await volume.files.release(handle)
            with pytest.raises(ReadOnly):
                await volume.files.open(found.ino, os.O_RDWR, CALLER)
            with pytest.raises(ReadOnly):
                await volume.tree.unlink(blocks.directory, name)
        with pytest.raises(ReadOnly):
            await volume.tree.create(blocks.directory, b"new", 0o644, CALLER, os.O_RDWR)
        with pytest.raises(ReadOnly):
            await blocks.put(engine, {b"new": b"bytes"})
        with pytest.raises(ReadOnly):
            await volume.inodes.set_xattr(blocks.directory, b"user.kvfuse.clear", b"1")
        await volume.inodes.fsync_directory(blocks.directory)
        assert await blocks.read(engine) == blocks.blocks
        assert volume.stats()["store"]["blocks"] == len(blocks.blocks)
    assert blocks.image() == before
    report = await blocks.check()
    assert report.clean


async def test_damage_changes_nothing_either(blocks: BlockTree) -> None:
    """Heads that a writer would free, and a block whose bytes rotted: it is a miss."""
    first, second = blocks.rng.sample(blocks.block_heads(), 2)
    blocks.flip(first[0].file, first[0].offset + 30)
    blocks.flip(*blocks.data_of(*second))
    used = {first[0].slab, second[0].slab}
    slab = next(s for s, _ in blocks.heads() if not s.index and s.slab not in used)
    blocks.flip(slab.file, slab.offset + 90)
    before = blocks.image()
    async with blocks.opened(blocks.read_only) as (_, engine):
        found = await blocks.read(engine)
        assert {name: blocks.blocks[name] for name in found} == found
        assert 0 < len(found) < len(blocks.blocks)
    assert blocks.image() == before


async def test_a_read_only_mount_serves_files_and_rings(tmp_path: Path, rng: random.Random) -> None:
    mount = KvfuseMount(tmp_path, ("volume.capacity=64MiB",))
    try:
        await trio.to_thread.run_sync(_use_read_only, mount, rng)
    finally:
        mount.remove()


def _use_read_only(mount: KvfuseMount, rng: random.Random) -> None:
    blocks = {b"key-%d" % number: rng.randbytes(rng.choice([100, 5000, 300_000])) for number in range(20)}
    mount.mount()
    (mount.point / "kv").mkdir()
    os.setxattr(mount.point / "kv", "user.kvfuse.namespace", b"kind=blocks")
    with BlockStore(mount.point, "kv") as store:
        assert store.put_many(list(blocks), list(blocks.values())).all()
    mount.unmount()
    mount.words = (*mount.words, "ro")
    mount.mount()
    folder = mount.point / "kv"
    assert {os.fsencode(name) for name in os.listdir(folder)} == blocks.keys()
    assert all((folder / os.fsdecode(name)).read_bytes() == data for name, data in blocks.items())
    with pytest.raises(OSError, match="Read-only"):
        (folder / "new").write_bytes(b"bytes")
    with pytest.raises(OSError, match="Read-only"):
        (folder / "key-1").unlink()
    with BlockStore(mount.point, "kv") as store:
        assert store.exists([*blocks, b"absent"]).tolist() == [True] * len(blocks) + [False]
        for name, data in blocks.items():
            buffer = bytearray(len(data))
            assert store.get_into(name, buffer) == len(data)
            assert buffer == data
        with pytest.raises(OSError, match="Read-only"):
            store.put(b"new", b"bytes")
        with pytest.raises(OSError, match="Read-only"):
            store.delete(b"key-1")
    mount.unmount()
    mount.fsck(verify=True)
