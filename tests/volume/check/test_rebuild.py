"""fsck --rebuild: every committed block comes back from segments alone, and nothing that is wrong or was removed."""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import inside
import pytest
from fsck_tree import CHUNK, Tree, can_be_used, flip
from volume_lab import CALLER

from kvfuse.errors import VolumeError
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.check.rebuild import rebuild
from kvfuse.volume.opening import formatting


def drop_records(tree: Tree) -> None:
    shutil.rmtree(tree.options.records_path)


def drop_superblock_too(tree: Tree) -> None:
    drop_records(tree)
    (tree.options.volume_path / "superblock").unlink()


def garbage_records(tree: Tree) -> None:
    (tree.options.records_path / "data.mdb").write_bytes(tree.rng.randbytes(300_000))


@pytest.mark.parametrize("loss", [drop_records, drop_superblock_too, garbage_records])
async def test_rebuild_recovers_every_block(tree: Tree, loss: Callable[[Tree], None]) -> None:
    """Renamed, rewritten, nested, of many chunks, and small ones; what was removed stays away."""
    loss(tree)
    report = await rebuild(tree.options)
    assert not report.dropped
    assert report.files == len(tree.files)
    assert report.nameless == 1, "the file that fills its slot of 4 KiB"
    assert await tree.read() == tree.files
    checked = await tree.check()
    assert checked.clean, [problem.text for problem in checked.problems]
    assert not checked.notes
    await can_be_used(tree)


async def test_rebuild_keeps_the_old_records(tree: Tree) -> None:
    report = await rebuild(tree.options)
    assert Path(report.records_kept, "data.mdb").exists()
    assert await tree.read() == tree.files


async def test_rebuild_twice_is_the_same(tree: Tree) -> None:
    await rebuild(tree.options)
    await can_be_used(tree)
    report = await rebuild(tree.options)
    found = await tree.read()
    found.pop(b"fresh/after")
    assert not report.dropped
    assert found == tree.files


async def test_rebuild_keeps_mode_owner_and_time(tree: Tree) -> None:
    async with tree.volume() as volume:
        node = await volume.tree.lookup(*await tree.place(volume, b"small"))
        changes = Changes(mode=0o604, uid=12, gid=34, mtime=1_600_000_000_123_456_789)
        await volume.inodes.set_attributes(node.ino, changes, CALLER)
    drop_records(tree)
    await rebuild(tree.options)
    async with tree.volume() as volume:
        node = await volume.tree.lookup(*await tree.place(volume, b"small"))
        assert (stat.S_IMODE(node.mode), node.uid, node.gid) == (0o604, 12, 34)
        assert node.size == 4000


async def test_rebuild_after_growth_cuts_and_changes_in_place(tree: Tree) -> None:
    """Files that changed after their first commit: appended to, shortened, overwritten."""
    async with tree.volume() as volume:
        for path, offset, data in [
            (b"a/mid", 70_000, b"+" * 10_000),
            (b"a/b/granules", 100_000, b"=" * 50_000),
            (b"a/b/chunks", 3 * CHUNK + 7, b"#" * CHUNK),
            (b"page", 10, b"!" * 10),
        ]:
            node = await volume.tree.lookup(*await tree.place(volume, path))
            handle = await volume.files.open(node.ino, os.O_RDWR, CALLER)
            await volume.files.write(handle, offset, data)
            await volume.files.release(handle)
            before = tree.files[path]
            tree.files[path] = before[:offset] + data + before[offset + len(data) :]
        node = await volume.tree.lookup(*await tree.place(volume, b"a/b/c/far"))
        await volume.inodes.set_attributes(node.ino, Changes(size=2 * CHUNK + 5), CALLER)
        tree.files[b"a/b/c/far"] = tree.files[b"a/b/c/far"][: 2 * CHUNK + 5]
    assert await tree.read() == tree.files
    drop_records(tree)
    report = await rebuild(tree.options)
    assert not report.dropped
    assert await tree.read() == tree.files


