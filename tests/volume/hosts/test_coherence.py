"""What one client changes, the others hear of: caches, the kernel, a watch that broke, a store that is away."""

from __future__ import annotations

import os
import random
from typing import Any

import inside
import pytest
import trio
import trio.testing
from mounting import wait_until
from shared_lab import eventually, exists, hosts, make, names_in, quiet, read, until_node, volumes
from volume_lab import CALLER, Chaos, Disk, lab_options

from kvfuse import errors
from kvfuse.options.config import Options
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.names.synced import SURE_SECONDS
from kvfuse.volume.volume import Volume


class HearingKernel:
    """Notes what it is told to forget."""

    def __init__(self) -> None:
        self.names: set[tuple[int, bytes]] = set()
        self.contents: set[int] = set()
        self.attributes: set[int] = set()

    def drop_content(self, ino: int) -> None:
        self.contents.add(ino)

    def drop_attributes(self, ino: int) -> None:
        self.attributes.add(ino)

    def drop_name(self, parent: int, name: bytes, ino: int = 0) -> None:
        self.names.add((parent, name))

    def drop_any_name(self, parent: int, name: bytes) -> None:
        self.names.add((parent, name))


@pytest.fixture
def options() -> Options:
    return lab_options(strict=False)


@pytest.fixture
def disk(options: Options) -> Disk:
    return Disk.format(options, shared=True)


async def until(volume: Volume, name: bytes, is_there: bool) -> None:
    """Wait until a change of another client shows here."""

    async def has_come() -> bool:
        return await exists(volume, name) is is_there

    await eventually(has_come)


async def until_mode(volume: Volume, ino: int, mode: int) -> None:
    await until_node(volume, ino, lambda node: node.mode & 0o777 == mode)


def gets(volume: Volume) -> int:
    return inside.records(volume).counters.gets


