"""fsck --rebuild of blocks: none that was synced is lost, none that was removed or cleared comes back."""

from __future__ import annotations

import os
import random
import shutil
import stat
from pathlib import Path

import inside
import msgspec
import pytest
from block_tree import BlockTree, make_block_tree
from namespace_lab import make_namespace
from volume_lab import CALLER, SECTOR

from kvfuse.options.options import NamespaceOptions
from kvfuse.slab import layout
from kvfuse.slab.image import LENT
from kvfuse.volume.api import ROOT_INODE, RowTerms
from kvfuse.volume.check.rebuild import RebuildReport, rebuild
from kvfuse.volume.namespaces.settings import ROOT
from kvfuse.volume.opening import engines, formatting
from kvfuse.volume.store import schema


@pytest.fixture
async def blocks(tmp_path: Path, rng: random.Random) -> BlockTree:
    """With files beside the blocks, and a folder in the namespace."""
    tree = await make_block_tree(tmp_path, rng)
    await tree.begin()
    async with tree.opened() as (volume, engine):
        handle, _ = await volume.tree.create(ROOT_INODE, b"file", 0o644, CALLER, os.O_RDWR)
        await volume.files.write(handle, 0, b"bytes" * 5000)
        await volume.files.release(handle)
        table = engine.table(tree.directory, tree.directory, 7, 8, 0o600)
        await engine.put(table, [b"private"], [memoryview(b"private bytes")], RowTerms())
    return tree


async def lose_records(tree: BlockTree, damaged: int = 0) -> RebuildReport:
    """The records, and the volume's superblock; then rebuild. fsck finds nothing wrong, of any byte.

    ``damaged``: heads, which stay.
    """
    shutil.rmtree(tree.options.records_path)
    (tree.options.volume_path / "superblock").unlink()
    report = await rebuild(tree.options)
    assert formatting.read_superblock(tree.options.volume_path).features & layout.FEATURE_LENT
    checked = await tree.check()
    assert len(checked.problems) == damaged, [problem.text for problem in checked.problems]
    assert (checked.blocks, checked.block_bytes) == (report.blocks, report.block_bytes)
    return report


async def test_rebuild_keeps_every_synced_block(blocks: BlockTree) -> None:
    report = await lose_records(blocks)
    assert not report.dropped
    assert report.files == 1
    assert report.blocks == len(blocks.blocks) + 1
    assert report.namespaces == [f"lost+found/namespace-{blocks.directory}"]
    blocks.blocks[b"private"] = b"private bytes"
    async with blocks.opened() as (volume, engine):
        lost = await volume.tree.lookup(ROOT_INODE, b"lost+found")
        folder = await volume.tree.lookup(lost.ino, b"namespace-%d" % blocks.directory)
        assert folder.ino == blocks.directory
        assert (folder.uid, stat.S_IMODE(folder.mode)) == (0, 0o700), "nobody knows who might read it"
        assert await blocks.read(engine) == blocks.blocks
        private = await volume.tree.lookup(folder.ino, b"private")
        assert (private.uid, private.gid, stat.S_IMODE(private.mode)) == (7, 8, 0o600)
        await volume.tree.rename(lost.ino, b"namespace-%d" % blocks.directory, ROOT_INODE, b"kv", 0)
        await blocks.put(engine, {b"key-1": b"new", b"fresh": blocks.content()})
        handle, _ = await volume.tree.create(ROOT_INODE, b"later", 0o644, CALLER, os.O_RDWR)
        await volume.files.write(handle, 0, b"later" * 50_000)
        await volume.files.release(handle)
    async with blocks.opened() as (volume, engine):
        assert (await volume.tree.lookup(ROOT_INODE, b"kv")).ino == blocks.directory
        assert await blocks.read(engine) == blocks.blocks
    assert (await blocks.check()).clean
    assert not (await lose_records(blocks)).dropped


