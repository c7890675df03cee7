"""fsck of blocks: sound ones are counted, damage is found, and removed, what is old is no fault."""

from __future__ import annotations

import os
import random
from pathlib import Path

import inside
import numpy as np
import pytest
from block_tree import BlockTree, Spot, make_block_tree
from namespace_lab import change_namespace
from volume_lab import CALLER, MIB

from kvfuse.checksum import crc32c
from kvfuse.native import blockforms as forms
from kvfuse.volume.api import ROOT_INODE, RowTerms
from kvfuse.volume.blocks.head_tables import plan_slab
from kvfuse.volume.check.evidence import CheckReport
from kvfuse.volume.check.rebuild import rebuild


@pytest.fixture
async def blocks(tmp_path: Path, rng: random.Random) -> BlockTree:
    tree = await make_block_tree(tmp_path, rng)
    await tree.begin()
    return tree


async def clean(tree: BlockTree, *, verify: bool = True) -> CheckReport:
    report = await tree.check(verify=verify)
    assert report.clean, [problem.text for problem in report.problems]
    assert report.blocks == len(tree.blocks)
    assert report.block_bytes == sum(map(len, tree.blocks.values()))
    return report


async def one_problem(tree: BlockTree, *words: str, verify: bool = True, lost: set[bytes]) -> None:
    """The check finds one; a repair removes it with these blocks, and all others are there."""
    before = tree.image()
    report = await tree.check(verify=verify)
    assert tree.image() == before, "a check changes nothing"
    (problem,) = report.problems
    assert all(word in problem.text for word in words), problem.text
    report = await tree.check(verify=verify, repair=True)
    assert report.clean
    assert report.repaired == 1
    tree.blocks = {name: data for name, data in tree.blocks.items() if name not in lost}
    await clean(tree)
    async with tree.opened() as (_, engine):
        assert await tree.read(engine) == tree.blocks
    await clean(tree)


def with_free_neighbour(tree: BlockTree) -> tuple[Spot, np.void]:
    """A block; in the slot behind it is none."""
    found = tree.block_heads()
    taken = {(spot.slab, spot.index) for spot, _ in found}

    def has_one(spot: Spot, row: np.void) -> bool:
        count, _ = plan_slab(tree.geometry.slab_size, int(row["slot_size"]))
        return (spot.slab, spot.index + 1) not in taken and spot.index < count

    return tree.rng.choice([one for one in found if has_one(*one)])


def is_one_of(tree: BlockTree, row: np.void) -> bool:
    return int(row["checksum"]) in map(crc32c, tree.blocks.values())


def name_of(tree: BlockTree, row: np.void) -> bytes:
    """Of a block with these bytes."""
    (found,) = [name for name, data in tree.blocks.items() if crc32c(data) == int(row["checksum"])]
    return found


async def test_blocks_are_counted_beside_files(blocks: BlockTree) -> None:
    async with blocks.opened() as (volume, _):
        await volume.tree.make_directory(ROOT_INODE, b"files", 0o755, CALLER)
    report = await clean(blocks)
    assert (report.files, report.directories) == (0, 3)
    assert report.verified_bytes == report.block_bytes
    assert not report.notes
    assert (await clean(blocks, verify=False)).verified_bytes == 0


@pytest.mark.parametrize("byte", [0, 700])
async def test_bytes_that_rot_are_found(blocks: BlockTree, byte: int) -> None:
    spot, row = blocks.rng.choice([(s, r) for s, r in blocks.block_heads() if r["length"] > byte])
    file, offset = blocks.data_of(spot, row)
    lost = {name_of(blocks, row)}
    blocks.flip(file, offset + byte)
    assert (await blocks.check(verify=False)).clean, "who does not read bytes cannot know"
    await one_problem(blocks, f"slab {spot.slab}, slot {spot.index - 1}", "bytes", lost=lost)


