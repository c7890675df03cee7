"""A volume gets less capacity while it is mounted: its last segments are emptied, and removed."""

from __future__ import annotations

import os
import random
import shutil
from contextlib import suppress
from pathlib import Path

import inside
import pytest
from block_tree import make_block_tree
from shared_lab import eventually, get, put
from test_growth import GROWN, NAME, Files, assert_clean, grow, options_of
from volume_lab import CALLER, MIB

from kvfuse.errors import InvalidArgument, NotAdmitted
from kvfuse.options.options import Options
from kvfuse.slab.layout import Superblock
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.blocks import draining
from kvfuse.volume.opening import formatting
from kvfuse.volume.running import open_volume
from kvfuse.volume.volume import Volume

SMALL = 60 * MIB


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "GRACE_SECONDS", 0)


async def shrink(volume: Volume, capacity: int = SMALL) -> None:
    """Until it is done."""
    await grow(volume, capacity)
    await shrunk(volume)


async def shrunk(volume: Volume) -> None:
    drain = inside.parts(volume).drain
    assert drain is not None

    async def is_done() -> bool:
        assert not drain.failure
        return not inside.core(volume).superblock.target

    await eventually(is_done, seconds=60, pause=0.01)


def segments_size(options: Options) -> int:
    return sum(path.stat().st_size for path in options.segments_path.iterdir())


async def made(options: Options, rng: random.Random, count: int) -> Files:
    """A large volume, full of files of which so many are left, here and there."""
    files = Files()
    await formatting.format_volume(options)
    async with open_volume(options) as volume:
        await grow(volume)
        await files.fill(volume, rng)
        for name in rng.sample(sorted(files.contents), len(files.contents) - count):
            await volume.tree.unlink(ROOT_INODE, name)
            del files.contents[name]
    return files


async def test_files_move_and_the_segments_go(tmp_path: Path, rng: random.Random) -> None:
    options = options_of(tmp_path / "volume")
    files = await made(options, rng, 40)
    async with open_volume(options) as volume:
        handle, _ = await volume.tree.create(ROOT_INODE, b"open", 0o644, CALLER, os.O_RDWR)
        await volume.files.write(handle, 0, b"x" * MIB)
        await volume.files.fsync(handle)
        await shrink(volume)
        await volume.files.write(handle, 100, b"y" * 100)
        assert bytes(await volume.files.read(handle, 0, 300)) == b"x" * 100 + b"y" * 100 + b"x" * 100
        await volume.files.release(handle)
        await files.verify(volume)
        assert segments_size(options) <= SMALL
        assert volume.space().size <= SMALL
        assert await volume.inodes.get_xattr(ROOT_INODE, NAME) == b"%d" % SMALL
        await files.fill(volume, rng)  # it is full when all of it is used, and no more
    assert segments_size(options) <= SMALL
    await assert_clean(options)
    async with open_volume(options) as volume:
        await files.verify(volume)
        await grow(volume)
        await files.fill(volume, rng, 30)
        await files.verify(volume)
    await assert_clean(options)


async def test_what_does_not_fit_is_refused_and_a_beginning_is_taken_back(tmp_path: Path, rng: random.Random) -> None:
    options = options_of(tmp_path / "volume")
    files = await made(options, rng, 80)
    async with open_volume(options) as volume:
        before = volume.space()
        for value, message in ((SMALL, r"files have \d+ bytes in slots, and 5\d slabs"), (MIB, "no room for 7 slabs")):
            with pytest.raises(InvalidArgument, match=message):
                await grow(volume, value)
        assert volume.space() == before
        handle, _ = await volume.tree.create(ROOT_INODE, b"gone", 0o644, CALLER, os.O_RDWR)
        await volume.files.write(handle, 0, b"x" * 20 * MIB)  # somewhere at the end
        await volume.files.fsync(handle)
        await volume.tree.unlink(ROOT_INODE, b"gone")
        for name in sorted(files.contents)[20:]:
            await volume.tree.unlink(ROOT_INODE, name)
            del files.contents[name]
        await volume.sync()
        await grow(volume, SMALL)
        drain, core = inside.parts(volume).drain, inside.core(volume)
        assert drain is not None
        with pytest.raises(InvalidArgument, match="it is about to have"):
            await grow(volume, 2 * GROWN)
        await grow(volume, GROWN)
        assert core.superblock.target == 0
        await eventually(lambda: _is(not core.slabs.going), seconds=10)
        assert volume.space().size == before.size
        await files.fill(volume, rng, 70)
        await files.verify(volume)
        await volume.files.release(handle)
    await assert_clean(options)


async def _is(condition: bool) -> bool:
    return condition


async def test_a_kill_at_any_step_is_gone_on_from(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_of(tmp_path / "volume")
    files = await made(options, rng, 40)
    write, left = formatting.write_superblock, list[str]()

    def leave(name: str) -> None:
        shutil.copytree(options.volume_path, tmp_path / name)
        left.append(name)

    def watched(path: Path, superblock: Superblock) -> None:
        number = len(left)
        leave(f"before-{number}")
        write(path, superblock)
        leave(f"after-{number}")

    async with open_volume(options) as volume:
        core = inside.core(volume)
        remove = core.segments.remove

        async def remove_watched(segment: int) -> None:
            await remove(segment)
            leave(f"removed-{segment}")

        monkeypatch.setattr(formatting, "write_superblock", watched)
        monkeypatch.setattr(core.segments, "remove", remove_watched)
        await shrink(volume)
        monkeypatch.undo()
    assert len(left) >= 6 + 4
    monkeypatch.setattr(draining, "GRACE_SECONDS", 0)
    for name in left:
        then = options_of(tmp_path / name)
        await assert_clean(then)
        async with open_volume(then) as volume:
            await files.verify(volume)
            if name != "before-0":
                await shrunk(volume)
                assert inside.core(volume).geometry.capacity == SMALL
                assert segments_size(then) <= SMALL
            await files.verify(volume)
        await assert_clean(then)


async def test_blocks_of_what_goes_are_dropped(tmp_path: Path, rng: random.Random) -> None:
    tree = await make_block_tree(tmp_path, rng, GROWN)
    await tree.begin(0)
    async with tree.opened() as (volume, engine):
        for number in range(300):
            with suppress(NotAdmitted):
                await tree.put(engine, {b"block-%d" % number: tree.content(MIB // 3)})
        before = await tree.read(engine)
        await shrink(volume)
        after = await tree.read(engine)
        assert 0 < len(after) < len(before)
        assert after.items() <= tree.blocks.items()
        assert sum(map(len, after.values())) <= SMALL
        assert segments_size(tree.options) <= SMALL
        await put(volume, b"a file", bytes(MIB))
        for number in range(100):
            with suppress(NotAdmitted):
                await tree.put(engine, {b"later-%d" % number: tree.content(MIB // 3)})
        engine.eviction.look()  # or it may do so after the blocks were read
        after = await tree.read(engine)
    assert segments_size(tree.options) <= SMALL
    assert not (await tree.check()).problems
    async with tree.opened() as (volume, engine):
        assert await tree.read(engine) == after
        assert await get(volume, b"a file") == bytes(MIB)
