"""A volume gets more capacity while it is mounted: its slabs are used at once, and whoever is killed loses nothing."""

from __future__ import annotations

import errno
import random
import shutil
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import inside
import pytest
import trio.testing
from block_tree import engine_of, make_block_tree
from kept_memory import after_kill, let_go
from namespace_lab import make_namespace
from shared_lab import eventually, get, hosts, put, quiet, until
from volume_lab import CALLER, MIB, Disk, check, lab_options, opened

from kvfuse.errors import EngineError, InvalidArgument, NoSpace, NotAdmitted, NotPermitted
from kvfuse.kept.keeper import MemoryKeeper
from kvfuse.options.options import CacheOptions, MountOptions, Options, VolumeOptions
from kvfuse.slab.layout import Superblock
from kvfuse.volume.api import ROOT_INODE, RowTerms
from kvfuse.volume.check.rebuild import rebuild
from kvfuse.volume.check.volume_check import fsck
from kvfuse.volume.opening import formatting
from kvfuse.volume.running import open_volume
from kvfuse.volume.volume import Volume

CAPACITY, GROWN = 40 * MIB, 130 * MIB
"""The volume as it is formatted has a segment that is shorter than all others."""
NAME = b"user.kvfuse.capacity"


def options_of(path: Path) -> Options:
    return Options(
        volume=VolumeOptions(path=path, capacity=CAPACITY, segment_size=16 * MIB),
        cache=CacheOptions(tier_size=16 * MIB, staging_size=16 * MIB),
        mount=MountOptions(),
    )


@dataclass
class Files:
    """Files of 1 MiB, and what they have to have."""

    contents: dict[bytes, bytes] = field(default_factory=dict)
    made: int = 0

    async def fill(self, volume: Volume, rng: random.Random, count: int = 1000) -> None:
        """Until the volume is full, or so many are stored."""
        for _ in range(count):
            name, data = b"%d" % self.made, rng.randbytes(MIB)
            self.made += 1
            try:
                await put(volume, name, data)
            except NoSpace:
                await volume.tree.unlink(ROOT_INODE, name)
                break
            self.contents[name] = data
        await volume.sync()

    async def verify(self, volume: Volume) -> None:
        for name, data in self.contents.items():
            assert await get(volume, name) == data, name


async def grow(volume: Volume, capacity: int = GROWN) -> None:
    await volume.inodes.set_xattr(ROOT_INODE, NAME, b"%d" % capacity, CALLER)


async def assert_clean(options: Options) -> None:
    report = await fsck(options, verify=True)
    assert report.clean, [problem.text for problem in report.problems]


async def test_a_full_volume_grows_while_it_is_mounted(tmp_path: Path, rng: random.Random) -> None:
    options, files = options_of(tmp_path / "volume"), Files()
    await formatting.format_volume(options)
    async with open_volume(options) as volume:
        await files.fill(volume, rng)
        size, count = volume.space().size, len(files.contents)
        await grow(volume)
        assert volume.space().size > 2.5 * size
        assert await volume.inodes.get_xattr(ROOT_INODE, NAME) == b"%d" % GROWN
        assert NAME not in await volume.inodes.list_xattrs(ROOT_INODE)
        await files.fill(volume, rng)
        assert len(files.contents) > 2.5 * count
        await files.verify(volume)
    assert sum(path.stat().st_size for path in options.segments_path.iterdir()) <= GROWN
    await assert_clean(options)
    async with open_volume(options) as volume:
        await files.verify(volume)
        await grow(volume, GROWN + 16 * MIB)
        await files.fill(volume, rng, 3)
    await assert_clean(options)


