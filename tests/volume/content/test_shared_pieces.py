"""Files whose chunks lie in many small slots of another client: what gives up all of them is one commit, and no leak.

One commit may carry fewer records than such a file has slots. The audit looks at the records after every commit: so a
crash after any of them leaves no slot that is allocated and nobody's.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from records_audit import Audit
from shared_lab import LEASE, get, names_in, quiet, slots_of, volumes
from volume_lab import CALLER, SHARED_LIMITS, Disk, check, lab_options

from kvfuse.slab.classes import SizeClasses
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.commit.batch import Batch
from kvfuse.volume.volume import Volume

CHUNK = 64 << 10
PIECE = 4096


async def write(volume: Volume, name: bytes, data: bytes) -> None:
    handle, node = await volume.tree.create(ROOT_INODE, name, 0o644, CALLER, os.O_RDWR)
    try:
        assert await volume.files.write(handle, 0, data) == len(data)
    finally:
        await volume.files.release(handle)
        volume.tree.forget(node.ino, 1)


@asynccontextmanager
async def file_in_pieces(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, size: int
) -> AsyncIterator[tuple[Disk, Volume, Volume]]:
    """(disk, who has its slabs, another client): file "pieces" in slots of one page, as where no others are free.

    No commit may be split.
    """
    options = lab_options(strict=True, chunk=CHUNK)
    disk = Disk.format(options, shared=True)
    Audit.attach(disk)
    monkeypatch.setattr(Batch, "split", None)
    monkeypatch.setattr(SizeClasses, "plan", lambda classes, length: (PIECE,) * -(-length // PIECE))
    async with volumes(disk, options, 2, rng) as (one, two):
        await write(one, b"pieces", rng.randbytes(size))
        await quiet(one, two)
        assert sum(slots_of(disk).values()) >= SHARED_LIMITS.commit_operations_max
        yield disk, one, two
        await quiet(one, two)
        await trio.sleep(LEASE)
        assert not [key for key in disk.records if key[:1] in (b"o", b"f")]


@pytest.mark.parametrize("size", [8 * CHUNK, 11 * CHUNK], ids=["inline", "far"])
async def test_a_cut_frees_more_slots_than_a_commit_has_records(
    rng: random.Random, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    async with file_in_pieces(rng, monkeypatch, size) as (disk, one, two):
        data = await get(one, b"pieces")
        node = await two.tree.lookup(ROOT_INODE, b"pieces")
        await two.inodes.set_attributes(node.ino, Changes(size=6000), CALLER)
        crashed = disk.copy()
        assert [key for key in crashed.records if key[:1] == b"o"]
        report = await check(crashed)
        assert report.clean, report.problems
        await quiet(two, one)
        for volume in (one, two):
            assert data is not None
            assert await get(volume, b"pieces") == data[:6000]


@pytest.mark.parametrize("size", [8 * CHUNK, 11 * CHUNK], ids=["inline", "far"])
async def test_a_removed_file_has_more_slots_than_a_commit_has_records(
    rng: random.Random, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    async with file_in_pieces(rng, monkeypatch, size) as (_, one, two):
        await two.tree.unlink(ROOT_INODE, b"pieces")
        await quiet(two, one)
        assert b"pieces" not in await names_in(one)
