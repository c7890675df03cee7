"""Blocks that are rows, on a volume that several hosts have: each finds what the others stored."""

from __future__ import annotations

import os
import random
import time

import inside
import pytest
import trio
import trio.testing
from block_hosts import BlockHost, block_hosts
from shared_lab import check_disk, eventually, get, joined, put, quiet, volumes, write_at
from volume_lab import CALLER, MIB, Chaos, Disk, lab_options

from kvfuse import errors
from kvfuse.options.config import Options
from kvfuse.slab.allocator import Allocator
from kvfuse.slab.image import LENT
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.blocks.block_engine import SHARED_PARTS
from kvfuse.volume.hosts import slab_supply
from kvfuse.volume.store import schema


@pytest.fixture
def options() -> Options:
    return lab_options(capacity=64 * MIB, strict=False)


@pytest.fixture
def disk(options: Options) -> Disk:
    return Disk.format(options, shared=True)


async def test_blocks_of_one_host_are_found_by_the_other_at_all_doors(
    disk: Disk, options: Options, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    data = {b"%d-%s" % (n, b"n" * n): rng.randbytes(rng.choice([1, 4096, 70_000])) for n in range(60)}
    async with volumes(disk, options, 2, rng) as mounted:
        one, two = await block_hosts(mounted)
        for name, content in data.items():
            await one.put(name, content)
        await one.written()
        before = {key: row for key, row in disk.records.items() if key[:1] in b"dicou"}
        for name, content in data.items():
            assert await two.get(name) == content
            assert await two.read(name) == content
        assert await two.names() == sorted(data)
        assert before == {key: row for key, row in disk.records.items() if key[:1] in b"dicou"}


async def test_puts_make_no_records(
    disk: Disk, options: Options, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with volumes(disk, options, 2, rng) as mounted:
        one, two = await block_hosts(mounted)
        await one.put(b"first", b"x")
        await one.written()
        await trio.sleep(10)  # slabs ahead of need have come
        before = inside.records(one.volume).counters.commits + inside.records(two.volume).counters.commits
        for number in range(1000):
            await one.put(b"%d" % number, b"y" * 100)
        await one.written()
        for number in range(0, 1000, 100):
            assert await two.get(b"%d" % number) == b"y" * 100
        after = inside.records(one.volume).counters.commits + inside.records(two.volume).counters.commits
        assert after - before <= 10, "some slabs were lent, or none"


async def test_the_later_put_of_a_name_counts_everywhere(
    disk: Disk, options: Options, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with volumes(disk, options, 2, rng) as mounted:
        one, two = await block_hosts(mounted)
        await one.put(b"name", b"first")
        await one.written()
        assert await two.get(b"name") == b"first"
        await two.put(b"name", b"second")
        await two.written()
        await one.until(b"name", b"second")
        await one.put(b"name", b"third")
        await one.written()
        await two.until(b"name", b"third")
        assert await one.get(b"name") == b"third"
    async with volumes(disk, options, 1, rng) as mounted:
        (three,) = [BlockHost(volume, one.folder) for volume in mounted]
        assert await three.get(b"name") == b"third"


@pytest.mark.parametrize("is_dropped_first", [False, True])
async def test_a_block_that_another_host_removes_is_gone_everywhere(
    disk: Disk, options: Options, rng: random.Random, is_dropped_first: bool, autojump_clock: trio.testing.MockClock
) -> None:
    async with volumes(disk, options, 2, rng) as mounted:
        one, two = await block_hosts(mounted)
        await one.put(b"name", b"first")
        await one.put(b"other", b"stays")
        await one.written()
        assert await two.get(b"name") == b"first"
        if is_dropped_first:  # an own one, over that of the other host
            await two.put(b"name", b"second")
            assert await two.engine.remove(two.folder, [b"name", b"none"]) == [True, False]
        else:
            await two.volume.tree.unlink(two.folder, b"name")
        assert await two.get(b"name") is None
        assert await two.names() == [b"other"]
        await two.written()
        await one.until(b"name", None)
        assert await one.names() == [b"other"]
        await one.written()
        for _ in range(100):  # graves go, and nothing comes back
            await trio.sleep(1)
            assert await two.get(b"name") is None
            two.engine.wake()
            if not two.engine.native.statistics()["shadows"]:
                break
        assert not two.engine.native.statistics()["shadows"], "the grave is not needed any more"
        two.engine.eviction.look()
        await two.written()
    async with volumes(disk, options, 1, rng) as mounted:
        (three,) = [BlockHost(volume, one.folder) for volume in mounted]
        assert await three.get(b"other") == b"stays"
        assert await three.get(b"name") is None


async def test_a_clear_ends_the_blocks_of_all_hosts(
    disk: Disk, options: Options, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with volumes(disk, options, 2, rng) as mounted:
        one, two = await block_hosts(mounted)
        await one.put(b"one", b"1")
        await two.put(b"two", b"2")
        await one.written()
        await two.written()
        assert await one.get(b"two") == b"2"
        assert await two.get(b"one") == b"1"
        node = await inside.lookups(one.volume).find_node(one.folder)
        await inside.xattrs(one.volume).namespaces.keeper.clear(node, None)
        assert await one.get(b"one") is None
        assert await one.get(b"two") is None

        async def has_heard() -> bool:
            return not any(two.engine.find(two.folder, name) for name in (b"one", b"two"))

        await eventually(has_heard, seconds=2)
        assert await two.names() == []
        await two.put(b"again", b"3")
        await two.written()
        await one.until(b"again", b"3")


async def test_a_host_whose_watch_is_late_serves_nothing_that_was_cleared(
    disk: Disk, options: Options, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """For more than a second: neither its own blocks, nor what its memory has of others."""
    chaos = [Chaos(random.Random(rng.random())) for _ in range(2)]
    async with volumes(disk, options, 2, rng, chaos) as mounted:
        one, two = await block_hosts(mounted)
        await one.put(b"one", b"1")
        await two.put(b"two", b"2")
        await one.written()
        await two.written()
        assert await two.get(b"one") == b"1"
        chaos[1].deaf = trio.Event()
        node = await inside.lookups(one.volume).find_node(one.folder)
        await inside.xattrs(one.volume).namespaces.keeper.clear(node, None)
        await one.put(b"new", b"3")
        await one.engine.flush()
        await trio.sleep(1)
        assert [await two.get(name) for name in (b"one", b"two", b"new")] == [None, None, b"3"]
        chaos[1].deaf.set()
        await two.put(b"again", b"4")
        await two.engine.flush()
        await one.until(b"again", b"4")


async def test_a_folder_that_has_a_block_of_any_host_stays(
    disk: Disk, options: Options, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Another host has not even looked for the block."""
    async with volumes(disk, options, 2, rng) as mounted:
        one, two = await block_hosts(mounted)
        await one.put(b"name", b"block")
        await one.written()
        node = await inside.lookups(two.volume).find_node(two.folder)
        keeper = inside.xattrs(two.volume).namespaces.keeper
        with pytest.raises(errors.NotEmpty):
            await two.volume.tree.remove_directory(ROOT_INODE, b"blocks")
        with pytest.raises(errors.NotEmpty):
            await keeper.delete(node, None)
        assert await two.get(b"name") == b"block"
        await two.volume.tree.unlink(two.folder, b"name")
        await two.written()
        await one.until(b"name", None)
        await keeper.delete(node, None)
        await two.volume.tree.remove_directory(ROOT_INODE, b"blocks")


async def test_blocks_of_a_killed_host_stay_readable(
    disk: Disk, options: Options, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    chaos = [Chaos(random.Random(rng.random()), delay=0.1) for _ in range(2)]
    data = {b"%d" % n: rng.randbytes(rng.choice([100, 5000, 70_000])) for n in range(40)}
    async with joined(disk, options, 1, chaos[0]) as first:
        async with joined(disk, options, 2, chaos[1]) as second:
            one, two = await block_hosts([first, second])
            for name, content in data.items():
                await two.put(name, content)
            await two.written()
            own = len(one.engine.core.slabs.lent)
            chaos[1].killed = True
        for name, content in data.items():
            assert await one.get(name) == content

        async def has_adopted() -> bool:
            return len(one.engine.core.slabs.lent) > own and not one.engine.slabs.to_load

        await eventually(has_adopted, seconds=120)
        for name, content in data.items():
            assert await one.get(name) == content
        assert one.engine.native.statistics()["foreign"] == 0
        assert await one.engine.remove(one.folder, list(data)) == [True] * len(data)
        await one.put(b"own", b"own")
        assert await one.names() == [b"own"]
    await check_disk(disk)


async def test_strict_hosts_see_what_others_did_at_once(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options(capacity=64 * MIB, strict=True)
    async with volumes(Disk.format(options, shared=True), options, 3, rng) as mounted:
        hosts = await block_hosts(mounted, is_strict=True)
        model: dict[bytes, bytes] = {}
        for step in range(60):
            host, name = rng.choice(hosts), b"%d" % rng.randrange(6)
            match rng.randrange(4):
                case 0 | 1:
                    model[name] = b"%d" % step * rng.choice([1, 3000])
                    await host.put(name, model[name])
                case 2:
                    found = await host.engine.remove(host.folder, [name], is_strict=True)
                    await host.written()
                    assert found == [model.pop(name, None) is not None]
                case _:
                    if name in model:
                        await host.volume.tree.unlink(host.folder, name)
                        del model[name]
            reader = rng.choice(hosts)
            for one in {name, b"%d" % rng.randrange(6)}:
                assert await rng.choice([reader.get, reader.read])(one) == model.get(one), (step, one)
            assert await reader.names() == sorted(model)


async def test_rows_that_are_not_true_any_more_are_misses(
    disk: Disk, options: Options, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Slots are used again, bytes are damaged, and the other host does not know it yet: never other bytes."""
    async with volumes(disk, options, 2, rng) as mounted:
        one, two = await block_hosts(mounted)
        history: dict[bytes, list[bytes]] = {}
        damaged: dict[int, tuple[int, int]] = {}
        """place -> the byte before, and after"""
        found = missed = 0
        for step in range(300):
            name = b"%d" % rng.randrange(40)
            if rng.random() < 0.5:
                history.setdefault(name, []).append(rng.randbytes(4096))
                await one.put(name, history[name][-1])
            else:
                one.engine.drop(one.folder, [name])
            if rng.random() < 0.1:
                await one.written()
            if rng.random() < 0.05:
                await two.engine.renew(is_strict=True)
            if step % 50 == 49:
                image = disk.segments[0]
                for place in [rng.randrange(len(image)) for _ in range(200)]:
                    before, _ = damaged.get(place, (image[place], 0))
                    image[place] ^= 1 << rng.randrange(8)
                    damaged[place] = before, image[place]
            for other in [b"%d" % rng.randrange(40) for _ in range(5)]:
                row = two.engine.find(two.folder, other)
                data = await two.engine.read(row[0], other) if row is not None else None
                found, missed = found + (data is not None), missed + (data is None and row is not None)
                if data is not None:
                    assert bytes(data) in history[other], "bytes that were never put"
        assert found > 0
        assert missed > 0
        await one.written()
        for place, (before, after) in damaged.items():  # a check follows
            image[place] = before if image[place] == after else image[place]


async def test_a_host_that_lost_its_lease_goes_on_with_what_others_adopted(
    disk: Disk, options: Options, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    chaos = [Chaos(random.Random(number)) for number in range(2)]
    async with volumes(disk, options, 2, rng, chaos) as mounted:
        one, two = await block_hosts(mounted)
        for number in range(20):
            await one.put(b"%d" % number, b"%d" % number * 100)
        await one.written()
        former, client = one.engine, inside.client(one.volume)
        chaos[0].stalled = trio.Event()
        await one.put(b"late", b"never written")
        members = inside.leases(two.volume).view.members

        async def is_gone() -> bool:
            return client not in members and client not in inside.leases(two.volume).view.held_counts

        await eventually(is_gone, seconds=60)
        chaos[0].stalled.set()

        async def is_another() -> bool:
            return inside.client(one.volume) != client and inside.life(one.volume) is not None

        await eventually(is_another, seconds=60)
        assert former.find(one.folder, b"1") is None
        assert one.engine is not former
        for number in range(20):
            assert await one.get(b"%d" % number) == b"%d" % number * 100
            assert await two.get(b"%d" % number) == b"%d" % number * 100
        assert await two.get(b"late") is None
        await one.put(b"again", b"again")
        await one.written()
        await two.until(b"again", b"again")


async def test_a_quota_holds_for_all_hosts_together(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    options = lab_options(capacity=64 * MIB, strict=False)
    most = 2 * MIB
    async with volumes(Disk.format(options, shared=True), options, 2, rng) as mounted:
        hosts = await block_hosts(mounted, capacity=str(most), admission="all")

        def used() -> int:
            return sum(host.engine.use(host.folder)[0] for host in hosts)

        for number in range(900):
            host = hosts[number % 2] if number < 600 else hosts[1]
            await host.put(b"%d" % number, b"x" * 4096)
            assert used() <= most
            if number % 50 == 0:
                await trio.sleep(0.5)
        assert used() > most // 3
        assert hosts[1].engine.use(hosts[1].folder)[0] > most // 4


async def test_a_host_that_comes_back_keeps_what_it_had_of_a_quota(
    rng: random.Random, autojump_clock: trio.testing.MockClock, disk: Disk, options: Options
) -> None:
    """As another client: its former part is not free yet, and the others have most of what is."""
    blocks = {b"%d" % number: rng.randbytes(300_000) for number in range(40)}
    fillers = [b"filler-%d" % number for number in range(40)]
    async with joined(disk, options, 1, Chaos(rng)) as stays:
        async with joined(disk, options, 2, Chaos(rng)) as leaver:
            one, two = await block_hosts([stays, leaver], capacity=str(32 * MIB))
            for name, data in blocks.items():
                await two.put(name, data)
            await two.written()
            for name in fillers:
                await one.put(name, rng.randbytes(300_000))
            await one.written()
            await one.engine.remove(one.folder, fillers)
        async with joined(disk, options, 3, Chaos(rng, delay=0.3)) as comes:
            back = BlockHost(comes, one.folder)
            for name, data in blocks.items():
                await back.until(name, data)
            assert sum(host.engine.use(one.folder)[0] for host in (one, back)) <= 32 * MIB
    await check_disk(disk)


async def test_a_full_volume_of_blocks_refuses_no_host(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """One fills it; the other, which has no slab, gets some."""
    options = lab_options(capacity=32 * MIB, strict=False)
    async with volumes(Disk.format(options, shared=True), options, 2, rng) as mounted:
        one, two = await block_hosts(mounted, admission="all", eviction="fifo")
        block = rng.randbytes(60_000)
        for number in range(32 * MIB // 60_000 + 100):
            await one.put(b"%d" % number, block)
        for number in range(100):
            await two.put(b"two-%d" % number, block)
        await two.written()
        assert await two.get(b"two-99") == block
        assert len(two.engine.core.slabs.lent) > 1
        await one.put(b"last", block)


async def test_a_host_whose_clock_is_ahead_holds_up_no_listing(
    disk: Disk,
    options: Options,
    rng: random.Random,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with volumes(disk, options, 2, rng) as mounted:
        one, two = await block_hosts(mounted)
        ahead = time.time_ns() + 3600 * 10**9
        with monkeypatch.context() as patched:
            patched.setattr(time, "time_ns", lambda: ahead)
            for number in range(20):
                await one.put(b"%d" % number, b"x")
        await one.written()
        await two.engine.renew(is_strict=True)
        await two.put(b"own", b"y")  # above what it knows of others
        assert await two.names() == sorted([b"%d" % number for number in range(20)] + [b"own"])
        assert await two.names(reader=1) == await two.names()


async def test_idle_hosts_hold_few_slabs_and_ask_nothing(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options(capacity=512 * MIB, strict=False)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 12, rng) as mounted:
        await block_hosts(mounted)
        await trio.sleep(60)
        held = dict(inside.leases(mounted[0]).view.held_counts)
        before = [inside.records(volume).counters.round_trips for volume in mounted]
        await trio.sleep(600)
        after = [inside.records(volume).counters.round_trips for volume in mounted]
    assert len(held) == 12, "each has some at hand"
    assert max(held.values()) <= slab_supply.AHEAD_IDLE + 2
    assert after == before


async def test_hosts_that_store_share_what_is_free_ahead_of_need(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options(capacity=512 * MIB, strict=False)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 12, rng) as mounted:
        hosts = await block_hosts(mounted)
        for number, host in enumerate(hosts):
            await host.put(b"%d" % number, b"x")
            await host.written()
        await trio.sleep(60)
        lent = sum(len(inside.slabs(volume).lent) for volume in mounted)
    assert lent <= 4 * len(hosts) + disk.superblock.geometry.slab_count // SHARED_PARTS * 4


async def test_slabs_that_are_too_many_are_free_for_all_without_another_commit(
    disk: Disk, options: Options, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with volumes(disk, options, 2, rng) as mounted:
        host, _ = await block_hosts(mounted)
        for number in range(40):
            await host.put(b"%d" % number, bytes(MIB // 2))
        await host.written()
        assert len(lent_by_records(disk)) >= 20
        host.engine.drop(host.folder, [b"%d" % number for number in range(40)])

        async def are_few_lent() -> bool:
            return len(lent_by_records(disk)) < 8

        await eventually(are_few_lent, pause=0.1)
        assert set(lent_by_records(disk)) == {slab for volume in mounted for slab in inside.slabs(volume).lent}


def lent_by_records(disk: Disk) -> list[int]:
    rows = [(key, schema.decode_slab(row.value)) for key, row in disk.records.items() if key[:1] == b"s"]
    return [schema.key_slab(key) for key, (slot_size, _) in rows if slot_size == LENT]


async def test_a_loan_whose_commit_was_refused_is_in_the_next_one(
    disk: Disk,
    options: Options,
    rng: random.Random,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Else the slab's next holder finds it free, with blocks in it."""
    chaos = Chaos(rng)
    async with joined(disk, options, 1, Chaos(rng)) as other, joined(disk, options, 2, chaos) as volume:
        host, _ = await block_hosts([volume, other])
        await put(other, b"name", bytes(4096))
        await quiet(other, volume)
        assert await get(volume, b"name") == bytes(4096)
        recalled = list[object]()
        slabs = inside.slabs(volume)
        monkeypatch.setattr(slabs, "recall", lambda *of: (recalled.append(of), Allocator.recall(slabs, *of)))
        node = await volume.tree.lookup(ROOT_INODE, b"name")
        handle = await volume.files.open(node.ino, os.O_RDWR, CALLER)
        chaos.deaf = trio.Event()
        await write_at(other, b"name", 0, b"1" * 4096)
        await volume.files.write(handle, 4096, b"2" * 4096)
        await volume.files.release(handle)
        await host.engine.slabs.lend(host.engine.native.statistics()["free_slabs"] + 1)
        chaos.deaf.set()
        assert recalled, "the commit was refused"
        assert not [slab for slab in slabs.lent if schema.slab_key(slab) not in disk.records]
        assert await get(volume, b"name") == b"1" * 4096 + b"2" * 4096
    await check_disk(disk)
