"""Records of names that came before anybody asked: lookups in folders that others filled cost no questions."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import inside
import pytest
import trio
import trio.testing
from shared_lab import eventually, exists, get, put, quiet, volumes
from volume_lab import CALLER, MIB, Disk, lab_options

from kvfuse.errors import EngineTimeout
from kvfuse.options.config import Options
from kvfuse.remote.records.api import Record, Versioned
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.inodes.dentries import Dentries
from kvfuse.volume.names.shared_lookup import SharedLookup
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume

FILLED = [b"%d" % number for number in range(40)]


@pytest.fixture
def options() -> Options:
    return lab_options(strict=False, capacity=16 * MIB)


@pytest.fixture
def disk(options: Options) -> Disk:
    return Disk.format(options, shared=True)


def questions(volume: Volume) -> int:
    """But for those which stamp there is, which all opens of some milliseconds share."""
    counters, lookups = inside.records(volume).counters, inside.lookups(volume)
    assert isinstance(lookups, SharedLookup)
    return counters.gets + counters.scans - lookups.synced.asked


@asynccontextmanager
async def newcomer(disk: Disk, options: Options, rng: random.Random) -> AsyncIterator[Volume]:
    """A volume whose root was filled (FILLED: each name has itself as its content) by one that is gone."""
    async with volumes(disk, options, 1, rng) as (one,):
        for name in FILLED:
            await put(one, name, name)
    async with volumes(disk, options, 2, rng) as (_, volume):
        await eventually(lambda: is_relaxed(volume))
        await quiet(volume)  # it also asks for what those left who are gone
        yield volume


async def test_names_that_the_watch_told_of_are_not_asked_for(
    disk: Disk, options: Options, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    names = [b"%d" % number for number in range(40)]
    async with volumes(disk, options, 2, rng) as (one, two):
        for name in names:
            await put(one, name, name)
        await quiet(one, two)
        assert await is_relaxed(two)
        before = questions(two)
        for name in names:
            assert await get(two, name) == name
        assert questions(two) == before


async def test_a_folder_that_was_filled_before_is_read_in_pages(
    disk: Disk, options: Options, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with newcomer(disk, options, rng) as volume:
        before = questions(volume)
        for name in FILLED:
            assert await get(volume, name) == name
        assert questions(volume) - before == 1


async def test_names_that_are_missed_side_by_side_take_one_page(
    disk: Disk,
    options: Options,
    rng: random.Random,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a ring puts many blocks into a folder that others filled."""
    async with newcomer(disk, options, rng) as volume:
        scan, scans = inside.records(volume).scan, 0

        async def slow(*arguments: Any) -> Sequence[Record]:
            nonlocal scans
            scans += 1
            await trio.sleep(0.01)
            return await scan(*arguments)

        monkeypatch.setattr(inside.records(volume), "scan", slow)
        async with trio.open_nursery() as nursery:
            for name in FILLED:
                nursery.start_soon(put, volume, b"new " + name, b"y")
        assert scans == 1
        assert await get(volume, b"new 39") == b"y"
        assert await get(volume, b"39") == b"39"


