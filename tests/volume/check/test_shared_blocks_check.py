"""Blocks of a volume that hosts share: each scrubs its own, fsck counts them all, and a rebuild keeps them."""

from __future__ import annotations

import random

import pytest
import trio.testing
from namespace_lab import make_namespace
from shared_lab import check_disk, eventually, volumes
from volume_lab import MIB, Chaos, Disk, MemoryRecords, MemorySegments, check, lab_options

from kvfuse.volume.api import ROOT_INODE, RowTerms
from kvfuse.volume.blocks.block_engine import BlockEngine
from kvfuse.volume.check.block_scrub import BlockScrub
from kvfuse.volume.check.rebuild import collect
from kvfuse.volume.opening.formatting import first_records
from kvfuse.volume.volume import Volume

OPTIONS = lab_options(capacity=64 * MIB, strict=False)


def engine_of(volume: Volume) -> BlockEngine:
    engine = volume.rows
    assert isinstance(engine, BlockEngine)
    return engine


async def put(volume: Volume, folder: int, name: bytes, data: bytes) -> None:
    engine = engine_of(volume)
    table = engine.table(folder, folder, 0, 0, 0o644)
    await engine.put(table, [name], [memoryview(data)], RowTerms())


async def read(volume: Volume, folder: int, name: bytes) -> bytes | None:
    engine = engine_of(volume)
    await engine.renew(is_strict=False)
    found = engine.find(folder, name)
    data = await engine.read(found[0], name) if found is not None else None
    return bytes(data) if data is not None else None


async def scrubbed(volume: Volume) -> tuple[int, list[str]]:
    """Blocks that a pass looked at, and what it found wrong."""
    wrong: list[str] = []

    async def pace(size: int) -> None:
        pass

    engine = engine_of(volume)
    one = BlockScrub(engine, engine.core.segments, pace, lambda what, text: wrong.append(text))
    await one.run()
    return one.blocks, wrong


@pytest.mark.usefixtures("autojump_clock")
async def test_each_host_looks_after_its_own_blocks(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    disk = Disk.format(OPTIONS, shared=True)
    data = {b"%d" % number: rng.randbytes(rng.choice([100, 9000, 70_000])) for number in range(10)}
    async with volumes(disk, OPTIONS, 2, rng) as mounted:
        folder = await make_namespace(mounted[0], ROOT_INODE, b"blocks", kind="blocks")

        async def has_heard() -> bool:
            return engine_of(mounted[1]).is_block_namespace(folder)

        await eventually(has_heard)
        for number, (name, content) in enumerate(data.items()):
            await put(mounted[number % 2], folder, name, content)
        for volume in mounted:
            await engine_of(volume).writer.flush()
        for volume in mounted:
            for name, content in data.items():
                assert await read(volume, folder, name) == content
            assert await scrubbed(volume) == (5, [])
        table, row, _ = engine_of(mounted[1]).find(folder, b"1") or pytest.fail("it is gone")
        place = table.rows[row]
        _, offset = engine_of(mounted[1]).native.slot_places(int(place["slab"]), int(place["slot"]))
        segment, start = disk.superblock.geometry.locate(
            int(place["slab"]) * disk.superblock.geometry.slab_size + offset
        )
        disk.segments[segment][start + 50] ^= 1
        assert await scrubbed(mounted[0]) == (5, []), "it is not this host's to judge"
        count, wrong = await scrubbed(mounted[1])
        assert (count, len(wrong)) == (5, 1)
        assert engine_of(mounted[1]).find(folder, b"1") is None
        del data[b"1"]
    await check_disk(disk)
    report = await check(disk)
    assert (report.blocks, report.block_bytes) == (len(data), sum(map(len, data.values())))

    disk.records.clear()  # they are lost
    records, segments = MemoryRecords(disk, Chaos(rng)), MemorySegments(disk, Chaos(rng))
    work = await collect(disk.superblock, segments)
    await records.commit(first_records(OPTIONS))
    await work.write(records)
    await check_disk(disk)
    async with volumes(disk, OPTIONS, 2, rng) as mounted:
        for volume in mounted:
            for name, content in data.items():
                assert await read(volume, folder, name) == content
        await put(mounted[0], folder, b"new", b"bytes")
    await check_disk(disk)
