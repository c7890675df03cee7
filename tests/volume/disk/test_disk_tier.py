"""Copies in the disk tier: what was read once is not read from the engine again, and is never wrong."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import inside
import numpy as np
import pytest
import trio
from disk_lab import engine_reads, filled, held_disk, segment_files, tier_of, tier_options, wait_for, with_tier
from shared_lab import check_disk, open_path, put, quiet, read
from volume_lab import CALLER, MIB, Disk

from kvfuse.checksum import granule_checksums
from kvfuse.options.config import Options
from kvfuse.remote.segments.api import Transfer
from kvfuse.remote.segments.file.store import FileSegments
from kvfuse.slab.layout import HEADER_SIZE
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.content import read_ahead
from kvfuse.volume.disk import disk_tier as tier_module
from kvfuse.volume.disk.copies import GranuleRun
from kvfuse.volume.disk.disk_tier import DiskTier
from kvfuse.volume.disk.folder import opened_folder
from kvfuse.volume.measures.speeds import Speed
from kvfuse.volume.namespaces.settings import ROOT, Settings
from kvfuse.volume.volume import Volume

KIB = 1 << 10
SIDE_BY_SIDE = 6
"""reads that one reader of a block may begin at once"""
SIZES = 1, 4096, 70_000, 256 * KIB, 700 * KIB, 3_000_000


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return tier_options(tmp_path / "tier")


@pytest.fixture
def disk(options: Options) -> Disk:
    return Disk.format(options, shared=True)


def blocks(rng: random.Random) -> dict[bytes, bytes]:
    return {b"%d" % size: rng.randbytes(size) for size in SIZES}


async def read_all(volume: Volume, stored: dict[bytes, bytes]) -> None:
    for name, data in stored.items():
        assert await read(volume, name) == data


async def store_and_read(volume: Volume, stored: dict[bytes, bytes]) -> None:
    """Afterwards the tier has a copy of each."""
    for name, data in stored.items():
        await put(volume, name, data)
    await read_all(volume, stored)
    await filled(volume)


async def until(is_so: Callable[[], bool]) -> None:
    with trio.fail_after(30):
        while True:
            if is_so():
                return
            await trio.sleep(0.001)


async def test_a_second_read_asks_no_engine_also_after_a_restart(
    disk: Disk, options: Options, rng: random.Random
) -> None:
    stored = blocks(rng)
    async with with_tier(disk, options) as volume:
        for name, data in stored.items():
            await put(volume, name, data)
        for name, data in stored.items():
            assert await read(volume, name) == data
        await filled(volume)
        before = engine_reads(volume)
        assert before
        for name, data in stored.items():
            assert await read(volume, name) == data
        assert engine_reads(volume) == before
        statistics = tier_of(volume).statistics()
        assert statistics["kept_bytes"] == sum(SIZES)
        assert 0 < statistics["local_share"] < 1
    async with with_tier(disk, options) as volume:
        statistics = tier_of(volume).statistics()
        assert statistics["kept_bytes"] == sum(SIZES)
        assert statistics["adopted"] == statistics["copies"]
        before = engine_reads(volume)
        for name, data in stored.items():
            assert await read(volume, name) == data
        assert engine_reads(volume) == before
        assert tier_of(volume).statistics()["local_share"] == 1


async def test_what_the_tier_gives_is_shown_where_it_is(
    disk: Disk, options: Options, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a copy, where one read of the tier has all of it; gathered, also with what the engine gave, where not."""
    data = rng.randbytes(4 * MIB)
    async with with_tier(disk, options) as volume:
        await store_and_read(volume, {b"block": data})
        tier, given = tier_of(volume), list[memoryview]()
        tier_read = tier.read

        async def read_some(stretch: GranuleRun) -> memoryview | None:
            found = await tier_read(stretch) if rng.random() < 0.7 else None
            if found is not None:
                given.append(found)
            return found

        monkeypatch.setattr(tier, "read", read_some)
        monkeypatch.setattr(read_ahead, "PART_SIZE", 256 * KIB)  # so that a chunk comes in several
        in_place = gathered = 0
        for _ in range(40):
            handle = await open_path(volume, b"block")
            end = 0
            while end < len(data):
                size = rng.choice([128 * KIB, MIB, 3 * MIB // 2])
                shown = memoryview(await volume.files.read(handle, end, size))
                assert shown == data[end : end + size]
                is_own = any(np.shares_memory(np.frombuffer(shown, np.uint8), own) for own in given)
                in_place += is_own
                gathered += bool(given) and not is_own
                end += len(shown)
            await volume.files.release(handle)
            given.clear()
        assert in_place > 10 < gathered
    await check_disk(disk)


async def test_what_this_host_stores_may_be_kept_too(tmp_path: Path, rng: random.Random) -> None:
    """Also what was written in pieces, and changed since."""
    options = tier_options(tmp_path / "tier", keep="all")
    disk = Disk.format(options, shared=True)
    stored = blocks(rng)
    async with with_tier(disk, options) as volume:
        for name, data in stored.items():
            await put(volume, name, data)
        handle, _ = await volume.tree.create(ROOT_INODE, b"pieces", 0o644, CALLER, os.O_RDWR)
        content = bytearray(rng.randbytes(1_500_000))
        for start in range(0, len(content), 70_000):
            await volume.files.write(handle, start, bytes(content[start : start + 70_000]))
        content[5:10] = b"later"
        await volume.files.write(handle, 5, b"later")
        await volume.files.release(handle)
        await volume.sync()
        await filled(volume)
        before = engine_reads(volume)
        await read_all(volume, stored | {b"pieces": bytes(content)})
        assert engine_reads(volume) == before
        assert tier_of(volume).counters.misses == 0
    async with with_tier(disk, options) as volume:
        before = engine_reads(volume)
        await read_all(volume, stored | {b"pieces": bytes(content)})
        assert engine_reads(volume) == before


async def test_what_is_read_before_all_copies_were_found_is_kept_too(tmp_path: Path, rng: random.Random) -> None:
    """Once: of what there was a copy before, no second one is written."""
    contents = [memoryview(rng.randbytes(300_000)) for _ in range(2)]
    stretches = [
        GranuleRun(number << 20, 5, len(data), granule_checksums(data), 0, len(data))
        for number, data in enumerate(contents)
    ]
    for known in (1, 2):
        async with opened_folder(tmp_path, 16 * MIB, b"v" * 16) as folder, trio.open_nursery() as nursery:
            tier = DiskTier(folder, compresses=False, keeps_stores=False)
            for stretch, data in list(zip(stretches, contents, strict=True))[:known]:
                assert await tier.read(stretch) is None
                tier.offer(stretch, data, 0.1)
            nursery.start_soon(tier.run, Speed(0.0, 1e9))
            await wait_for(tier.adopted)
            await wait_for(tier.filler.idle)
            assert (tier.filler.written, len(tier.index.copies)) == (2, 2 * known)
            for stretch, data in list(zip(stretches, contents, strict=True))[:known]:
                assert await tier.read(stretch) == data
            tier.stop()


@pytest.mark.parametrize("keep", ["reads", "all"])
async def test_a_namespace_says_whether_its_blocks_are_kept(tmp_path: Path, rng: random.Random, keep: str) -> None:
    options = tier_options(tmp_path / "tier", keep=keep)
    disk = Disk.format(options, shared=True)
    stored = blocks(rng)
    async with with_tier(disk, options) as volume:
        namespaces = inside.namespaces(volume)
        for tiers, expected in (("dram", 0), ("remote", 0), ("disk", sum(SIZES)), ("all", sum(SIZES))):
            namespaces.put(ROOT, Settings(tiers=tiers))
            await store_and_read(volume, {name + tiers.encode(): data for name, data in stored.items()})
            found = tier_of(volume).statistics()
            assert found["kept_bytes"] == expected * (2 if tiers == "all" else 1), tiers
        assert found["engine_bytes"] > 0


# -- bytes that are wrong ------------------------------------------------------------------------------


def damage(volume: Volume, rng: random.Random, name: str = "data") -> None:
    """Flip a bit of each copy: in its bytes, or in its "head"."""
    tier = tier_of(volume)
    geometry, slabs = tier.folder.geometry, tier.index.slabs
    for copy in tier.index.copies.values():
        if name == "head":
            segment, offset = geometry.locate_header(copy.place, slabs.slot_size(copy.place))
            offset += rng.randrange(HEADER_SIZE)
        else:
            segment, offset = geometry.locate(copy.place)
            offset += rng.randrange(copy.length)
        path = Path(segment_files(volume)[segment])
        with path.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))