async def test_who_waits_for_a_page_hears_that_it_did_not_come(
    disk: Disk,
    options: Options,
    rng: random.Random,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A deadline of the store is waited for once."""
    async with newcomer(disk, options, rng) as volume:
        refused: list[int] = []

        async def silent(*_: object) -> Sequence[Record]:
            await trio.sleep(3.0)
            raise EngineTimeout("no answer within 3 s")

        async def miss(number: int) -> None:
            with pytest.raises(EngineTimeout):
                await volume.tree.lookup(ROOT_INODE, b"absent %d" % number)
            refused.append(number)

        with monkeypatch.context() as patch:
            patch.setattr(inside.records(volume), "scan", silent)
            patch.setattr(inside.records(volume), "get", silent)
            began = trio.current_time()
            async with trio.open_nursery() as nursery:
                for number in range(8):
                    nursery.start_soon(miss, number)
            assert trio.current_time() - began < 4.0
        assert len(refused) == 8
        assert await get(volume, b"39") == b"39"


async def is_relaxed(volume: Volume) -> bool:
    """Names in the root are told as the watch says."""
    await volume.inodes.attributes(ROOT_INODE)
    return not inside.lookups(volume).must_ask(ROOT_INODE)


async def test_what_others_did_to_a_name_counts_not_what_was_shelved(
    disk: Disk, options: Options, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with volumes(disk, options, 2, rng) as (one, two):
        for name in (b"removed", b"renamed", b"rewritten", b"replaced"):
            await put(one, name, b"before " + name)
        await quiet(one, two)
        names = (b"removed", b"renamed", b"rewritten", b"replaced")
        assert all(inside.dentries(two).get(ROOT_INODE, name).record for name in names)
        await one.tree.unlink(ROOT_INODE, b"removed")
        await one.tree.rename(ROOT_INODE, b"renamed", ROOT_INODE, b"elsewhere", 0)
        node = await one.tree.lookup(ROOT_INODE, b"rewritten")
        handle = await one.files.open(node.ino, os.O_WRONLY, CALLER)
        await one.files.write(handle, 0, b"AFTER")
        await one.files.release(handle)
        await put(one, b"new", b"after replaced")
        await one.tree.rename(ROOT_INODE, b"new", ROOT_INODE, b"replaced", 0)
        await quiet(one, two)
        assert not await exists(two, b"removed")
        assert not await exists(two, b"renamed")
        assert await get(two, b"elsewhere") == b"before renamed"
        assert await get(two, b"rewritten") == b"AFTERe rewritten"
        assert await get(two, b"replaced") == b"after replaced"


async def test_what_this_host_did_to_a_name_counts_not_what_was_shelved(
    disk: Disk, options: Options, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with volumes(disk, options, 2, rng) as (one, two):
        for name in (b"removed", b"changed"):
            await put(one, name, name)
        await quiet(one, two)
        await two.tree.unlink(ROOT_INODE, b"removed")
        assert not await exists(two, b"removed")
        node = await two.tree.lookup(ROOT_INODE, b"changed")
        await inside.cutter(two).truncate(node, 3)
        await two.sync()
        inside.nodes(two).drop(node)
        assert not await exists(two, b"removed")
        assert await get(two, b"changed") == b"cha"


async def test_a_page_that_is_older_than_the_news_is_not_believed(
    disk: Disk,
    options: Options,
    rng: random.Random,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with volumes(disk, options, 1, rng) as (one,):
        for name in (b"gone", b"other", b"stays"):
            await put(one, name, b"before")
    async with volumes(disk, options, 2, rng) as (one, two):
        await eventually(lambda: is_relaxed(two))
        scan, is_read, may_go_on = inside.records(two).scan, trio.Event(), trio.Event()

        async def late(prefix: bytes, after: bytes = b"", limit: int = 1000) -> Sequence[Record]:
            rows = await scan(prefix, after, limit)
            is_read.set()
            await may_go_on.wait()
            return rows

        monkeypatch.setattr(inside.records(two), "scan", late)
        found: list[bytes | None] = []
        async with trio.open_nursery() as nursery:

            async def look() -> None:
                found.append(await get(two, b"stays"))

            nursery.start_soon(look)
            await is_read.wait()
            await one.tree.unlink(ROOT_INODE, b"gone")
            await put(one, b"new", b"after")
            await one.tree.rename(ROOT_INODE, b"new", ROOT_INODE, b"other", 0)
            await quiet(one)
            may_go_on.set()
        assert found == [b"before"]
        assert not await exists(two, b"gone")
        assert await get(two, b"other") == b"after"


def record(version: int, value: bytes = b"I") -> Versioned:
    return Versioned(value, version)


def test_records_are_bounded_and_are_those_of_inodes() -> None:
    dentries = Dentries(names_max=10)
    for number in range(25):
        dentries.shelve(1, b"%d" % number, record(number + 1))
    dentries.shelve(1, b"reference", record(30, schema.encode_entry_reference(7)))
    assert dentries.get(1, b"reference").record is None
    kept = [number for number in range(25) if dentries.get(1, b"%d" % number).record]
    assert len(kept) <= 10
    assert kept[-1] == 24
    assert dentries.get(1, b"24").record == record(25)
    dentries.drop_record(1, b"24")
    assert dentries.get(1, b"24").record is None


def test_a_page_is_told_what_changes_while_it_is_read() -> None:
    dentries = Dentries()
    with dentries.reading(1) as changed:
        dentries.note(1, b"noted", 5)
        dentries.forget(1, b"forgotten")
        dentries.note_stored(1, b"stored", True)
        dentries.drop_record(1, b"dropped")
        dentries.note(2, b"elsewhere", 5)
    assert changed == {b"noted", b"forgotten", b"stored", b"dropped"}
    stored = dentries.stored_in(1)
    dentries.clear()
    assert dentries.stored_in(1) is not stored, "what was read before everything was forgotten is not learned"
