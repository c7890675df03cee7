"""Copies in the disk tier: what was read once is not read from the engine again, and is never wrong."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from disk_lab import engine_reads, filled, tier_of, tier_options, with_tier
from shared_lab import put, read
from volume_lab import Disk

from kvfuse.options.config import Options

KIB = 1 << 10
SIZES = 1, 4096, 70_000, 256 * KIB, 700 * KIB, 3_000_000


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return tier_options(tmp_path / "tier")


@pytest.fixture
def disk(options: Options) -> Disk:
    return Disk.format(options, shared=True)


def blocks(rng: random.Random) -> dict[bytes, bytes]:
    return {b"%d" % size: rng.randbytes(size) for size in SIZES}


async def test_a_second_read_asks_no_engine_also_after_a_restart(
    disk: Disk, options: Options, rng: random.Random
) -> None:
    stored = blocks(rng)
    async with with_tier(disk, options) as volume:
        for name, data in stored.items():
            await put(volume, name, data)
        for name, data in stored.items():
            assert await read(volume, name) == data
        await filled(volume)
        before = engine_reads(volume)
        assert before
        for name, data in stored.items():
            assert await read(volume, name) == data
        assert engine_reads(volume) == before
        statistics = tier_of(volume).statistics()
        assert statistics["kept_bytes"] == sum(SIZES)
        assert 0 < statistics["local_share"] < 1
    async with with_tier(disk, options) as volume:
        statistics = tier_of(volume).statistics()
        assert statistics["kept_bytes"] == sum(SIZES)
        assert statistics["adopted"] == statistics["copies"]
        before = engine_reads(volume)
        for name, data in stored.items():
            assert await read(volume, name) == data
        assert engine_reads(volume) == before
        assert tier_of(volume).statistics()["local_share"] == 1