@pytest.mark.parametrize("where", ["data", "head"])
@pytest.mark.parametrize("restarts", [False, True])
async def test_damaged_copies_are_found_and_replaced(
    disk: Disk, options: Options, rng: random.Random, where: str, restarts: bool
) -> None:
    stored = blocks(rng)
    async with AsyncExitStack() as stack:
        volume = await stack.enter_async_context(with_tier(disk, options))
        await store_and_read(volume, stored)
        count = len(tier_of(volume).index.copies)
        damage(volume, rng, where)
        if restarts:
            await stack.aclose()
            volume = await stack.enter_async_context(with_tier(disk, options))
        await read_all(volume, stored)
        found = tier_of(volume).statistics()
        if where == "data":
            assert 0 < found["damaged"] <= count
        else:
            assert found["damaged"] == 0
            assert found["adopted"] == 0  # a damaged head is none; of this mount's own copies nobody reads the heads
        await filled(volume)
        await read_all(volume, stored)  # parts of a stretch that were right stayed, the others are written by now
        await filled(volume)
        before = engine_reads(volume)
        await read_all(volume, stored)
        assert engine_reads(volume) == before


async def test_a_copy_whose_bytes_were_not_written_before_a_crash_is_not_used(
    disk: Disk, options: Options, rng: random.Random
) -> None:
    """Heads and bytes are written in no order: here all heads came to the disk, and half of each copy's bytes."""
    stored = blocks(rng)
    async with with_tier(disk, options) as volume:
        await store_and_read(volume, stored)
        tier = tier_of(volume)
        for copy in tier.index.copies.values():
            half = bytes(-(-copy.length // 2))
            await tier.folder.segments.write([Transfer(*tier.folder.geometry.locate(copy.place), half)])
        count = len(tier.index.copies)
    async with with_tier(disk, options) as volume:
        assert tier_of(volume).statistics()["adopted"] == count
        await read_all(volume, stored)
        assert tier_of(volume).statistics()["damaged"] == count


async def test_what_another_host_stored_is_read(
    disk: Disk, options: Options, rng: random.Random, tmp_path: Path
) -> None:
    async with with_tier(disk, options) as one, with_tier(disk, tier_options(tmp_path / "other"), 2) as two:
        for turn in range(2):
            stored = blocks(rng)
            for name, data in stored.items():
                if turn:
                    await two.tree.unlink(ROOT_INODE, name)
                await put(two, name, data)
            await quiet(one, two)
            for _ in range(2):
                await read_all(one, stored)
                await filled(one)
        assert tier_of(one).statistics()["hits"]
    await check_disk(disk)


async def test_the_next_life_of_a_slot_has_other_bytes(disk: Disk, options: Options, rng: random.Random) -> None:
    """Its record names another generation, which hosts take from ranges of their own: it may be a lower one."""

    def life(generation: int) -> tuple[GranuleRun, memoryview]:
        data = memoryview(rng.randbytes(300_000))
        return GranuleRun(4096, generation, len(data), granule_checksums(data), 0, len(data)), data

    async with with_tier(disk, options) as volume:
        tier = tier_of(volume)
        for generation in (7, 9, 8):
            stretch, data = life(generation)
            assert await tier.read(stretch) is None
            tier.offer(stretch, data, 0.1)
            await filled(volume)
            assert await tier.read(stretch) == data
            assert tier.have_copies([4096], [generation]) == [True]
            stale, _ = life(generation)
            assert await tier.read(stale) is None, "a record with other checksums"
            tier.offer(stretch, data, 0.1)
            await filled(volume)
        assert len(tier.index.copies) == 2


async def test_copies_of_what_this_host_removes_are_dropped(disk: Disk, options: Options, rng: random.Random) -> None:
    stored = blocks(rng)
    async with with_tier(disk, options) as volume:
        await store_and_read(volume, stored)
        for name in stored:
            await volume.tree.unlink(ROOT_INODE, name)
        await volume.sync()
        await until(lambda: not tier_of(volume).index.copies)  # freed by a later commit: others might have had it open
        found = tier_of(volume).statistics()
        assert found["dropped"]
        assert (found["copies"], found["kept_bytes"], found["used_bytes"]) == (0, 0, 0)


async def test_copies_of_what_another_host_removes_are_dropped(
    disk: Disk, options: Options, rng: random.Random, tmp_path: Path
) -> None:
    """When it is heard of; those of a file that is open, when it is closed."""
    stored = blocks(rng)
    async with with_tier(disk, options) as one, with_tier(disk, tier_options(tmp_path / "other"), 2) as two:
        await store_and_read(one, stored)
        await quiet(one, two)
        await read_all(two, stored)
        await filled(two)
        copies = tier_of(two).index.copies
        handle = await open_path(two, b"1")
        addr = handle.node.chunks[0].extents[0].addr
        for name in stored:
            await one.tree.unlink(ROOT_INODE, name)
        await until(lambda: set(copies) == {addr})
        assert await two.files.read(handle, 0, 1) == stored[b"1"]
        await two.files.release(handle)
        await until(lambda: not copies)
    await check_disk(disk)


async def test_copies_of_slots_that_another_host_frees_are_dropped(
    disk: Disk, options: Options, rng: random.Random, tmp_path: Path
) -> None:
    """Of a file with other bytes by now, in slots of a third host."""
    data = rng.randbytes(256 * KIB)
    async with AsyncExitStack() as stack:
        folders = [options, *[tier_options(tmp_path / f"tier of {client}") for client in (2, 3)]]
        one, two, three = [
            await stack.enter_async_context(with_tier(disk, folder, client)) for client, folder in enumerate(folders, 1)
        ]
        await put(one, b"file", data)
        await quiet(one, two, three)
        for volume in (two, three):
            assert await read(volume, b"file") == data
            await filled(volume)
        before = set(tier_of(three).index.copies)
        assert before
        handle = await open_path(two, b"file")
        await two.files.write(handle, 0, data[::-1])
        await two.files.release(handle)
        await until(lambda: not before & set(tier_of(three).index.copies))
        assert tier_of(three).statistics()["dropped"]
        await quiet(two, three)
        assert await read(three, b"file") == data[::-1]
    await check_disk(disk)


# -- a disk that is slow, or fails ----------------------------------------------------------------------


async def test_a_slow_disk_delays_a_reader_for_a_moment_alone(
    disk: Disk, options: Options, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = blocks(rng)
    async with with_tier(disk, options) as volume:
        await store_and_read(volume, stored)
        tier = tier_of(volume)
        with held_disk(volume, "read", monkeypatch), monkeypatch.context() as hurry:
            hurry.setattr(tier_module, "PATIENCE_MIN", 0.05)
            hurry.setattr(tier_module, "PATIENCE_MAX", 0.05)
            for _ in range(3):
                await read_all(volume, stored)
            assert 0 <= tier.counters.late - tier_module.LATE_MAX <= SIDE_BY_SIDE, "then nobody waits any more"
            assert tier.is_on
        await until(lambda: tier._late_count == 0)
        before = engine_reads(volume)
        await read_all(volume, stored)
        assert engine_reads(volume) == before


async def test_of_a_disk_slower_than_the_readers_copies_are_skipped(
    disk: Disk, options: Options, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = {b"%d" % number: rng.randbytes(65_536) for number in range(20)}
    async with with_tier(disk, options) as volume:
        tier = tier_of(volume)
        tier.filler.queue_bytes_max = 10 * 65_536
        with held_disk(volume, "write", monkeypatch):
            for name, data in stored.items():
                await put(volume, name, data)
            await read_all(volume, stored)
            found = tier.statistics()
            assert found["queued_bytes"] == 10 * 65_536
            assert found["skipped"] == 10
            assert found["copies"] == 0
        await filled(volume)
        assert tier.statistics()["copies"] == 10


@pytest.mark.parametrize("call", ["read", "write"])
async def test_a_disk_that_fails_turns_the_tier_off(
    disk: Disk, options: Options, rng: random.Random, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its segments are cut, as by a file system that lost them; or nothing can be written to them any more."""
    stored = blocks(rng)
    more = {b"more": rng.randbytes(100_000)}
    async with with_tier(disk, options) as volume:
        await store_and_read(volume, stored)
        for name, data in more.items():
            await put(volume, name, data)
        tier = tier_of(volume)
        segments = tier.folder.segments
        assert isinstance(segments, FileSegments)
        if call == "read":
            for path in segment_files(volume):
                os.truncate(path, 4096)
        else:
            for file in segments._files.values():
                with file.path.open("rb") as read_only:
                    os.dup2(read_only.fileno(), file.fd, inheritable=False)
        for _ in range(3):
            await read_all(volume, stored | more)
            await filled(volume)
        found = tier.statistics()
        assert (found["is_on"], found["errors"], found["copies"], found["used_bytes"]) == (0, 1, 0, 0)
        lines = [record.message for record in caplog.records if "the disk tier is off" in record.message]
        assert len(lines) == 1


# -- room ------------------------------------------------------------------------------------------------


async def test_it_never_takes_more_than_its_size(tmp_path: Path, rng: random.Random) -> None:
    """Blocks of many sizes come and go: slabs change their slot size, the least recently used copies go."""
    size = 16 * MIB
    options = tier_options(tmp_path / "tier", size)
    disk = Disk.format(options, shared=True)
    async with with_tier(disk, options) as volume:
        tier = tier_of(volume)
        for turn in range(12):
            lengths = [rng.choice((4096, 20_000, 65_536, 150_000, 262_144, 700_000)) for _ in range(30)]
            stored = {b"%d-%d" % (turn, number): rng.randbytes(length) for number, length in enumerate(lengths)}
            for name, data in stored.items():
                await put(volume, name, data)
            for _ in range(3):
                await read_all(volume, stored)
                await filled(volume)
            found = tier.statistics()
            assert found["kept_bytes"] <= found["used_bytes"] <= found["capacity_bytes"] <= size
            blocks_on_disk = sum(512 * path.stat().st_blocks for path in (tmp_path / "tier").iterdir())
            assert blocks_on_disk <= size, turn
        assert found["evicted"] + found["dropped"] > 0
        copies = {key: (copy.generation, copy.checksum) for key, copy in tier.index.copies.items()}
    async with with_tier(disk, options) as volume:
        adopted = {key: (copy.generation, copy.checksum) for key, copy in tier_of(volume).index.copies.items()}
        assert {key: adopted[key] for key in copies} == copies
        await read_all(volume, stored)
        assert tier_of(volume).counters.damaged <= len(adopted) - len(copies), "copies that had been given up"
