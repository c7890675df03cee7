"""Blocks in shared memory after the daemon was killed: the next one serves those that are right, without engines."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import inside
import pytest
from block_calls import CHUNK, bound, get_bound, overwrite, put, put_shared
from kept_memory import after_kill, let_go
from packing_lab import compressible, pack_everything
from shared_lab import joined
from volume_lab import CALLER, MIB, Chaos, Disk, check, lab_options, opened

from kvfuse.kept.keeper import MemoryKeeper
from kvfuse.options.config import Options
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.tier.arena_pool import ARENA_PREFIX
from kvfuse.volume.volume import Volume


@pytest.fixture
def options() -> Options:
    return lab_options(capacity=16 * MIB, chunk=CHUNK)


@pytest.fixture
def keeper() -> Iterator[MemoryKeeper]:
    keeper = MemoryKeeper()
    yield keeper
    let_go(keeper)


async def killed(
    disk: Disk, options: Options, keeper: MemoryKeeper, blocks: dict[bytes, bytes], *, is_stored: bool = True
) -> tuple[Disk, MemoryKeeper]:
    """What a daemon leaves that has put these blocks, and was killed."""
    async with opened(disk, options, keeper=keeper) as volume:
        for name, data in blocks.items():
            await put_shared(volume, name, data)
        volume.blocks.hear_of_tier()
        if is_stored:
            await volume.sync()
        return disk.copy(), after_kill(keeper)


async def shown(volume: Volume, name: bytes) -> bytes | None:
    """A block as a ring's thread finds it, in shared memory; None: it is not there."""
    binding = await bound(volume, name)
    last = (binding.map.size - 1) // CHUNK
    await volume.files.show(await volume.inodes.attributes(binding.ino), 0, last)
    rows = [binding.map.rows.get(index) for index in range(last + 1)]
    if any(row is None or row.block is None for row in rows):
        return None
    return b"".join(bytes(row.source.bytes[row.start :][: row.length]) for row in rows if row and row.source)


def left(volume: Volume) -> int:
    return len(inside.tier(volume).left)


async def test_the_next_daemon_serves_blocks_without_its_engines(
    disk: Disk, options: Options, keeper: MemoryKeeper, rng: random.Random
) -> None:
    blocks = {b"block %d" % size: rng.randbytes(size) for size in (1, CHUNK, 3 * CHUNK + 5, 20 * CHUNK)}
    crashed, kept = await killed(disk, options, keeper, blocks)
    async with opened(crashed, options, keeper=kept) as volume:
        counters = inside.segments(volume).counters
        reads = counters.reads
        assert left(volume) == volume.stats()["tier"]["adopted"] == 4
        for name, data in blocks.items():
            assert await shown(volume, name) == data
        tier = inside.tier(volume).statistics()
        assert counters.reads == reads
        assert (tier.misses, tier.blocks) == (0, 4)
        assert left(volume) == 0
        assert await volume.blocks.prefetch(ROOT_INODE, list(blocks)) == [True] * 4
        assert counters.reads == reads
        crashed, again = crashed.copy(), after_kill(kept)
    let_go(kept)
    async with opened(crashed, options, keeper=again) as volume:
        reads = inside.segments(volume).counters.reads
        assert await volume.blocks.prefetch(ROOT_INODE, list(blocks)) == [True] * 4
        assert inside.segments(volume).counters.reads == reads
        assert [await shown(volume, name) for name in blocks] == list(blocks.values())
    let_go(again)
    assert (await check(crashed)).clean


async def test_torn_bytes_are_found(disk: Disk, options: Options, keeper: MemoryKeeper, rng: random.Random) -> None:
    blocks = {b"torn": rng.randbytes(2 * CHUNK), b"whole": rng.randbytes(2 * CHUNK)}
    crashed, kept = await killed(disk, options, keeper, blocks)
    tear(kept, rng.randrange(2 * CHUNK - 4))
    async with opened(crashed, options, keeper=kept) as volume:
        assert left(volume) == 2
        assert await shown(volume, b"torn") is None
        assert await get_bound(volume, b"torn") == blocks[b"torn"]
        assert await shown(volume, b"whole") == blocks[b"whole"]
    let_go(kept)