async def test_a_name_that_rots_is_found(blocks: BlockTree) -> None:
    spot, row = blocks.rng.choice([(s, r) for s, r in blocks.block_heads() if r["slot_size"] > 4 * forms.PAGE])
    lost = {name_of(blocks, row)}
    file, offset = blocks.name_place(spot, row)
    blocks.flip(file, offset + 1)
    await one_problem(blocks, f"slab {spot.slab}, slot {spot.index - 1}", "name", lost=lost)


@pytest.mark.parametrize("byte", [4, 20, 40, 60, 92])
async def test_a_damaged_head_is_found(blocks: BlockTree, byte: int) -> None:
    spots = [(s, r) for s, r in blocks.block_heads() if s.offset // 512 == (s.offset + 95) // 512]
    spot, row = blocks.rng.choice(spots)
    lost = {name_of(blocks, row)}
    blocks.flip(spot.file, spot.offset + byte)
    await one_problem(blocks, f"slab {spot.slab}, slot {spot.index - 1}", "head", verify=False, lost=lost)


async def test_a_head_in_two_sectors_may_be_torn(blocks: BlockTree) -> None:
    torn = [(s, r) for s, r in blocks.block_heads() if s.offset // 512 != (s.offset + 95) // 512]
    if not torn:
        pytest.skip("no block has such a slot")
    spot, row = torn[0]
    del blocks.blocks[name_of(blocks, row)]
    blocks.flip(spot.file, spot.offset + 90)
    report = await clean(blocks)
    assert any("torn" in note for note in report.notes)


async def test_a_damaged_head_of_a_slab_is_found(blocks: BlockTree) -> None:
    spot, _ = blocks.rng.choice([(s, r) for s, r in blocks.heads() if not s.index])
    lost = {name_of(blocks, r) for s, r in blocks.block_heads() if s.slab == spot.slab}
    blocks.flip(spot.file, spot.offset + 80)
    await one_problem(blocks, f"slab {spot.slab}", "head", verify=False, lost=lost)


@pytest.mark.parametrize("field", ["length", "slot_size", "name_length", "sequence"])
async def test_a_head_that_contradicts_its_slab_is_found(blocks: BlockTree, field: str) -> None:
    spot, row = blocks.rng.choice(blocks.block_heads())
    lost = {name_of(blocks, row)}
    changed = row.copy()
    changed[field] = {"length": int(row["slot_size"]) + 1, "slot_size": 2 * MIB}.get(field, 0)
    blocks.write_head(spot, changed)
    await one_problem(blocks, f"slab {spot.slab}, slot {spot.index - 1}", verify=False, lost=lost)


@pytest.mark.parametrize("has_bytes", [False, True])
async def test_a_head_in_the_wrong_slot_is_found(blocks: BlockTree, *, has_bytes: bool) -> None:
    """Of a write that went astray; perhaps with its bytes."""
    spot, row = with_free_neighbour(blocks)
    astray = spot._replace(index=spot.index + 1, offset=spot.offset + forms.HEAD.itemsize)
    blocks.write_head(astray, row)
    if has_bytes:
        (source, start), (target, end) = blocks.data_of(spot, row), blocks.data_of(astray, row)
        data = source.read_bytes()[start : start + int(row["length"])]
        with target.open("r+b") as file:
            file.seek(end)
            file.write(data)
    await one_problem(blocks, f"slab {spot.slab}, slot {spot.index}", "elsewhere", verify=False, lost=set())


async def test_a_block_of_another_namespace_is_found(blocks: BlockTree) -> None:
    async with blocks.opened() as (volume, engine):
        folder = await volume.tree.make_directory(blocks.directory, b"sub", 0o755, CALLER)
        table = engine.table(folder.ino, blocks.directory, 0, 0, 0o644)
        data = blocks.content(5000)
        await engine.put(table, [b"x"], [memoryview(data)], RowTerms())
        other = await volume.tree.make_directory(ROOT_INODE, b"other", 0o755, CALLER)
        await change_namespace(volume, other.ino, kind="blocks")
    (found,) = [(s, r) for s, r in blocks.block_heads() if r["directory"] == folder.ino]
    spot, row = found[0], found[1].copy()
    async with blocks.opened() as (volume, _):
        row["name_space"], row["epoch"] = other.ino, inside.core(volume).namespaces.all[other.ino].settings.epoch
    blocks.write_head(spot, row)
    await one_problem(blocks, f"namespace {other.ino} instead of {blocks.directory}", verify=False, lost=set())


async def test_what_is_old_is_no_fault(blocks: BlockTree) -> None:
    """Of earlier lives of slabs, of an earlier epoch, of folders that are gone, and blocks that were replaced."""
    old = blocks.block_heads()
    async with blocks.opened() as (volume, engine):
        await volume.inodes.set_xattr(blocks.directory, b"user.kvfuse.clear", b"1")
        blocks.blocks = {}
        await blocks.put(engine, {b"new-%d" % number: blocks.content() for number in range(5)})
    spots = {spot for spot, _ in blocks.block_heads()}
    for spot, row in old:  # as if no head had been freed
        if spot not in spots:
            blocks.write_head(spot, row)
    await clean(blocks)
    spot, row = next((s, r) for s, r in blocks.block_heads() if s in spots and is_one_of(blocks, r))
    name = name_of(blocks, row)
    async with blocks.opened() as (_, engine):
        await blocks.put(engine, {name: blocks.content(int(row["length"]))})
    assert spot not in {spot for spot, _ in blocks.heads()}
    blocks.write_head(spot, row)  # of the block that it had before
    await clean(blocks)


async def test_a_block_that_was_removed_or_expired_is_none(blocks: BlockTree) -> None:
    """Where a later head of its name says so."""
    spot, row = with_free_neighbour(blocks)
    del blocks.blocks[name_of(blocks, row)]
    later = row.copy()
    later["sequence"], later["expires"], later["length"] = int(row["sequence"]) + 1, 1, 1
    blocks.write_head(spot._replace(index=spot.index + 1, offset=spot.offset + forms.HEAD.itemsize), later)
    await clean(blocks)
    report = await rebuild(blocks.options)
    assert (report.blocks, report.block_bytes) == (len(blocks.blocks), sum(map(len, blocks.blocks.values())))
    await clean(blocks)
    async with blocks.opened() as (_, engine):
        assert await blocks.read(engine) == blocks.blocks


async def test_blocks_of_a_removed_folder_are_no_fault(blocks: BlockTree) -> None:
    """Their heads are freed behind the removal."""
    async with blocks.opened() as (volume, engine):
        folder = await volume.tree.make_directory(blocks.directory, b"sub", 0o755, CALLER)
        table = engine.table(folder.ino, blocks.directory, 0, 0, 0o644)
        await engine.put(table, [b"x"], [memoryview(blocks.content(5000))], RowTerms())
        await engine.writer.flush()
        ((spot, row),) = [(s, r) for s, r in blocks.block_heads() if r["directory"] == folder.ino]
        engine.drop(folder.ino, [b"x"])
        await volume.tree.remove_directory(blocks.directory, b"sub")
    blocks.write_head(spot, row)
    report = await clean(blocks)
    assert any("folders that are gone" in note for note in report.notes)


async def test_files_of_an_earlier_life_of_a_slab_are_no_fault(tmp_path: Path, rng: random.Random) -> None:
    """Their heads stay in the tables of slabs that are lent afterwards."""
    tree = await make_block_tree(tmp_path, rng, capacity=24 * MIB)
    async with tree.opened() as (volume, _):
        for number in range(40):
            handle, _ = await volume.tree.create(ROOT_INODE, b"f%d" % number, 0o644, CALLER, os.O_RDWR)
            await volume.files.write(handle, 0, rng.randbytes(300_000))
            await volume.files.release(handle)
        await volume.sync()
        for number in range(40):
            await volume.tree.unlink(ROOT_INODE, b"f%d" % number)
        await volume.sync()
    await tree.begin(30)
    report = await clean(tree)
    assert not report.notes
