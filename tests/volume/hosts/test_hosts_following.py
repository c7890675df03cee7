"""A host hears of what it uses: names and inodes that it has read, and nothing of folders that it never looked at."""

from __future__ import annotations

import os
import random
from collections import Counter

import inside
import pytest
import trio
import trio.testing
from shared_lab import eventually, exists, get, hosts, look, put, quiet, read, until, volumes
from test_coherence import HearingKernel
from volume_lab import CALLER, Chaos, Disk, MemoryFollowing, lab_options

from kvfuse import errors
from kvfuse.remote.records.api import Change
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.hosts import unfollowing
from kvfuse.volume.names.path_beliefs import CONTESTED_SECONDS
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume

FILES = 1000


def heard(volume: Volume) -> int:
    return inside.coherence(volume).counters.changes


async def folder_of(volume: Volume, name: bytes) -> int:
    return (await volume.tree.make_directory(ROOT_INODE, name, 0o755, CALLER)).ino


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """Kinds of the records that followings of all hosts handed over."""
    found: Counter[bytes] = Counter()
    take = MemoryFollowing.__anext__

    async def counted(self: MemoryFollowing) -> Change:
        change = await take(self)
        found[change.key[:1]] += 1
        return change

    monkeypatch.setattr(MemoryFollowing, "__anext__", counted)
    return found


@pytest.mark.parametrize("strict", [True, False])
async def test_what_is_stored_in_a_folder_that_nobody_else_looked_at(
    rng: random.Random, autojump_clock: trio.testing.MockClock, handed: Counter[bytes], strict: bool
) -> None:
    async with hosts(rng, 3, [Chaos(rng) for _ in range(3)], strict=strict, capacity=64 << 20) as (one, *others):
        folder = await folder_of(one, b"folder")
        for number, volume in enumerate(others):
            await put(volume, b"own", b"bytes", await folder_of(volume, b"folder-%d" % number))
        await quiet(one, *others)
        before, handed_before = [heard(volume) for volume in others], Counter(handed)
        for number in range(FILES):
            await put(one, b"file-%d" % number, b"bytes", folder)
        await quiet(one, *others)
        print(handed - handed_before)
        assert [heard(volume) - was for volume, was in zip(others, before, strict=True)] == [0, 0]
        names = Counter({kind: handed[kind] - handed_before[kind] for kind in (b"d", b"i", b"t", b"o")})
        assert names[b"d"] <= 2 * FILES  # the one host's own: made, and closed
        assert await get(others[0], b"file-7", folder) == b"bytes"