@pytest.mark.parametrize("change", ["nothing", "torn", "other bytes", "one chunk"])
@pytest.mark.parametrize("how", ["put", "prefetched"])
async def test_blocks_that_are_stored_compressed(
    disk: Disk,
    options: Options,
    keeper: MemoryKeeper,
    rng: random.Random,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    how: str,
) -> None:
    pack_everything(monkeypatch)
    data, other = compressible(rng, 3 * CHUNK + 500), compressible(rng, 3 * CHUNK + 500)
    async with opened(disk, options, keeper=keeper) as volume:
        if how == "put":
            await put_shared(volume, b"block", data)
        else:
            await put(volume, b"block", data)
        await volume.sync()
        assert await volume.blocks.prefetch(ROOT_INODE, [b"block"]) == [True]
        node = await volume.inodes.attributes((await bound(volume, b"block")).ino)
        assert [bool(node.chunks[index].extents[0].packing) for index in range(4)] == [True, True, True, False]
        volume.blocks.hear_of_tier()
        crashed, kept = disk.copy(), after_kill(keeper)
    if change == "torn":
        tear(kept, rng.randrange(3 * CHUNK))
    elif change in ("other bytes", "one chunk"):
        data = other if change == "other bytes" else data[:CHUNK] + other[CHUNK : 2 * CHUNK] + data[2 * CHUNK :]
        async with opened(crashed, options) as volume:
            await overwrite(volume, (await bound(volume, b"block")).ino, 0, data)
    async with opened(crashed, options, keeper=kept) as volume:
        reads = inside.segments(volume).counters.reads
        assert await shown(volume, b"block") == (data if change == "nothing" else None)
        assert inside.segments(volume).counters.reads == reads
        assert await get_bound(volume, b"block") == data
    let_go(kept)


def tear(keeper: MemoryKeeper, offset: int) -> None:
    """Change bytes in the only arena."""
    (name,) = keeper.list_names(ARENA_PREFIX)
    found = keeper.take(name)
    assert found is not None
    os.pwrite(found.descriptors[0], b"torn", offset)
    for descriptor in found.descriptors:
        os.close(descriptor)


async def test_blocks_that_were_not_stored_are_not_there(disk: Disk, options: Options, keeper: MemoryKeeper) -> None:
    crashed, kept = await killed(disk, options, keeper, {b"block": b"a" * CHUNK}, is_stored=False)
    async with opened(crashed, options, keeper=kept) as volume:
        assert await volume.blocks.bind(ROOT_INODE, b"block") is None
        await put(volume, b"block", b"b" * CHUNK)
        assert await get_bound(volume, b"block") == b"b" * CHUNK
    let_go(kept)


CHANGES = ["write", "shorten", "grow", "chmod", "chown", "move", "link", "unlink", "replace"]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("moment", ["while nobody ran", "before it is looked at", "after it was looked at"])
async def test_a_file_that_changes_is_not_shown_as_it_was(
    disk: Disk, options: Options, keeper: MemoryKeeper, change: str, moment: str
) -> None:
    """As another host, or a daemon without the memory, changes it in between; or the next daemon itself."""
    crashed, kept = await killed(disk, options, keeper, {b"block": b"a" * CHUNK, b"other": b"o"})
    if moment == "while nobody ran":
        async with opened(crashed, options) as volume:
            ino = await changed(volume, change)
    async with opened(crashed, options, keeper=kept) as volume:
        if moment != "while nobody ran":
            if moment == "after it was looked at":
                assert await shown(volume, b"block") == b"a" * CHUNK
            ino = await changed(volume, change)
        binding = await volume.blocks.bind(ROOT_INODE, b"block")
        if binding is not None and binding.ino == ino:
            assert await shown(volume, b"block") is None
            assert await get_bound(volume, b"block") == content_after(change)
        assert ino not in inside.tier(volume) or change in ("move", "unlink", "replace")
        assert ino not in inside.tier(volume).kept
        assert await shown(volume, b"other") == b"o"
    let_go(kept)
    assert (await check(crashed)).clean


