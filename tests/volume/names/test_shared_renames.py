"""Files that one host changes while another renames or removes them: the changes follow, and nothing is given up."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import inside
import pytest
import trio
import trio.testing
from records_audit import Audit
from shared_lab import (
    exists,
    get,
    hosts,
    look,
    make,
    names_in,
    put,
    quiet,
    until,
    volumes,
    write_at,
)
from volume_lab import CALLER, Chaos, Delay, Disk, lab_options

from kvfuse import errors
from kvfuse.volume.api import RENAME_EXCHANGE, RENAME_NOREPLACE, ROOT_INODE, Changes
from kvfuse.volume.commit.conflicts import Conflicts
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names import commit_first
from kvfuse.volume.store import schema, search
from kvfuse.volume.volume import Volume


async def test_a_change_follows_a_renamed_file_that_the_kernel_has_forgotten(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with hosts(rng, 2, [Chaos(random.Random(0)) for _ in range(2)]) as (one, two):
        await put(one, b"name", b"bytes" * 1000)
        await quiet(one, two)
        await write_at(two, b"name", 0, b"changed")
        handle = await two.files.open((await two.tree.lookup(ROOT_INODE, b"name")).ino, os.O_RDWR, CALLER)
        await two.files.write(handle, 7, b" again")
        await two.files.release(handle)
        two.tree.forget(handle.node.ino, 1)
        await one.tree.rename(ROOT_INODE, b"name", ROOT_INODE, b"other", 0)
        began = trio.current_time()
        await two.sync()
        assert trio.current_time() - began < 1
        await quiet(one)
        for volume in (one, two):
            assert await get(volume, b"other") == b"changed again" + (b"bytes" * 1000)[13:]


async def test_changes_follow_a_file_that_is_renamed_to_and_fro(
    rng: random.Random, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    chaos = [Chaos(random.Random(0)) for _ in range(2)]
    follow = Conflicts._find_renamed

    async def follow_late(conflicts: Conflicts, node: Node) -> None:
        await one.tree.rename(ROOT_INODE, b"other", ROOT_INODE, b"name", 0)
        await one.sync()
        await follow(conflicts, node)

    monkeypatch.setattr(Conflicts, "_find_renamed", follow_late)
    async with hosts(rng, 2, chaos, strict=False) as (one, two):
        await put(one, b"name", b"before")
        await quiet(one, two)
        handle = await two.files.open((await two.tree.lookup(ROOT_INODE, b"name")).ino, os.O_RDWR, CALLER)
        await two.files.write(handle, 0, b"after ")
        await two.files.release(handle)
        chaos[1].stalled = trio.Event()
        await one.tree.rename(ROOT_INODE, b"name", ROOT_INODE, b"other", 0)
        await one.sync()
        chaos[1].stalled.set()
        await quiet(two, one)
        for volume in (one, two):
            assert await get(volume, b"name") == b"after "


@asynccontextmanager
async def changed_by_one_renamed_by_another(
    rng: random.Random, chaos: list[Chaos]
) -> AsyncIterator[tuple[Volume, Volume]]:
    """The second host has written "after" over "before" in the file "name", which the body makes "other" on the first
    one. In the end it must be both for both.
    """
    async with hosts(rng, 2, chaos, strict=False) as (one, two):
        await put(one, b"name", b"before")
        for number in range(50):
            await put(one, b"m%02d" % number, b"more")
        await quiet(one, two)
        handle = await two.files.open((await two.tree.lookup(ROOT_INODE, b"name")).ino, os.O_RDWR, CALLER)
        two.tree.forget(handle.node.ino, 1)
        await two.files.write(handle, 0, b"after ")  # not stored as long as the file is open
        yield one, two
        await two.files.release(handle)
        with suppress(errors.EngineError):
            await two.sync()
        if chaos[1].deaf is not None:
            chaos[1].deaf.set()
        await quiet(two, one)
        for volume in (one, two):
            assert await get(volume, b"other") == b"after "
            assert not await exists(volume, b"name")


async def test_an_old_answer_about_a_renamed_file_is_not_taken_for_news(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with changed_by_one_renamed_by_another(rng, [Chaos(random.Random(0)) for _ in range(2)]) as (one, two):
        ino = (await look(one, b"name")).ino
        await one.inodes.set_attributes(ino, Changes(mode=0o600), CALLER)
        await quiet(one)
        (row,) = await inside.records(two).get([schema.entry_key(ROOT_INODE, b"name")])
        assert row is not None
        await one.tree.rename(ROOT_INODE, b"name", ROOT_INODE, b"other", 0)
        await quiet(one)
        record = schema.decode_entry(row.value)
        assert isinstance(record, schema.InodeRecord)
        inside.lookups(two).refresher.take(record, row.version, (ROOT_INODE, b"name"), own=False)


async def test_a_change_finds_a_renamed_file_that_nobody_told_of(
    rng: random.Random, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is asked for all of its names, rather than to give up what was written."""
    monkeypatch.setattr(search, "PAGE", 7)
    chaos = [Chaos(random.Random(0)) for _ in range(2)]
    async with changed_by_one_renamed_by_another(rng, chaos) as (one, _):
        chaos[1].deaf = trio.Event()
        await one.tree.rename(ROOT_INODE, b"name", ROOT_INODE, b"other", 0)
        await one.sync()


