"""Caches of many hosts: each evicts what is in its slabs, and what it evicts is gone for all."""

from __future__ import annotations

import random

import inside
import msgspec
import pytest
import trio
import trio.testing
from shared_lab import check_disk, eventually, exists, get, joined, open_path, quiet, until, volumes
from volume_lab import CALLER, MIB, Chaos, Disk, lab_options

from kvfuse.options.options import NamespaceOptions
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.hosts.reports import REPORT_SECONDS
from kvfuse.volume.namespaces.cache import block_key
from kvfuse.volume.namespaces.settings import ROOT, Settings, encode_settings
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume

BLOCK = 64 << 10
OPTIONS = lab_options(capacity=64 * MIB, strict=False)


def cache_disk(**settings: object) -> Disk:
    """A shared volume whose root is a cache."""
    disk = Disk.format(OPTIONS, shared=True)
    record = encode_settings(Settings(kind="cache").changed({"admission": "all", "eviction": "lru", **settings}))
    disk.apply({schema.namespace_key(ROOT): record}, ())
    return disk


def quick(rng: random.Random, count: int) -> list[Chaos]:
    return [Chaos(random.Random(rng.random())) for _ in range(count)]


async def fill(volume: Volume, count: int, prefix: bytes = b"") -> list[bytes]:
    names = [prefix + b"%08d" % number for number in range(count)]
    for name in names:
        await volume.blocks.put(ROOT_INODE, name, memoryview((name * BLOCK)[:BLOCK]), CALLER, 0o644)
        space = volume.space()
        assert 0 <= space.free <= space.size
    return names


def books(volume: Volume) -> int:
    """Blocks on the books of a host."""
    return len(inside.caches(volume)[ROOT].policy)


async def present(volume: Volume, names: list[bytes]) -> int:
    return sum(await volume.blocks.exists(ROOT_INODE, names))


