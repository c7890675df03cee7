"""Blocks that are rows, in namespaces with compression: smaller slots, the same bytes, whoever is killed or damaged."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

import inside
import numpy as np
import pytest
import trio
from kept_memory import after_kill, let_go
from namespace_lab import change_namespace, make_namespace
from packing_lab import compressible
from volume_lab import MIB, Chaos, Disk, check, lab_options, opened

from kvfuse.errors import EngineError
from kvfuse.kept.keeper import NO_KEEPER, Keeper, MemoryKeeper
from kvfuse.native import blockforms as forms
from kvfuse.volume.api import ROOT_INODE, RowTerms
from kvfuse.volume.blocks.block_engine import BlockEngine
from kvfuse.volume.check.block_scrub import BlockScrub
from kvfuse.volume.store.codec import Codec
from kvfuse.volume.volume import Volume

OPTIONS = lab_options(capacity=64 * MIB, tier_size=8 * MIB, staging_size=8 * MIB)
KEYS = [b"key-%d" % number for number in range(16)]
SIZES = [1, 4096, 9000, 70_000, 300_000, 900_001]


def value_of(key: bytes, version: int = 0) -> bytes:
    """Two of three can be compressed."""
    rng = random.Random(f"{key!r} {version}")
    size = rng.choice(SIZES)
    return compressible(rng, size) if rng.random() < 0.67 else rng.randbytes(size)


class Lab:
    def __init__(self, volume: Volume, directory: int) -> None:
        self.volume = volume
        self.directory = directory
        assert isinstance(volume.rows, BlockEngine)
        self.engine = volume.rows

    async def put(self, keys: Iterable[bytes], version: int = 0) -> None:
        table, names = self.engine.table(self.directory, self.directory, 0, 0, 0o644), list(keys)
        await self.engine.put(table, names, [memoryview(value_of(key, version)) for key in names], RowTerms())

    async def store(self, version: int = 0) -> None:
        await self.put(KEYS, version)
        await self.engine.writer.flush()

    def leave_memory(self) -> None:
        self.engine.arenas.pins_are_known()
        for place in self.engine.arenas._known:
            assert self.engine.arenas._free(place)
        assert self.engine.native.statistics()["resident"] == 0

    async def read(self, key: bytes) -> bytes | None:
        found = self.engine.find(self.directory, key)
        data = await self.engine.read(found[0], key) if found is not None else None
        return bytes(data) if data is not None else None

    def row(self, key: bytes) -> np.void:
        table, row, _ = self.engine.find(self.directory, key) or pytest.fail(f"{key!r} is no more")
        return table.rows[row]

    @property
    def packed(self) -> list[bytes]:
        return [key for key in KEYS if self.row(key)["packed"]]

    @property
    def used(self) -> int:
        return self.engine.use(self.directory)[0]

    def place_of(self, key: bytes) -> tuple[int, int]:
        """(segment, offset) of a slot."""
        row = self.row(key)
        _, offset = self.engine.native.slot_places(int(row["slab"]), int(row["slot"]))
        geometry = inside.core(self.volume).geometry
        return geometry.locate(int(row["slab"]) * geometry.slab_size + offset)


@asynccontextmanager
async def lab_on(
    disk: Disk, directory: int = 0, *, keeper: Keeper = NO_KEEPER, chaos: Chaos | None = None
) -> AsyncIterator[Lab]:
    async with opened(disk, OPTIONS, chaos, keeper=keeper) as volume:
        if not directory:
            directory = await make_namespace(volume, ROOT_INODE, b"kv", kind="blocks", compression="zstd")
        lab = Lab(volume, directory)
        await lab.engine.slabs.loaded.wait()
        yield lab
    report = await check(disk)
    assert report.clean, report.problems


def plain_slots(lab: Lab) -> int:
    sizes = inside.core(lab.volume).slabs.classes
    return sum(sizes.class_for(len(value_of(key))) for key in KEYS)


async def test_blocks_take_less_room_and_have_the_same_bytes() -> None:
    disk = Disk.format(OPTIONS)
    async with lab_on(disk) as lab:
        await lab.store()
        assert 3 < len(lab.packed) < len(KEYS)
        assert lab.used < 0.8 * plain_slots(lab)
        saved = lab.engine.packer.statistics(lab.directory)
        assert saved["saved_bytes"] == plain_slots(lab) - lab.used
        assert saved["smaller"] == len(lab.packed)
        lab.leave_memory()
        for key in KEYS:
            assert await lab.read(key) == value_of(key)
        used, packed = lab.used, lab.packed
    async with lab_on(disk, lab.directory) as again:  # by their heads
        assert (again.used, again.packed) == (used, packed)
        for key in KEYS:
            assert await again.read(key) == value_of(key)
        await change_namespace(again.volume, lab.directory, compression="none")
        again.engine.update_quotas()
        await again.store(1)
        assert not again.packed
        again.leave_memory()
        for key in KEYS:
            assert await again.read(key) == value_of(key, 1)


@pytest.mark.parametrize("shrinks", [True, False], ids=["as before", "by another compressor"])
async def test_a_daemon_that_is_killed_before_the_write(shrinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have smaller slots already, and no slot has their bytes: the next daemon compresses them again."""
    disk, keeper, chaos = Disk.format(OPTIONS), MemoryKeeper(), Chaos(random.Random(0))
    async with lab_on(disk, keeper=keeper, chaos=chaos) as lab:
        await lab.store()
        chaos.stalled_writes = trio.Event()
        await lab.put(KEYS, 1)
        with trio.fail_after(30):
            while not (packed := lab.packed):
                await lab.engine._has_looked.wait()
        left, disk_then = after_kill(keeper), disk.copy()
        chaos.stalled_writes.set()
        chaos.stalled_writes = None
    with monkeypatch.context() as patch:
        if not shrinks:
            patch.setattr(Codec, "pack", lambda codec, granules: [bytes(2 * len(data)) for data in granules])
        async with lab_on(disk_then, lab.directory, keeper=left) as again:
            await again.engine.writer.flush()
            assert set(packed) <= set(again.packed) if shrinks else not again.packed
            again.leave_memory()
            for key in KEYS:
                assert await again.read(key) == value_of(key, 1)
    let_go(keeper, left)


