"""Caches of files, as volumes had them before, become namespaces of blocks: what is kept, and every instant of it."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
import trio
from block_tree import engine_of
from namespace_lab import make_namespace
from volume_lab import CALLER, MIB, Chaos, Disk, MemoryRecords, MemorySegments, check, lab_options, opened

from kvfuse import errors
from kvfuse.native import blockforms as forms
from kvfuse.native._blocks import begin_table, name_keys
from kvfuse.options.config import Options, load
from kvfuse.options.options import NamespaceOptions
from kvfuse.remote.records.api import Lease
from kvfuse.remote.segments.api import Transfer
from kvfuse.slab.image import LENT
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.blocks.conversion import Converted
from kvfuse.volume.check.volume_check import fsck
from kvfuse.volume.namespaces.settings import ROOT, Settings, decode_settings, encode_settings
from kvfuse.volume.opening.formatting import format_volume
from kvfuse.volume.opening.former_caches import convert_caches
from kvfuse.volume.opening.held_volume import HeldVolume, hold
from kvfuse.volume.running import open_volume, run_volume
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume

BLOCK = 64 << 10
LABS = Path(__file__).parents[2] / "labs"
KIND = NamespaceOptions(kind="blocks")


class Killed(Exception):
    """The daemon is killed here."""


@dataclass
class Fuse:
    """Burns down with each step of a daemon. ``length``: steps that it lives for."""

    length: int = 1 << 60
    steps: int = 0

    def burn(self) -> None:
        self.steps += 1
        if self.steps > self.length:
            raise Killed


class Records(MemoryRecords):
    fuse = Fuse()

    async def commit(
        self,
        puts: Mapping[bytes, bytes],
        deletes: Collection[bytes] = (),
        expect: Mapping[bytes, int] | None = None,
        *,
        durable: bool = False,
        lease: Lease | None = None,
    ) -> int:
        self.fuse.burn()
        version = await super().commit(puts, deletes, expect, durable=durable, lease=lease)
        self.fuse.burn()
        return version


class Segments(MemorySegments):
    fuse = Fuse()

    async def write(self, batch: Sequence[Transfer]) -> None:
        for transfer in batch:
            self.fuse.burn()
            half = len(transfer.buffer) // 2
            await super().write([transfer._replace(buffer=memoryview(transfer.buffer)[:half])])
            self.fuse.burn()
            await super().write([transfer])

    async def sync(self) -> None:
        self.fuse.burn()
        await super().sync()


async def convert(disk: Disk, options: Options, fuse: Fuse | None = None) -> Converted | None:
    """What a mount does before it serves the volume. Killed."""
    chaos = Chaos(random.Random(0))
    records, segments = Records(disk, chaos), Segments(disk, chaos)
    records.fuse = segments.fuse = fuse or Fuse()
    held = HeldVolume(disk.superblock, records, segments, change_superblock=disk.change_superblock)
    return (await convert_caches(options, held))[1]


@dataclass
class Former:
    """A volume of before."""

    options: Options
    rng: random.Random
    disk: Disk
    cache: bytes
    """record of the root's settings"""
    blocks: dict[bytes, bytes] = field(default_factory=dict)
    """of the root, by name"""

    @classmethod
    def make(cls, options: Options, rng: random.Random, **settings: object) -> Former:
        cache = encode_settings(Settings(kind="cache").changed({"admission": "all", **settings}))
        return cls(options, rng, Disk.format(options), cache)

    @asynccontextmanager
    async def filling(self) -> AsyncIterator[Volume]:
        """The volume while it is filled. It is a cache of before, not one that is served, when that is done."""
        async with opened(self.disk, self.options) as volume:
            yield volume
        self.disk.apply({schema.namespace_key(ROOT): self.cache}, ())

    async def put(self, volume: Volume, name: bytes, size: int, folder: int = ROOT_INODE) -> None:
        data = self.rng.randbytes(size)
        await volume.blocks.put(folder, name, memoryview(data), CALLER, 0o640)
        if folder == ROOT_INODE:
            self.blocks[name] = data

    async def write(self, volume: Volume, name: bytes, data: bytes, folder: int = ROOT_INODE) -> int:
        handle, node = await volume.tree.create(folder, name, 0o644, CALLER, os.O_WRONLY)
        done = 0
        while done < len(data):
            done += await volume.files.write(handle, done, memoryview(data)[done:])
        await volume.files.flush(handle)
        await volume.files.release(handle)
        return node.ino

    @property
    def slot_sizes(self) -> dict[int, int]:
        """Of slabs, by number."""
        rows = self.disk.records.items()
        return {schema.key_slab(key): schema.decode_slab(row.value)[0] for key, row in rows if key[:1] == b"s"}

    @property
    def settings(self) -> Settings:
        return decode_settings(self.disk.records[schema.namespace_key(ROOT)].value)


