"""Devices join and leave a volume while it is in use; a kill at any write of that leaves a sound volume."""

from __future__ import annotations

import errno
import json
import random
import shutil
import struct
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import inside
import msgspec
import pytest
import trio
from block_tree import engine_of
from mounting import shared_conf
from namespace_lab import make_namespace
from shared_lab import eventually
from test_growth import Files, assert_clean, grow
from volume_lab import CALLER, MIB

from kvfuse.checksum import crc32c
from kvfuse.errors import EngineError, InvalidArgument
from kvfuse.options import config
from kvfuse.options.options import BlockOptions, CacheOptions, MountOptions, Options, VolumeOptions
from kvfuse.remote.segments.block import changing, moving, pieces
from kvfuse.remote.segments.block.finding import label_at
from kvfuse.remote.segments.block.making import prepare_device
from kvfuse.remote.segments.block.segment_map import SegmentMap, area_of, parse_map
from kvfuse.slab.layout import FEATURE_MAPPED, FEATURE_RESIZED, Superblock
from kvfuse.volume.api import ROOT_INODE, RowTerms
from kvfuse.volume.blocks import draining
from kvfuse.volume.check.rebuild import rebuild
from kvfuse.volume.inodes import device_changes
from kvfuse.volume.opening import formatting
from kvfuse.volume.running import open_volume
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume
from kvfuse_cluster.etcd import EtcdServers

DEVICES = b"user.kvfuse.devices"
DEVICE_SIZE = 60 * MIB
"""three segments of 16 MiB"""
CAPACITY = 77 * MIB


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "GRACE_SECONDS", 0)


def blank(path: Path, size: int = DEVICE_SIZE) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


def options_of(folder: Path, names: str = "ab", **segments: Any) -> Options:
    """Devices are files of the folder with these names; the volume need not be made yet."""
    return Options(
        volume=VolumeOptions(path=folder / "volume", capacity=CAPACITY, segment_size=16 * MIB),
        cache=CacheOptions(tier_size=16 * MIB, staging_size=16 * MIB),
        mount=MountOptions(),
        segments=BlockOptions(devices=tuple(str(folder / name) for name in names), **segments),
    )


async def made(folder: Path, names: str = "ab", **segments: Any) -> Options:
    options = options_of(folder, names, **segments)
    for name in names:
        blank(folder / name)
    await formatting.format_volume(options)
    return options


def map_of(volume: Volume) -> SegmentMap:
    devices = inside.core(volume).segments.devices
    assert devices is not None
    return devices.map


async def ask(volume: Volume, **request: Any) -> None:
    await volume.inodes.set_xattr(ROOT_INODE, DEVICES, json.dumps(request).encode(), CALLER)


def prepare(volume: Volume, path: Path) -> None:
    found = map_of(volume)
    members = [row.device_id for row in found.rows]
    prepare_device(path, found.volume_id, found.segment_size, found.head_size, members)


async def join(volume: Volume, path: Path, **more: Any) -> None:
    """As the command does it."""
    prepare(volume, path)
    await ask(volume, add=str(path), **more)


async def leave(volume: Volume, path: Path) -> None:
    """Until it has left."""
    await ask(volume, remove=id_of(volume, path))
    await has_left(volume)


def id_of(volume: Volume, path: Path) -> str:
    return next(row.device_id.hex() for row in map_of(volume).rows if row.path == str(path))


async def has_left(volume: Volume) -> None:
    drain = inside.parts(volume).drain
    assert drain is not None

    async def is_done() -> bool:
        assert not drain.failure
        return not drain.statistics()["leaving"] and not drain.statistics()["target"]

    await eventually(is_done, seconds=60, pause=0.01)


def paths_of(volume: Volume) -> list[str]:
    return [Path(row.path).name for row in map_of(volume).rows]


async def test_a_full_volume_gets_a_device_and_uses_it(tmp_path: Path, rng: random.Random) -> None:
    options, files = await made(tmp_path), Files()
    async with open_volume(options) as volume:
        await files.fill(volume, rng)
        size, count = volume.space().size, len(files.contents)
        await join(volume, blank(tmp_path / "c"), domain="rack", weight=3)
        assert volume.space().size > 1.5 * size
        assert map_of(volume).rows[2][2:5] == (3, "rack", str(tmp_path / "c"))
        await files.fill(volume, rng)
        assert len(files.contents) > 1.5 * count
        await files.verify(volume)
        (row,) = json.loads(await volume.inodes.get_xattr(ROOT_INODE, DEVICES))["devices"][2:]
        assert (row["places"], row["leaving"]) == (3, False)
        assert row["segments"] > 1
        assert DEVICES not in await volume.inodes.list_xattrs(ROOT_INODE)
    await assert_clean(options)
    for names in ("ab", "cab", "b"):  # what mount.conf says may stay as it is
        async with open_volume(options_of(tmp_path, names)) as volume:
            assert paths_of(volume) == ["a", "b", "c"]
            await files.verify(volume)
    await assert_clean(options)