async def test_rebuild_of_directories_that_were_renamed(tree: Tree) -> None:
    """A description holds a path: files below a renamed directory come back with their bytes, wherever."""
    async with tree.volume() as volume:
        await volume.tree.rename(*await tree.place(volume, b"a"), *await tree.place(volume, b"z"), 0)
    drop_records(tree)
    report = await rebuild(tree.options)
    assert not report.dropped
    assert sorted((await tree.read()).values()) == sorted(tree.files.values())


@pytest.mark.parametrize("path", [b"small", b"a/b/granules", b"a/b/c/far"])
async def test_rebuild_drops_damaged_blocks(tree: Tree, path: bytes) -> None:
    """Wrong bytes do not come back; the report names the file, all others are there."""
    await flip(tree, path, len(tree.files[path]) // 2)
    drop_records(tree)
    report = await rebuild(tree.options)
    assert len(report.dropped) == 1
    assert path.decode() in report.dropped[0]
    expected = {name: data for name, data in tree.files.items() if name != path}
    assert await tree.read() == expected
    assert (await tree.check()).clean


async def test_rebuild_drops_damaged_headers(tree: Tree, rng: random.Random) -> None:
    """A head table with flipped bits: what comes back is right, and the rest is absent."""
    segment = tree.options.segments_path / "00000000.seg"
    geometry = formatting.read_superblock(tree.options.volume_path).geometry
    with open(segment, "r+b") as file:
        for _ in range(40):
            _, start = geometry.locate_head(0)
            place = start + rng.randrange(geometry.head_size)
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))
    drop_records(tree)
    await rebuild(tree.options)
    found = await tree.read()
    for path, data in found.items():
        if not path.startswith(b"lost+found/"):
            assert tree.files[path] == data, path
    assert (await tree.check()).clean


async def test_rebuild_without_any_copy_of_the_superblock(tree: Tree) -> None:
    shutil.rmtree(tree.options.records_path)
    (tree.options.volume_path / "superblock").unlink()
    for segment in tree.options.segments_path.iterdir():
        with segment.open("r+b") as file:
            file.write(bytes(4096))
    with pytest.raises(VolumeError, match="no segment has a copy"):
        await rebuild(tree.options)


async def test_blocks_of_a_killed_daemon_do_not_mix_with_later_ones(tree: Tree) -> None:
    """What was written but never committed does not take the place of what was committed afterwards."""
    folder = tree.options.volume_path
    copy = folder.with_name("copy")
    async with tree.volume() as volume:  # bytes and headers are written, the commit never comes
        await tree.write(volume, b"uncommitted", tree.rng.randbytes(5000))
        node = await volume.tree.lookup(ROOT_INODE, b"uncommitted")
        await inside.journal(volume).flusher.flush([inside.nodes(volume).get(node.ino)])
        shutil.copytree(folder, copy)
    shutil.rmtree(folder)
    copy.rename(folder)
    data = tree.files.pop(b"uncommitted")
    async with tree.volume() as volume:
        await tree.write(volume, b"committed", tree.rng.randbytes(150_000))
    drop_records(tree)
    await rebuild(tree.options)
    found = await tree.read()
    assert found.pop(b"uncommitted", data) == data
    assert found == tree.files


async def test_removed_before_its_commit_stays_removed(tree: Tree) -> None:
    """A file that reached its slots and was removed before any commit is not recovered."""
    async with tree.volume() as volume:
        await tree.write(volume, b"short-lived", tree.rng.randbytes(5000))
        node = await volume.tree.lookup(ROOT_INODE, b"short-lived")
        await inside.journal(volume).flusher.flush([inside.nodes(volume).get(node.ino)])
        await volume.tree.unlink(ROOT_INODE, b"short-lived")
        tree.files.pop(b"short-lived")
    drop_records(tree)
    await rebuild(tree.options)
    assert await tree.read() == tree.files
