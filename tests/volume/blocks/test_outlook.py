"""Look-ups that say where blocks are, and take for absent what is computed sooner than read."""

from __future__ import annotations

import inside
import pytest
from block_calls import CHUNK, put
from volume_lab import MIB, Disk, lab_options, opened

from kvfuse.options.config import Options
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.measures.speeds import Speed, Speeds, Tier
from kvfuse.volume.tenancy.namespace_attributes import NAMESPACE
from kvfuse.volume.volume import Volume

NAMES = [b"a", b"b", b"c", b"absent", b"d"]
SIZE = 50_000


@pytest.fixture
def options() -> Options:
    return lab_options(capacity=16 * MIB, chunk=CHUNK)


async def _filled(volume: Volume) -> None:
    for name in NAMES:
        if name != b"absent":
            await put(volume, name, bytes(SIZE))
    await volume.sync()


def _have_speeds(volume: Volume) -> None:
    """0.1 s and 50 ms for each block of the segments, 1 ms for one in memory."""
    core = inside.core(volume)
    core.reads.speeds = Speeds(dram=Speed(0.0, SIZE * 1000), remote=Speed(0.1, SIZE * 20))


async def test_costs_know_tiers_and_sizes_of_what_memory_has_and_has_not(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        await _filled(volume)
    async with opened(disk, options) as volume:
        _have_speeds(volume)
        tiers, seconds = await volume.blocks.costs(ROOT_INODE, NAMES)
        assert tiers.tolist() == [Tier.REMOTE, Tier.REMOTE, Tier.REMOTE, Tier.NONE, Tier.REMOTE]
        assert seconds == pytest.approx([0.15, 0.2, 0.25, 0.25, 0.3])
        assert await volume.blocks.prefetch(ROOT_INODE, [b"a", b"c"]) == [True, True]
        _have_speeds(volume)
        tiers, seconds = await volume.blocks.costs(ROOT_INODE, NAMES)
        assert tiers.tolist() == [Tier.DRAM, Tier.REMOTE, Tier.DRAM, Tier.NONE, Tier.REMOTE]
        assert seconds == pytest.approx([0.001, 0.15, 0.15, 0.15, 0.2])


async def test_what_is_computed_sooner_is_absent(disk: Disk, options: Options) -> None:
    async with opened(disk, options) as volume:
        await _filled(volume)
        await volume.inodes.set_xattr(ROOT_INODE, NAMESPACE, b"token_size=50KiB recompute_speed=0")
    async with opened(disk, options) as volume:
        _have_speeds(volume)
        everything = [True, True, True, False, True]
        assert await volume.blocks.exists(ROOT_INODE, NAMES) == everything
        await volume.inodes.set_xattr(ROOT_INODE, NAMESPACE, b"token_size=50000 recompute_speed=1")
        assert await volume.blocks.exists(ROOT_INODE, NAMES) == everything, "1 s a block"
        await volume.inodes.set_xattr(ROOT_INODE, NAMESPACE, b"recompute_speed=10000000")
        assert await volume.blocks.exists(ROOT_INODE, NAMES) == [False] * 5, "0.1 us a block"
        await volume.inodes.set_xattr(ROOT_INODE, NAMESPACE, b"recompute_speed=100")
        assert await volume.blocks.prefetch(ROOT_INODE, [b"a", b"b"]) == [True, True]
        _have_speeds(volume)
        assert await volume.blocks.exists(ROOT_INODE, NAMES) == [True, True, False, False, False]
        tiers, _ = await volume.blocks.costs(ROOT_INODE, NAMES)
        assert tiers.tolist() == [Tier.DRAM, Tier.DRAM, Tier.NONE, Tier.NONE, Tier.NONE]