@pytest.mark.ring(3)
async def test_two_hosts_fill_a_cache_three_times(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    async with volumes(cache_disk(), OPTIONS, 2, rng, quick(rng, 2)) as (one, two):
        count = 3 * one.space().size // BLOCK // 2
        found: dict[bytes, list[bytes]] = {}  # by who ended first

        async def store(volume: Volume, prefix: bytes) -> None:
            found[prefix] = await fill(volume, count, prefix)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(store, one, b"a")
            nursery.start_soon(store, two, b"b")
        await quiet(one, two)
        for prefix, writer, other in ((b"a", one, two), (b"b", two, one)):
            names = found[prefix]

            async def agree(names: list[bytes] = names, writer: Volume = writer, other: Volume = other) -> bool:
                """Evictions end, and are heard of, when threads have had their turns, whatever the clock says."""
                here = await writer.blocks.exists(ROOT_INODE, names)
                return bool(here == await other.blocks.exists(ROOT_INODE, names))

            await eventually(agree, seconds=60.0)
            there = await writer.blocks.exists(ROOT_INODE, names)
            assert sum(there) < len(there)
            if prefix == [*found][-1]:  # the other one may have given all its slabs to this one since
                assert there[-1]
            for name in [name for name, is_there in zip(names, there, strict=True) if is_there][::29]:
                assert await get(other, name) == (name * BLOCK)[:BLOCK]
        await quiet(one, two)


async def test_what_a_host_evicts_is_gone_for_all_but_for_who_has_it_open(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with volumes(cache_disk(eviction="fifo"), OPTIONS, 2, rng, quick(rng, 2)) as (one, two):
        count = one.space().size // BLOCK
        (name,) = await fill(one, 1, b"first")
        (other,) = await fill(one, 1, b"second")
        await quiet(one, two)
        handle = await open_path(two, name)
        assert await two.blocks.find(ROOT_INODE, other) is not None
        await fill(one, 2 * count)
        await quiet(one, two)
        assert not await exists(one, name)
        assert not await exists(two, name)
        assert await two.blocks.exists(ROOT_INODE, [name, other]) == [False, False]
        assert await two.blocks.find(ROOT_INODE, other) is None
        assert bytes(await two.files.read(handle, 0, BLOCK)) == (name * BLOCK)[:BLOCK]
        await two.files.release(handle)


async def test_no_host_has_files_of_others_on_its_books(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with volumes(cache_disk(), OPTIONS, 2, rng, quick(rng, 2)) as (one, two):
        names = await fill(one, 20)
        await quiet(one, two)
        assert await present(two, names) == 20
        assert (books(one), books(two)) == (20, 0)
        await two.tree.rename(ROOT_INODE, names[0], ROOT_INODE, b"renamed", 0)
        await two.tree.unlink(ROOT_INODE, names[1])
        await quiet(two, one)
        assert (books(one), books(two)) == (19, 0)
        await one.blocks.delete(ROOT_INODE, [b"renamed"])
        await quiet(one, two)
        assert (books(one), books(two)) == (18, 0)


async def test_who_takes_slabs_of_others_has_their_blocks_on_the_books(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    disk = cache_disk()
    async with joined(disk, OPTIONS, 1, Chaos(rng)) as two:
        async with joined(disk, OPTIONS, 2, Chaos(rng)) as one:
            names = await fill(one, 3 * one.space().size // BLOCK // 2)
            await quiet(one, two)
            count = await present(two, names)
            assert books(two) == 0
        await until(lambda: books(two) == count, 90)
        new = await fill(two, 2 * two.space().size // BLOCK, b"new")
        await quiet(two)
        assert await present(two, names) < count // 4
        assert await present(two, new) > two.space().size // BLOCK // 3


async def test_what_other_hosts_use_stays(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    """By each way in which a block is used."""
    async with volumes(cache_disk(), OPTIONS, 2, rng, quick(rng, 2)) as (one, two):
        names = await fill(one, one.space().size // BLOCK // 2)
        await quiet(one, two)
        read, asked, opened, unused = names[:10], names[10:20], names[20:30], names[30:]
        more = iter(range(1 << 20))
        for _ in range(8):
            for name in read:
                assert await get(two, name) is not None
            assert await two.blocks.exists(ROOT_INODE, asked) == [True] * 10
            for name in opened:
                assert await two.blocks.bind(ROOT_INODE, name) is not None
            inside.namespaces(two).uses.note(ROOT_INODE, opened)  # as ring threads do
            await trio.sleep(2 * REPORT_SECONDS)
            for _ in range(one.space().size // BLOCK // 8):
                await fill(one, 1, b"more%d-" % next(more))
        await quiet(one, two)
        assert await present(one, [*read, *asked, *opened]) == 30
        assert await present(one, unused) < 20, "some slabs went to and fro"
        sent, heard = two.stats()["reports"], one.stats()["reports"]
        assert 8 <= sent["sent"] == heard["heard"] <= 20
        assert heard["own_keys"] == heard["heard_keys"] == sent["sent_keys"]
        assert heard["sent_keys"] == sent["heard_keys"] == 0, "who uses its own blocks has nothing to say"
        figures = two.stats()["namespaces"][0]["cache"]
        assert figures["present"] == figures["asked"] > 0


async def test_nothing_is_reported_that_was_not_used(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    disk = cache_disk()
    async with volumes(disk, OPTIONS, 2, rng, quick(rng, 2)) as (one, two):
        names = await fill(one, 10)
        await quiet(one, two)
        assert two.stats()["reports"]["sent"] == 0
        sent = one.stats()["reports"]["sent"]
        await trio.sleep(10 * REPORT_SECONDS)
        assert one.stats()["reports"]["sent"] <= sent + 1, "how much it has, once"
        assert two.stats()["reports"]["sent"] == 0
        assert await two.blocks.exists(ROOT_INODE, [*names, b"absent"]) == [True] * 10 + [False]
        await trio.sleep(2 * REPORT_SECONDS)
        record = disk.records[schema.report_key(inside.client(two))]
        (found,) = schema.decode_report(record.value).uses
        assert (found[0], schema.decode_u64s(found[1])) == (ROOT, [block_key(ROOT_INODE, name) for name in names])
    assert not any(key[:1] == b"a" for key in disk.records)


async def test_a_host_gets_room_that_anothers_cache_has(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """It has nothing to evict itself."""
    async with volumes(cache_disk(), OPTIONS, 2, rng, quick(rng, 2)) as (one, two):
        count = one.space().size // BLOCK
        await fill(one, 2 * count, b"one")
        await quiet(one, two)
        names = await fill(two, count // 3, b"two")
        await quiet(one, two)
        assert (await two.blocks.exists(ROOT_INODE, names))[-1]
        assert await present(two, names) > count // 8


@pytest.mark.parametrize("has_cache", [True, False], ids=["whose root is a cache", "without caches"])
async def test_blocks_of_caches_keep_no_files_out(
    rng: random.Random, autojump_clock: trio.testing.MockClock, has_cache: bool
) -> None:
    """A host stores files that are never evicted, as many as fit, while the other's cache has the whole volume."""
    disk = Disk.format(OPTIONS, shared=True)
    cached = lab_options(capacity=64 * MIB, strict=False)
    cached = msgspec.structs.replace(cached, namespace=NamespaceOptions(kind="cache", admission="all"))
    async with (
        joined(disk, cached, 1, Chaos(rng)) as one,
        joined(disk, cached if has_cache else OPTIONS, 2, Chaos(rng)) as two,
    ):
        size = one.space().size
        await fill(one, 2 * size // BLOCK, b"one")
        await quiet(one, two)
        names = await fill(two, size // BLOCK * 7 // 8, b"two")
        await quiet(one, two)
        if not has_cache:
            assert await present(two, names) == len(names)
        assert books(one) * BLOCK < size
    await check_disk(disk)


async def test_who_asks_for_room_gets_whole_slabs(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    async with volumes(cache_disk(), OPTIONS, 2, rng, quick(rng, 2)) as (one, two):
        core, leases = inside.core(two), inside.leases(two)
        assert inside.coherence(two) is not None
        assert leases is not None
        assert inside.coherence(one) is not None
        reports, slab_size = inside.coherence(two).giving.reports, core.geometry.slab_size
        await fill(one, 9 * one.space().size // BLOCK // 10)
        await quiet(one, two)
        await until(lambda: any(report.evictable for report in reports.others.values()))
        assert not inside.coherence(one).giving.reports.ask(slab_size), "nobody has more"
        blocks, free = books(one), core.slabs.free_bytes
        assert reports.ask(4 * slab_size)
        await until(lambda: one.stats()["reports"]["given_slabs"] == 4)
        assert books(one) == blocks - 4 * slab_size // BLOCK
        await until(lambda: len(leases.view.given) >= 4)
        await leases.take_unheld_slabs()
        for _ in range(4):
            await leases.take_unheld_slabs()
        await until(lambda: core.slabs.free_bytes >= free + 4 * slab_size)