async def read_all(disk: Disk, options: Options, folder: int = ROOT_INODE) -> dict[bytes, bytes]:
    """All files of a folder, by name, as the file door reads them."""
    found = {}
    async with opened(disk, options) as volume:
        await engine_of(volume).slabs.loaded.wait()
        after = 0
        while entries := await volume.tree.list_directory(folder, after, 100):
            for entry in entries:
                after = entry.cookie
                node = await volume.tree.lookup(folder, entry.name)
                volume.tree.forget(node.ino, 1)
                if node.mode & 0o170000 != 0o100000:
                    continue
                handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
                found[entry.name] = bytes(await volume.files.read(handle, 0, 1 << 30)) if node.size else b""
                await volume.files.release(handle)
    return found


async def checked(disk: Disk) -> None:
    report = await check(disk)
    assert report.clean, report


@pytest.fixture
def options() -> Options:
    return lab_options(capacity=32 * MIB)


async def mixed(options: Options, rng: random.Random) -> Former:
    """Blocks of all sizes beside files that stay, some of them in the blocks' slabs."""
    former = Former.make(options, rng)
    async with former.filling() as volume:
        for number in range(60):
            await former.put(volume, b"block-%d" % number, BLOCK)
            await former.put(volume, b"small-%d" % number, rng.choice([1, 4096, 4000]))
        for number in range(12):
            await former.put(volume, b"odd-%d" % number, rng.choice([70_001, 130_000, 333_333]))
            former.blocks[b"large-%d" % number] = data = rng.randbytes(2 * MIB + 17 if number < 2 else 50_000)
            await former.write(volume, b"large-%d" % number, data)
        former.blocks[b"empty"] = b""
        await former.write(volume, b"empty", b"")
        files = await make_namespace(volume, ROOT_INODE, b"weights", kind="files")
        for number in range(7):
            await former.write(volume, b"weight-%d" % number, b"%d" % number * 30_000, files)
            await former.put(volume, b"late-%d" % number, BLOCK)
    return former


async def test_blocks_keep_their_slots_and_files_stay(options: Options, rng: random.Random) -> None:
    former = await mixed(options, rng)
    disk = former.disk
    places = {
        key: record.chunks[0][0].addr
        for key, row in disk.records.items()
        if key[:1] == b"d" and not isinstance(record := schema.decode_entry(row.value), int) and record.chunks
    }
    alone = former.slot_sizes
    found = await convert(disk, options)
    assert found is not None
    assert (found.evicted, found.files, found.cleared) == (0, 3, 0), "two are larger than a slab, and one is empty"
    assert found.kept + found.copied == len(former.blocks) - 3
    assert found.kept >= 40
    await checked(disk)
    lent = [slab for slab, size in former.slot_sizes.items() if size == LENT]
    assert lent
    assert former.settings.kind == "blocks"
    kept = 0
    async with opened(disk, options) as volume:
        engine = engine_of(volume)
        await engine.slabs.loaded.wait()
        for key, addr in places.items():
            parent, _, name = schema.split_entry_key(key)
            at = engine.find(parent, name)
            if at is None:
                continue
            row = at[0].rows[at[1]]
            slab, slot = int(row["slab"]), int(row["slot"])
            kept += addr == slab * engine.core.geometry.slab_size + engine.native.slot_places(slab, slot)[1]
    assert kept == found.kept
    assert set(lent) & alone.keys()
    assert await read_all(disk, options) == former.blocks
    await checked(disk)
    assert await convert(disk, options) is None, "there is nothing left to do"