async def changed(volume: Volume, change: str) -> int:
    """The inode of the block."""
    ino = (await bound(volume, b"block")).ino
    folder = (await volume.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)).ino
    if change == "write":
        await overwrite(volume, ino, 0, b"new")
    elif change in ("shorten", "grow"):
        await volume.inodes.set_attributes(ino, Changes(size=CHUNK // 2 if change == "shorten" else 2 * CHUNK), CALLER)
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
        await put(volume, b"block", b"b" * CHUNK)
    return ino


def content_after(change: str) -> bytes:
    data = b"a" * CHUNK
    return {"write": b"new" + data[3:], "shorten": data[: CHUNK // 2], "grow": data + bytes(CHUNK)}.get(change, data)


@pytest.mark.parametrize("is_same", [True, False])
async def test_a_directory_that_others_may_use_now_has_other_arenas(
    disk: Disk, options: Options, keeper: MemoryKeeper, is_same: bool
) -> None:
    crashed, kept = await killed(disk, options, keeper, {b"block": b"a" * CHUNK})
    async with opened(crashed, options) as volume:
        await volume.inodes.set_attributes(ROOT_INODE, Changes(mode=0o700), CALLER)
        if is_same:
            await volume.inodes.set_attributes(ROOT_INODE, Changes(mode=0o755), CALLER)
    async with opened(crashed, options, keeper=kept) as volume:
        assert left(volume) == is_same
        assert await get_bound(volume, b"block") == b"a" * CHUNK
    let_go(kept)


@pytest.mark.parametrize("change", [*CHANGES, "nothing", "chmod of the directory"])
async def test_what_another_host_changed_while_nobody_ran_here(
    options: Options, keeper: MemoryKeeper, change: str
) -> None:
    disk = Disk.format(options, shared=True)
    async with joined(disk, options, 1, Chaos(random.Random(0)), keeper) as volume:
        for name in (b"block", b"other"):
            await put_shared(volume, name, b"a" * CHUNK)
        volume.blocks.hear_of_tier()
        await volume.sync()
        kept = after_kill(keeper)
    async with joined(disk, options, 2, Chaos(random.Random(0))) as volume:
        ino = (await bound(volume, b"block")).ino
        if change == "chmod of the directory":
            await volume.inodes.set_attributes(ROOT_INODE, Changes(mode=0o700), CALLER)
        elif change != "nothing":
            await changed(volume, change)
        await volume.sync()
    async with joined(disk, options, 3, Chaos(random.Random(0)), kept) as volume:
        assert left(volume) == (0 if change == "chmod of the directory" else 2)
        binding = await volume.blocks.bind(ROOT_INODE, b"block")
        if binding is not None and binding.ino == ino:
            assert (await shown(volume, b"block") is not None) == (change == "nothing")
            assert await get_bound(volume, b"block") == content_after(change)
        assert (await shown(volume, b"other") is not None) == (change != "chmod of the directory")
    let_go(kept)
    assert (await check(disk)).clean


async def test_files_and_blocks_after_kills_against_a_model(
    disk: Disk, options: Options, keeper: MemoryKeeper, rng: random.Random
) -> None:
    """Whatever is read after a kill is a state that the block had, and what was synced is there."""
    names = [b"block %d" % number for number in range(8)]
    states: dict[bytes, list[bytes | None]] = {name: [None] for name in names}
    for _ in range(8):
        async with opened(disk, options, keeper=keeper) as volume:
            for name in names:
                binding = await volume.blocks.bind(ROOT_INODE, name)
                data = None if binding is None else await read_any(volume, name, rng)
                assert data in states[name]
                states[name] = [data]
            for _ in range(rng.randrange(30)):
                name, choice = rng.choice(names), rng.random()
                present = states[name][-1]
                if choice < 0.5:
                    data = rng.randbytes(rng.choice([10, CHUNK, CHUNK + 7]))
                    await put_shared(volume, name, data)
                    states[name].append(data)
                elif choice < 0.6 and present is not None:
                    await volume.blocks.delete(ROOT_INODE, [name])
                    states[name].append(None)
                elif choice < 0.7 and present:
                    await overwrite(volume, (await bound(volume, name)).ino, 0, b"over")
                    states[name] += [b"over"[:cut] + present[cut:] for cut in range(1, 5)]
                elif choice < 0.8 and present is not None:
                    assert await read_any(volume, name, rng) == present
                elif choice < 0.85:
                    await volume.sync()
                    states = {name: [last[-1]] for name, last in states.items()}
                volume.blocks.hear_of_tier()
            crashed, kept = disk.copy(), after_kill(keeper)
        let_go(keeper)
        disk, keeper = crashed, kept
    let_go(keeper)
    assert (await check(disk)).clean


async def read_any(volume: Volume, name: bytes, rng: random.Random) -> bytes | None:
    found = await shown(volume, name) if rng.random() < 0.7 else None
    other = await get_bound(volume, name)
    assert found is None or found == other
    return other