async def test_a_name_of_an_open_file_that_two_hosts_changed_can_be_removed(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with hosts(rng, 2, [Chaos(random.Random(0)) for _ in range(2)]) as (one, two):
        await put(one, b"name", b"bytes")
        ino = (await one.tree.lookup(ROOT_INODE, b"name")).ino
        await one.tree.link(ino, ROOT_INODE, b"other")
        await quiet(one, two)
        handle = await two.files.open((await two.tree.lookup(ROOT_INODE, b"name")).ino, os.O_RDWR, CALLER)
        await two.files.write(handle, 5, b" and more")  # not stored as long as it is open
        await one.inodes.set_attributes(ino, Changes(mode=0o600), CALLER)
        await quiet(one)
        await two.tree.unlink(ROOT_INODE, b"name")
        await two.files.release(handle)
        await quiet(two, one)
        for volume in (one, two):
            assert await names_in(volume) == [b"other"]
            assert await get(volume, b"other") == b"bytes and more"
            assert (await look(volume, b"other")).mode & 0o777 == 0o600


async def test_an_open_file_that_was_removed_and_turns_out_to_live_on_can_be_renamed(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options()
    disk = Disk.format(options, shared=True)
    Audit.attach(disk)
    data = b"bytes" * 1000
    async with volumes(disk, options, 2, rng, [Chaos(random.Random(0)) for _ in range(2)]) as (one, two):
        await put(one, b"name", data)
        await quiet(one, two)
        handle = await two.files.open((await two.tree.lookup(ROOT_INODE, b"name")).ino, os.O_RDWR, CALLER)
        await two.files.write(handle, 0, b"lost")
        await two.tree.unlink(ROOT_INODE, b"name")  # in memory, for a while
        await two.files.write(handle, 4, b"as well")
        await one.tree.rename(ROOT_INODE, b"name", ROOT_INODE, b"other", 0)
        await quiet(two)
        await two.tree.rename(ROOT_INODE, b"other", ROOT_INODE, b"third", 0)
        assert bytes(await two.files.read(handle, 0, 1 << 20)) == data
        await two.files.write(handle, 0, b"kept")
        await two.files.release(handle)
        await quiet(two, one)
        for volume in (one, two):
            assert await names_in(volume) == [b"third"]
            assert await get(volume, b"third") == b"kept" + data[4:]


async def test_a_removed_file_that_turns_out_to_live_on_has_its_bytes(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options()
    disk = Disk.format(options, shared=True)
    Audit.attach(disk)
    async with volumes(disk, options, 2, rng, [Chaos(random.Random(0)) for _ in range(2)]) as (one, two):
        await put(one, b"name", b"bytes" * 1000)
        await quiet(one, two)
        ino = (await two.tree.lookup(ROOT_INODE, b"name")).ino
        await two.tree.unlink(ROOT_INODE, b"name")  # in memory, for a while
        await one.tree.rename(ROOT_INODE, b"name", ROOT_INODE, b"other", 0)
        await trio.sleep(0.01)
        inside.names(two).nameless.reap_unnamed()  # as who has no room does
        await two.sync()
        await two.inodes.set_attributes((await look(two, b"other")).ino, Changes(mode=0o600), CALLER)
        await quiet(two, one)
        assert (await look(one, b"other")).ino == ino
        for volume in (one, two):
            assert await get(volume, b"other") == b"bytes" * 1000


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
async def test_a_directory_that_was_only_listed_is_where_another_host_moves_it(
    rng: random.Random, autojump_clock: trio.testing.MockClock, strict: bool
) -> None:
    """It came into memory by its number, without a name: the news of its move are all that says where it is."""
    options = lab_options(strict=strict)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng) as (one, two):
        inner, outer = [
            (await one.tree.make_directory(ROOT_INODE, name, 0o755, CALLER)).ino for name in (b"in", b"out")
        ]
        await quiet(one)
        assert await names_in(two) == [b"in", b"out"]
        await one.tree.rename(ROOT_INODE, b"in", outer, b"in", 0)
        await quiet(one, two)
        assert (await two.tree.lookup(ROOT_INODE, b"out")).ino == outer
        assert (await two.tree.lookup(outer, b"in")).ino == inner
        assert (await two.tree.lookup(inner, b"..")).ino == outer
        with pytest.raises(errors.InvalidArgument):
            await two.tree.rename(ROOT_INODE, b"out", inner, b"out", 0)
        await two.inodes.set_attributes(inner, Changes(mode=0o700), CALLER)
        await quiet(two, one)
        assert schema.decode_inode(disk.records[schema.inode_key(inner)].value).parent == outer


@pytest.mark.parametrize("flags", [0, RENAME_NOREPLACE, RENAME_EXCHANGE])
async def test_of_two_hosts_that_rename_one_name_to_one_target_one_does(
    rng: random.Random, autojump_clock: trio.testing.MockClock, flags: int
) -> None:
    """The other host renames between the reads of both names, which then mean one inode."""
    chaos = [Chaos(random.Random(number)) for number in range(2)]
    async with hosts(rng, 2, chaos, strict=True) as (one, two):
        chaos[0].deaf = trio.Event()
        ino = await make(two, b"source")
        late = chaos[0].late = Delay(schema.entry_key(ROOT_INODE, b"source"))
        refused: list[bytes] = []

        async def rename() -> None:
            try:
                await one.tree.rename(ROOT_INODE, b"source", ROOT_INODE, b"target", flags)
            except errors.NotFound:
                refused.append(b"source")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(rename)
            await late.given.wait()
            await two.tree.rename(ROOT_INODE, b"source", ROOT_INODE, b"target", 0)
            late.arrives.set()
        assert refused == [b"source"]
        chaos[0].end()
        for volume in (one, two):
            assert await names_in(volume) == [b"target"]
            assert (await look(volume, b"target")).ino == ino


async def test_a_rename_between_two_names_of_a_file_knows_that_one_was_removed(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """While it exists, the rename does nothing."""
    chaos = [Chaos(random.Random(number)) for number in range(2)]
    async with hosts(rng, 2, chaos, strict=True) as (one, two):
        ino = await make(one, b"name")
        await one.tree.link(ino, ROOT_INODE, b"link")
        await one.tree.rename(ROOT_INODE, b"link", ROOT_INODE, b"name", 0)
        assert await names_in(two) == [b"link", b"name"]
        await quiet(one, two)
        chaos[0].deaf = trio.Event()
        await two.tree.unlink(ROOT_INODE, b"link")
        with pytest.raises(errors.NotFound):
            await one.tree.rename(ROOT_INODE, b"link", ROOT_INODE, b"name", 0)
        chaos[0].end()
        assert await names_in(one) == [b"name"]


async def test_a_folder_that_was_renamed_before_it_had_names_is_not_found(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Under its former name it never had any, so its removal must not say that it has."""
    chaos = [Chaos(random.Random(number)) for number in range(2)]
    async with hosts(rng, 2, chaos, strict=True) as (one, two):
        chaos[0].deaf = trio.Event()
        folder = (await two.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        late = chaos[0].late = Delay(schema.inode_key(folder))
        failures: list[errors.OperationError] = []

        async def remove() -> None:
            try:
                await one.tree.remove_directory(ROOT_INODE, b"folder")
            except errors.OperationError as error:
                failures.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(remove)
            await late.given.wait()
            await two.tree.rename(ROOT_INODE, b"folder", ROOT_INODE, b"other", 0)
            await make(two, b"file", folder)
            late.arrives.set()
        assert [type(failure) for failure in failures] == [errors.NotFound]
        chaos[0].end()
        assert await names_in(one) == [b"other"]


async def test_a_file_that_is_written_all_the_time_can_be_renamed(
    rng: random.Random, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt stores what was written by then, which changes the record of the name."""
    monkeypatch.setattr(commit_first, "ATTEMPTS_MAX", 10)
    async with hosts(rng, 2, strict=True) as (one, two):
        await put(one, b"log", b"bytes" * 1000)
        await put(two, b"log.1", b"before")
        node = await look(one, b"log")
        handle = await one.files.open(node.ino, os.O_RDWR, CALLER)
        async with trio.open_nursery() as nursery:

            async def write_always() -> None:
                while True:
                    await one.files.write(handle, 0, b"written")
                    await trio.sleep(0.0003)

            nursery.start_soon(write_always)
            await until(lambda: node.changed)
            await one.tree.rename(ROOT_INODE, b"log", ROOT_INODE, b"log.1", 0)
            nursery.cancel_scope.cancel()
        await one.files.release(handle)
        for volume in (one, two):
            assert await names_in(volume) == [b"log.1"]
            assert (await look(volume, b"log.1")).ino == node.ino