async def test_a_conversion_may_end_anywhere(options: Options, rng: random.Random) -> None:
    """Records are right after each step, and the next mount goes on."""
    former = await mixed(options, rng)
    whole = Fuse()
    await convert(former.disk.copy(), options, whole)
    lengths = rng.sample(range(1, whole.steps), 40)
    for length in lengths:
        disk = former.disk.copy()
        with pytest.raises(Killed):
            await convert(disk, options, Fuse(length))
        await checked(disk)
        if rng.random() < 0.3:
            with suppress(Killed):
                await convert(disk, options, Fuse(rng.randrange(2, 20)))
            await checked(disk)
        await convert(disk, options)
        await checked(disk)
        assert await read_all(disk, options) == former.blocks, length
    await checked(disk)


async def test_a_process_that_converts_may_be_killed(tmp_path: Path, rng: random.Random) -> None:
    """With files, and a store, of this machine; the volume is clean after each kill."""
    options = load(tmp_path / "volume", words=["capacity=64MiB,publish=strict"]).options
    await format_volume(options)
    blocks = {b"%d" % number: rng.randbytes(rng.choice([BLOCK, 4096, 70_001])) for number in range(300)}
    async with hold(options) as held:
        cache = encode_settings(Settings(kind="cache", admission="all"))
        await held.records.commit({schema.namespace_key(ROOT): cache}, durable=True)
        async with run_volume(options, held) as volume:
            for name, data in blocks.items():
                await volume.blocks.put(ROOT_INODE, name, memoryview(data), CALLER, 0o644)
    kills = 0
    for step in itertools.count(2, 3):
        command = [sys.executable, str(LABS / "conversion_killed.py"), str(tmp_path / "volume"), str(step)]
        done = await trio.run_process(command, check=False, capture_stderr=True)
        report = await fsck(options, verify=True)
        assert report.clean, report
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        kills += 1
    assert kills > 2
    async with open_volume(options) as volume:
        engine = engine_of(volume)
        await engine.slabs.loaded.wait()
        for name, data in blocks.items():
            at = engine.find(ROOT_INODE, name)
            assert at is not None
            assert await engine.read(at[0], name) == data


async def test_a_full_cache_loses_what_has_no_room(options: Options, rng: random.Random) -> None:
    former = Former.make(options, rng)
    async with former.filling() as volume:
        with suppress(errors.NoSpace):
            for number in range(400):
                await former.put(volume, b"%d" % number, rng.choice([70_001, 100_000, 130_001]))
    found = await convert(former.disk, options)
    assert found is not None
    await checked(former.disk)
    left = await read_all(former.disk, options)
    assert left.items() <= former.blocks.items()
    assert len(left) == found.kept + found.copied > 50
    async with opened(former.disk, options) as volume:
        assert volume.space().free >= 0
    await checked(former.disk)


async def test_what_was_cleared_does_not_come_back(options: Options, rng: random.Random) -> None:
    former = Former.make(options, rng)
    async with former.filling() as volume:
        for number in range(30):
            await former.put(volume, b"%d" % number, BLOCK)
        node = await volume.tree.lookup(ROOT_INODE, b"1")
        await volume.tree.link(node.ino, ROOT_INODE, b"link")
        await volume.sync()
        (number,) = {schema.decode_u64(former.disk.records[schema.COUNTER_INODE].value)}
        disk = former.disk.copy()
    disk.apply({schema.namespace_key(ROOT): former.cache, schema.cleared_key(ROOT): schema.encode_u64(number)}, ())
    found = await convert(disk, options)
    assert found is not None
    assert (found.cleared, found.kept, found.copied) == (30, 0, 0)
    await checked(disk)
    assert await read_all(disk, options) == {}
    assert schema.cleared_key(ROOT) not in disk.records


