"""Books that are begun anew have files, too, whose names are not stored yet."""

from __future__ import annotations

import random

import inside
import trio
import trio.testing
from cache_lab import OPTIONS, cache_disk
from cache_play import check_books
from namespace_lab import change_namespace, make_namespace
from volume_lab import CALLER, MIB, Chaos, Disk, check, lab_options, opened

from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.eviction.stored_blocks import read_blocks
from kvfuse.volume.namespaces.settings import ROOT


async def test_a_new_policy_has_what_no_commit_has_stored(autojump_clock: trio.testing.MockClock) -> None:
    options = lab_options(capacity=16 * MIB)
    disk, chaos = Disk.format(options), Chaos(random.Random(0))
    async with opened(disk, options, chaos) as volume:
        folder = await make_namespace(volume, ROOT_INODE, b"n", kind="cache", admission="all", eviction="lru")
        chaos.stalled_commits = trio.Event()
        await volume.blocks.put(folder, b"block", memoryview(bytes(5000)), CALLER, 0o644)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: change_namespace(volume, folder, eviction="fifo"))
            await trio.sleep(3)
            chaos.stalled_commits.set()
        await trio.sleep(3)
        await check_books(disk, volume)
    assert (await check(disk)).clean


async def test_a_namespace_that_went_meanwhile_is_not_read() -> None:
    async with opened(cache_disk(), OPTIONS) as volume:
        await read_blocks(inside.core(volume), [ROOT, 1096], lambda slab: True)
        assert inside.caches(volume)[ROOT].before.is_known