async def test_relaxed_names_are_answered_from_memory_until_another_client_changes_them(
    disk: Disk, options: Options, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with volumes(disk, options, 2, rng) as (one, two):
        await one.tree.make_symlink(ROOT_INODE, b"name", b"first", CALLER)
        await until(two, b"name", True)
        assert not await exists(two, b"other")
        before, began = gets(two), trio.current_time()
        for _ in range(10):
            assert (await two.tree.lookup(ROOT_INODE, b"name")).target == b"first"
            assert not await exists(two, b"other")
        moments = 1 + (trio.current_time() - began) // SURE_SECONDS  # in each it asks whether something was synced
        assert gets(two) - before <= moments
        await one.tree.rename(ROOT_INODE, b"name", ROOT_INODE, b"other", 0)
        await until(two, b"name", False)
        await until(two, b"other", True)


async def test_the_kernel_hears_of_what_others_change_and_of_nothing_else(
    disk: Disk, options: Options, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with volumes(disk, options, 2, rng) as (one, two):
        kernels = (HearingKernel(), HearingKernel())
        for volume, kernel in zip((one, two), kernels, strict=True):
            volume.connect_kernel(kernel)
        folder = (await one.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        await until(two, b"folder", True)
        assert not await exists(two, b"link", folder)
        await one.tree.make_symlink(folder, b"link", b"target", CALLER)
        await one.inodes.set_attributes(folder, Changes(mode=0o700), CALLER)
        await one.sync()
        await until_mode(two, folder, 0o700)

        def is_told() -> bool:
            return (folder, b"link") in kernels[1].names and folder in kernels[1].attributes

        # A thread tells it, which knows nothing of a clock that jumps.
        await trio.to_thread.run_sync(wait_until, is_told, "the news for the kernel")
        assert kernels[0].names == set() == kernels[0].contents


@pytest.mark.parametrize("change", ["removed", "changed"])
@pytest.mark.parametrize("was_known", [False, True])
async def test_the_kernel_hears_of_names_that_may_be_in_a_listing(
    disk: Disk,
    options: Options,
    rng: random.Random,
    autojump_clock: trio.testing.MockClock,
    change: str,
    was_known: bool,
) -> None:
    """Nobody here has asked for the name, or that was long ago."""
    async with volumes(disk, options, 2, rng) as (one, two):
        ino = (await one.tree.make_symlink(ROOT_INODE, b"link", b"target", CALLER)).ino
        await quiet(one, two)
        if was_known:
            two.tree.forget((await two.tree.lookup(ROOT_INODE, b"link")).ino, 1)
            inside.nodes(two).drop(inside.nodes(two).get(ino))
        kernel = HearingKernel()
        two.connect_kernel(kernel)
        if change == "removed":
            await one.tree.unlink(ROOT_INODE, b"link")
        else:
            await one.inodes.set_attributes(ino, Changes(uid=1000), CALLER)
        await quiet(one)
        await trio.to_thread.run_sync(wait_until, lambda: (ROOT_INODE, b"link") in kernel.names, "the news")


@pytest.mark.parametrize("strict", [True, False])
async def test_what_was_missed_while_a_watch_was_broken_is_read_anew(
    disk: Disk, rng: random.Random, autojump_clock: trio.testing.MockClock, strict: bool
) -> None:
    options = lab_options(strict=strict)
    async with volumes(disk, options, 2, rng) as (one, two):
        kept = (await one.tree.make_directory(ROOT_INODE, b"kept", 0o755, CALLER)).ino
        await one.tree.make_directory(ROOT_INODE, b"gone", 0o755, CALLER)
        await until(two, b"gone", True)
        await until(two, b"kept", True)
        for watch in list(disk.watches):
            watch.break_off()
        await one.tree.remove_directory(ROOT_INODE, b"gone")
        await one.tree.make_symlink(ROOT_INODE, b"new", b"target", CALLER)
        await one.inodes.set_attributes(kept, Changes(mode=0o711), CALLER)
        await one.sync()
        await until(two, b"gone", False)
        await until(two, b"new", True)
        await until_mode(two, kept, 0o711)
        statistics: Any = two.stats()["coherence"]
        assert statistics["watches"] == 2


async def test_while_the_store_is_away_known_names_are_told_and_the_rest_fails_fast(
    disk: Disk, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options(strict=True)
    chaos = [Chaos(random.Random(rng.random())), Chaos(random.Random(rng.random()), deadline=1.0)]
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        await one.tree.make_symlink(ROOT_INODE, b"known", b"target", CALLER)
        assert (await two.tree.lookup(ROOT_INODE, b"known")).target == b"target"
        await write(one, b"block", b"bytes" * 10_000)
        assert await read(two, b"block") == b"bytes" * 10_000
        chaos[1].cut = trio.Event()
        with pytest.raises(errors.EngineError):
            await two.tree.lookup(ROOT_INODE, b"unknown")
        begun = trio.current_time()
        for _ in range(20):
            assert (await two.tree.lookup(ROOT_INODE, b"known")).target == b"target"
            with pytest.raises(errors.EngineError):
                await two.tree.lookup(ROOT_INODE, b"unknown")
        assert trio.current_time() - begun < 2.5
        with pytest.raises(errors.EngineError), trio.fail_after(10):
            await two.tree.make_symlink(ROOT_INODE, b"new", b"target", CALLER)
        chaos[1].cut.set()

        async def is_back() -> bool:
            try:
                return not await exists(two, b"unknown")
            except errors.EngineError:
                return False

        await eventually(is_back)
        await one.tree.unlink(ROOT_INODE, b"known")
        assert not await exists(two, b"known")
        assert await make(two, b"back")
        assert b"back" in await names_in(one)


async def write(volume: Volume, name: bytes, data: bytes) -> int:
    """A file with these bytes, instead of what has the name; its inode."""
    try:
        handle, node = await volume.tree.create(ROOT_INODE, name, 0o644, CALLER, os.O_RDWR)
    except errors.Exists:
        node = await volume.tree.lookup(ROOT_INODE, name)
        handle = await volume.files.open(node.ino, os.O_RDWR | os.O_TRUNC, CALLER)
    await volume.files.write(handle, 0, data)
    await volume.files.flush(handle)
    await volume.files.release(handle)
    return node.ino


async def test_what_one_closed_the_next_open_elsewhere_reads(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with hosts(rng, 3, strict=True, capacity=64 << 20) as all_volumes:
        for number in range(30):
            writer = all_volumes[number % 3]
            data = rng.randbytes(rng.randrange(1, 200_000))
            await write(writer, b"name", data)
            for volume in all_volumes:
                assert await read(volume, b"name") == data, number


async def test_a_removed_file_stays_readable_where_it_is_open(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    options = lab_options(strict=True, capacity=8 << 20)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng) as (one, two):
        data = rng.randbytes(300_000)
        ino = await write(one, b"name", data)
        handle = await two.files.open((await two.tree.lookup(ROOT_INODE, b"name")).ino, os.O_RDONLY, CALLER)
        await one.tree.unlink(ROOT_INODE, b"name")
        one.tree.forget(ino, 100)
        assert not await exists(two, b"name")
        for number in range(30):  # long enough for slots to be used again
            await write(one, b"other", rng.randbytes(300_000))
            await trio.sleep(1)
            assert bytes(await two.files.read(handle, 0, 1 << 20)) == data, number
        statistics: Any = two.stats()["coherence"]
        assert statistics["held"] == 1
        await two.files.release(handle)
        await trio.sleep(60)
        assert not [key for key in disk.records if key[:1] in (b"h", b"o")]


async def test_two_rename_over_one_name_and_its_bytes_are_one_of_theirs(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with hosts(rng, 2, strict=True) as (one, two):
        written: set[bytes] = set()

        async def replace(volume: Volume, number: int) -> None:
            data = rng.randbytes(10_000)
            written.add(data)
            await write(volume, b"temporary-%d" % number, data)
            await volume.tree.rename(ROOT_INODE, b"temporary-%d" % number, ROOT_INODE, b"final", 0)
            assert await read(volume, b"final") in written

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(replace, (one, two)[number % 2], number)
        assert await read(one, b"final") == await read(two, b"final")
        await trio.sleep(60)


async def test_appends_of_two_both_survive(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    async with hosts(rng, 2, strict=True, capacity=64 << 20) as both:
        await write(both[0], b"log", b"")

        async def append(volume: Volume, mark: bytes) -> None:
            for number in range(30):
                node = await volume.tree.lookup(ROOT_INODE, b"log")
                handle = await volume.files.open(node.ino, os.O_WRONLY | os.O_APPEND, CALLER)
                await volume.files.write(handle, node.size, b"%s %d\n" % (mark, number))
                await volume.files.flush(handle)
                await volume.files.release(handle)

        async with trio.open_nursery() as nursery:
            for volume, mark in zip(both, (b"one", b"two"), strict=True):
                nursery.start_soon(append, volume, mark)
        expected = sorted(b"%s %d" % (mark, number) for mark in (b"one", b"two") for number in range(30))
        for volume in both:
            assert sorted((await read(volume, b"log")).splitlines()) == expected


async def test_writes_of_two_to_parts_of_a_file_survive(
    rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    async with hosts(rng, 2, strict=True, capacity=64 << 20) as both:
        size, part = 128 << 10, 4096
        await write(both[0], b"file", bytes(size))

        async def fill(volume: Volume, first: int) -> None:
            node = await volume.tree.lookup(ROOT_INODE, b"file")
            handle = await volume.files.open(node.ino, os.O_RDWR, CALLER)
            for number, offset in enumerate(range(first * part, size, 2 * part)):
                await volume.files.write(handle, offset, bytes([1 + first]) * part)
                if number % 4 == 0:
                    await volume.files.fsync(handle)
            await volume.files.flush(handle)
            await volume.files.release(handle)

        async with trio.open_nursery() as nursery:
            for first, volume in enumerate(both):
                nursery.start_soon(fill, volume, first)
        expected = (b"\1" * part + b"\2" * part) * (size // part // 2)
        for volume in both:
            assert await read(volume, b"file") == expected
