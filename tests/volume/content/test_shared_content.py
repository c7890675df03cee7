"""Files that several clients of a shared volume change at the same time: nothing is lost, and nothing made up."""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable, Sequence

import inside
import pytest
import trio
import trio.testing
from shared_lab import get, hosts, names_in, put, quiet, volumes, write_at
from volume_lab import CALLER, MIB, Chaos, Disk, lab_options

from kvfuse import errors
from kvfuse.remote.segments.api import Transfer
from kvfuse.slab.layout import FEATURE_SHRINKS, SUPERBLOCK_SIZE
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.commit.batch import Draft
from kvfuse.volume.commit.planner import Planner
from kvfuse.volume.inodes.chunk import COMMITTED, Extent
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume

CHUNK = 64 << 10


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
async def test_what_one_wrote_the_other_reads(
    rng: random.Random, autojump_clock: trio.testing.MockClock, strict: bool
) -> None:
    data = {b"%d" % number: rng.randbytes(rng.randrange(1, 12 * CHUNK)) for number in range(10)}
    async with hosts(rng, 2, strict=strict, capacity=16 * MIB, chunk=CHUNK) as (one, two):
        for number, name in enumerate(data):
            await put((one, two)[number % 2], name, data[name])
        if not strict:
            await quiet(one, two)
        for volume in (one, two):
            for name in data:
                assert await get(volume, name) == data[name]


