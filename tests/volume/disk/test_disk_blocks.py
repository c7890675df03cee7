"""Blocks that are rows, below memory: on the disk tier of the host, found there before the segments are asked."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import inside
import msgspec
import numpy as np
import pytest
import trio
from disk_lab import engine_reads, filled, segment_files, tier_of, wait_for
from namespace_lab import change_namespace, make_namespace
from packing_lab import compressible
from volume_lab import MIB, Disk, check, lab_options, opened

from kvfuse.native.blockforms import name_columns
from kvfuse.options.config import Options
from kvfuse.volume.api import ROOT_INODE, RowTerms
from kvfuse.volume.blocks.block_engine import BlockEngine
from kvfuse.volume.measures.speeds import Tier
from kvfuse.volume.volume import Volume

KEYS = [b"key-%d" % number for number in range(12)]
SIZES = [1, 4096, 70_000, 256 << 10, 300_000, 900_001]


def options_of(folder: Path, **chosen: object) -> Options:
    options = lab_options(capacity=64 * MIB, tier_size=8 * MIB, staging_size=8 * MIB)
    disk = {"disk_path": folder, "disk_size": 32 * MIB, **chosen}
    return msgspec.structs.replace(options, cache=msgspec.structs.replace(options.cache, **disk))


def value_of(key: bytes, version: int = 0) -> bytes:
    rng = random.Random(f"{key!r} {version}")
    make = compressible if rng.random() < 0.5 else lambda rng, size: rng.randbytes(size)
    return make(rng, rng.choice(SIZES))


class Lab:
    """A volume, and the directory of blocks in it."""

    def __init__(self, volume: Volume, directory: int) -> None:
        self.volume = volume
        self.directory = directory
        engine = volume.rows
        assert isinstance(engine, BlockEngine)
        self.engine = engine

    async def put(self, keys: Iterable[bytes], version: int = 0) -> None:
        table = self.engine.table(self.directory, self.directory, 0, 0, 0o644)
        for key in keys:
            await self.engine.put(table, [key], [memoryview(value_of(key, version))], RowTerms())
        await self.engine.writer.flush()

    def leave_memory(self) -> None:
        """No block is in memory: its arenas were taken back."""
        for place in self.engine.arenas._known:
            assert self.engine.arenas._free(place)
        assert self.engine.native.statistics()["resident"] == 0

    def tiers(self) -> list[int]:
        """Of all keys, as a look-up says."""
        columns = name_columns(KEYS)
        tiers: list[int] = self.engine.look_up(self.directory, self.directory, columns, is_timed=True)[0].tolist()
        return tiers

    def hits(self) -> dict[str, int]:
        """By tier, of a volume whose segments are elsewhere."""
        hits: dict[str, int] = self.engine.describe(self.directory, {}, "remote")["hits"]
        return hits

    async def read(self, key: bytes) -> bytes | None:
        found = self.engine.find(self.directory, key)
        data = await self.engine.read(found[0], key) if found is not None else None
        return bytes(data) if data is not None else None

    async def read_all(self, version: int = 0) -> None:
        for key in KEYS:
            assert await self.read(key) == value_of(key, version), key

    async def copies_are(self, count: int) -> None:
        with trio.fail_after(30):
            while len(tier_of(self.volume).index.copies) != count:
                self.engine.wake()
                await self.engine._has_looked.wait()


def granules(version: int = 0) -> int:
    return sum(-(-len(value_of(key, version)) // (256 << 10)) for key in KEYS)


@asynccontextmanager
async def lab_on(disk: Disk, options: Options, directory: int = 0) -> AsyncIterator[Lab]:
    async with opened(disk, options) as volume:
        await wait_for(tier_of(volume).adopted)
        directory = directory or await make_namespace(volume, ROOT_INODE, b"kv", kind="blocks")
        lab = Lab(volume, directory)
        await lab.engine.slabs.loaded.wait()
        yield lab
    report = await check(disk)
    assert report.clean, report.problems


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return options_of(tmp_path / "tier")


async def test_what_was_read_once_is_read_from_the_disk_also_after_a_restart(options: Options) -> None:
    disk = Disk.format(options)
    async with lab_on(disk, options) as lab:
        await lab.put(KEYS)
        lab.leave_memory()
        await lab.read_all()
        await filled(lab.volume)
        await lab.copies_are(granules())
        lab.leave_memory()
        before = engine_reads(lab.volume)
        await lab.read_all()
        assert engine_reads(lab.volume) == before
    async with lab_on(disk, options, lab.directory) as again:
        before = engine_reads(again.volume)
        await again.read_all()
        assert engine_reads(again.volume) == before


async def test_look_ups_say_which_blocks_are_on_the_disk(options: Options) -> None:
    async with lab_on(Disk.format(options), options) as lab:
        await lab.put(KEYS)
        lab.leave_memory()
        assert lab.tiers() == [Tier.REMOTE] * len(KEYS)
        some = KEYS[::2]
        for key in some:
            await lab.read(key)
        await filled(lab.volume)
        lab.leave_memory()
        assert lab.tiers() == [Tier.DISK, Tier.REMOTE] * len(some)
        before = lab.hits()
        for key in KEYS:
            await lab.read(key)
        after = lab.hits()
        assert [after[tier] - before[tier] for tier in ("disk", "remote")] == [len(some), len(some)]
        lab.leave_memory()
        await lab.put(KEYS[:1], version=1)
        lab.leave_memory()
        assert lab.tiers()[0] == Tier.REMOTE, "the copy is of the block before"


async def test_blocks_that_are_dropped_replaced_or_cleared_leave_the_disk(options: Options) -> None:
    async with lab_on(Disk.format(options), options) as lab:
        await lab.put(KEYS)
        lab.leave_memory()
        await lab.read_all()
        await filled(lab.volume)
        await lab.copies_are(granules())
        lab.engine.drop(lab.directory, KEYS[:1])
        left = granules() - -(-len(value_of(KEYS[0])) // (256 << 10))
        await lab.copies_are(left)
        await lab.put(KEYS[1:2], version=1)
        await lab.copies_are(left - -(-len(value_of(KEYS[1])) // (256 << 10)))
        lab.leave_memory()
        assert await lab.read(KEYS[0]) is None
        assert await lab.read(KEYS[1]) == value_of(KEYS[1], 1)
        await filled(lab.volume)
        await lab.volume.inodes.set_xattr(lab.directory, b"user.kvfuse.clear", b"1")
        await lab.copies_are(0)


async def test_damaged_copies_are_asked_for_at_the_segments(options: Options) -> None:
    async with lab_on(Disk.format(options), options) as lab:
        await lab.put(KEYS)
        lab.leave_memory()
        await lab.read_all()
        await filled(lab.volume)
        tier = tier_of(lab.volume)
        for number, (key, copy) in enumerate(list(tier.index.copies.items())):
            segment, offset = tier.folder.geometry.locate(copy.place)
            if number % 2:  # on the disk
                with segment_files(lab.volume)[segment].open("r+b") as file:
                    file.seek(offset)
                    first = file.read(1)
                    file.seek(offset)
                    file.write(bytes([first[0] ^ 1]))
            else:  # and, as nothing else would be noticed, in what the tier believes it has: bytes of another block
                wrong = random.Random(key).randbytes(copy.length)
                view = memoryview(wrong)
                tier.index.drop(key)
                tier.keep_slot(key, copy.generation, view)
        await filled(lab.volume)
        lab.leave_memory()
        await lab.read_all()
        assert tier.counters.damaged
        assert lab.engine.native.statistics()["blocks"] == len(KEYS)


async def test_blocks_for_which_there_is_no_memory_are_read_from_the_disk(options: Options) -> None:
    async with lab_on(Disk.format(options), options) as lab:
        await lab.put(KEYS)
        lab.leave_memory()
        for is_known in (False, True):
            before = engine_reads(lab.volume)
            for key in KEYS:
                table, row, sequence = lab.engine.find(lab.directory, key) or pytest.fail("it is no more")
                data = await lab.engine.read_row(table, row, sequence)
                assert data == value_of(key)
            assert (engine_reads(lab.volume) == before) is is_known
            await filled(lab.volume)
        for copy in tier_of(lab.volume).index.copies.values():
            segment, offset = tier_of(lab.volume).folder.geometry.locate(copy.place)
            with segment_files(lab.volume)[segment].open("r+b") as file:
                file.seek(offset)
                file.write(bytes(copy.length))
        for key in KEYS:
            table, row, sequence = lab.engine.find(lab.directory, key) or pytest.fail("it is no more")
            assert await lab.engine.read_row(table, row, sequence) == value_of(key)


async def test_stores_are_kept_where_that_is_wanted(tmp_path: Path) -> None:
    options = options_of(tmp_path / "tier", disk_keep="all")
    async with lab_on(Disk.format(options), options) as lab:
        await lab.put(KEYS)
        await filled(lab.volume)
        await lab.copies_are(granules())
        lab.leave_memory()
        before = engine_reads(lab.volume)
        await lab.read_all()
        assert engine_reads(lab.volume) == before


async def test_a_namespace_may_keep_its_blocks_off_the_disk(options: Options) -> None:
    async with lab_on(Disk.format(options), options) as lab:
        await change_namespace(lab.volume, lab.directory, tiers="dram")
        await lab.put(KEYS)
        lab.leave_memory()
        await lab.read_all()
        await filled(lab.volume)
        assert not tier_of(lab.volume).index.copies


async def test_a_copy_of_any_age_is_never_another_block(options: Options, rng: random.Random) -> None:
    """Random puts, drops and reads, beside a dictionary."""
    versions: dict[bytes, int] = {}
    async with lab_on(Disk.format(options), options) as lab:
        for turn in range(3000):
            if turn > 120 and tier_of(lab.volume).counters.hits:
                break
            key = rng.choice(KEYS)
            action = rng.choice(["put", "drop", "read", "read", "leave", "fill"])
            if action == "put":
                await lab.put([key], turn)
                versions[key] = turn
            elif action == "drop":
                lab.engine.drop(lab.directory, [key])
                versions.pop(key, None)
            elif action == "leave":
                await lab.engine.writer.flush()
                lab.leave_memory()
            elif action == "fill":
                await filled(lab.volume)
            else:
                wanted = value_of(key, versions[key]) if key in versions else None
                assert await lab.read(key) == wanted
        assert tier_of(lab.volume).counters.hits
    np.testing.assert_equal(inside.core(lab.volume).counters.checksum_failures, 0)
