"""Names in a volume that several clients have open: each change happens for all of them in one step, or not at all."""

from __future__ import annotations

import itertools
import os
import random

import inside
import pytest
import trio
import trio.testing
from records_audit import Audit
from shared_lab import (
    as_by_path,
    eventually,
    exists,
    hosts,
    look,
    make,
    names_in,
    quiet,
    until_node,
    volumes,
)
from shared_walk import OF_FILES, OF_HANDLES, OF_NAMES, walk_at_random
from volume_lab import CALLER, MIB, Chaos, Disk, lab_options

from kvfuse import errors
from kvfuse.volume.api import RENAME_EXCHANGE, ROOT_INODE, Changes
from kvfuse.volume.names.shared_lookup import SharedLookup
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume


async def until_nlink(volume: Volume, nlink: int) -> None:
    """Wait for news of the root: nobody looks it up by a name."""
    await until_node(volume, ROOT_INODE, lambda node: node.nlink == nlink)


async def test_a_name_made_on_one_is_seen_on_the_other(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with hosts(rng, 2, strict=True) as (one, two):
        made = await one.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)
        assert (await two.tree.lookup(ROOT_INODE, b"folder")).ino == made.ino
        link = await two.tree.make_symlink(made.ino, b"link", b"target", CALLER)
        found = await one.tree.lookup(made.ino, b"link")
        assert found.ino == link.ino
        assert found.target == b"target"
        await until_nlink(two, 3)
        with pytest.raises(errors.NotEmpty):
            await one.tree.remove_directory(ROOT_INODE, b"folder")
        await one.tree.unlink(made.ino, b"link")
        assert not await exists(two, b"link", made.ino)
        await two.tree.remove_directory(ROOT_INODE, b"folder")
        assert not await exists(one, b"folder")
        await until_nlink(one, 2)


async def test_late_news_of_a_directory_do_not_take_its_times_back(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """What this host stored comes again as news. Times that another host set are taken as they are."""

    def tell_late(version: int, times: tuple[int, int, int]) -> None:
        inside.lookups(one).refresher.take_times(folder, schema.encode_times(*times), version)

    def times() -> tuple[int, int, int]:
        return folder.atime, folder.mtime, folder.ctime

    options = lab_options(strict=False)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng) as (one, two):
        folder = await one.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)
        made = times()
        await quiet(one, two)
        version = disk.records[schema.times_key(folder.ino)].version
        await one.inodes.set_attributes(folder.ino, Changes(atime=2_000_000_000, mtime=3_000_000_000), CALLER)
        changed = times()
        tell_late(version, made)
        tell_late(version + 1, made)  # as it may be read before it is known to be our own
        assert times() == changed
        await quiet(one, two)
        tell_late(version, made)
        assert times() == changed
        await one.tree.list_directory(folder.ino, 0, 100)
        listed = times()
        assert listed[0] > 3_000_000_000
        tell_late(1 << 60, changed)
        assert times() == listed
        folder.times_version = 0  # no store gave that version: news with true ones count again
        await two.inodes.set_attributes((await look(two, b"folder")).ino, Changes(atime=1_000_000_000, mtime=1), CALLER)
        await quiet(one, two)
        assert (await look(one, b"folder")).atime == 1_000_000_000