async def test_rebuild_knows_folders_and_epochs(blocks: BlockTree) -> None:
    """Blocks in a folder of the namespace, and of a namespace that was cleared twice."""
    async with blocks.opened() as (volume, engine):
        sub = (await volume.tree.make_directory(blocks.directory, b"sub", 0o755, CALLER)).ino
        table = engine.table(sub, blocks.directory, 0, 0, 0o644)
        await engine.put(table, [b"deep"], [memoryview(b"deep bytes")], RowTerms())
        other = await make_namespace(volume, ROOT_INODE, b"other", kind="blocks")
        for name in (b"first", b"second", b"third"):
            table = engine.table(other, other, 0, 0, 0o644)
            await engine.put(table, [name], [memoryview(name * 100)], RowTerms())
            await engine.writer.flush()
            if name != b"third":
                await volume.inodes.set_xattr(other, b"user.kvfuse.clear", b"1")
    report = await lose_records(blocks)
    assert sorted(report.namespaces) == sorted(f"lost+found/namespace-{n}" for n in (blocks.directory, other))
    async with blocks.opened() as (volume, engine):
        assert await blocks.read(engine, sub) == {b"deep": b"deep bytes"}
        assert await blocks.read(engine, other) == {b"third": b"third" * 100}
        folder = await volume.tree.lookup(ROOT_INODE, b"lost+found")
        folder = await volume.tree.lookup(folder.ino, b"namespace-%d" % blocks.directory)
        assert (await volume.tree.lookup(folder.ino, b"folder-%d" % sub)).ino == sub


async def test_rebuild_leaves_out_what_is_damaged(blocks: BlockTree) -> None:
    whole = [s for s, _ in blocks.block_heads() if s.offset // SECTOR == (s.offset + 95) // SECTOR]
    spots = blocks.rng.sample(whole, 3)
    for spot in spots:
        blocks.flip(spot.file, spot.offset + 30)
    report = await lose_records(blocks, damaged=3)
    assert report.blocks == len(blocks.blocks) + 1 - 3
    async with blocks.opened() as (_, engine):
        found = await blocks.read(engine)
        assert {name: blocks.blocks.get(name, b"private bytes") for name in found} == found
        assert len(found) == report.blocks


async def test_a_damaged_record_of_a_lent_slab_is_made_again(blocks: BlockTree) -> None:
    async with engines.open_records(blocks.options) as records:  # as they are stored
        rows = await records.scan(b"s", limit=1000)
        row = next(row for row in rows if schema.decode_slab(row.value[:-4])[0] == LENT)
        await records.commit({row.key: row.value[:-1] + bytes([row.value[-1] ^ 1])}, durable=True)
    report = await blocks.check()
    assert len(report.problems) == 1
    assert report.blocks == len(blocks.blocks) + 1
    assert (await blocks.check(repair=True)).clean
    async with blocks.opened() as (_, engine):
        found = await blocks.read(engine)
        assert found.pop(b"private") == b"private bytes"
        assert found == blocks.blocks


async def test_rebuild_of_a_volume_that_is_a_cache(tmp_path: Path, rng: random.Random) -> None:
    """Blocks of the root's namespace, in the root and in a folder."""
    tree = await make_block_tree(tmp_path, rng)
    plain = tree.options
    tree.options = msgspec.structs.replace(plain, namespace=NamespaceOptions(kind="blocks"))
    await formatting.format_volume(tree.options, replace=True)
    tree.options = plain
    async with tree.opened() as (volume, engine):
        sub = (await volume.tree.make_directory(ROOT_INODE, b"sub", 0o755, CALLER)).ino
        for folder, name in ((ROOT_INODE, b"above"), (sub, b"below")):
            table = engine.table(folder, ROOT, 0, 0, 0o644)
            await engine.put(table, [name], [memoryview(name * 1000)], RowTerms())
    report = await lose_records(tree)
    assert (report.blocks, report.namespaces) == (2, [])
    async with tree.opened() as (volume, engine):
        assert inside.core(volume).namespaces.all[ROOT].settings.is_blocks
        assert await tree.read(engine, ROOT_INODE) == {b"above": b"above" * 1000}
        lost = await volume.tree.lookup(ROOT_INODE, b"lost+found")
        assert (await volume.tree.lookup(lost.ino, b"folder-%d" % sub)).ino == sub
        assert await tree.read(engine, sub) == {b"below": b"below" * 1000}
        assert (await volume.tree.lookup(ROOT_INODE, b"above")).size == 5000
        tree.directory = ROOT_INODE
        table = engine.table(ROOT_INODE, ROOT, 0, 0, 0o644)
        await engine.put(table, [b"new"], [memoryview(b"new")], RowTerms())
    assert (await tree.check()).clean
