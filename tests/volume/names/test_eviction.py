"""A full cache goes on: files are evicted by need and ahead of it, what is open stays, nothing is lost that may not."""

from __future__ import annotations

import math
import os
import random
from typing import Any

import pytest
import trio
import trio.testing
from volume_lab import CALLER, MIB, Chaos, Delay, Disk, check, lab_options, opened

from kvfuse.errors import EngineError, InvalidArgument, NoAttribute, NoSpace, NotAdmitted, NotFound, Stale
from kvfuse.policy import HOLD_SECONDS
from kvfuse.remote.records.api import Record
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.names.eviction import Evictor
from kvfuse.volume.namespaces.cache import Candidate, block_key
from kvfuse.volume.namespaces.settings import ROOT, Settings, encode_settings
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume

BLOCK = 64 << 10


OPTIONS = lab_options(capacity=64 * MIB)


def cache_disk(**settings: object) -> Disk:
    """A volume whose root is a cache."""
    disk = Disk.format(OPTIONS)
    record = encode_settings(Settings(kind="cache").changed(settings))
    disk.apply({schema.namespace_key(ROOT): record}, ())
    return disk


def used(volume: Volume) -> int:
    space = volume.space()
    assert 0 <= space.free <= space.size
    return space.size - space.free


async def write_file(volume: Volume, name: bytes, data: bytes) -> None:
    handle, node = await volume.tree.create(ROOT_INODE, b"tmp-" + name, 0o644, CALLER, os.O_WRONLY)
    position = 0
    while position < len(data):
        position += await volume.files.write(handle, position, memoryview(data)[position:])
    await volume.files.flush(handle)
    await volume.files.release(handle)
    await volume.tree.rename(ROOT_INODE, b"tmp-" + name, ROOT_INODE, name, 0)
    volume.tree.forget(node.ino, 1)