async def test_of_many_who_create_one_name_exactly_one_does(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    won: dict[bytes, list[int]] = {}
    async with hosts(rng, 3, strict=True) as all_volumes, trio.open_nursery() as nursery:

        async def create(volume: Volume, name: bytes) -> None:
            try:
                handle, node = await volume.tree.create(ROOT_INODE, name, 0o644, CALLER, os.O_RDWR | os.O_EXCL)
            except errors.Exists:
                return
            won.setdefault(name, []).append(node.ino)
            await volume.files.release(handle)

        for number, volume in itertools.product(range(20), all_volumes * 3):
            nursery.start_soon(create, volume, b"name-%d" % number)
    assert len(won) == 20
    assert all(len(made) == 1 for made in won.values()), won


async def test_of_renames_over_one_name_all_happen_and_one_is_last(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options(strict=True)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 3, rng) as all_volumes:
        made: list[int] = []
        async with trio.open_nursery() as nursery:

            async def replace(volume: Volume, number: int) -> None:
                name = b"temporary-%d" % number
                made.append(await make(volume, name))
                await volume.tree.rename(ROOT_INODE, name, ROOT_INODE, b"final", 0)

            for number in range(30):
                nursery.start_soon(replace, all_volumes[number % 3], number)
        assert [await names_in(volume) for volume in all_volumes] == [[b"final"]] * 3
        finals = {(await volume.tree.lookup(ROOT_INODE, b"final")).ino for volume in all_volumes}
        assert len(finals) == 1
        assert finals <= set(made)
        assert len([key for key in disk.records if key.startswith(b"d")]) == 1


@pytest.mark.parametrize("strict", [True, False])
async def test_many_names_in_one_folder_none_lost_none_doubled(
    rng: random.Random, autojump_clock: trio.testing.MockClock, strict: bool
) -> None:
    options = lab_options(strict=strict)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng) as (one, two):
        folder = (await one.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        async with trio.open_nursery() as nursery:

            async def fill(volume: Volume, first: int) -> None:
                for number in range(first, 10_000, 20):
                    await make(volume, b"name-%d" % number, folder)

            for first in range(20):
                nursery.start_soon(fill, one if first % 2 else two, first)
        await one.sync()
        await two.sync()
        expected = sorted(b"name-%d" % number for number in range(10_000))
        assert await names_in(one, folder) == expected
        assert await names_in(two, folder) == expected
        rows = [row for key, row in disk.records.items() if key.startswith(schema.entry_prefix(folder))]
        assert len({row.value for row in rows}) == 10_000


async def test_a_rename_is_seen_as_one_step(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    async with hosts(rng, 2, strict=True) as (one, two):
        ino = await make(one, b"a")
        seen: set[tuple[bytes, ...]] = set()
        finished = False

        async def observe() -> None:
            while not finished:
                rows = await two.tree.list_directory(ROOT_INODE, 0, 100)
                assert [row.attributes.ino for row in rows] == [ino]
                seen.add(tuple(row.name for row in rows))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(observe)
            for old, new in [(b"a", b"b"), (b"b", b"a")] * 40:
                await one.tree.rename(ROOT_INODE, old, ROOT_INODE, new, 0)
                assert (await two.tree.lookup(ROOT_INODE, new)).ino == ino
                assert not await exists(two, old)
            finished = True
        assert seen == {(b"a",), (b"b",)}


async def test_names_of_a_link_are_counted_by_all(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    async with hosts(rng, 2, strict=True) as (one, two):
        ino = await make(one, b"first")
        await two.tree.lookup(ROOT_INODE, b"first")
        async with trio.open_nursery() as nursery:
            for number, volume in enumerate([one, two] * 10):
                nursery.start_soon(volume.tree.link, ino, ROOT_INODE, b"link-%d" % number)
        for volume in (one, two):
            assert (await look(volume, b"first")).nlink == 21
        async with trio.open_nursery() as nursery:
            for number, volume in enumerate([two, one] * 10):
                nursery.start_soon(volume.tree.unlink, ROOT_INODE, b"link-%d" % number)
        for volume in (one, two):
            assert (await look(volume, b"first")).nlink == 1
        assert await names_in(two) == [b"first"]


async def test_a_folder_is_never_removed_with_a_name_in_it(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options(strict=True)
    disk = Disk.format(options, shared=True)
    outcomes = set()
    async with volumes(disk, options, 2, rng) as (one, two):
        for number in range(60):
            name = b"folder-%d" % number
            folder = (await one.tree.make_directory(ROOT_INODE, name, 0o755, CALLER)).ino
            done: list[str] = []

            async def remove(name: bytes, done: list[str]) -> None:
                try:
                    await one.tree.remove_directory(ROOT_INODE, name)
                    done.append("removed")
                except errors.NotEmpty:
                    pass

            async def create(folder: int, name: bytes, done: list[str]) -> None:
                try:
                    await two.tree.lookup(ROOT_INODE, name)
                    await make(two, b"file", folder)
                    done.append("created")
                except (errors.NotFound, errors.Stale):
                    pass

            async with trio.open_nursery() as nursery:
                nursery.start_soon(remove, name, done)
                nursery.start_soon(create, folder, name, done)
            assert len(done) == 1, done
            outcomes.update(done)
            rows = [key for key in disk.records if key.startswith(schema.entry_prefix(folder))]
            assert bool(rows) == (done == ["created"])
            assert await exists(two, name) == (done == ["created"])
    assert outcomes == {"created", "removed"}


async def test_two_folders_never_go_into_each_other(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    async with hosts(rng, 2, strict=True) as (one, two):
        for number in range(20):
            names = (b"x%d" % number, b"y%d" % number)
            x, y = [(await one.tree.make_directory(ROOT_INODE, name, 0o755, CALLER)).ino for name in names]
            for name in names:
                await two.tree.lookup(ROOT_INODE, name)
            moved: list[int] = []

            async def move(volume: Volume, name: bytes, into: int, moved: list[int]) -> None:
                try:
                    await as_by_path(lambda: volume.tree.rename(ROOT_INODE, name, into, name, 0))
                    moved.append(into)
                except (errors.InvalidArgument, errors.NotFound):
                    pass

            async with trio.open_nursery() as nursery:
                nursery.start_soon(move, one, names[0], y, moved)
                nursery.start_soon(move, two, names[1], x, moved)
            assert len(moved) == 1
        assert len(await names_in(two)) == 20
        await until_nlink(one, 22)


async def test_exchanged_names_are_both_there_all_the_time(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with hosts(rng, 2, strict=True) as (one, two):
        folder = (await one.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        file = await make(one, b"file", folder)
        other = (await two.tree.make_directory(ROOT_INODE, b"other", 0o755, CALLER)).ino
        for number in range(9):
            volume = (one, two)[number % 2]
            await volume.tree.rename(folder, b"file", ROOT_INODE, b"other", RENAME_EXCHANGE)
            expected = (other, file) if number % 2 == 0 else (file, other)
            for seeing in (one, two):
                found = (await look(seeing, b"file", folder), await look(seeing, b"other"))
                assert (found[0].ino, found[1].ino) == expected
                await until_nlink(seeing, 3 if number % 2 == 0 else 4)
                assert (await seeing.tree.lookup(ROOT_INODE, b"folder")).nlink == (3 if number % 2 == 0 else 2)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
@pytest.mark.parametrize("run", range(6))
async def test_all_agree_on_a_tree_that_three_changed_at_random(
    rng: random.Random, autojump_clock: trio.testing.MockClock, run: int, strict: bool
) -> None:
    await walk_at_random(rng, strict=strict)


CHUNKS = (4096, MIB)
"""Bytes: files are of many chunks, or of one."""
KINDS = {"files": OF_NAMES + OF_FILES, "open files": OF_NAMES + OF_FILES + OF_HANDLES}


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("run", range(6))
async def test_all_agree_on_files_that_three_changed_at_random(
    rng: random.Random, autojump_clock: trio.testing.MockClock, run: int, kinds: str, strict: bool
) -> None:
    await walk_at_random(rng, KINDS[kinds], strict=strict, chunk=CHUNKS[run % 2])


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
@pytest.mark.parametrize("run", range(6))
async def test_all_agree_on_files_that_three_changed_while_engines_failed(
    rng: random.Random, autojump_clock: trio.testing.MockClock, run: int, strict: bool
) -> None:
    await walk_at_random(rng, KINDS["open files"], strict=strict, chunk=CHUNKS[run % 2], faults=0.1)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
@pytest.mark.parametrize("faults", [0.0, 0.3])
async def test_all_agree_where_there_is_no_room_for_what_three_write(
    rng: random.Random, autojump_clock: trio.testing.MockClock, faults: float, strict: bool
) -> None:
    kinds = KINDS["open files"]
    await walk_at_random(rng, kinds, strict=strict, chunk=64 << 10, capacity=8 * MIB, data_max=400_000, faults=faults)


@pytest.mark.parametrize("seed", [4, 9, 10, 14, 18, 28, 77, 86, 1091, 1224, 2017, 2091, 2120, 3045])
async def test_all_agree_on_a_tree_where_they_did_not_once(autojump_clock: trio.testing.MockClock, seed: int) -> None:
    await walk_at_random(random.Random(seed), strict=False)


async def test_a_file_that_another_client_renamed_before_our_removal_came_stays(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options()
    disk = Disk.format(options, shared=True)
    Audit.attach(disk)
    chaos = [Chaos(random.Random(0)), Chaos(random.Random(0))]
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        ino = await make(one, b"a")
        await one.sync()
        assert (await two.tree.lookup(ROOT_INODE, b"a")).ino == ino
        await two.tree.unlink(ROOT_INODE, b"a")  # in memory, for a while
        await one.tree.rename(ROOT_INODE, b"a", ROOT_INODE, b"b", 0)
        await one.sync()
        await two.sync()
        for volume in (one, two):
            assert await names_in(volume) == [b"b"]
            assert (await volume.tree.lookup(ROOT_INODE, b"b")).ino == ino
        assert schema.orphan_key(ino) not in disk.records


async def test_a_file_that_came_under_a_name_before_our_removal_did_stays(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options()
    disk = Disk.format(options, shared=True)
    Audit.attach(disk)
    chaos = [Chaos(random.Random(0)), Chaos(random.Random(0))]
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        await make(one, b"a")
        other = await make(one, b"b")
        await one.sync()
        await two.tree.lookup(ROOT_INODE, b"a")
        await two.tree.lookup(ROOT_INODE, b"b")
        await two.tree.unlink(ROOT_INODE, b"a")
        await one.tree.rename(ROOT_INODE, b"b", ROOT_INODE, b"a", 0)
        await one.sync()
        await two.sync()
        for volume in (one, two):
            assert await names_in(volume) == [b"a"]
            assert (await look(volume, b"a")).ino == other
        assert schema.orphan_key(other) not in disk.records


@pytest.mark.parametrize("run", range(8))
async def test_two_files_that_were_changed_under_one_name_keep_their_own(
    rng: random.Random, autojump_clock: trio.testing.MockClock, run: int
) -> None:
    """The commit of the first is refused when the second one was changed, too: both are thought to have the name."""
    options = lab_options()
    disk = Disk.format(options, shared=True)
    Audit.attach(disk)
    chaos = [Chaos(random.Random(0)), Chaos(random.Random(0)), Chaos(rng, delay=1.0)]
    async with volumes(disk, options, 3, rng, chaos) as (one, two, three), trio.open_nursery() as nursery:
        first = await make(one, b"name")
        await quiet(one, two, three)
        await three.tree.lookup(ROOT_INODE, b"name")
        await three.inodes.set_attributes(first, Changes(mode=0o600), CALLER)
        await one.tree.rename(ROOT_INODE, b"name", ROOT_INODE, b"other", 0)
        await trio.sleep(0.001)  # two has heard of it
        second = await make(two, b"name")
        await two.sync()
        nursery.start_soon(three.sync)

        async def has_heard() -> bool:
            return (await three.tree.lookup(ROOT_INODE, b"name")).ino == second

        await eventually(has_heard)
        await three.inodes.set_attributes(second, Changes(mode=0o640), CALLER)
        await quiet(three, one, two)
        for volume in (one, two, three):
            found = [(await look(volume, name)) for name in (b"other", b"name")]
            assert [(node.ino, node.mode & 0o777) for node in found] == [(first, 0o600), (second, 0o640)]


async def test_a_file_that_comes_into_a_folder_while_its_path_is_checked_stays(
    rng: random.Random, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosts(rng, 2, strict=True) as (one, two):
        folder = (await one.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        await quiet(one, two)
        await two.tree.lookup(ROOT_INODE, b"folder")
        lookups = inside.lookups(one)
        assert isinstance(lookups, SharedLookup)
        check_path = lookups.find_path_versions

        async def check_slowly(directory: int, is_fresh: bool) -> dict[bytes, int]:
            found = await check_path(directory, is_fresh)
            if not await exists(two, b"file", folder):
                await make(two, b"file", folder)
                await quiet(two, one)
            return found

        monkeypatch.setattr(lookups, "find_path_versions", check_slowly)
        with pytest.raises(errors.NotEmpty):
            await one.tree.remove_directory(ROOT_INODE, b"folder")
        assert await names_in(one, folder) == [b"file"]


async def test_a_folder_whose_making_was_in_doubt_shows_what_others_put_into_it(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    chaos = [Chaos(random.Random(0)), Chaos(random.Random(0))]
    async with hosts(rng, 2, chaos) as (one, two):
        chaos[0].commit_error_after = 1.0
        with pytest.raises(errors.EngineError):
            await one.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)
        chaos[0].commit_error_after, chaos[0].commit_error = 0.0, 2.0  # it cannot ask, either
        folder = (await two.tree.lookup(ROOT_INODE, b"folder")).ino
        await make(two, b"file", folder)
        await quiet(two)
        assert (await one.tree.lookup(ROOT_INODE, b"folder")).ino == folder
        chaos[0].commit_error = 0.0
        await make(one, b"any")  # its commit finds out about the last one
        await one.sync()
        assert await exists(one, b"file", folder)
        await one.inodes.set_attributes(folder, Changes(mode=0o700), CALLER)
        await quiet(one)
        assert (await look(two, b"folder")).mode & 0o777 == 0o700


async def test_a_folder_is_removed_after_the_names_that_left_it(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options()
    disk = Disk.format(options, shared=True)
    Audit.attach(disk)
    async with volumes(disk, options, 2, rng) as (one, two):
        for number in range(10):
            folder = (await one.tree.make_directory(ROOT_INODE, b"%d" % number, 0o755, CALLER)).ino
            await make(one, b"file", folder)
            await one.sync()
            await one.tree.unlink(folder, b"file")
            await one.tree.remove_directory(ROOT_INODE, b"%d" % number)
        await two.sync()
    assert not [key for key in disk.records if key[:1] == b"d"]


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
async def test_a_name_that_is_replaced_is_in_every_listing(
    rng: random.Random, autojump_clock: trio.testing.MockClock, strict: bool
) -> None:
    async with hosts(rng, 2, strict=strict) as (one, two):
        await make(one, b"name")
        await eventually(lambda: exists(two, b"name"))
        ended = trio.Event()

        async def replace() -> None:
            for number in range(100):
                volume = (one, two)[number % 2]
                await make(volume, b"temporary %d" % number)
                await volume.tree.rename(ROOT_INODE, b"temporary %d" % number, ROOT_INODE, b"name", 0)
            ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(replace)
            while not ended.is_set():
                await one.tree.lookup(ROOT_INODE, b"name")
                assert b"name" in await names_in(one)
