"""Block calls: whole files by name, beside the file door."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from itertools import pairwise

import inside
import pytest
import trio
import trio.testing
from block_calls import CHUNK, bound, get, get_bound, put
from volume_lab import CALLER, MIB, Chaos, Disk, check, lab_options, opened

from kvfuse.errors import (
    InvalidArgument,
    IsADirectory,
    NoSpace,
    NotADirectory,
    NotFound,
    OperationError,
    ReadOnly,
    Stale,
)
from kvfuse.options.config import Options
from kvfuse.remote.segments.api import Transfer
from kvfuse.volume.api import ROOT_INODE, Caller
from kvfuse.volume.blocks.blocks import _for_each
from kvfuse.volume.inodes.stored_names import StoredNames


@pytest.fixture
def options() -> Options:
    return lab_options(capacity=16 * MIB, chunk=CHUNK)


# -- put ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4096, CHUNK - 1, CHUNK, CHUNK + 1, 11 * CHUNK + 5])
async def test_a_block_is_a_file(disk: Disk, options: Options, size: int) -> None:
    data = random.Random(size).randbytes(size)
    async with opened(disk, options) as volume:
        assert await put(volume, b"block", data) == 0
        assert await get(volume, b"block") == data, "staged"
        node = await volume.tree.lookup(ROOT_INODE, b"block")
        assert (node.size, node.mode, node.nlink) == (size, 0o100644, 1)
        volume.tree.forget(node.ino, 1)
        await volume.sync()
        assert await get(volume, b"block") == data, "in slots"
    async with opened(disk, options) as volume:
        assert await get(volume, b"block") == data
        assert await get_bound(volume, b"block") == data


async def test_names_of_all_bytes(disk: Disk, options: Options) -> None:
    names = [bytes([byte]) for byte in range(1, 256) if byte not in b"/."]
    names += [bytes([byte]) * 255 for byte in range(1, 256) if byte not in b"/"]
    async with opened(disk, options) as volume:
        for name in names:
            await put(volume, name, name)
        assert all(await volume.blocks.exists(ROOT_INODE, names))
    async with opened(disk, options) as volume:
        assert all(await volume.blocks.exists(ROOT_INODE, names))
        for name in names:
            assert await get_bound(volume, name) == name


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"/", b"a\0"])
async def test_what_is_no_name_is_refused(disk: Disk, options: Options, name: bytes) -> None:
    async with opened(disk, options) as volume:
        with pytest.raises(InvalidArgument):
            await put(volume, name, b"x")
        assert await volume.blocks.exists(ROOT_INODE, [name]) == [False]
        assert await volume.blocks.delete(ROOT_INODE, [name]) == [0]


async def test_a_name_that_is_too_long_is_absent(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        for call in (volume.blocks.exists, volume.blocks.delete, volume.blocks.prefetch):
            assert not any(await call(ROOT_INODE, [b"x" * 256]))
        assert await volume.blocks.bind(ROOT_INODE, b"x" * 256) is None
        with pytest.raises(OperationError):
            await put(volume, b"x" * 256, b"x")


async def test_directories_are_no_blocks(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        folder = (await volume.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        with pytest.raises(IsADirectory):
            await put(volume, b"folder", b"x")
        assert await volume.blocks.bind(ROOT_INODE, b"folder") is None
        assert await volume.blocks.delete(ROOT_INODE, [b"folder"]) == [0]
        await put(volume, b"block", b"x")
        ino = (await bound(volume, b"block")).ino
        with pytest.raises(NotADirectory):
            await put(volume, b"x", b"x", directory=ino)
        await volume.tree.remove_directory(ROOT_INODE, b"folder")
        with pytest.raises((NotFound, Stale)):
            await put(volume, b"x", b"x", directory=folder)


async def test_owner_and_mode(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        folder = await volume.tree.make_directory(ROOT_INODE, b"folder", 0o2775, Caller(5, 6))
        await volume.blocks.put(folder.ino, b"block", memoryview(b"x"), Caller(7, 8), 0o4640)
        binding = await bound(volume, b"block", folder.ino)
        assert (binding.uid, binding.gid, binding.mode) == (7, 6, 0o104640)


@pytest.mark.parametrize(
    ("caller", "kept"),
    [(Caller(7, 6, 0, False), True), (Caller(7, 8, 0, True), True), (Caller(7, 8, 0, False, frozenset()), False)],
)
async def test_a_setgid_folder_gives_its_group_to_programs_of_the_group(
    disk: Disk, options: Options, caller: Caller, kept: bool
) -> None:
    """The kernel sees to it, by what it knows of the folder's mode: another host may have changed that."""
    async with opened(disk, options) as volume:
        folder = await volume.tree.make_directory(ROOT_INODE, b"folder", 0o2775, Caller(5, 6))
        handle, node = await volume.tree.create(folder.ino, b"program", 0o2755, caller, os.O_RDWR)
        assert (node.gid, bool(node.mode & 0o2000)) == (6, kept)
        await volume.files.release(handle)