async def test_after_a_write_that_failed_what_others_write_is_read(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    chaos = [Chaos(random.Random(number)) for number in range(2)]
    data = rng.randbytes(CHUNK // 2)
    async with hosts(rng, 2, chaos, strict=True, capacity=16 * MIB, chunk=CHUNK) as (one, two):
        await put(one, b"file", data)
        handle = await one.files.open((await one.tree.lookup(ROOT_INODE, b"file")).ino, os.O_RDWR, CALLER)
        chaos[0].cut = trio.Event()
        with pytest.raises(errors.EngineError):
            await one.files.write(handle, 100, b"never")  # the bytes around it cannot be read
        chaos[0].cut.set()
        await one.files.release(handle)
        await write_at(two, b"file", 200, b"later")
        assert await get(one, b"file") == data[:200] + b"later" + data[205:]


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
async def test_disjoint_writes_of_two_hosts_are_both_there(
    rng: random.Random, autojump_clock: trio.testing.MockClock, strict: bool
) -> None:
    expected = bytearray(rng.randbytes(12 * CHUNK))
    async with hosts(rng, 2, strict=strict, capacity=32 * MIB, chunk=CHUNK) as (one, two):
        await put(one, b"file", bytes(expected))
        await quiet(one, two)
        for _ in range(10):
            async with trio.open_nursery() as nursery:
                for volume, parity in ((one, 0), (two, 1)):
                    for page in rng.sample(range(parity, len(expected) // 4096, 2), 3):
                        data = rng.randbytes(4096)
                        expected[page * 4096 : (page + 1) * 4096] = data
                        nursery.start_soon(write_at, volume, b"file", page * 4096, data)
        await quiet(one, two)
        assert await get(one, b"file") == expected
        assert await get(two, b"file") == expected


async def keep_writing(volume: Volume) -> None:
    """Its own part of a file, again and again."""
    while True:
        await write_at(volume, b"file", 0, b"own!")


async def keep_changing_modes(volume: Volume) -> None:
    """Of the file, which nobody has open meanwhile."""
    node = await volume.tree.lookup(ROOT_INODE, b"file")
    while True:
        for mode in (0o600, 0o644):
            await volume.inodes.set_attributes(node.ino, Changes(mode=mode), CALLER)


@pytest.mark.parametrize("change", [keep_writing, keep_changing_modes])
async def test_an_open_sees_what_another_host_closed_while_a_commit_of_the_same_file_is_under_way(
    rng: random.Random, autojump_clock: trio.testing.MockClock, change: Callable[[Volume], Awaitable[None]]
) -> None:
    async with hosts(rng, 2, strict=True, capacity=64 * MIB, chunk=CHUNK) as (one, two):
        await put(one, b"file", bytes(2 * CHUNK))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(change, two)
            for number in range(1, 60):
                part = b"%4d" % number
                offset = rng.choice([4, CHUNK])  # in the chunk that the other changes, and in another
                await write_at(one, b"file", offset, part)
                found = await get(two, b"file")
                assert found is not None
                assert found[offset : offset + 4] == part, number
            nursery.cancel_scope.cancel()
        await quiet(one, two)
        assert await get(one, b"file") == await get(two, b"file")


async def test_an_open_sees_what_another_host_closed_beside_bytes_that_nobody_closed_yet(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with hosts(rng, 2, strict=True, capacity=64 * MIB, chunk=CHUNK) as (one, two):
        await put(one, b"file", bytes(2 * CHUNK))
        handle = await two.files.open((await two.tree.lookup(ROOT_INODE, b"file")).ino, os.O_RDWR, CALLER)
        for number in range(10):
            part = b"%4d" % number
            await two.files.write(handle, 4 * number, part)
            await write_at(one, b"file", CHUNK - 4 * number, part)
            found = await get(two, b"file")
            assert found is not None
            assert found[4 * number : 4 * number + 4] == found[CHUNK - 4 * number : CHUNK - 4 * number + 4] == part
        await two.files.flush(handle)
        assert await get(one, b"file") == found
        await two.files.release(handle)
        two.tree.forget(handle.node.ino, 1)


async def test_a_segment_that_another_host_made_keeps_its_header(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Who is killed amid another one, of a volume with other features by now, would leave a segment with none."""
    options = lab_options(strict=True)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng) as (one, other):
        await put(one, b"one", b"x" * MIB)
        header = bytes(disk.segments[0][:SUPERBLOCK_SIZE])
        await inside.core(other).add_feature(FEATURE_SHRINKS)
        await put(other, b"two", b"y" * MIB)
        assert inside.core(other).made_segments == {0}
        assert bytes(disk.segments[0][:SUPERBLOCK_SIZE]) == header


async def test_a_header_that_the_medium_lost_is_written_again(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options(strict=True)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng) as (one, other):
        await put(one, b"one", b"x" * MIB)
        segments = inside.segments(other)
        read, header = segments.read, bytes(disk.segments[0][:SUPERBLOCK_SIZE])

        async def lost(batch: Sequence[Transfer]) -> None:
            if any(one.offset < SUPERBLOCK_SIZE for one in batch):
                raise errors.MediumError("injected: a bad sector")
            await read(batch)

        monkeypatch.setattr(segments, "read", lost)
        disk.segments[0][:SUPERBLOCK_SIZE] = bytes(SUPERBLOCK_SIZE)
        await put(other, b"two", b"y" * MIB)
        assert bytes(disk.segments[0][:SUPERBLOCK_SIZE]) == header


async def test_slots_behind_the_stored_size_stay_in_the_record(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """A host stores them so whose bytes came to slots before the size did; others change attributes meanwhile."""
    data = rng.randbytes(5 * 4096)
    async with hosts(rng, 2, strict=False, capacity=16 * MIB, chunk=4096) as (one, two):
        await put(one, b"file", data)
        await quiet(one, two)
        node = await two.tree.lookup(ROOT_INODE, b"file")
        node.size = 2 * 4096 + 100
        assert [len(extents) for extents in node.record().chunks] == [1] * 5
        node.size = len(data)


async def test_bytes_are_read_anew_although_their_time_was_set_back(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    data = rng.randbytes(20 * 4096)
    async with hosts(rng, 2, strict=False, capacity=16 * MIB, chunk=4096) as (one, two):
        await put(one, b"file", data)
        await quiet(one, two)
        assert await get(two, b"file") == data
        node = await one.tree.lookup(ROOT_INODE, b"file")
        mtime = node.mtime
        handle = await one.files.open(node.ino, os.O_RDWR, CALLER)
        await one.files.write(handle, 15 * 4096, b"newer")
        await one.inodes.set_attributes(node.ino, Changes(mtime=mtime), CALLER)
        await one.files.release(handle)
        await quiet(one, two)
        assert await get(two, b"file") == data[: 15 * 4096] + b"newer" + data[15 * 4096 + 5 :]


async def test_times_that_two_hosts_set_are_those(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    chaos = [Chaos(random.Random(number)) for number in range(2)]
    async with hosts(rng, 2, chaos, strict=False, capacity=16 * MIB) as (one, two):
        await put(one, b"file", b"data")
        await quiet(one, two)
        ino = (await two.tree.lookup(ROOT_INODE, b"file")).ino
        await two.inodes.set_attributes(ino, Changes(mtime=10**9), CALLER)
        chaos[1].stalled = trio.Event()
        await one.inodes.set_attributes(ino, Changes(atime=2 * 10**9, mode=0o600), CALLER)
        await one.sync()
        chaos[1].stalled.set()
        await quiet(two, one)
        for volume in (one, two):
            node = await volume.tree.lookup(ROOT_INODE, b"file")
            assert (node.atime, node.mtime, node.mode & 0o777) == (2 * 10**9, 10**9, 0o600)


async def test_of_files_that_two_put_under_one_name_one_is_whole(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options(capacity=32 * MIB, chunk=CHUNK)
    disk = Disk.format(options, shared=True)
    wanted: dict[bytes, list[bytes]] = {}
    async with volumes(disk, options, 3, rng) as all_volumes:

        async def work(volume: Volume, number: int, rng: random.Random) -> None:
            for serial in range(30):
                name, data = b"name%d" % rng.randrange(5), rng.randbytes(rng.randrange(1, 3 * CHUNK))
                wanted.setdefault(name, []).append(data)
                await put(volume, b"tmp%d.%d" % (number, serial), data)
                await volume.tree.rename(ROOT_INODE, b"tmp%d.%d" % (number, serial), ROOT_INODE, name, 0)

        async with trio.open_nursery() as nursery:
            for number, volume in enumerate(all_volumes):
                nursery.start_soon(work, volume, number, random.Random(rng.random()))
        await quiet(*all_volumes)
        for volume in all_volumes:
            assert await names_in(volume) == sorted(wanted)
        found = [{name: await get(volume, name) for name in wanted} for volume in all_volumes]
        assert found[0] == found[1] == found[2]
        assert all(found[0][name] in wanted[name] for name in wanted)
        await trio.sleep(60)  # what was replaced is freed
        assert not [key for key in disk.records if key[:1] in (b"o", b"f")]


async def test_an_open_fails_where_bytes_of_ours_that_cannot_be_stored_hide_what_another_host_closed(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    chaos = [Chaos(random.Random(number)) for number in range(2)]
    async with hosts(rng, 2, chaos, strict=True, capacity=64 * MIB, chunk=CHUNK) as (one, two):
        await put(one, b"file", bytes(2 * CHUNK))
        handle = await two.files.open((await two.tree.lookup(ROOT_INODE, b"file")).ino, os.O_RDWR, CALLER)
        await two.files.write(handle, 0, b"ours")
        chaos[1].write_error = 1.0
        await write_at(one, b"file", CHUNK, b"theirs")
        with pytest.raises(errors.EngineError):
            await get(two, b"file")
        chaos[1].write_error = 0.0
        found = await get(two, b"file")
        assert found is not None
        assert (found[:4], found[CHUNK : CHUNK + 6]) == (b"ours", b"theirs")
        await two.files.release(handle)
        two.tree.forget(handle.node.ino, 1)


async def test_a_slot_that_another_host_freed_goes_with_the_record_that_says_so(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Also where a commit has no room for all: who finds the record of a slot that is free may free its next life."""
    async with hosts(rng, 1, strict=False, capacity=16 * MIB) as (one,):
        core, journal = inside.core(one), inside.journal(one)
        slab = next(slab for slab in range(core.geometry.slab_count) if core.slabs.holds(slab))
        addr = slab * core.geometry.slab_size
        extents = [Extent(addr + number * 4096, 4096, 10, number, b"", COMMITTED) for number in range(5)]
        core.dead += extents
        for extent in extents:
            journal.put(schema.freed_key(slab, extent.addr, extent.generation), None)
        pieces = list(Planner(journal.pending, journal.terms)._split_loose(Draft(), set()))
        assert [(piece.dead, piece.deletes) for piece in pieces] == [
            ([extent], {schema.freed_key(slab, extent.addr, extent.generation)}) for extent in extents
        ]


async def test_a_late_removal_takes_what_was_there_then_and_nothing_newer(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    chaos = [Chaos(random.Random(number)) for number in range(2)]
    async with hosts(rng, 2, chaos, strict=False) as (one, two):
        await put(one, b"file", b"old")
        await quiet(one, two)
        chaos[0].stalled = trio.Event()
        await one.tree.unlink(ROOT_INODE, b"file")
        await put(two, b"file.part", b"newer")
        await two.tree.rename(ROOT_INODE, b"file.part", ROOT_INODE, b"file", 0)
        await two.sync()
        chaos[0].stalled.set()
        await quiet(one, two)
        assert await get(one, b"file") == await get(two, b"file") == b"newer"


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
async def test_what_another_host_removes_stays_readable_while_it_is_open(
    rng: random.Random, autojump_clock: trio.testing.MockClock, strict: bool
) -> None:
    options = lab_options(strict=strict, capacity=16 * MIB, chunk=CHUNK)
    disk = Disk.format(options, shared=True)
    data = rng.randbytes(10 * CHUNK)
    async with volumes(disk, options, 2, rng) as (one, two):
        await put(one, b"file", data)
        await quiet(one, two)
        node = await two.tree.lookup(ROOT_INODE, b"file")
        handle = await two.files.open(node.ino, os.O_RDONLY, CALLER)
        await one.tree.unlink(ROOT_INODE, b"file")
        await quiet(one, two)
        for number in range(10):  # would take the slots, if they were free
            await put(one, b"other%d" % number, rng.randbytes(10 * CHUNK))
        await trio.sleep(60)
        assert bytes(await two.files.read(handle, 0, 64 * MIB)) == data
        await two.files.release(handle)
        two.tree.forget(node.ino, 1)
        await trio.sleep(120)
        assert not [key for key in disk.records if key[:1] in (b"o", b"f", b"h")]


async def test_threads_see_no_slots_of_a_shared_volume(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Another host may free the slot, and use it again, before this one hears of it."""
    options = lab_options(capacity=24 * MIB, chunk=CHUNK, nodes=64)
    disk = Disk.format(options, shared=True)
    disk.mappable = True
    async with volumes(disk, options, 1, rng) as (volume,):
        await put(volume, b"block", rng.randbytes(CHUNK))
        await quiet(volume)
        node = await volume.tree.lookup(ROOT_INODE, b"block")
        handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
        await volume.files.show(handle, 0, 0)
        rows = volume.files.content_map(handle).rows.values()
        assert not [row for row in rows if row.source is not None and row.block is None]
        await volume.files.release(handle)
        volume.tree.forget(node.ino, 1)


async def test_names_of_one_call_are_removed_together(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Where each name is asked for at the store, and removed there: they share the way, which takes some 10 ms."""
    chaos = [Chaos(random.Random(rng.random()), delay=1) for _ in range(2)]
    async with hosts(rng, 2, chaos, strict=True, capacity=16 * MIB, chunk=CHUNK) as (first, second):
        there = [b"block %d" % number for number in range(60)]
        async with trio.open_nursery() as nursery:
            for name in there:
                nursery.start_soon(put, second, name, b"x")
        names = [*there, *[b"absent %d" % number for number in range(1200)]]
        rng.shuffle(names)
        started = trio.current_time()
        gone = await first.blocks.delete(ROOT_INODE, names)
        assert trio.current_time() - started < 2
        assert {name for name, ino in zip(names, gone, strict=True) if ino} == set(there)
        assert not any(await first.blocks.delete(ROOT_INODE, there))
        assert await names_in(second) == []


async def test_rings_hear_who_may_read_a_file_that_both_hosts_change(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """The other host's mode comes with the conflict of the two, not with the watch."""
    async with hosts(rng, 2, strict=True, capacity=16 * MIB, chunk=CHUNK) as (one, two):
        await put(one, b"file", b"secret")
        binding = await two.blocks.bind(ROOT_INODE, b"file")
        assert binding is not None
        handle = await two.files.open(binding.ino, os.O_RDWR, CALLER)
        await two.files.write(handle, 0, b"S")
        await one.inodes.set_attributes(binding.ino, Changes(mode=0o600), CALLER)
        await two.files.flush(handle)
        assert handle.node.mode & 0o777 == 0o600
        assert not binding.valid
        await two.files.release(handle)