async def test_what_a_daemon_of_another_form_kept_is_found_by_heads() -> None:
    disk, keeper = Disk.format(OPTIONS), MemoryKeeper()
    async with lab_on(disk, keeper=keeper) as lab:
        await lab.store()
    left = after_kill(keeper)
    for name in left.list_names("blocks/"):
        kept = left.take(name)
        assert kept is not None
        content = kept.content[-16:] if name == "blocks/slabs" else b"\1" + kept.content[1:]
        left.keep(name, content, kept.descriptors)
    async with lab_on(disk, lab.directory, keeper=left) as again:
        for key in KEYS:
            assert await again.read(key) == value_of(key)
    let_go(keeper, left)


async def test_damaged_streams_are_misses(rng: random.Random) -> None:
    disk = Disk.format(OPTIONS)
    async with lab_on(disk) as lab:
        await lab.store()
        packed = lab.packed
        lab.leave_memory()
        while not lab.engine.arenas._known:
            lab.engine.wake()
            await lab.engine._has_looked.wait()
        for number, key in enumerate(packed):
            segment, offset = lab.place_of(key)
            size = int(lab.row(key)["packed"]) * forms.PAGE
            image = disk.segments[segment]
            if number % 3 == 0:
                image[offset + rng.randrange(size // 2)] ^= 0x40
            elif number % 3 == 1:
                image[offset : offset + size] = rng.randbytes(size)
            else:  # a frame that is right, of other bytes
                frame = Codec().pack([memoryview(compressible(rng, len(value_of(key))))])[0][:size]
                image[offset : offset + size] = frame.ljust(size, b"\0")
        for key in packed:
            assert await lab.read(key) in (None, value_of(key))
        gone = [key for key in packed if lab.engine.find(lab.directory, key) is None]
        assert len(gone) >= len(packed) * 2 // 3
        assert inside.core(lab.volume).counters.checksum_failures == len(gone)
        for key in set(KEYS) - set(packed):
            assert await lab.read(key) == value_of(key)


async def test_fsck_and_a_scrub_read_them(rng: random.Random) -> None:
    disk = Disk.format(OPTIONS)
    async with lab_on(disk) as lab:
        await lab.store()
        found = list[str]()

        async def pace(size: int) -> None:
            pass

        async def scrub() -> list[str]:
            found.clear()
            segments = inside.core(lab.volume).segments
            await BlockScrub(lab.engine, segments, pace, lambda key, text: found.append(text)).run()
            return found

        assert not await scrub()
        key = rng.choice(lab.packed)
        segment, offset = lab.place_of(key)
        damaged = disk.copy()
        for image in (disk.segments[segment], damaged.segments[segment]):
            image[offset + 100] ^= 1
        assert [text for text in await scrub() if "bytes" in text] == found
        assert len(found) == 1
        assert lab.engine.find(lab.directory, key) is None
    report = await check(damaged)
    assert len(report.problems) == 1
    assert "its bytes are damaged" in str(report.problems[0])


async def test_blocks_for_which_there_is_no_memory() -> None:
    async with lab_on(Disk.format(OPTIONS)) as lab:
        await lab.store()
        lab.leave_memory()
        for key in KEYS:
            table, row, sequence = lab.engine.find(lab.directory, key) or pytest.fail("it is no more")
            assert await lab.engine.read_row(table, row, sequence) == value_of(key)


async def test_blocks_that_save_nothing_are_hardly_tried() -> None:
    async with lab_on(Disk.format(OPTIONS)) as lab:
        table = lab.engine.table(lab.directory, lab.directory, 0, 0, 0o644)
        for number in range(600):
            data = random.Random(number).randbytes(20_000)
            await lab.engine.put(table, [b"%d" % number], [memoryview(data)], RowTerms())
            await lab.engine.writer.flush()
        found = lab.engine.packer.statistics(lab.directory)
        assert found["saved_bytes"] == 0
        assert 100 < found["tried"] < 250


async def test_random_puts_and_drops_beside_a_dictionary(rng: random.Random) -> None:
    versions: dict[bytes, int] = {}
    unsynced, in_doubt = set[bytes](), set[bytes]()
    """that were put since the last sync; that may have left memory before a sync of them failed, and be misses since"""
    chaos = Chaos(random.Random(rng.random()))
    async with lab_on(Disk.format(OPTIONS), chaos=chaos) as lab:
        for turn in range(150):
            key = rng.choice(KEYS)
            action = rng.choice(["put", "put", "drop", "read", "read", "leave", "refuse", "setting"])
            if action == "put":
                await lab.put([key], turn)
                versions[key] = turn
                unsynced.add(key)
                in_doubt.discard(key)
            elif action == "drop":
                lab.engine.drop(lab.directory, [key])
                versions.pop(key, None)
            elif action == "leave":
                await lab.engine.writer.flush()
                unsynced.clear()
                lab.leave_memory()
            elif action == "refuse":
                in_doubt |= unsynced
                chaos.write_error = 1.0
                for other in rng.sample(KEYS, 3):
                    with suppress(EngineError):  # a slab that it needs cannot be had now
                        await lab.put([other], turn)
                        versions[other] = turn
                        unsynced.add(other)
                        in_doubt.discard(other)
                with suppress(EngineError):
                    await lab.engine.writer.flush()
                chaos.write_error = 0.0
                for _ in range(2):  # the first one may hear of what failed before
                    with suppress(EngineError):
                        await lab.engine.writer.flush()
            elif action == "setting":
                await change_namespace(lab.volume, lab.directory, compression=rng.choice(["none", "zstd"]))
                lab.engine.update_quotas()
            else:
                found = await lab.read(key)
                if found is None and key in in_doubt:
                    versions.pop(key, None)
                assert found == (value_of(key, versions[key]) if key in versions else None)
