"""Copies that are compressed: smaller slots for the same bytes, and no work where nothing is gained."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from disk_lab import engine_reads, filled, tier_of, tier_options, with_tier
from shared_lab import put, read
from volume_lab import Disk

from kvfuse.checksum import GRANULE_SIZE
from kvfuse.remote.segments.api import Transfer
from kvfuse.volume.store.codec import TRIED_ONE_OF, Codec, Trials
from kvfuse.volume.volume import Volume

pytest.importorskip("zstandard")

KIB = 1 << 10
Make = Callable[[random.Random, int], bytes]


def bf16(rng: random.Random, size: int) -> bytes:
    """As activations are distributed: of two bytes one has little in it."""
    values = np.random.default_rng(rng.randrange(1 << 32)).standard_normal(size // 2).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def noise(rng: random.Random, size: int) -> bytes:
    return rng.randbytes(size)


def zeros(rng: random.Random, size: int) -> bytes:
    return bytes(size)


async def store(volume: Volume, stored: dict[bytes, bytes]) -> None:
    for name, data in stored.items():
        await put(volume, name, data)
        assert await read(volume, name) == data
        await filled(volume)


async def read_from_the_tier(volume: Volume, stored: dict[bytes, bytes]) -> None:
    before = engine_reads(volume)
    for name, data in stored.items():
        assert await read(volume, name) == data
    assert engine_reads(volume) == before


@pytest.mark.parametrize(("make", "saves"), [(bf16, True), (zeros, True), (noise, False)])
async def test_what_gets_a_smaller_slot_is_compressed(
    tmp_path: Path, rng: random.Random, make: Make, saves: bool
) -> None:
    options = tier_options(tmp_path / "tier", compression="zstd")
    disk = Disk.format(options, shared=True)
    stored = {b"%d" % size: make(rng, size) for size in (2, 4 * KIB, 64 * KIB, 256 * KIB, 1000 * KIB)}
    async with with_tier(disk, options) as volume:
        await store(volume, stored)
        found = tier_of(volume).statistics()
        assert (found["saved_bytes"] > 0) == saves
        assert (found["used_bytes"] < found["kept_bytes"]) == saves
        assert (found["compressed_to"] < 0.9) == saves
        await read_from_the_tier(volume, stored)
    async with with_tier(disk, options) as volume:
        again = tier_of(volume).statistics()
        assert [again[name] for name in ("kept_bytes", "saved_bytes", "used_bytes", "copies")] == [
            found[name] for name in ("kept_bytes", "saved_bytes", "used_bytes", "copies")
        ]
        await read_from_the_tier(volume, stored)


async def test_damage_of_a_compressed_copy_is_found(tmp_path: Path, rng: random.Random) -> None:
    options = tier_options(tmp_path / "tier", compression="zstd")
    disk = Disk.format(options, shared=True)
    stored = {b"%d" % number: bf16(rng, 128 * KIB) for number in range(30)}
    async with with_tier(disk, options) as volume:
        await store(volume, stored)
        tier = tier_of(volume)
        for copy in tier.index.copies.values():
            assert copy.stored < copy.length
            start = rng.choice((0, rng.randrange(copy.stored - 16)))
            place = tier.folder.geometry.locate(copy.place + start)
            await tier.folder.segments.write([Transfer(*place, rng.randbytes(16))])
        count = len(tier.index.copies)
        for name, data in stored.items():
            assert await read(volume, name) == data
        assert tier.counters.damaged == count


async def test_compressed_copies_are_read_where_nothing_is_compressed_any_more(
    tmp_path: Path, rng: random.Random
) -> None:
    options = tier_options(tmp_path / "tier", compression="zstd")
    disk = Disk.format(options, shared=True)
    stored = {b"a": bf16(rng, 128 * KIB)}
    async with with_tier(disk, options) as volume:
        await store(volume, stored)
    options = tier_options(tmp_path / "tier")
    async with with_tier(disk, options) as volume:
        await read_from_the_tier(volume, stored)


def test_frames_that_promise_too_much_are_damaged() -> None:
    import zstandard

    large = zstandard.ZstdCompressor().compress(bytes(100 * GRANULE_SIZE))  # says so in its header
    unsaid = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100 * GRANULE_SIZE))
    for frame in (large, unsaid, b"", b"x" * 100):
        target = bytearray(b"t" * 1000)
        Codec().unpack([(memoryview(frame), memoryview(target))])
        assert target != bytes(1000)


def test_while_nothing_is_gained_few_are_tried() -> None:
    trials = Trials()

    def tried(count: int, *, is_smaller: bool) -> int:
        found = 0
        for _ in range(count):
            if trials.is_due():
                found += 1
                trials.note(1000, 500, is_smaller=is_smaller)
        return found

    assert tried(100, is_smaller=True) == 100
    tried(400, is_smaller=False)
    assert tried(160, is_smaller=False) == 160 // TRIED_ONE_OF
    tried(160, is_smaller=True)
    assert tried(100, is_smaller=True) == 100, "it is noticed when it pays again"
