"""Shared memory that is taken back from those who map it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from kvfuse.volume.tier.revocable import RevocableMemory, Supply
from kvfuse.volume.tier.shared_tier import ReadClass, SharedTier

MIB = 1 << 20
HERE = ReadClass(1, 0, 0, 0o444)


@pytest.fixture(params=["guarded", "not guarded"])
def supply(request: pytest.FixtureRequest) -> Supply:
    return Supply(is_guarded=request.param == "guarded")


def there(piece: RevocableMemory) -> int:
    return os.fstat(piece.descriptor).st_blocks * 512


def test_pages_are_gone_for_all_who_map_them(supply: Supply) -> None:
    piece = supply.make("test", 2 * MIB)
    written = mmap.mmap(piece.descriptor, 2 * MIB)
    written[:] = b"x" * (2 * MIB)
    shown = piece.open_for_others()
    read = mmap.mmap(shown, 2 * MIB, prot=mmap.PROT_READ)
    os.close(shown)
    assert read[:] == written[:]
    piece.take_back(MIB, 2 * MIB)
    assert there(piece) == MIB
    assert read[:] == b"x" * MIB + bytes(MIB)
    piece.take_back(0, 2 * MIB)
    assert there(piece) == 0
    assert not any(read[:])
    written.close()
    read.close()


@pytest.mark.root
def test_only_guarded_memory_is_for_all() -> None:
    assert Supply().is_for_all
    assert not Supply(is_guarded=False).is_for_all


@pytest.mark.root
def test_nothing_is_mounted_where_others_see_it() -> None:
    before = Path("/proc/self/mountinfo").read_bytes().count(b"kvfuse-memory")
    supply = Supply()
    piece = supply.make("test", MIB)
    assert Path("/proc/self/mountinfo").read_bytes().count(b"kvfuse-memory") == before == 0
    assert Path("/proc/self/stat").exists(), "the place where it was mounted is as before"
    os.pwrite(piece.descriptor, b"x", 0)
    del supply
    assert os.pread(piece.readable, 1, 0) == b"x", "a piece is there without its supply"


def test_an_arena_that_somebody_maps_counts_until_it_is_taken_back() -> None:
    tier = SharedTier(4 * MIB)
    blocks = [tier.allocate(MIB, HERE) for _ in range(4)]
    assert None not in blocks
    number = next(iter(tier._pool.arenas))
    descriptor = tier.arena_descriptor(number)
    os.pwrite(tier._pool.arenas[number].memory.descriptor, b"x" * 4 * MIB, 0)
    blocks.clear()
    tier.retire([HERE.directory])
    assert number not in tier._pool.arenas
    assert tier.statistics().used_bytes == 4 * MIB, "nobody was there to take it back"
    assert tier.allocate(3 * MIB, HERE) is not None, "who needs room does"
    assert tier.statistics().used_bytes <= 4 * MIB
    while tier._pool.ended:
        tier.settle()
    assert tier.statistics().used_bytes == 3 * MIB
    assert os.fstat(descriptor).st_blocks == 0
    os.close(descriptor)