async def test_a_folder_that_a_host_begins_to_use(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    """At any moment: each open after a close of another host sees what that wrote."""
    async with hosts(rng, 3, strict=True, capacity=64 << 20) as all_volumes:
        folders = [await folder_of(all_volumes[0], b"folder-%d" % number) for number in range(6)]
        newest: dict[tuple[int, bytes], bytes | None] = {}
        busy: set[tuple[int, bytes]] = set()

        async def use(volume: Volume, mine: random.Random) -> None:
            for number in range(120):
                await trio.sleep(mine.random() * 0.05)
                place = mine.choice(folders), b"file-%d" % mine.randrange(3)
                if mine.random() < 0.3:
                    await inside.coherence(volume).unfollowing.sweep()
                if mine.random() < 0.4 and place not in busy:
                    await change(volume, place, b"%d-%d" % (id(volume), number), mine)
                else:
                    await check(volume, place)

        async def change(volume: Volume, place: tuple[int, bytes], data: bytes, mine: random.Random) -> None:
            busy.add(place)
            if newest.get(place) is not None and mine.random() < 0.3:
                await volume.tree.unlink(place[0], place[1])
                newest[place] = None
            else:
                await replace(volume, place[1], data, place[0])
                newest[place] = data
            busy.discard(place)

        async def check(volume: Volume, place: tuple[int, bytes]) -> None:
            was_busy, was = place in busy, newest.get(place)
            try:
                found = await get_again(volume, place)
            except errors.Stale:
                found = b"busy"
            if not was_busy and place not in busy and newest.get(place) == was:
                assert found == was

        async with trio.open_nursery() as nursery:
            for volume in all_volumes:
                nursery.start_soon(use, volume, random.Random(rng.random()))


async def get_again(volume: Volume, place: tuple[int, bytes]) -> bytes | None:
    """As a program opens a file: its path is walked twice if need be."""
    try:
        return await get(volume, place[1], place[0])
    except errors.Stale:
        return await get(volume, place[1], place[0])


async def replace(volume: Volume, name: bytes, data: bytes, parent: int) -> None:
    """As programs do: another file takes the name."""
    await put(volume, b"part-" + name, data, parent)
    await volume.tree.rename(parent, b"part-" + name, parent, name, 0)


# -- what other hosts do with files that are open here ------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("target", ["same", "other", "other and removed"])
async def test_an_open_file_that_another_host_renames(
    rng: random.Random, autojump_clock: trio.testing.MockClock, strict: bool, target: str
) -> None:
    """Also to a folder that nobody follows here: what is written to it there is read by the handle."""
    async with hosts(rng, 2, strict=strict, capacity=64 << 20) as (one, two):
        source, other = await folder_of(one, b"source"), await folder_of(one, b"other")
        await put(one, b"file", b"before", source)
        await quiet(one)
        ino = (await look(two, b"file", source)).ino
        handle = await two.files.open(ino, os.O_RDONLY, CALLER)
        to = source if target == "same" else other
        await one.tree.rename(source, b"file", to, b"moved", 0)
        writing = await one.files.open((await look(one, b"moved", to)).ino, os.O_WRONLY, CALLER)
        await one.files.write(writing, 0, b"after, and longer")
        await one.files.fsync(writing)
        await one.files.release(writing)

        async def is_read() -> bool:
            return bytes(await two.files.read(handle, 0, 100)) == b"after, and longer"

        await eventually(is_read)
        assert not await exists(two, b"file", source)
        if target == "other and removed":
            await one.tree.unlink(to, b"moved")
            await trio.sleep(3 * inside.core(one).grace.seconds)
            await fill(one)
            assert await is_read()
            assert (await two.inodes.attributes(ino)).nlink == 0
        else:
            assert await get(two, b"moved", to) == b"after, and longer"
        await two.files.release(handle)
        two.tree.forget(ino, 1)


async def test_an_open_file_that_was_renamed_while_a_watch_was_broken(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    disk = Disk.format(options := lab_options(strict=True), shared=True)
    async with volumes(disk, options, 2, rng) as (one, two):
        folder = await folder_of(one, b"folder")
        await put(one, b"file", b"before", folder)
        ino = (await look(two, b"file", folder)).ino
        handle = await two.files.open(ino, os.O_RDONLY, CALLER)
        for watch in list(disk.watches):
            watch.break_off()
        await one.tree.rename(folder, b"file", folder, b"moved", 0)
        writing = await one.files.open(ino, os.O_WRONLY, CALLER)
        await one.files.write(writing, 0, b"after, and longer")
        await one.files.fsync(writing)
        await one.files.release(writing)

        async def is_read() -> bool:
            return bytes(await two.files.read(handle, 0, 100)) == b"after, and longer"

        await eventually(is_read)
        await two.files.release(handle)
        two.tree.forget(ino, 1)


async def test_names_that_are_made_in_a_folder_without_a_look_at_it(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """The commit itself says what they mean."""
    async with hosts(rng, 2, strict=False, capacity=64 << 20) as (one, two):
        folder = await folder_of(one, b"folder")
        await quiet(one)
        await two.inodes.attributes(folder)
        made = (await two.tree.make_directory(folder, b"inner", 0o755, CALLER)).ino
        await one.tree.rename(folder, b"inner", folder, b"away", 0)
        other = (await one.tree.make_directory(folder, b"inner", 0o755, CALLER)).ino
        await put(one, b"file", b"bytes", other)
        await quiet(one, two)
        assert made != other == (await two.tree.lookup(folder, b"inner")).ino
        assert await get(two, b"file", other) == b"bytes"


async def fill(volume: Volume) -> None:
    """Slots that are free get other bytes."""
    for number in range(50):
        await put(volume, b"other-%d" % number, bytes([number]) * 17)
    await quiet(volume)


@pytest.mark.parametrize("strict", [True, False])
async def test_a_file_with_changes_here_that_another_host_moves_to_another_folder(
    rng: random.Random, autojump_clock: trio.testing.MockClock, strict: bool
) -> None:
    async with hosts(rng, 2, strict=strict, capacity=64 << 20) as (one, two):
        source, other = await folder_of(one, b"source"), await folder_of(one, b"other")
        await put(one, b"file", b"before", source)
        await quiet(one)
        ino = (await look(two, b"file", source)).ino
        handle = await two.files.open(ino, os.O_RDWR, CALLER)
        await two.files.write(handle, 0, b"after.")
        await one.tree.rename(source, b"file", other, b"moved", 0)
        await two.files.fsync(handle)
        await two.files.release(handle)
        assert await get(two, b"moved", other) == b"after."
        assert await get_again(one, (other, b"moved")) == b"after."
        two.tree.forget(ino, 1)


async def test_a_replaced_file_is_not_opened_by_its_inode_once_that_was_synced(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """The kernel may have the name in its cache, and ask for the inode."""
    async with hosts(rng, 2, strict=False, capacity=64 << 20) as (one, two):
        folder = await folder_of(one, b"folder")
        await put(one, b"file", b"before", folder)
        await quiet(one)
        ino = (await look(two, b"file", folder)).ino
        await put(one, b"other", b"after", folder)
        await one.tree.rename(folder, b"other", folder, b"file", 0)
        await one.inodes.fsync_directory(folder)
        with pytest.raises(errors.Stale):
            await two.files.open(ino, os.O_RDONLY, CALLER)
        await trio.sleep(2 * CONTESTED_SECONDS)
        with pytest.raises(errors.Stale):
            await two.files.open(ino, os.O_RDONLY, CALLER)
        assert await get(two, b"file", folder) == b"after"
        two.tree.forget(ino, 1)


# -- what is no longer used ---------------------------------------------------------------------------


async def test_a_folder_that_is_not_used_any_more(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    async with hosts(rng, 2, strict=False, capacity=64 << 20) as (one, two):
        kernel = HearingKernel()
        two.connect_kernel(kernel)
        folder = await folder_of(one, b"folder")
        await put(one, b"file", b"before", folder)
        await put(one, b"elsewhere", b"bytes")
        await quiet(one)
        found = await look(two, b"folder")
        assert await get(two, b"file", folder) == b"before"
        key = schema.entry_prefix(folder)
        followed = inside.coherence(two).followed.topics
        assert key in followed
        handle = await two.files.open((await look(two, b"file", folder)).ino, os.O_RDONLY, CALLER)
        await trio.sleep(2 * unfollowing.IDLE_SECONDS)
        assert key in followed, "a file is open"
        assert bytes(await two.files.read(handle, 0, 100)) == b"before"
        await two.files.release(handle)
        del handle, found
        assert await read(two, b"elsewhere") == b"bytes"  # the lab keeps the frames of the last read
        await trio.sleep(2 * unfollowing.IDLE_SECONDS)
        assert key not in followed
        assert (ROOT_INODE, b"folder") in kernel.names
        before = heard(two)
        await replace(one, b"file", b"after", folder)
        await put(one, b"new", b"new", folder)
        await one.inodes.set_attributes(folder, Changes(mode=0o711), CALLER)
        await quiet(one, two)
        assert heard(two) == before
        assert await get(two, b"file", folder) == b"after"
        assert await get(two, b"new", folder) == b"new"
        assert (await two.inodes.attributes(folder)).mode & 0o777 == 0o711


async def test_too_many_folders(
    rng: random.Random, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfollowing, "TOPICS_MAX", 20)
    async with hosts(rng, 2, strict=True, capacity=64 << 20) as (one, two):
        folders = [await folder_of(one, b"folder-%d" % number) for number in range(30)]
        for number, folder in enumerate(folders):
            await put(one, b"file", b"%d" % number, folder)
            assert await read(two, b"folder-%d" % number, b"file") == b"%d" % number
        topics = inside.coherence(two).followed.topics
        assert len(topics) > 60
        await until(lambda: len(topics) <= 20, 60)
        for number, folder in enumerate(folders):
            await replace(one, b"file", b"anew %d" % number, folder)
            assert await read(two, b"folder-%d" % number, b"file") == b"anew %d" % number