async def test_a_growth_that_cannot_be_is_refused(tmp_path: Path) -> None:
    options = options_of(tmp_path / "volume")
    await formatting.format_volume(options)
    async with open_volume(options) as volume:
        before = volume.space()
        for value in (b"%d" % (CAPACITY + MIB), b"%d" % MIB, b"1TiB", b""):
            with pytest.raises(InvalidArgument):
                await volume.inodes.set_xattr(ROOT_INODE, NAME, value)
        with pytest.raises(NotPermitted):
            await volume.inodes.set_xattr(ROOT_INODE, NAME, b"%d" % GROWN, CALLER._replace(uid=4711))
        with pytest.raises(NotPermitted):
            await volume.inodes.remove_xattr(ROOT_INODE, NAME)
        assert volume.space() == before
        await grow(volume, CAPACITY)  # what it has is no change
        assert volume.space() == before
    assert formatting.read_superblock(options.volume_path).resizes == 0


async def test_a_kill_at_any_step_leaves_a_sound_volume(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a daemon that is killed leaves is what its files have then."""
    options, files = options_of(tmp_path / "volume"), Files()
    await formatting.format_volume(options)
    write, left = formatting.write_superblock, dict[str, int]()

    def leave(name: str) -> None:
        shutil.copytree(options.volume_path, tmp_path / name)
        left[name] = len(files.contents)

    def watched(path: Path, superblock: Superblock) -> None:
        leave("before")
        (path / "superblock.new").write_bytes(b"half of it")
        leave("half")
        write(path, superblock)
        leave("stored")

    async with open_volume(options) as volume:
        await files.fill(volume, rng)
        monkeypatch.setattr(formatting, "write_superblock", watched)
        await grow(volume)
        monkeypatch.undo()
        core = inside.core(volume)
        await core.segments.create(4, core.geometry.segment_size(4))
        leave("headless")  # a segment of which no record tells yet
        await files.fill(volume, rng, 20)
        leave("used")
    capacities = {"before": CAPACITY, "half": CAPACITY, "stored": GROWN, "headless": GROWN, "used": GROWN}
    for name, count in left.items():
        then, stored = options_of(tmp_path / name), Files(dict(list(files.contents.items())[:count]), files.made)
        await assert_clean(then)
        async with open_volume(then) as volume:
            assert inside.core(volume).geometry.capacity == capacities[name], name
            await stored.verify(volume)
            await grow(volume)
            await stored.fill(volume, rng, 25)
            await stored.verify(volume)
        await assert_clean(then)


async def test_a_growth_that_is_not_stored_is_none(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_of(tmp_path / "volume")
    await formatting.format_volume(options)

    def fail(path: Path, superblock: Superblock) -> None:
        raise OSError(errno.EIO, "injected")

    async with open_volume(options) as volume:
        before = volume.space()
        monkeypatch.setattr(formatting, "write_superblock", fail)
        with pytest.raises(EngineError, match="superblock"):
            await grow(volume)
        assert volume.space() == before
        monkeypatch.undo()
        await grow(volume)
    await assert_clean(options)


async def test_a_rebuild_takes_the_newest_copy_of_the_superblock(tmp_path: Path, rng: random.Random) -> None:
    options, files = options_of(tmp_path / "volume"), Files()
    await formatting.format_volume(options)
    async with open_volume(options) as volume:
        await files.fill(volume, rng)
        await grow(volume)
        await files.fill(volume, rng, 40)
    (options.volume_path / "superblock").unlink()
    report = await rebuild(options)
    assert not report.dropped
    await assert_clean(options)
    async with open_volume(options) as volume:
        assert inside.core(volume).geometry.capacity == GROWN
        await files.verify(volume)


async def test_the_store_of_records_and_the_budget_grow_with_the_volume(tmp_path: Path) -> None:
    options = options_of(tmp_path / "volume")
    await formatting.format_volume(options)
    async with open_volume(options) as volume:
        core, larger = inside.core(volume), 64 * CAPACITY
        before = await core.records.bound(1 << 62), core.metadata.limit
        await grow(volume, larger)
        assert core.metadata.limit == larger // 16 > before[1]
    async with open_volume(options) as volume:
        assert inside.core(volume).metadata.limit == larger // 16


# -- blocks ------------------------------------------------------------------------------------------


async def test_a_cache_uses_what_its_volume_has_more(tmp_path: Path, rng: random.Random) -> None:
    tree = await make_block_tree(tmp_path, rng, CAPACITY)
    await tree.begin(0)
    wanted = {b"block-%d" % number: tree.content(MIB - 5) for number in range(100)}
    async with tree.opened() as (volume, engine):
        for name, data in wanted.items():
            with suppress(NotAdmitted):
                await tree.put(engine, {name: data})
        assert 0 < len(await tree.read(engine)) < 40
        await grow(volume)

        async def is_stored() -> bool:
            """The cache is not full any more, as soon as it has looked."""
            with suppress(NotAdmitted):
                await tree.put(engine, wanted)
                return True
            return False

        await eventually(is_stored, pause=0.01)
        await engine.writer.flush()
        assert await tree.read(engine) == wanted
    assert not (await tree.check()).problems
    async with tree.opened() as (_, engine):
        assert await tree.read(engine) == wanted
    assert not (await tree.check()).problems


async def test_the_next_daemon_finds_blocks_in_slabs_that_the_last_one_got(rng: random.Random) -> None:
    """In shared memory, which the holder keeps: no head is read."""
    options = lab_options(capacity=CAPACITY)
    disk, keeper = Disk.format(options), MemoryKeeper()
    contents = {b"block-%d" % number: rng.randbytes(MIB // 2) for number in range(100)}
    async with opened(disk, options, keeper=keeper) as volume:
        directory = await make_namespace(volume, ROOT_INODE, b"kv", kind="blocks")
        await grow(volume)
        engine = engine_of(volume)
        table = engine.table(directory, directory, CALLER.uid, CALLER.gid, 0o644)
        for name, data in contents.items():
            await engine.put(table, [name], [memoryview(data)], RowTerms())
        await engine.writer.flush()
        left, then = after_kill(keeper), disk.copy()
    async with opened(then, options, keeper=left) as volume:
        engine = engine_of(volume)
        assert not engine.slabs.loaded_blocks
        for name, data in contents.items():
            at = engine.find(directory, name)
            assert at is not None
            assert await engine.read(at[0], name) == data
    let_go(keeper, left)
    assert (await check(then)).clean


# -- many hosts --------------------------------------------------------------------------------------


async def test_all_hosts_of_a_volume_use_what_one_of_them_gave(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with hosts(rng, 3, capacity=CAPACITY) as volumes:
        one, two, three = volumes
        first, second = Files(), Files()
        await first.fill(one, rng)
        await grow(one)
        await until(lambda: all(inside.core(volume).geometry.capacity == GROWN for volume in volumes))
        for number in range(25):
            for volume, files in ((two, first), (three, second)):
                name, data = b"%d of %d" % (number, id(volume)), rng.randbytes(MIB)
                await put(volume, name, data)
                files.contents[name] = data
        await quiet(*volumes)
        assert inside.leases(two).view.unheld_count < inside.core(two).geometry.slab_count
        for volume in volumes:
            await first.verify(volume)
            await second.verify(volume)


async def test_a_host_that_has_not_heard_of_it_reads_what_others_store(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """It takes no slab that it does not know of, and nothing of others for damaged."""
    async with hosts(rng, 2, capacity=CAPACITY) as volumes:
        one, deaf = volumes
        former = replace(inside.core(deaf).geometry)
        inside.leases(deaf).view.resized = lambda superblock: None
        files = Files()
        await files.fill(one, rng, 20)
        await grow(one)
        await files.fill(one, rng, 60)
        await quiet(*volumes)
        assert inside.core(deaf).geometry == former
        await files.verify(deaf)
        view = inside.leases(deaf).view
        assert max(view.holders) >= former.slab_count
        assert all(slab < former.slab_count for slab in (*view.unheld(), *view.held_by(inside.client(one))))
        for name in list(files.contents)[:30]:  # it frees slots in slabs that it does not know
            await deaf.tree.unlink(ROOT_INODE, name)
            del files.contents[name]
        await quiet(*volumes)
        await files.verify(one)
