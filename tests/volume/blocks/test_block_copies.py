"""Blocks in the shared-memory tier, crashes, and block calls against a plain model."""

from __future__ import annotations

import copy
import os
import random

import inside
import pytest
import trio
import trio.testing
from block_calls import (
    CHUNK,
    READERS,
    bound,
    get,
    get_bound,
    has_copy_rows,
    overwrite,
    put,
    put_shared,
)
from volume_lab import CALLER, MIB, Chaos, Disk, check, lab_options, opened

from kvfuse.errors import EngineError, InvalidArgument
from kvfuse.options.config import Options
from kvfuse.remote.segments.api import Transfer
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.tenancy.namespace_attributes import NAMESPACE
from kvfuse.volume.tier.shared_tier import ReadClass
from kvfuse.volume.volume import Volume


@pytest.fixture
def options() -> Options:
    return lab_options(capacity=16 * MIB, chunk=CHUNK)


# -- the tier -----------------------------------------------------------------------------------------


async def test_a_put_block_of_the_tier_is_shown_there(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        data = random.randbytes(2 * CHUNK + 5)
        block = await put_shared(volume, b"block", data)
        for state in ("staged", "in slots"):
            binding = await bound(volume, b"block")
            await volume.files.show(await volume.inodes.attributes(binding.ino), 0, 2)
            rows = [binding.map.rows[index] for index in range(3)]
            assert all(row.block is block for row in rows), state
            assert b"".join(bytes(row.source.bytes[row.start :][: row.length]) for row in rows if row.source) == data
            await volume.sync()
        other = inside.tier(volume).allocate(5, ReadClass(99, 0, 0, 0o444))
        assert other is not None
        await volume.blocks.put(ROOT_INODE, b"other", other, CALLER, 0o644)
        assert inside.tier(volume).find((await bound(volume, b"other")).ino) is None, "it has other readers"


@pytest.mark.parametrize(
    "change", ["write", "append", "shorten", "grow", "chmod", "chown", "move", "link", "unlink", "replace"]
)
@pytest.mark.parametrize("state", ["staged", "in slots", "loaded"])
async def test_a_copy_goes_when_it_is_no_longer_true(disk: Disk, options: Options, change: str, state: str) -> None:
    async with opened(disk, options) as volume:
        folder = (await volume.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        if state == "loaded":
            await put(volume, b"block", b"a" * CHUNK + b"b")
            await volume.sync()
            assert await volume.blocks.prefetch(ROOT_INODE, [b"block"]) == [True]
        else:
            await put_shared(volume, b"block", b"a" * CHUNK + b"b")
            if state == "in slots":
                await volume.sync()
        binding = await bound(volume, b"block")
        ino = binding.ino
        await volume.files.show(await volume.inodes.attributes(ino), 0, 1)
        assert inside.tier(volume).find(ino) is not None
        assert has_copy_rows(binding)
        version = binding.map.version
        if change in ("write", "append"):
            await overwrite(volume, ino, 0 if change == "write" else CHUNK + 1, b"new")
        elif change in ("shorten", "grow"):
            await volume.inodes.set_attributes(ino, Changes(size=CHUNK if change == "shorten" else 2 * CHUNK), CALLER)
        elif change == "chmod":
            await volume.inodes.set_attributes(ino, Changes(mode=0o600), CALLER)
        elif change == "chown":
            await volume.inodes.set_attributes(ino, Changes(uid=1), CALLER)
        elif change == "move":
            await volume.tree.rename(ROOT_INODE, b"block", folder, b"block", 0)
        elif change == "link":
            await volume.tree.link(ino, folder, b"block")
        elif change == "unlink":
            await volume.tree.unlink(ROOT_INODE, b"block")
        else:
            await put(volume, b"block", b"new")
        assert inside.tier(volume).find(ino) is None
        assert not has_copy_rows(binding)
        assert binding.map.version > version


async def test_prefetch_loads_what_it_can(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        for name in (b"a", b"b", b"linked", b"open"):
            await put(volume, name, name * 1000)
        await put(volume, b"empty", b"")
        await volume.tree.link((await bound(volume, b"linked")).ino, ROOT_INODE, b"linked 2")
        await volume.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)
        node = await volume.tree.lookup(ROOT_INODE, b"open")
        handle = await volume.files.open(node.ino, os.O_RDWR, CALLER)
        await volume.sync()
        names = [b"a", b"absent", b"b", b"linked", b"open", b"empty", b"folder", b"a"]
        assert await volume.blocks.prefetch(ROOT_INODE, names) == [True, False, True, *[False] * 4, True]
        await volume.files.release(handle)
        assert await volume.blocks.prefetch(ROOT_INODE, [b"open"]) == [True]
        for name in (b"a", b"b", b"open"):
            block = inside.tier(volume).find((await bound(volume, name)).ino)
            assert block is not None
            assert bytes(block.buffer) == name * 1000
            assert block.read_class == READERS


async def test_a_namespace_says_whether_its_blocks_are_copied(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        tier, content = inside.tier(volume), bytes(5000)
        for number, (setting, expected) in enumerate(
            [(b"tiers=disk", False), (b"tiers=dram", True), (b"tiers=remote", False), (b"tiers=all", True)]
        ):
            await volume.inodes.set_xattr(ROOT_INODE, NAMESPACE, setting)
            fetched, given = b"fetched %d" % number, b"given %d" % number
            await put(volume, fetched, content)
            assert await volume.blocks.prefetch(ROOT_INODE, [fetched]) == [expected]
            block = tier.allocate(len(content), ReadClass(ROOT_INODE, CALLER.uid, CALLER.gid, 0o444))
            assert block is not None
            block.buffer.data[:] = content
            await volume.blocks.put(ROOT_INODE, given, block, CALLER, 0o644)
            for name in (fetched, given):
                assert (tier.find((await bound(volume, name)).ino) is not None) == expected, setting
        with pytest.raises(InvalidArgument, match="tiers is one of all, dram, disk, remote"):
            await volume.inodes.set_xattr(ROOT_INODE, NAMESPACE, b"tiers=tape")


async def test_prefetch_verifies(options: Options) -> None:
    disk = Disk.format(options)
    async with opened(disk, options) as volume:
        await put(volume, b"good", b"good" * 1000)
        await put(volume, b"bad", b"bad!" * 1000)
        await volume.sync()
        place = disk.segments[0].index(b"bad!bad!")
        disk.segments[0][place] ^= 1
        assert await volume.blocks.prefetch(ROOT_INODE, [b"bad", b"good"]) == [False, True]
        assert inside.tier(volume).find((await bound(volume, b"bad")).ino) is None


async def test_prefetch_keeps_nothing_that_changes_meanwhile(
    disk: Disk, options: Options, chaos: Chaos, autojump_clock: trio.testing.MockClock
) -> None:
    """Every copy that is found in the tier is what the file door reads, however they interleave."""
    async with opened(disk, options, chaos) as volume:
        names = [b"%d" % number for number in range(4)]
        for name in names:
            await put(volume, name, bytes(CHUNK))
        chaos.delay = 0.5
        rng = chaos.random
        hits = 0

        async def write() -> None:
            for _ in range(60):
                name = rng.choice(names)
                ino = (await bound(volume, name)).ino
                await overwrite(volume, ino, rng.randrange(CHUNK), rng.randbytes(rng.randrange(1, 5000)))
                await trio.sleep(rng.random() * 0.05)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            for _ in range(150):
                await volume.blocks.prefetch(ROOT_INODE, rng.sample(names, 2))
                for name in names:
                    node = await volume.inodes.attributes((await bound(volume, name)).ino)
                    block = inside.tier(volume).find(node.ino)
                    if block is not None:
                        hits += 1
                        data = bytes(block.buffer)
                        handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
                        shown = bytes(await volume.files.read(handle, 0, MIB))
                        await volume.files.release(handle)
                        assert data == shown or inside.tier(volume).find(node.ino) is not block
                await trio.sleep(0.01)
        assert hits
        chaos.delay = 0


@pytest.mark.parametrize("change", ["write", "replace", "chmod"])
async def test_what_changes_while_it_is_read_is_not_kept(
    disk: Disk, options: Options, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    async with opened(disk, options) as volume:
        await put(volume, b"block", b"old" * 1000)
        ino = (await bound(volume, b"block")).ino
        read_into = inside.reader(volume).read_into

        async def read_and_change(node: Node, offset: int, target: memoryview) -> int:
            length = await read_into(node, offset, target)
            if change == "write":
                await overwrite(volume, ino, 0, b"new")
            elif change == "replace":
                await put(volume, b"block", b"new")
            else:
                await volume.inodes.set_attributes(ino, Changes(mode=0o600), CALLER)
            return length

        monkeypatch.setattr(inside.reader(volume), "read_into", read_and_change)
        assert await volume.blocks.prefetch(ROOT_INODE, [b"block"]) == [False]
        assert inside.tier(volume).find(ino) is None
        assert inside.tier(volume).find((await bound(volume, b"block")).ino) is None


async def test_evicted_blocks_leave_the_maps(disk: Disk) -> None:
    options = lab_options(capacity=16 * MIB, chunk=CHUNK, tier_size=4 * CHUNK)
    async with opened(disk, options) as volume:
        names = [b"%d" % number for number in range(4)]
        for name in names:
            await put_shared(volume, name, name * CHUNK)
            binding = await bound(volume, name)
            await volume.files.show(await volume.inodes.attributes(binding.ino), 0, 0)
            assert has_copy_rows(binding)
        await volume.sync()
        await inside.segments(volume).read([Transfer(0, 0, bytearray(1))])
        # From here on no write holds them, and no read whose callers wrote.
        assert inside.tier(volume).allocate(CHUNK, READERS) is None, "the maps still show all blocks"
        await trio.testing.wait_all_tasks_blocked()
        assert not any([has_copy_rows(await bound(volume, name)) for name in names])
        assert inside.tier(volume).allocate(CHUNK, READERS) is not None


async def test_a_directory_with_other_readers_gets_other_arenas(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        folder = (await volume.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
        readers = ReadClass(folder, 0, 0, 0o444)
        before = await put_shared(volume, b"a", b"x", readers)
        await volume.inodes.set_attributes(folder, Changes(mode=0o700), CALLER)
        after = await put_shared(volume, b"b", b"x", readers)
        assert after.arena != before.arena
        assert inside.tier(volume).find((await bound(volume, b"a", folder)).ino) is None


# -- crashes and a model ------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [0.0, 0.1], ids=["slow engines", "failing engines"])
async def test_after_a_crash_every_block_is_whole_or_absent(
    disk: Disk, options: Options, chaos: Chaos, autojump_clock: trio.testing.MockClock, error: float
) -> None:
    """The disk is copied at any moment; each name shows one of the blocks it had since the last sync."""
    rng = chaos.random
    names = [b"%d" % number for number in range(12)]
    history: dict[bytes, list[bytes | None]] = {name: [None] for name in names}
    crashes: list[tuple[Disk, dict[bytes, list[bytes | None]]]] = []
    finished = trio.Event()

    async def crash() -> None:
        while not finished.is_set():
            crashes.append((disk.copy(), copy.deepcopy(history)))
            await trio.sleep(0.02 + rng.random() * 0.1)

    async def link(volume: Volume, name: bytes) -> None:
        alias = b"alias of " + name
        await volume.blocks.delete(ROOT_INODE, [alias])
        ino = (await bound(volume, name)).ino
        await volume.tree.link(ino, ROOT_INODE, alias)
        volume.tree.forget(ino, 1)

    async def step(volume: Volume, name: bytes, own: list[bytes]) -> None:
        data = rng.randbytes(rng.choice([0, 10, 5000, CHUNK, 3 * CHUNK + 7]))
        action = rng.random()
        if action < 0.7:
            history[name].append(data)
            await (put(volume, name, data) if not data or action < 0.4 else put_shared(volume, name, data))
        elif action < 0.8:
            history[name].append(None)
            await volume.blocks.delete(ROOT_INODE, [name])
        elif action < 0.9 and history[name][-1] is not None:
            await link(volume, name)
        else:
            marks = {each: len(history[each]) - 1 for each in own}
            await volume.sync()
            for each, mark in marks.items():
                del history[each][:mark]

    async def change(volume: Volume, number: int) -> None:
        own = names[number::3]
        for _ in range(60):
            name = rng.choice(own)
            try:
                await step(volume, name, own)
            except EngineError:  # before anything was changed, or after
                history[name].append(await get(volume, name))
            assert await get(volume, name) == history[name][-1]
            await trio.sleep(rng.random() * 0.05)

    async with opened(disk, options, chaos) as volume, trio.open_nursery() as nursery:
        chaos.delay, chaos.commit_error, chaos.write_error = 0.3, error, error
        nursery.start_soon(crash)
        async with trio.open_nursery() as writers:
            for number in range(3):
                writers.start_soon(change, volume, number)
        finished.set()
        chaos.delay = chaos.commit_error = chaos.write_error = 0
    assert len(crashes) > 10
    for left, expected in rng.sample(crashes, 10):
        report = await check(left.copy())
        assert report.clean, report
        async with opened(left, options) as volume:
            for name in names:
                assert await get(volume, name) in expected[name]
    async with opened(disk, options) as volume:
        for name in names:
            assert await get(volume, name) == history[name][-1]


async def test_block_calls_and_the_file_door_against_a_dict(
    disk: Disk, options: Options, chaos: Chaos, autojump_clock: trio.testing.MockClock
) -> None:
    rng = chaos.random
    names = [b"%d" % number for number in range(20)]
    model: dict[bytes, bytearray] = {}

    async def step(volume: Volume) -> None:
        name, other = rng.sample(names, 2)
        action = rng.choice(["put", "put", "shared", "delete", "rename", "unlink", "link", "write", "load", "sync"])
        data = rng.randbytes(rng.choice([1, 100, 5000, CHUNK + 5]))
        if action in ("put", "shared"):
            await (put(volume, name, data) if action == "put" else put_shared(volume, name, data))
            model[name] = bytearray(data)
        elif action == "delete":
            removed = await volume.blocks.delete(ROOT_INODE, [name, other])
            assert list(map(bool, removed)) == [model.pop(each, None) is not None for each in (name, other)]
        elif action == "load":
            await volume.blocks.prefetch(ROOT_INODE, names)
        elif action == "sync":
            await volume.sync()
        elif name in model:
            await by_file(volume, action, name, other, data)

    async def by_file(volume: Volume, action: str, name: bytes, other: bytes, data: bytes) -> None:
        ino = (await bound(volume, name)).ino
        if action == "rename":
            await volume.tree.rename(ROOT_INODE, name, ROOT_INODE, other, 0)
            if model.get(other) is not model[name]:  # of two names of one file, a rename changes nothing
                model[other] = model.pop(name)
        elif action == "unlink":
            await volume.tree.unlink(ROOT_INODE, name)
            del model[name]
        elif action == "link" and other not in model:
            await volume.tree.link(ino, ROOT_INODE, other)
            volume.tree.forget(ino, 1)
            model[other] = model[name]
        elif action == "write":
            offset = rng.randrange(len(model[name]))
            await overwrite(volume, ino, offset, data)
            model[name][offset : offset + len(data)] = data

    async def compare(volume: Volume) -> None:
        name = rng.choice(names)
        wanted = bytes(model[name]) if name in model else None
        assert await get(volume, name) == wanted
        assert await get_bound(volume, name) == wanted
        assert await volume.blocks.exists(ROOT_INODE, names) == [each in model for each in names]
        if wanted is not None:
            block = inside.tier(volume).find((await bound(volume, name)).ino)
            assert block is None or bytes(block.buffer) == wanted

    chaos.delay = 0.1
    for _ in range(3):
        async with opened(disk, options, chaos) as volume:
            for _ in range(200):
                await step(volume)
                await compare(volume)