async def test_a_volume_grows_on_places_that_its_devices_have_free(tmp_path: Path, rng: random.Random) -> None:
    options, files = await made(tmp_path), Files()
    async with open_volume(options) as volume:
        await files.fill(volume, rng)
        count = len(files.contents)
        await grow(volume, CAPACITY + 17 * MIB)
        assert len(map_of(volume).places) == 6
        with pytest.raises(InvalidArgument, match="devices have places for 6 segments"):
            await grow(volume, CAPACITY + 40 * MIB)
        await files.fill(volume, rng)
        assert len(files.contents) > count
        await files.verify(volume)
    await assert_clean(options)


async def test_any_device_leaves_and_its_files_stay(tmp_path: Path, rng: random.Random) -> None:
    options, files = await made(tmp_path, "abc"), Files()
    async with open_volume(options) as volume:
        await files.fill(volume, rng)
        size = volume.space().size
        await join(volume, blank(tmp_path / "d"), capacity=CAPACITY)
        assert volume.space().size == size
        for name in "a":
            await leave(volume, tmp_path / name)
        assert paths_of(volume) == ["b", "c", "d"]
        assert volume.space().size == size
        await files.verify(volume)
        blank(tmp_path / "a").write_bytes(bytes(DEVICE_SIZE))  # it is somebody else's now
    then = options_of(tmp_path, "dcb")
    await assert_clean(then)
    async with open_volume(then) as volume:
        await files.verify(volume)


async def test_a_volume_gets_smaller_where_the_others_have_no_places(tmp_path: Path, rng: random.Random) -> None:
    options, files = await made(tmp_path, "abc"), Files()
    async with open_volume(options) as volume:
        await files.fill(volume, rng)
        with pytest.raises(InvalidArgument, match="files have"):
            await grow(volume, CAPACITY + 60 * MIB)
            await files.fill(volume, rng)
            await ask(volume, remove=id_of(volume, tmp_path / "a"))
        for name in rng.sample(sorted(files.contents), len(files.contents) - 30):
            await volume.tree.unlink(ROOT_INODE, name)
            del files.contents[name]
        await volume.sync()
        await leave(volume, tmp_path / "b")
        assert len(map_of(volume).places) == 6
        assert paths_of(volume) == ["a", "c"]
        await files.verify(volume)
    await assert_clean(options)
    async with open_volume(options) as volume:  # mount.conf still names the one that left
        await files.verify(volume)
        with pytest.raises(InvalidArgument, match="not labelled to join"):
            await ask(volume, add=str(tmp_path / "b"))
        await join(volume, tmp_path / "b")
        await files.fill(volume, rng)
        await files.verify(volume)
    await assert_clean(options)


