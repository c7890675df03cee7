"""Evictions that meet others: look-ups, removals, renames, other evictions, and stores that answer late or fail."""

from __future__ import annotations

import math
import os
import random

import inside
import pytest
import trio
import trio.testing
from cache_lab import BLOCK, OPTIONS, cache_disk, checked, evict, fill, statistics, used
from volume_lab import CALLER, MIB, Chaos, Delay, check, lab_options, opened

from kvfuse.errors import EngineError
from kvfuse.policy import HOLD_SECONDS
from kvfuse.remote.records.api import Record
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.eviction.evictor import Evictor
from kvfuse.volume.namespaces.cache import Candidate
from kvfuse.volume.namespaces.settings import ROOT
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume


async def test_a_name_that_is_evicted_while_the_store_answers_is_a_miss() -> None:
    disk, chaos = cache_disk(admission="all"), Chaos(random.Random(0))
    async with opened(disk, OPTIONS) as volume:
        await volume.blocks.put(ROOT_INODE, b"a", memoryview(bytes(BLOCK)), CALLER, 0o644)
    async with opened(disk, OPTIONS, chaos) as volume:
        await trio.sleep(1.5)  # the books have what the store has
        (evictor,) = inside.space(volume).evictors
        chaos.late = late = Delay(schema.entry_key(ROOT_INODE, b"a"))
        found: list[object] = []

        async def find() -> None:
            found.append(await volume.blocks.find(ROOT_INODE, b"a"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(find)
            await late.given.wait()
            nursery.start_soon(evictor.make_room, float("inf"), None)
            while not inside.dentries(volume).vanishing.places:
                await trio.lowlevel.checkpoint()
            late.arrives.set()
        assert found == [None]
    assert (await check(disk)).clean


async def test_a_newer_file_does_not_go_in_the_place_of_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = cache_disk(admission="all", eviction="fifo")
    async with opened(disk, OPTIONS) as volume:
        await fill(volume, 0, 4)
        await volume.sync()
        (evictor,) = inside.space(volume).evictors
        assert isinstance(evictor, Evictor)
        read_rows = evictor._rows_of

        async def replaced_before(candidates: list[Candidate]) -> list[Record | None]:
            await fill(volume, 0, 1)
            await volume.sync()
            return await read_rows(candidates)

        monkeypatch.setattr(evictor, "_rows_of", replaced_before)
        assert await evictor.evict_some(2 * BLOCK)
        found = await volume.blocks.exists(ROOT_INODE, [b"%08d" % number for number in range(4)])
        assert found == [True, False, True, True]
        assert len(inside.caches(volume)[ROOT].policy) == 3
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
        (evictor,) = inside.space(volume).evictors
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
            assert inside.dentries(volume).vanishing.places
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
        (evictor,) = inside.space(volume).evictors
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
                await inside.journal(volume).commit()
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
    evict = Evictor.evict_some

    async def counted(evictor: Evictor, size: int, namespace: int | None = None) -> bool:
        steps.append(size)
        return await evict(evictor, size, namespace)

    monkeypatch.setattr(Evictor, "evict_some", counted)
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