@pytest.mark.parametrize("door", ["puts", "files"])
async def test_three_times_its_capacity_goes_in(door: str) -> None:
    disk = cache_disk(admission="all")
    async with opened(disk, OPTIONS) as volume:
        count = 3 * volume.space().size // BLOCK
        for number in range(count):
            name, data = b"%08d" % number, number.to_bytes(8, "big") * (BLOCK // 8)
            if door == "puts":
                await volume.blocks.put(ROOT_INODE, name, memoryview(data), CALLER, 0o644)
            else:
                await write_file(volume, name, data)
            used(volume)
        names = [b"%08d" % number for number in range(count)]
        found = await volume.blocks.exists(ROOT_INODE, names)
        assert 0.85 * volume.space().size < sum(found) * BLOCK <= volume.space().size
        assert found[-1]
        for number in [number for number, there in enumerate(found) if there][::37]:
            node = await volume.blocks.find(ROOT_INODE, names[number])
            assert node is not None
            handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
            assert bytes(await volume.files.read(handle, 0, BLOCK)) == number.to_bytes(8, "big") * (BLOCK // 8)
            await volume.files.release(handle)
    await checked(disk)


async def checked(disk: Disk) -> None:
    report = await check(disk)
    assert report.clean, report


def statistics(volume: Volume) -> dict[str, Any]:
    found: dict[str, Any] = volume.stats()["namespaces"][0]["cache"]
    return found


async def fill(volume: Volume, start: int, count: int) -> list[bytes]:
    names = [b"%08d" % number for number in range(start, start + count)]
    for name in names:
        await volume.blocks.put(ROOT_INODE, name, memoryview(name * (BLOCK // 8)), CALLER, 0o644)
    return names


async def test_what_is_open_stays_and_is_evicted_later(autojump_clock: object) -> None:
    disk = cache_disk(admission="all", eviction="fifo")
    async with opened(disk, OPTIONS) as volume:
        block_count = volume.space().size // BLOCK
        (name,) = await fill(volume, 0, 1)
        node = await volume.tree.lookup(ROOT_INODE, name)
        handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
        await fill(volume, 1, 2 * block_count)
        assert await volume.blocks.exists(ROOT_INODE, [name]) == [True]
        assert bytes(await volume.files.read(handle, 0, BLOCK)) == name * (BLOCK // 8)
        await volume.files.release(handle)
        await trio.sleep(HOLD_SECONDS)
        await fill(volume, 3 * block_count, 2 * block_count)
        assert await volume.blocks.exists(ROOT_INODE, [name]) == [False]
        with pytest.raises(NotFound):
            await volume.tree.lookup(ROOT_INODE, name)
        with pytest.raises(Stale):
            await volume.files.open(node.ino, os.O_RDONLY, CALLER)
    await checked(disk)


async def test_what_is_being_written_stays() -> None:
    disk = cache_disk(admission="all", eviction="fifo")
    async with opened(disk, OPTIONS) as volume:
        block_count = volume.space().size // BLOCK
        handle, node = await volume.tree.create(ROOT_INODE, b"slow", 0o644, CALLER, os.O_WRONLY)
        await volume.files.write(handle, 0, b"a" * BLOCK)
        await fill(volume, 1, 2 * block_count)
        await volume.files.write(handle, BLOCK, b"b" * BLOCK)
        await volume.files.release(handle)
        handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
        assert bytes(await volume.files.read(handle, 0, 2 * BLOCK)) == b"a" * BLOCK + b"b" * BLOCK
        await volume.files.release(handle)
    await checked(disk)


async def test_a_namespace_of_files_loses_none() -> None:
    disk = Disk.format(OPTIONS)
    async with opened(disk, OPTIONS) as volume:
        block_count = volume.space().size // BLOCK
        names: list[bytes] = []
        with pytest.raises(NoSpace):
            for number in range(block_count + 10):
                names += await fill(volume, number, 1)
        assert all(await volume.blocks.exists(ROOT_INODE, names))
        assert len(names) > 0.9 * block_count
    await checked(disk)


@pytest.mark.parametrize("ends", ["cleanly", "in a crash"])
async def test_a_restart_keeps_the_cache_and_the_order(ends: str) -> None:
    disk = cache_disk(admission="all", eviction="lru")
    async with opened(disk, OPTIONS) as volume:
        block_count = volume.space().size // BLOCK
        names = await fill(volume, 0, block_count // 2)
        await volume.sync()
        crashed = disk.copy()
    disk = crashed if ends == "in a crash" else disk
    async with opened(disk, OPTIONS) as volume:
        assert all(await volume.blocks.exists(ROOT_INODE, names))
        await fill(volume, 1 << 20, block_count)
        assert not any(await volume.blocks.exists(ROOT_INODE, names[: len(names) // 2]))
        assert statistics(volume)["blocks"] == sum(
            await volume.blocks.exists(
                ROOT_INODE, [*names, *[b"%08d" % (number + (1 << 20)) for number in range(block_count)]]
            )
        )
    await checked(disk)


async def test_a_full_cache_stores_what_its_policy_admits() -> None:
    """With "second-touch": what somebody asked for before."""
    disk = cache_disk(admission="second-touch", eviction="lru")
    async with opened(disk, OPTIONS) as volume:
        with pytest.raises(NotAdmitted):
            await fill(volume, 0, volume.space().size // BLOCK)
        for number in range(1 << 20, (1 << 20) + 10):
            name = b"%08d" % number
            with pytest.raises(NotAdmitted):
                await fill(volume, number, 1)
            await volume.blocks.exists(ROOT_INODE, [name])
            await volume.blocks.exists(ROOT_INODE, [name])
            await fill(volume, number, 1)
        assert statistics(volume)["refused"] == 11
    await checked(disk)


def note(volume: Volume, names: list[bytes]) -> None:
    """As the thread of a ring does it."""
    _, uses = volume.blocks.terms(ROOT_INODE)
    assert uses is not None
    uses.note(ROOT_INODE, names)


async def test_uses_are_counted_once_each(autojump_clock: object) -> None:
    disk = cache_disk()
    async with opened(disk, OPTIONS) as volume:
        names = await fill(volume, 0, 4)
        await volume.blocks.exists(ROOT_INODE, [*names, b"absent"])
        note(volume, names)
        await trio.sleep(1.5)
        counted = statistics(volume)
        assert (counted["asked"], counted["present"], counted["absent"]) == (5, 4, 1), "to look and to read is one use"
        note(volume, names)
        await trio.sleep(1.5)
        assert statistics(volume)["asked"] == 9


async def test_names_that_are_about_to_be_made_are_no_misses(autojump_clock: object) -> None:
    """The kernel looks up what it creates and renames to."""
    disk = cache_disk()
    async with opened(disk, OPTIONS) as volume:
        for name in (b"tmp-file", b"file", b"other"):
            with pytest.raises(NotFound):
                await volume.tree.lookup(ROOT_INODE, name)
        await write_file(volume, b"file", b"x" * BLOCK)
        await trio.sleep(3)
        counted = statistics(volume)
        assert (counted["asked"], counted["absent"], counted["stored"]) == (1, 1, 1)


async def test_blocks_expire(autojump_clock: object) -> None:
    """Each so long after it was stored, whether it is used or not; also when the volume was opened again since."""
    disk = cache_disk(ttl=60)
    async with opened(disk, OPTIONS) as volume:
        first = await fill(volume, 0, 10)
        await trio.sleep(40)
        second = await fill(volume, 10, 10)
        await trio.sleep(15)
        assert all(await volume.blocks.exists(ROOT_INODE, [*first, *second]))
        await trio.sleep(7)
        assert await volume.blocks.exists(ROOT_INODE, [*first, *second]) == [False] * 10 + [True] * 10
        await fill(volume, 10, 1)
        await trio.sleep(40)
        assert await volume.blocks.exists(ROOT_INODE, second) == [True] + [False] * 9
        assert statistics(volume)["expired"] == 19
        await volume.sync()
    await checked(disk)


async def test_a_clock_that_is_advanced() -> None:
    async with opened(cache_disk(ttl=3600), OPTIONS) as volume:
        names = await fill(volume, 0, 10)
        advance = b"user.kvfuse.namespace.advance"
        for seconds, left in ((b"3590", 10), (b"11.5", 0)):
            await volume.inodes.set_xattr(ROOT_INODE, advance, seconds)
            await trio.sleep(3)
            assert sum(await volume.blocks.exists(ROOT_INODE, names)) == left
        for wrong in (b"-1", b"soon"):
            with pytest.raises(InvalidArgument, match="advances by seconds"):
                await volume.inodes.set_xattr(ROOT_INODE, advance, wrong)
        folder = await volume.tree.make_directory(ROOT_INODE, b"ordinary", 0o755, CALLER)
        with pytest.raises(InvalidArgument, match="only a cache"):
            await volume.inodes.set_xattr(folder.ino, advance, b"1")
        with pytest.raises(NoAttribute):
            await volume.inodes.get_xattr(ROOT_INODE, advance)


@pytest.mark.parametrize("quota", [{"capacity": 8 * MIB}, {"blocks": 100}])
async def test_a_namespace_at_its_quota_evicts_its_own(quota: dict[str, int]) -> None:
    disk = cache_disk()
    async with opened(disk, OPTIONS) as volume:
        others = await fill(volume, 0, 100)
        folder = await volume.tree.make_directory(ROOT_INODE, b"small", 0o755, CALLER)
        keeper = volume.parts.xattrs.namespaces.keeper
        await keeper.create(folder, {"kind": "cache", "admission": "all", **quota}, None)
        for number in range(300):
            name = b"%08d" % number
            await volume.blocks.put(folder.ino, name, memoryview(name * (BLOCK // 8)), CALLER, 0o644)
            use = volume.parts.core.namespaces.accounts.use(folder.ino)
            assert use.files <= quota.get("blocks", 300)
            assert use.size <= quota.get("capacity", 300 * BLOCK)
        found = await volume.blocks.exists(folder.ino, [b"%08d" % number for number in range(300)])
        assert found[-1]
        assert 90 <= sum(found) <= 130
        assert all(await volume.blocks.exists(ROOT_INODE, others))
        await keeper.change(folder, {name: value // 2 for name, value in quota.items()}, None)
        while volume.parts.core.namespaces.accounts.use(folder.ino).files > 64:
            await trio.lowlevel.checkpoint()
        assert all(await volume.blocks.exists(ROOT_INODE, others))
    await checked(disk)


async def test_blocks_of_a_pinned_namespace_go_last() -> None:
    disk = cache_disk(admission="all")
    async with opened(disk, OPTIONS) as volume:
        keeper = volume.parts.xattrs.namespaces.keeper
        folder = await volume.tree.make_directory(ROOT_INODE, b"pinned", 0o755, CALLER)
        await keeper.create(folder, {"kind": "cache", "admission": "all", "soft_pin": "true"}, None)
        pinned = [b"%08d" % number for number in range(200)]  # of which nobody makes use any more
        for name in pinned:
            await volume.blocks.put(folder.ino, name, memoryview(name * (BLOCK // 8)), CALLER, 0o644)
        count = 2 * volume.space().size // BLOCK
        await fill(volume, 0, count)
        assert all(await volume.blocks.exists(folder.ino, pinned))
        await keeper.change(folder, {"soft_pin": "false", "ttl": 1000}, None)
        for number in range(count):  # now the larger cache gives first, and that is this one by and by
            name = b"%08d" % number
            await volume.blocks.put(folder.ino, name, memoryview(name * (BLOCK // 8)), CALLER, 0o644)
        assert not all(await volume.blocks.exists(folder.ino, pinned))
        await keeper.change(folder, {"soft_pin": "true", "capacity": 50 * BLOCK}, None)
        accounts = volume.parts.core.namespaces.accounts
        while accounts.use(folder.ino).size > 50 * BLOCK:
            await trio.lowlevel.checkpoint()  # its own capacity holds all the same
    await checked(disk)


async def test_a_name_that_is_evicted_while_the_store_answers_is_a_miss() -> None:
    disk, chaos = cache_disk(admission="all"), Chaos(random.Random(0))
    async with opened(disk, OPTIONS) as volume:
        await volume.blocks.put(ROOT_INODE, b"a", memoryview(bytes(BLOCK)), CALLER, 0o644)
    async with opened(disk, OPTIONS, chaos) as volume:
        await trio.sleep(1.5)  # the books have what the store has
        (evictor,) = volume.parts.space.evictors
        chaos.late = late = Delay(schema.entry_key(ROOT_INODE, b"a"))
        found: list[object] = []

        async def find() -> None:
            found.append(await volume.blocks.find(ROOT_INODE, b"a"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(find)
            await late.given.wait()
            nursery.start_soon(evictor.make_room, float("inf"), None)
            while not volume.parts.core.dentries.vanishing.places:
                await trio.lowlevel.checkpoint()
            late.arrives.set()
        assert found == [None]
    assert (await check(disk)).clean


async def test_a_newer_file_does_not_go_in_the_place_of_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = cache_disk(admission="all", eviction="fifo")
    async with opened(disk, OPTIONS) as volume:
        await fill(volume, 0, 4)
        await volume.sync()
        (evictor,) = volume.parts.space.evictors
        assert isinstance(evictor, Evictor)
        read_rows = evictor._rows_of

        async def replaced_before(candidates: list[Candidate]) -> list[Record | None]:
            await fill(volume, 0, 1)
            await volume.sync()
            return await read_rows(candidates)

        monkeypatch.setattr(evictor, "_rows_of", replaced_before)
        assert await evictor._evict_some(2 * BLOCK)
        found = await volume.blocks.exists(ROOT_INODE, [b"%08d" % number for number in range(4)])
        assert found == [True, False, True, True]
        assert len(volume.parts.core.caches[ROOT].policy) == 3
    await checked(disk)


async def test_a_file_that_somebody_removes_while_another_is_evicted_goes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = cache_disk(admission="all", eviction="fifo")
    async with opened(disk, OPTIONS) as volume:
        for name in (b"a", b"b"):
            await volume.blocks.put(ROOT_INODE, name, memoryview(bytes(BLOCK)), CALLER, 0o644)
        node = await volume.tree.lookup(ROOT_INODE, b"a")
        await volume.inodes.set_xattr(node.ino, b"user.takes.unlink", b"1")
        volume.tree.forget(node.ino, 1)
        await volume.sync()
        (evictor,) = volume.parts.space.evictors
        assert isinstance(evictor, Evictor)
        unlink = evictor._unlink

        async def unlink_late(row: Record) -> bool:
            if row.key.endswith(b"a"):
                await volume.tree.rename(ROOT_INODE, b"b", ROOT_INODE, b"c", 0)
                await volume.sync()
                await volume.tree.unlink(ROOT_INODE, b"c")
            return await unlink(row)

        monkeypatch.setattr(evictor, "_unlink", unlink_late)
        await trio.sleep(HOLD_SECONDS)
        assert await evictor.make_room(float("inf"), None)
        await volume.sync()
        assert used(volume) == 0
    assert (await check(disk)).clean


async def evict(volume: Volume, size: int = MIB) -> bool:
    (evictor,) = volume.parts.space.evictors
    return await evictor.make_room(math.inf, None)


async def test_an_interrupted_eviction_forgets_no_block(autojump_clock: object) -> None:
    """The store fails, or the caller that wants room is cancelled."""
    disk, chaos = cache_disk(admission="all", eviction="fifo"), Chaos(random.Random(0))
    async with opened(disk, OPTIONS, chaos) as volume:
        names = await fill(volume, 0, 200)
        chaos.commit_error = 2.0
        with pytest.raises(EngineError):
            await evict(volume)
        assert statistics(volume)["blocks"] == 200
        with trio.CancelScope() as scope:
            scope.cancel()
            await evict(volume)
        assert statistics(volume)["blocks"] == 200
        chaos.commit_error = 0.0
        await trio.sleep(HOLD_SECONDS)
        while await evict(volume):
            pass
        assert not any(await volume.blocks.exists(ROOT_INODE, names))
        assert statistics(volume)["blocks"] == 0
    await checked(disk)


async def test_files_that_are_published_by_links_are_evicted() -> None:
    disk = cache_disk(admission="all")
    async with opened(disk, OPTIONS) as volume:
        count = 2 * volume.space().size // BLOCK
        names = [b"%08d" % number for number in range(count)]
        for name in names:
            await write_file(volume, b"first", name * (BLOCK // 8))
            node = await volume.tree.lookup(ROOT_INODE, b"first")
            await volume.tree.link(node.ino, ROOT_INODE, name)
            await volume.tree.unlink(ROOT_INODE, b"first")
            volume.tree.forget(node.ino, 2)
        found = await volume.blocks.exists(ROOT_INODE, names)
        assert statistics(volume)["blocks"] == sum(found) > 0.4 * count
    await checked(disk)


@pytest.mark.parametrize("question", ["lookup", "listing", "listing of inodes"])
async def test_what_was_evicted_while_the_store_answered_is_not_there(question: str) -> None:
    """The store gave an answer before the eviction, and it arrives before the commit that deletes the record."""
    disk, chaos = cache_disk(admission="all", eviction="fifo"), Chaos(random.Random(0))
    async with opened(disk, lab_options(capacity=64 * MIB, nodes=8), chaos) as volume:
        await volume.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)
        names = await fill(volume, 0, 100)
        if question == "listing of inodes":  # the answer that is late is about one that is no file
            await volume.tree.link((await volume.tree.lookup(ROOT_INODE, names[90])).ino, ROOT_INODE, b"other")
        await volume.sync()
        await fill(volume, 1 << 20, 20)  # so that the nodes of the first leave memory
        await volume.sync()
        prefix = {
            "lookup": schema.entry_key(ROOT_INODE, names[0]),
            "listing": schema.entry_prefix(ROOT_INODE),
            "listing of inodes": b"i",
        }[question]
        async with trio.open_nursery() as nursery:
            chaos.late = late = Delay(prefix)
            nursery.start_soon(ask, volume, names[0], question)
            with trio.fail_after(5):
                await late.given.wait()
            chaos.stalled_commits = trio.Event()
            nursery.start_soon(evict, volume)
            await trio.testing.wait_all_tasks_blocked()
            assert volume.parts.core.dentries.vanishing.places
            late.arrives.set()
            await trio.testing.wait_all_tasks_blocked()
            chaos.stalled_commits.set()
    await checked(disk)


async def ask(volume: Volume, name: bytes, question: str) -> None:
    if question == "lookup":
        assert await volume.blocks.find(ROOT_INODE, name) is None
    else:
        assert name not in {entry.name for entry in await volume.tree.list_directory(ROOT_INODE, 0, 1000)}


async def test_who_waits_for_an_eviction_evicts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its files are gone, and their slots are about to be free."""
    async with opened(cache_disk(), OPTIONS) as volume:
        await fill(volume, 0, 400)
        await volume.sync()
        (evictor,) = volume.parts.space.evictors
        assert isinstance(evictor, Evictor)
        free = evictor.journal.free_given_up
        gone, goes_on = trio.Event(), trio.Event()

        async def free_late(deadline: float, namespace: int | None) -> bool:
            gone.set()
            await goes_on.wait()
            return await free(deadline, namespace)

        monkeypatch.setattr(evictor.journal, "free_given_up", free_late)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(evictor.make_room, math.inf, None)
            await gone.wait()
            portion = statistics(volume)["room"]
            nursery.start_soon(evictor.make_room, math.inf, None)
            await trio.testing.wait_all_tasks_blocked()
            goes_on.set()
        assert 0 < statistics(volume)["room"] == portion


@pytest.mark.parametrize("is_all", [False, True], ids=["beside others", "alone"])
async def test_a_file_that_was_closed_waits_for_its_name(is_all: bool, autojump_clock: object) -> None:
    """A writer closes a file under a temporary name, and renames it: it does not go in between, while others can."""
    disk = cache_disk(admission="all", eviction="lfu")
    async with opened(disk, OPTIONS) as volume:
        if not is_all:
            for start in range(0, 900, 100):
                names = await fill(volume, start, 100)
                await volume.blocks.exists(ROOT_INODE, names)
                await volume.parts.journal.commit()
        closed = []
        for number in range(1200 if is_all else 1):
            handle, node = await volume.tree.create(ROOT_INODE, b"tmp-%d" % number, 0o644, CALLER, os.O_WRONLY)
            await volume.files.write(handle, 0, b"t" * BLOCK)
            await volume.files.release(handle)
            volume.tree.forget(node.ino, 1)
            closed.append(b"tmp-%d" % number)
        if is_all:
            assert 0 < sum(await volume.blocks.exists(ROOT_INODE, closed)) < 1200, (
                "where there is nothing else, they go"
            )
            return
        await fill(volume, 5000, 300)
        await volume.tree.rename(ROOT_INODE, closed[0], ROOT_INODE, b"named", 0)
        assert await volume.blocks.exists(ROOT_INODE, [b"named"]) == [True]
    await checked(disk)


async def test_an_eviction_does_not_chase_what_is_stored_meanwhile(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    """Each step takes a commit: a steady writer costs few of them, not one for each handful of blocks."""
    steps: list[int] = []
    evict = Evictor._evict_some

    async def counted(evictor: Evictor, size: int, namespace: int | None = None) -> bool:
        steps.append(size)
        return await evict(evictor, size, namespace)

    monkeypatch.setattr(Evictor, "_evict_some", counted)
    disk = cache_disk(admission="all", low_water=0.8)
    async with opened(disk, OPTIONS, Chaos(random.Random(0), delay=0.01)) as volume:
        count = 3 * volume.space().size // BLOCK
        for number in range(count):
            await fill(volume, number, 1)
            await trio.sleep(0.002)
        evicted = statistics(volume)["room"]
    assert evicted > count // 2
    assert min(steps) > 2 * MIB, steps
    await checked(disk)


async def test_a_large_block_takes_whole_slabs_from_small_ones() -> None:
    """Hardly more small blocks go than it is large, and one that is open stays."""
    disk = cache_disk(admission="all", eviction="lru")
    small, size, rng = 4096, 17 * MIB, random.Random(5)
    async with opened(disk, OPTIONS) as volume:
        names = [b"%08d" % number for number in range(volume.space().size // small)]
        for name in names:
            await volume.blocks.put(ROOT_INODE, name, memoryview(name * (small // 8)), CALLER, 0o644)
        await volume.sync()
        there = await volume.blocks.exists(ROOT_INODE, names)
        kept = names[there.index(True)]
        node = await volume.tree.lookup(ROOT_INODE, kept)
        handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
        cache = volume.parts.core.caches[ROOT]
        for name in rng.sample(names, len(names)):
            cache.policy.used([block_key(ROOT_INODE, name)], cache.clock())
        before = statistics(volume)["room"]
        await volume.blocks.put(ROOT_INODE, b"large", memoryview(bytes(size)), CALLER, 0o644)
        assert statistics(volume)["room"] - before < 1.3 * size // small
        assert await volume.blocks.exists(ROOT_INODE, [b"large", kept]) == [True, True]
        assert bytes(await volume.files.read(handle, 0, small)) == kept * (small // 8)
        await volume.files.release(handle)
    await checked(disk)
