"""Another host takes rights away: when this one hears of it, what its clients have of the folders below ends."""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable

import msgspec
import pytest
import trio.testing
from shared_lab import eventually, quiet, volumes
from volume_lab import CALLER, Chaos, Disk, lab_options

from kvfuse.options.options import NamespaceOptions
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.blocks.block_engine import BlockEngine
from kvfuse.volume.namespaces.settings import ROOT
from kvfuse.volume.tier.shared_tier import ReadClass
from kvfuse.volume.volume import Volume

NAMES = b"top", b"middle", b"low"


async def close(host: Volume, inos: dict[bytes, int], name: bytes) -> None:
    await host.inodes.set_attributes(inos[name], Changes(mode=0o700), CALLER)


async def move(host: Volume, inos: dict[bytes, int], name: bytes) -> None:
    parent = ROOT_INODE if name == b"top" else inos[NAMES[NAMES.index(name) - 1]]
    await host.tree.rename(parent, name, inos[b"elsewhere"], name, 0)


@pytest.mark.parametrize("is_missed", [False, True], ids=["heard", "while the watch was broken"])
@pytest.mark.parametrize("is_strict", [False, True], ids=["relaxed", "strict"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [close, move])
async def test_what_another_host_changes_ends_the_memory_of_clients(
    change: Callable[[Volume, dict[bytes, int], bytes], Awaitable[None]], name: bytes, is_strict: bool,
    is_missed: bool, rng: random.Random, autojump_clock: trio.testing.MockClock,
) -> None:  # fmt: skip
    """Though nothing keeps the inodes in memory."""
    options = msgspec.structs.replace(lab_options(strict=is_strict, nodes=8), namespace=NamespaceOptions(kind="blocks"))
    chaos = [Chaos(random.Random(rng.random()), delay=0.5) for _ in range(2)]
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng, chaos) as (one, two):
        inos = {b"elsewhere": (await one.tree.make_directory(ROOT_INODE, b"elsewhere", 0o755, CALLER)).ino}
        parent = ROOT_INODE
        for folder in NAMES:
            parent = inos[folder] = (await one.tree.make_directory(parent, folder, 0o755, CALLER)).ino
        await quiet(one, two)
        readers = ReadClass(parent, CALLER.uid, CALLER.gid, 0o444)
        block = two.tier.allocate(1000, readers)
        assert block is not None
        ancestors, _ = await two.search.ancestors(parent)
        os.close(two.tier.arena_descriptor(block.arena, ancestors))
        engine = two.rows
        assert isinstance(engine, BlockEngine)
        table = engine.table(parent, ROOT, CALLER.uid, CALLER.gid, 0o644)
        engine.shown.open(table, ancestors, is_unlimited=False)
        for number in range(40):  # others take the places of inodes in memory
            await two.tree.make_directory(inos[b"elsewhere"], b"%d" % number, 0o755, CALLER)
        await quiet(one, two)
        del ancestors
        assert two.tier.readers_of(block.arena) == (readers, False)
        broken = [watch for watch in disk.watches if is_missed and watch._chaos is chaos[1]]
        for watch in broken:
            disk.watches.discard(watch)
        await change(one, inos, name)
        await one.sync()
        for watch in broken:
            watch.break_off()

        async def has_heard() -> bool:
            found = two.tier.readers_of(block.arena)
            return found is None or found[1]

        await eventually(has_heard)
        assert table.has_ended
        later = two.tier.allocate(1000, readers)
        assert later is not None
        assert later.arena != block.arena