async def test_a_mount_that_goes_on_keeps_its_files(options: Options, rng: random.Random) -> None:
    """The kernel knows them. Unless a conversion has begun, which nobody saw."""
    former = Former.make(options, rng)
    async with former.filling() as volume:
        await former.put(volume, b"a", BLOCK)
    records = dict(former.disk.records)
    chaos = Chaos(random.Random(0))
    store, segments = MemoryRecords(former.disk, chaos), MemorySegments(former.disk, chaos)
    held = HeldVolume(former.disk.superblock, store, segments, change_superblock=former.disk.change_superblock)
    cached = msgspec.structs.replace(options, namespace=KIND)
    _, converted = await convert_caches(cached, held, goes_on=True)
    assert converted is None
    assert former.disk.records == records
    with pytest.raises(Killed):
        await convert(former.disk, cached, Fuse(3))
    _, converted = await convert_caches(cached, held, goes_on=True)
    assert converted is not None
    assert converted.kept == 1
    await checked(former.disk)


async def test_owner_mode_time_and_ttl_are_kept(options: Options, rng: random.Random) -> None:
    former = Former.make(options, rng, ttl=1e8)
    async with former.filling() as volume:
        await former.put(volume, b"a", BLOCK)
        before = await volume.tree.lookup(ROOT_INODE, b"a")
    await convert(former.disk, options)
    async with opened(former.disk, options) as volume:
        engine = engine_of(volume)
        await engine.slabs.loaded.wait()
        after = await volume.tree.lookup(ROOT_INODE, b"a")
        assert (after.mode, after.uid, after.gid, after.size) == (before.mode, before.uid, before.gid, BLOCK)
        assert after.mtime // 10**9 == before.mtime // 10**9
        table, row, _ = engine.find(ROOT_INODE, b"a") or pytest.fail("it is not there")
        assert int(table.rows["expires"][row]) == before.mtime // 10**9 + 10**8


async def test_an_option_makes_the_root_one_of_blocks_for_good(options: Options, rng: random.Random) -> None:
    former = Former.make(options, rng)
    async with opened(former.disk, options) as volume:
        await former.put(volume, b"a", BLOCK)
    assert await convert(former.disk, options) is None
    cached = msgspec.structs.replace(options, namespace=KIND)
    found = await convert(former.disk, cached)
    assert found is not None
    assert found.kept == 1
    assert former.settings.is_blocks
    assert await read_all(former.disk, options) == former.blocks
    files = msgspec.structs.replace(options, namespace=NamespaceOptions(kind="files"))
    with pytest.raises(errors.ConfigError, match="which do not become files"):
        await convert(former.disk, files)


def test_fingerprints_are_those_of_the_core(rng: random.Random) -> None:
    multipliers = forms.multipliers_of(rng.randbytes(16))
    names = [rng.randbytes(rng.randint(1, 255)).replace(b"\0", b"x").replace(b"/", b"y") for _ in range(300)]
    memory = bytearray(forms.table_size(forms.BUCKETS_MIN, 16))
    directory = rng.getrandbits(63)
    begin_table(memory, multipliers, forms.BUCKETS_MIN, 16, directory, 0, 0, 0, 0, 1)
    keys = np.zeros(len(names), np.uint64)
    name_keys(memory, directory, *forms.name_columns(names), keys)
    low, high = forms.fingerprints(multipliers, np.full(len(names), directory, np.uint64), names)
    assert low.tolist() == keys.tolist()
    assert len(set(high.tolist())) == len(set(names))