async def test_blocks_stay_when_a_device_leaves(tmp_path: Path, rng: random.Random) -> None:
    options = await made(tmp_path, "abc")
    contents = {b"block-%d" % number: rng.randbytes(MIB // 3) for number in range(60)}

    async def read_all(volume: Volume, directory: int) -> None:
        engine = engine_of(volume)
        for name, data in contents.items():
            found = engine.find(directory, name)
            assert found is not None
            assert await engine.read(found[0], name) == data

    async with open_volume(options) as volume:
        directory = await make_namespace(volume, ROOT_INODE, b"kv", kind="blocks")
        engine = engine_of(volume)
        table = engine.table(directory, directory, CALLER.uid, CALLER.gid, 0o644)
        for name, data in contents.items():
            await engine.put(table, [name], [memoryview(data)], RowTerms())
        await engine.writer.flush()
        await leave(volume, tmp_path / "a")
        assert paths_of(volume) == ["b", "c"]
        await read_all(volume, directory)
    (tmp_path / "a").unlink()
    then = options_of(tmp_path, "bc")
    await assert_clean(then)
    async with open_volume(then) as volume:
        directory = (await volume.tree.lookup(ROOT_INODE, b"kv")).ino
        engine = engine_of(volume)
        engine.table(directory, directory, CALLER.uid, CALLER.gid, 0o644)
        await engine.slabs.loaded.wait()
        await read_all(volume, directory)


# -- kills -------------------------------------------------------------------------------------------


SMALL_DEVICE, SMALL = 17 * MIB, 14 * MIB
"""three segments of 4 MiB, and a volume that has four"""


def small_options(folder: Path, names: str = "ab") -> Options:
    options = options_of(folder, names)
    return msgspec.structs.replace(
        options, volume=VolumeOptions(path=folder / "volume", capacity=SMALL, segment_size=4 * MIB)
    )


class Killer:
    """Leaves a copy of all that is on the medium, before and after each write of a change, and in the midst of some."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.left: list[Path] = []
        for module in (changing, moving):
            monkeypatch.setattr(module, "write_page", self.watched(pieces.write_page))
        monkeypatch.setattr(changing, "write_bytes", self.watched(pieces.write_bytes, is_torn=True))
        monkeypatch.setattr(formatting, "write_superblock", self.watched(formatting.write_superblock))

    def watched(self, write: Callable[..., None], *, is_torn: bool = False) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            if is_torn:
                image = kwargs["image"]
                write(*args, **{**kwargs, "image": image[: len(image) // 2]})
                self.leave()
            write(*args, **kwargs)
            self.leave()

        return call

    def leave(self) -> None:
        there = self.folder.with_name(f"{self.folder.name}-{len(self.left)}")
        subprocess.run(["cp", "--recursive", "--sparse=always", self.folder, there], check=True)
        self.left.append(there)


async def filled(options: Options, rng: random.Random) -> Files:
    files = Files()
    await formatting.format_volume(options)
    async with open_volume(options) as volume:
        await files.fill(volume, rng)
        await volume.tree.unlink(ROOT_INODE, min(files.contents))
        del files.contents[min(files.contents)]
        await volume.sync()
    return files


@pytest.fixture
def disks(tmp_path: Path) -> Path:
    """A folder of devices."""
    folder = tmp_path / "disks"
    folder.mkdir()
    for name in "ab":
        blank(folder / name, SMALL_DEVICE)
    return folder


async def test_a_kill_at_any_write_of_a_join_leaves_one_set_or_the_other(
    disks: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = small_options(disks)
    files = await filled(options, rng)
    before = len(files.contents)
    async with open_volume(options) as volume:
        blank(disks / "c", SMALL_DEVICE)
        prepare(volume, disks / "c")
        killer = Killer(disks, monkeypatch)
        await ask(volume, add=str(disks / "c"))
        monkeypatch.undo()
    assert len(killer.left) >= 8
    disks.rename(disks.with_name("done"))
    seen = set()
    for there in killer.left:
        then = small_options(there, "abc")
        await assert_clean(then)
        async with open_volume(then) as volume:
            await files.verify(volume)
            seen.add(count := len(map_of(volume).rows))
        if count == 2:
            async with open_volume(small_options(there, "ab")) as volume:
                await files.verify(volume)
        async with open_volume(then) as volume:
            if len(map_of(volume).rows) == 2:
                await join(volume, there / "c")  # again
            more = Files(dict(files.contents), 1000)
            await more.fill(volume, rng)
            assert len(more.contents) > before + 5
            await more.verify(volume)
        await assert_clean(then)
        shutil.rmtree(there)
    assert seen == {2, 3}


async def test_a_kill_at_any_write_of_a_removal_is_gone_on_from(
    disks: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = small_options(disks)
    files = await filled(options, rng)
    async with open_volume(options) as volume:
        await join(volume, blank(disks / "c", SMALL_DEVICE), capacity=SMALL)
        killer = Killer(disks, monkeypatch)
        await leave(volume, disks / "a")
        monkeypatch.undo()
        monkeypatch.setattr(draining, "GRACE_SECONDS", 0)
    assert len(killer.left) >= 20
    disks.rename(disks.with_name("done"))
    for there in killer.left:
        then = small_options(there, "abc")
        await assert_clean(then)
        async with open_volume(then) as volume:
            await has_left(volume)
            await files.verify(volume)
            if len(map_of(volume).rows) == 3:  # the first step was not taken
                await leave(volume, disks / "a")
            assert paths_of(volume) == ["b", "c"]
            await files.verify(volume)
        (there / "a").unlink()
        await assert_clean(small_options(there, "bc"))
        shutil.rmtree(there)


def as_version_1(options: Options) -> None:
    """What a program of before this made: no map, and a label that says where all segments are."""
    superblock = formatting.read_superblock(options.volume_path)
    features = superblock.features & ~(FEATURE_MAPPED | FEATURE_RESIZED)
    formatting.write_superblock(
        options.volume_path, replace(superblock, segment_map=(0, 0), resizes=0, features=features)
    )
    assert isinstance(options.segments, BlockOptions)
    paths = [Path(path) for path in options.segments.devices]
    maps = [parse_map(path.read_bytes()[area_of(1) :]) for path in paths]
    for index, path in enumerate(paths):
        made = maps[index]
        fields = (b"\x89KVBLK\r\n", 1, index, len(made.rows), made.volume_id, made.segment_size, made.head_size)
        page = struct.pack("<8s I H H 16s Q Q Q", *fields, len(made.places))
        page += b"".join(struct.pack("<16s Q Q", *row[:3]) for row in made.rows)
        with path.open("r+b") as device:
            device.write((page + struct.pack("<I", crc32c(page))).ljust(MIB, b"\0"))


async def test_a_set_with_labels_of_version_1_gets_a_map_with_its_first_change(
    disks: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = small_options(disks)
    files = await filled(options, rng)
    as_version_1(options)
    async with open_volume(options) as volume:
        await files.verify(volume)
        assert map_of(volume).name == (0, 0)
    assert formatting.read_superblock(options.volume_path).segment_map == (0, 0)
    await assert_clean(options)
    async with open_volume(options) as volume:
        prepare(volume, blank(disks / "c", SMALL_DEVICE))
        killer = Killer(disks, monkeypatch)
        await ask(volume, add=str(disks / "c"))
        monkeypatch.undo()
    assert all(label_at(disks / name).first_map is None for name in "abc")
    disks.rename(disks.with_name("done"))
    for there in killer.left:
        then = small_options(there, "abc")
        await assert_clean(then)
        async with open_volume(then) as volume:
            await files.verify(volume)
            if len(map_of(volume).rows) == 2:
                await join(volume, there / "c")
            more = Files(dict(files.contents), 1000)
            await more.fill(volume, rng)
            assert len(more.contents) > len(files.contents) + 5
        await assert_clean(then)
        shutil.rmtree(there)


async def test_random_changes_with_kills(disks: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "GRACE_SECONDS", 0)
    files, folder, made_count = await filled(small_options(disks), rng), disks, 2
    for turn in range(6):
        names = "".join(sorted(path.name for path in folder.iterdir() if len(path.name) == 1))
        with monkeypatch.context() as patch:
            async with open_volume(small_options(folder, names)) as volume:
                await has_left(volume)
                await files.verify(volume)
                killer = Killer(folder, patch)
                kind = rng.choice(["join", "leave"]) if len(map_of(volume).rows) > 2 else "join"
                if kind == "join":
                    name, made_count = "abcdefgh"[made_count], made_count + 1
                    with suppress(InvalidArgument):
                        await join(volume, blank(folder / name, SMALL_DEVICE), capacity=rng.choice([None, SMALL]))
                else:
                    row = rng.choice(map_of(volume).rows)
                    with suppress(InvalidArgument):  # files would not fit
                        await ask(volume, remove=row.device_id.hex())
                        await has_left(volume)
            await assert_clean(small_options(folder, names))
        there = rng.choice([*killer.left, folder])
        folder = folder.rename(folder.with_name(f"done-{turn}")) if there is not folder else folder
        for other in {*killer.left} - {there}:
            shutil.rmtree(other)
        names = "".join(sorted(path.name for path in there.iterdir() if len(path.name) == 1))
        folder = there
    async with open_volume(small_options(folder, names)) as volume:
        await has_left(volume)
        await files.verify(volume)
    await assert_clean(small_options(folder, names))


async def test_a_rebuild_finds_segments_by_the_map_that_all_devices_have(
    disks: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = small_options(disks)
    files = await filled(options, rng)
    async with open_volume(options) as volume:
        await join(volume, blank(disks / "c", SMALL_DEVICE), capacity=SMALL)
        killer = Killer(disks, monkeypatch)
        await leave(volume, disks / "a")
        monkeypatch.undo()
    disks.rename(disks.with_name("done"))
    for there in killer.left[:: max(len(killer.left) // 8, 1)]:
        then = small_options(there, "abc")
        (then.volume_path / "superblock").unlink()
        report = await rebuild(then)
        assert not report.dropped
        await assert_clean(then)
        async with open_volume(then) as volume:
            await files.verify(volume)
        shutil.rmtree(there)


class SickFolder:
    """Of a volume: some superblocks are not stored, or stored while the call fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
        self.write, self.rng = formatting.write_superblock, rng
        self.failed = 0
        monkeypatch.setattr(formatting, "write_superblock", self.write_some)

    def write_some(self, path: Path, superblock: Superblock) -> None:
        kind = self.rng.randrange(3)
        if kind:
            self.write(path, superblock)
        if kind < 2:
            self.failed += 1
            raise OSError(errno.EIO, "injected")


async def test_a_superblock_that_is_not_stored_for_sure_loses_nothing(
    disks: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_changes, "RETRY_SECONDS", 0.01)
    options = small_options(disks)
    files = await filled(options, rng)
    async with open_volume(options) as volume:
        await join(volume, blank(disks / "c", SMALL_DEVICE), capacity=SMALL)
        await ask(volume, remove=id_of(volume, disks / "a"))
        sick, devices = SickFolder(monkeypatch, rng), inside.parts(volume).devices
        assert devices is not None

        async def is_gone() -> bool:
            name = rng.choice(sorted(files.contents))
            await volume.tree.unlink(ROOT_INODE, name)
            del files.contents[name]
            await files.fill(volume, rng, 1)
            await files.verify(volume)
            return not devices.leaving_count

        await eventually(is_gone, seconds=60, pause=0.02)
        assert sick.failed
        monkeypatch.undo()
        await files.verify(volume)
    (disks / "a").unlink()
    await assert_clean(small_options(disks, "bc"))
    async with open_volume(small_options(disks, "bc")) as volume:
        await files.verify(volume)


# -- which device ------------------------------------------------------------------------------------


async def test_slabs_are_taken_of_all_devices_in_turn(tmp_path: Path, rng: random.Random) -> None:
    options, files = await made(tmp_path, "abcd", domains=("one", "one", "two", "two")), Files()
    async with open_volume(options) as volume:
        await files.fill(volume, rng, 24)
        core = inside.core(volume)
        assert core.spread is not None
        used = [core.spread.stripe(state.slab) for state in core.slabs.durable_images()]
        counts = Counter(used)
        assert len(counts) == 4
        assert max(counts.values()) - min(counts.values()) <= 2, counts
        assert abs(sum(stripe.domain == "one" for stripe in used) - len(used) / 2) <= 1
    await assert_clean(options)


# -- many hosts --------------------------------------------------------------------------------------


@pytest.fixture
async def shared(tmp_path: Path, etcd: EtcdServers) -> Options:
    """Of a volume that hosts share, made on two devices."""
    for name in "ab":
        blank(tmp_path / name)
    conf = shared_conf(tmp_path, etcd)
    options = config.load(conf).options
    segments = BlockOptions(devices=tuple(str(tmp_path / name) for name in "ab"), quarantine=0.5)
    shape = msgspec.structs.replace(options.volume, capacity=CAPACITY, segment_size=16 * MIB)
    options = msgspec.structs.replace(options, segments=segments, volume=shape)
    await formatting.format_volume(options)
    return options


async def test_hosts_follow_devices_that_others_add(shared: Options, tmp_path: Path, rng: random.Random) -> None:
    files, paths = Files(), [blank(tmp_path / name) for name in "cde"]
    async with open_volume(shared) as one, open_volume(shared) as two:
        for volume, path in ((one, paths[0]), (two, paths[1]), (one, paths[2])):
            await join(volume, path)
            size = max(one.space().size, two.space().size)

            async def have_it(size: int = size) -> bool:
                return one.space().size == two.space().size == size

            await eventually(have_it, seconds=20, pause=0.05)
            await files.fill(volume, rng, 45)
        await files.verify(one)
        await files.verify(two)
        assert paths_of(one) == ["a", "b", "c", "d", "e"]
        with pytest.raises(InvalidArgument, match="while nobody has it mounted"):
            await ask(one, remove=id_of(one, paths[0]))
    await assert_clean(shared)


async def test_one_host_at_a_time_changes_devices(shared: Options, tmp_path: Path, rng: random.Random) -> None:
    """One that died in the midst holds up others until its last writes are over."""
    paths, refused = [blank(tmp_path / name) for name in "cd"], []
    async with open_volume(shared) as one, open_volume(shared) as two:

        async def add(volume: Volume, path: Path) -> None:
            prepare(volume, path)
            try:
                await ask(volume, add=str(path))
            except EngineError as error:
                refused.append(str(error))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(add, one, paths[0])
            nursery.start_soon(add, two, paths[1])
        records = inside.core(one).records
        await records.commit({schema.CHANGER: schema.encode_u64(4711)}, durable=True)
        began = trio.current_time()
        await join(one, blank(tmp_path / "f"))
        assert trio.current_time() - began >= 0.5
        assert (await records.get([schema.CHANGER])) == [None]
        assert len(map_of(one).rows) == 5 - len(refused)
        assert all("another host changes" in text for text in refused)
    await assert_clean(shared)
