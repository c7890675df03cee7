"""A write on a full volume waits for whatever space is on its way back, instead of failing."""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import inside
import pytest
import trio
import trio.testing
from shared_lab import check_disk, hosts, joined, open_path, quiet, read, until, volumes
from volume_lab import CALLER, MIB, Chaos, Disk, MemoryRecords, check, lab_options, opened

from kvfuse.errors import NoSpace
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.slots import space
from kvfuse.volume.slots.heads import identity_of
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume


async def write(volume: Volume, name: bytes, parts: int = 1, size: int = MIB) -> int:
    """Write a block in so many calls; its inode. The kernel is not told to forget it."""
    handle, node = await volume.tree.create(ROOT_INODE, name, 0o644, CALLER, os.O_WRONLY)
    try:
        for offset in range(0, size, size // parts):
            await volume.files.write(handle, offset, (name * (size // len(name)))[offset : offset + size // parts])
    finally:
        await volume.files.release(handle)
    return node.ino


async def fill(volume: Volume, size: int = MIB, start: int = 0) -> list[bytes]:
    names: list[bytes] = []
    while True:
        name = b"%08d" % (start + len(names))
        try:
            await write(volume, name, size=size)
        except NoSpace:
            await volume.tree.unlink(ROOT_INODE, name)
            return names
        names.append(name)


def slow_down(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Each answer of the record store takes so long, as on a loaded machine. Leases are kept all the same."""

    def slowed(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def answer(*args: Any, **options: Any) -> Any:
            await trio.sleep(seconds)
            return await call(*args, **options)

        return answer

    for name in ("get", "scan", "commit"):
        monkeypatch.setattr(MemoryRecords, name, slowed(getattr(MemoryRecords, name)))


@pytest.mark.parametrize("known", [True, False], ids=["known to the kernel", "forgotten"])
async def test_a_block_that_was_removed_while_it_was_written(seed: int, known: bool) -> None:
    """Its slots are given up only when the write in vain has ended: the next block waits for that."""
    options = lab_options(capacity=16 * MIB)
    disk = Disk.format(options)
    chaos = Chaos(random.Random(seed))
    async with opened(disk, options, chaos) as volume:
        names = await fill(volume)
        await volume.sync()
        await volume.tree.unlink(ROOT_INODE, names.pop())
        ino = await write(volume, b"in vain!")
        chaos.delay, chaos.first_write = 1.0, trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(volume.sync)
            await chaos.first_write.wait()
            await volume.tree.unlink(ROOT_INODE, b"in vain!")
            if not known:
                volume.tree.forget(ino, 1)
            await write(volume, b"new data")
        chaos.delay = 0
    assert (await check(disk)).clean


@pytest.mark.parametrize("number", range(40))
async def test_each_removed_block_makes_room_for_one(
    seed: int, number: int, autojump_clock: trio.testing.MockClock
) -> None:
    """Whatever becomes of a removed block's bytes at that moment: staged, being written, committed, being read."""
    rng = random.Random(seed + number)
    options = lab_options(capacity=16 * MIB, chunk=4 * MIB)
    disk = Disk.format(options)
    chaos = Chaos(rng, delay=rng.choice([0, 0.1, 0.5, 1.0]))
    parts = rng.choice([1, 1, 2, 4, 8])
    async with opened(disk, options, chaos) as volume:
        names = await fill(volume)
        for turn in range(20):
            await volume.tree.unlink(ROOT_INODE, names.pop(rng.choice([0, -1])))
            name = b"new.%04d" % turn
            await write(volume, name, parts)
            names.append(name)
            if rng.random() < 0.5:
                replaced = rng.choice(names[:-1])
                await volume.tree.rename(ROOT_INODE, name, ROOT_INODE, replaced, 0)
                names.pop()
                await write(volume, name, parts)
                names.append(name)
            if rng.random() < 0.4:
                node = await volume.tree.lookup(ROOT_INODE, rng.choice(names))
                handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
                await volume.files.read(handle, 0, MIB)
                await volume.files.release(handle)
            if rng.random() < 0.4:
                await trio.sleep(rng.random() * 0.2)
        chaos.delay = 0
    assert (await check(disk)).clean


async def test_a_block_that_was_removed_while_it_was_open(seed: int) -> None:
    """Closing it gives its space to a write that begins in the same moment."""
    options = lab_options(capacity=16 * MIB)
    disk = Disk.format(options)
    async with opened(disk, options, Chaos(random.Random(seed))) as volume:
        names = await fill(volume)
        node = await volume.tree.lookup(ROOT_INODE, names[0])
        handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
        await volume.tree.unlink(ROOT_INODE, names[0])
        with pytest.raises(NoSpace):
            await write(volume, b"too soon")
        await volume.tree.unlink(ROOT_INODE, b"too soon")
        await volume.files.release(handle)
        await write(volume, b"new data")
    assert (await check(disk)).clean


@pytest.mark.parametrize("by_ring", [False, True], ids=["write", "put"])
async def test_room_that_comes_back_piece_by_piece(
    rng: random.Random, by_ring: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """On a shared volume removed slots wait for a while: the first that is free again may be too small."""
    async with hosts(rng, 1, [Chaos(rng)], capacity=16 * MIB) as (volume,):
        for number in range(40):
            await write(volume, b"small.%02d" % number, size=4096)
        names = await fill(volume)
        await volume.sync()
        for number in range(0, 40, 4):
            await volume.tree.unlink(ROOT_INODE, b"small.%02d" % number)
            await trio.sleep(0.1)
        await volume.tree.unlink(ROOT_INODE, names.pop())
        await until(lambda: volume.space().free >= MIB)
        if by_ring:
            await volume.blocks.put(ROOT_INODE, b"new data", memoryview(bytes(MIB)), CALLER, 0o644)
        else:
            await write(volume, b"new data")


async def empty(volume: Volume, names: list[bytes]) -> None:
    for name in names:
        await volume.tree.unlink(ROOT_INODE, name)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
async def test_a_client_alone_fills_again_what_it_emptied(
    rng: random.Random, strict: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """Nobody else can be reading what it removed: nothing has to rest."""
    async with hosts(rng, 1, [Chaos(rng)], capacity=16 * MIB, strict=strict) as (volume,):
        first = await fill(volume)
        for _ in range(3):
            await empty(volume, first)
            began = trio.current_time()
            assert await fill(volume) == first
            assert trio.current_time() - began < inside.core(volume).grace.seconds


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
async def test_what_was_removed_makes_room_however_slow_the_store_is(
    rng: random.Random, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    """Each answer comes within its deadline, and all that it takes to have the room take longer than a grace."""
    async with hosts(rng, 1, [Chaos(random.Random(0))], strict=strict, capacity=8 * MIB) as (volume,):
        names = await fill(volume)
        handle, _ = await volume.tree.create(ROOT_INODE, b"large", 0o644, CALLER, os.O_WRONLY)
        await quiet(volume)
        with monkeypatch.context() as slow:
            slow_down(slow, 4.5)
            await volume.tree.unlink(ROOT_INODE, names[0])
            began = trio.current_time()
            assert await volume.files.write(handle, 0, bytes(MIB)) == MIB
            assert trio.current_time() - began > inside.core(volume).grace.seconds + space.ROOM_SECONDS
            with pytest.raises(NoSpace):
                await volume.files.write(handle, MIB, bytes(MIB))
        await volume.files.release(handle)


async def test_the_next_client_fills_what_the_last_one_emptied(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options(capacity=16 * MIB)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 1, rng, [Chaos(rng)]) as (volume,):
        names = await fill(volume)
        await empty(volume, names)
    assert not any(key[:1] == b"o" for key in disk.records), "it left removed files behind"
    async with joined(disk, options, 2, Chaos(rng)) as volume:
        assert await fill(volume) == names
    await check_disk(disk)


async def test_a_client_among_others_waits_until_they_can_have_said_what_they_read(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """One of them has a removed file open: that stays. A write does not wait for it, once that is known."""
    async with hosts(rng, 2, [Chaos(rng), Chaos(rng)], capacity=16 * MIB) as (one, two):
        names = await fill(one)
        await one.sync()
        kept = await open_path(two, names[3])
        before = bytes(await two.files.read(kept, 0, MIB))
        await empty(one, names)
        again = await fill(one)
        assert len(again) >= len(names) - 1
        assert await two.files.read(kept, 0, MIB) == before
        began = trio.current_time()
        with pytest.raises(NoSpace):
            await write(one, b"too much")
        assert trio.current_time() - began < 1
        await one.tree.unlink(ROOT_INODE, b"too much")
        await two.files.release(kept)


@pytest.mark.parametrize("who", ["holder", "remover"])
async def test_what_a_client_removed_from_slabs_of_another_makes_room(
    rng: random.Random, who: str, autojump_clock: trio.testing.MockClock
) -> None:
    """For who holds the slabs, and waits; and for others, as he gives back what he needs no more."""
    async with hosts(rng, 2, [Chaos(rng), Chaos(rng)], capacity=16 * MIB) as (one, two):
        names = await fill(one)
        await quiet(one, two)
        await empty(two, names)
        await quiet(two)
        assert len(await fill(one if who == "holder" else two)) >= len(names) - 1


@pytest.mark.parametrize("delay", [0.5, 1.0])
async def test_what_is_freed_by_and_by_in_slabs_of_another_makes_room(
    rng: random.Random, delay: float, autojump_clock: trio.testing.MockClock
) -> None:
    """He goes on giving back what he needs no more, also while some of that is still nobody's."""
    chaos = [Chaos(rng, delay=delay), Chaos(rng, delay=delay)]
    async with hosts(rng, 2, chaos, capacity=200 * MIB) as (one, two):
        names = await fill(one)
        await quiet(one, two)
        await empty(two, names)
        assert len(await fill(two)) >= len(names) - 1


@pytest.mark.parametrize("size", [64 << 10, 256 << 10])
async def test_half_of_a_full_volume_becomes_free_in_slabs_of_one_who_does_not_need_it(
    rng: random.Random, size: int, autojump_clock: trio.testing.MockClock
) -> None:
    """No slab is wholly free: others get those that are partly used, and he gets the bytes of his files from them."""
    async with hosts(rng, 2, [Chaos(rng), Chaos(rng)], capacity=16 * MIB) as (one, two):
        names = await fill(one, size)
        await quiet(one, two)
        await empty(two, names[::2])
        made = await fill(two, size, start=10_000)
        assert len(made) >= len(names[::2]) - MIB // size
        for volume, name in zip((one, two) * len(names), names[1::2] + made, strict=False):
            assert await read(volume, name) == name * (size // len(name))
        await empty(one, names[1::2])
        assert len(await fill(one, size, start=20_000)) >= len(names[1::2]) - MIB // size
        await quiet(one, two)


async def test_late_news_of_a_freed_slot_do_not_free_its_next_life(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """A slot that has rested is written again at once: an answer that was under way then still has its f record."""
    options = lab_options(capacity=16 * MIB)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng, [Chaos(rng), Chaos(rng)]) as (one, two):
        names = await fill(one)
        await quiet(one, two)
        heard: dict[bytes, None] = {}
        assert inside.leases(one) is not None
        hint = inside.leases(one).freed.hint

        def listen(keys: Iterable[bytes]) -> None:
            keys = list(keys)
            heard.update(dict.fromkeys(keys))
            hint(keys)

        monkeypatch.setattr(inside.leases(one).freed, "hint", listen)
        await empty(two, names)
        await quiet(two)
        names = await fill(one)
        await one.sync()
        assert heard
        disk.apply(dict.fromkeys(heard, schema.RESTED_SLOT), ())
        hint(heard)
        await quiet(one)
        disk.apply({}, heard)
        for name in names:
            assert await read(one, name) == name * (MIB // len(name))


@pytest.mark.parametrize("number", range(8))
async def test_whenever_a_client_leaves_alone_nothing_removed_stays(
    seed: int, number: int, autojump_clock: trio.testing.MockClock
) -> None:
    """Also in the middle of freeing it."""
    rng = random.Random(seed + number)
    options = lab_options(capacity=64 * MIB, chunk=64 << 10)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 1, rng, [Chaos(rng, delay=0.05)]) as (volume,):
        names = [b"%08d" % index for index in range(200)]
        for name in names:
            await write(volume, name, size=4096)
        await volume.sync()
        await empty(volume, names)
        await trio.sleep(rng.random() * 2)
    assert not any(key[:1] in (b"o", b"s") for key in disk.records)


async def test_who_removed_what_others_made_may_leave_first(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """How many files there are is told to the last, and to who comes later."""
    options = lab_options(capacity=16 * MIB)
    disk = Disk.format(options, shared=True)
    async with joined(disk, options, 1, Chaos(rng)) as maker:
        async with joined(disk, options, 2, Chaos(rng)) as remover:
            for number in range(10):
                await write(maker, b"%08d" % number, size=4096)
            await quiet(maker, remover)
            await empty(remover, [b"%08d" % number for number in range(9)])
            await quiet(maker, remover)
            spaces = [volume.space() for volume in (maker, remover)]
            assert [space.files - space.files_free for space in spaces] == [2, 2], "the root directory, and one"
        await quiet(maker)
        assert maker.space().files - maker.space().files_free == 2
    report = await check(disk)
    assert not report.notes, report.notes


async def test_who_took_a_slab_of_another_writes_about_the_files_in_it(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Also of one that was read when its slot's size was not known yet."""
    options = lab_options(capacity=16 * MIB)
    disk = Disk.format(options, shared=True)
    async with joined(disk, options, 2, Chaos(rng)) as heir:
        async with joined(disk, options, 1, Chaos(rng)) as maker:
            await write(maker, b"file", size=4096)
            await quiet(maker, heir)
            node = await heir.tree.lookup(ROOT_INODE, b"file")
            handle = await heir.files.open(node.ino, os.O_RDONLY, CALLER)
            assert len(await heir.files.read(handle, 0, 4096)) == 4096
        (extent,) = node.chunks[0].extents
        assert not extent.slot_size
        await fill(heir)
        await until(lambda: inside.slabs(heir).holds(inside.core(heir).geometry.slab_of(extent.addr)))
        await heir.inodes.set_attributes(node.ino, Changes(mode=0o600), CALLER)
        await quiet(heir)
        assert node.described == identity_of(node)
        await heir.files.release(handle)
        heir.tree.forget(node.ino, 1)
    await check_disk(disk)


async def test_all_who_have_no_room_look_together_at_what_others_free(
    rng: random.Random, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosts(rng, 2, [Chaos(rng), Chaos(rng)], capacity=16 * MIB) as (one, two):
        await fill(one)
        await quiet(one, two)
        monkeypatch.setattr(inside.leases(two).shares, "is_owed", lambda: True)
        counters = inside.records(two).counters
        before = counters.scans
        with trio.move_on_after(5):
            async with trio.open_nursery() as nursery:
                for number in range(50):
                    nursery.start_soon(write, two, b"%08d" % (10_000 + number))
        assert 5 <= counters.scans - before < 100
        await quiet(one, two)


async def test_changes_of_two_that_wait_for_room_hold_up_nobody_else(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """And they are not lost: another commit stores the removal that makes room for them."""
    async with hosts(rng, 2, [Chaos(rng), Chaos(rng)], capacity=48 * MIB) as (one, two):
        await write(one, b"shared")
        other, _ = await one.tree.create(ROOT_INODE, b"other", 0o644, CALLER, os.O_WRONLY)
        await one.files.write(other, 0, b"x")
        for name in (b"of two 0", b"of two 1"):
            await write(two, name)
        await quiet(one, two)
        found = [(volume, await volume.tree.lookup(ROOT_INODE, b"shared")) for volume in (one, two)]
        handles = [await volume.files.open(node.ino, os.O_RDWR, CALLER) for volume, node in found]
        names = await fill(one)
        await fill(two, start=1000)
        await two.tree.unlink(ROOT_INODE, b"of two 0")
        await one.tree.unlink(ROOT_INODE, names[0])
        for volume, handle, offset in zip((one, two), handles, (1, MIB // 2), strict=True):
            await volume.files.write(handle, offset, b"written")
        await two.files.fsync(handles[1])
        await one.files.write(other, 0, b"y")
        began, ends = trio.current_time(), dict[bytes, float]()

        async def sync(name: bytes, handle: FileHandle) -> None:
            await one.files.fsync(handle)
            ends[name] = trio.current_time() - began

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sync, b"shared", handles[0])
            nursery.start_soon(sync, b"other", other)
        assert ends[b"other"] < 1 < ends[b"shared"]
        for volume, handle in ((one, handles[0]), (one, other), (two, handles[1])):
            await volume.files.release(handle)
        await quiet(one, two)
        for volume in (one, two):
            data = await read(volume, b"shared")
            assert (data[1:8], data[MIB // 2 :][:7]) == (b"written", b"written")