async def test_nothing_is_changed_on_a_read_only_volume(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        await put(volume, b"block", b"data")
        inside.core(volume).read_only = True
        with pytest.raises(ReadOnly):
            await put(volume, b"block", b"other")
        with pytest.raises(ReadOnly):
            await volume.blocks.delete(ROOT_INODE, [b"block"])
        inside.core(volume).read_only = False
        assert await get(volume, b"block") == b"data"


async def test_a_put_takes_the_name_as_a_rename_does(disk: Disk, options: Options) -> None:
    """What has the file open, or another name of it, keeps it; the space of the others comes back."""
    async with opened(disk, options) as volume:
        await put(volume, b"a", b"first")
        first = await volume.tree.lookup(ROOT_INODE, b"a")
        handle = await volume.files.open(first.ino, os.O_RDONLY, CALLER)
        await volume.tree.link(first.ino, ROOT_INODE, b"b")
        assert await put(volume, b"a", b"second") == first.ino
        assert await get(volume, b"b") == b"first"
        assert await put(volume, b"b", b"third") == first.ino
        assert bytes(await volume.files.read(handle, 0, 100)) == b"first"
        assert (await get(volume, b"a"), await get(volume, b"b")) == (b"second", b"third")
        await volume.files.release(handle)
        volume.tree.forget(first.ino, 2)
        await volume.sync()
        free = volume.space().free
        for number in range(50):
            await put(volume, b"a", bytes([number]) * 5000)
            await put(volume, b"b", b"%d" % number)
        await volume.sync()
        assert volume.space().free >= free - 8192


async def test_a_full_volume_keeps_the_old_block(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        count = 0
        with pytest.raises(NoSpace):
            for count in range(1000):
                await put(volume, b"%d" % count, bytes([count % 251]) * CHUNK)
        names = [b"%d" % number for number in range(count)]
        assert count > 200
        with pytest.raises(NoSpace):
            await put(volume, b"0", b"x" * 2 * CHUNK)
        assert await get(volume, b"0") == bytes(CHUNK)
        await volume.sync()
        assert all(await volume.blocks.delete(ROOT_INODE, names[:5]))
        for name in names[:5]:
            await put(volume, name, b"y" * CHUNK)  # waits for the commit that frees what was removed a moment ago
        assert all(await volume.blocks.exists(ROOT_INODE, names))
        assert await get(volume, b"0") == b"y" * CHUNK


async def test_a_block_that_does_not_fit_takes_nothing(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        free = volume.space().free
        with pytest.raises(NoSpace):
            await put(volume, b"block", bytes(free + CHUNK))
        assert volume.space().free == free
        assert await volume.blocks.exists(ROOT_INODE, [b"block"]) == [False]


async def test_a_strict_folder_returns_after_the_commit(chaos: Chaos) -> None:
    options = lab_options(strict=True)
    disk = Disk.format(options)
    async with opened(disk, options, chaos) as volume:
        await put(volume, b"block", b"data")
        async with opened(disk.copy(), options) as crashed:
            assert await get(crashed, b"block") == b"data"
        await put(volume, b"block", b"other")
        commits = chaos.commits
        await put(volume, b"block 2", b"other")
        assert await volume.blocks.delete(ROOT_INODE, [b"absent", b"block 2"]) != [0, 0]
        assert chaos.commits == commits + 2
        async with opened(disk.copy(), options) as crashed:
            assert await get(crashed, b"block") == b"other"
            assert await get(crashed, b"block 2") is None
    assert (await check(disk)).clean


async def test_relaxed_puts_share_a_commit(disk: Disk, options: Options, chaos: Chaos) -> None:
    async with opened(disk, options, chaos) as volume:
        commits = chaos.commits
        for number in range(100):
            await put(volume, b"%d" % number, b"data")
        await volume.sync()
        assert chaos.commits <= commits + 2


@pytest.mark.parametrize("size", [4096, CHUNK])
async def test_blocks_that_are_stored_together_are_few_writes(
    disk: Disk, options: Options, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their slots lie side by side, and so do what the slots say of them: a system call for each run of bytes."""
    written: list[tuple[int, int, int]] = []
    async with opened(disk, options) as volume:
        write = inside.segments(volume).write

        async def noted(batch: Sequence[Transfer]) -> None:
            written.extend((segment, offset, offset + len(buffer)) for segment, offset, buffer in batch)
            await write(batch)

        monkeypatch.setattr(inside.segments(volume), "write", noted)
        for number in range(64):
            await put(volume, b"%03d" % number, bytes(size))
        await volume.sync()
    written.sort()
    runs = 1 + sum(before[2] != after[1] for before, after in pairwise(written))
    assert len(written) > 64
    assert runs < 10


# -- exists -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("learns", [True, False], ids=["that is read to its end", "that stays unknown"])
async def test_exists_in_a_large_directory_that_changes(
    disk: Disk,
    options: Options,
    chaos: Chaos,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    learns: bool,
) -> None:
    if not learns:
        monkeypatch.setattr(StoredNames, "learn", lambda *_, **__: None)
    present = [b"old %d" % number for number in range(2500)]
    async with opened(disk, options, chaos) as volume:
        for name in present:
            await put(volume, name, b"")
    chaos.delay = 0.2
    async with opened(disk, options, chaos) as volume:
        rng = chaos.random
        model = set(present)
        finished = trio.Event()

        async def change() -> None:
            for number in range(300):
                name = rng.choice(present) if rng.random() < 0.5 else b"new %d" % number
                if name in model:
                    await volume.blocks.delete(ROOT_INODE, [name])
                    model.remove(name)
                else:
                    await put(volume, name, b"x")
                    model.add(name)
                await trio.sleep(0.01 * rng.random())
            finished.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(change)
            while not finished.is_set():
                names = rng.sample(present, 20) + [b"new %d" % rng.randrange(300) for _ in range(20)]
                before = set(model)
                found = await volume.blocks.exists(ROOT_INODE, names)
                for name, exists in zip(names, found, strict=True):
                    if (name in before) == (name in model):
                        assert exists == (name in model), name
                await trio.sleep(0.002)
        chaos.delay = 0
        everything = [*present, *[b"new %d" % number for number in range(300)]]
        for _ in range(3):
            assert await volume.blocks.exists(ROOT_INODE, everything) == [name in model for name in everything]


async def test_a_known_directory_costs_no_round_trip(disk: Disk, options: Options) -> None:
    names = [b"%d" % number for number in range(2000)]
    async with opened(disk, options) as volume:
        folder = (await volume.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        for name in names[::2]:
            await put(volume, name, b"", directory=folder)
        await volume.sync()
        wanted = [True, False] * 1000
        counters = inside.records(volume).counters
        gets = counters.round_trips
        assert await volume.blocks.exists(folder, names) == wanted
        assert counters.round_trips == gets, "a directory that was made here"
    async with opened(disk, options) as volume:
        assert await volume.blocks.exists(folder, names) == wanted
        counters = inside.records(volume).counters
        gets = counters.round_trips
        assert await volume.blocks.exists(folder, names) == wanted
        assert counters.round_trips == gets, "a directory that was read to its end"


async def test_names_that_need_no_wait_leave_turns_to_others() -> None:
    """However many peers a call has: 16 names in a pass of the event loop. All of 128 were dealt with in one."""
    dealt, seen = 0, list[int]()

    async def deal(number: int, name: bytes) -> None:
        nonlocal dealt
        dealt += 1

    async def watch() -> None:
        while dealt < 200:
            seen.append(dealt)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await _for_each([b"name"] * 200, deal, 128)
    assert max(after - before for before, after in pairwise([*seen, 200])) <= 32


async def test_names_that_wait_wait_together() -> None:
    waiting, most = 0, 0
    goes_on = trio.Event()

    async def wait(number: int, name: bytes) -> None:
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        await goes_on.wait()
        waiting -= 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_for_each, [b"name"] * 100, wait, 32)
        await trio.testing.wait_all_tasks_blocked()
        assert waiting == 32
        goes_on.set()
    assert (waiting, most) == (0, 32)
