"""Data and holes of files with more chunks than a page of records has, as what is stored and what is in memory say."""

from __future__ import annotations

import os
import random

import pytest
from volume_lab import CALLER, MIB, Disk, lab_options, opened

from kvfuse.errors import NoSuchOffset
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.content import holes
from kvfuse.volume.volume import Volume

OPTIONS = lab_options(capacity=64 * MIB)
CHUNKS = 60


async def next_of(volume: Volume, ino: int, offset: int, *, data: bool) -> int | None:
    try:
        return await volume.inodes.seek(ino, offset, data=data)
    except NoSuchOffset:
        return None


async def test_stored_and_changed_chunks_are_seen_together(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holes, "PAGE", 3)
    disk = Disk.format(OPTIONS)
    async with opened(disk, OPTIONS) as volume:
        handle, node = await volume.tree.create(ROOT_INODE, b"file", 0o644, CALLER, os.O_RDWR)
        ino, size = node.ino, node.chunk_size
        written: set[int] = set()
        await volume.files.release(handle)
    for _ in range(4):
        async with opened(disk, OPTIONS) as volume:  # nothing of the file is in memory
            await volume.tree.lookup(ROOT_INODE, b"file")
            handle = await volume.files.open(ino, os.O_RDWR, CALLER)
            for _ in range(8):
                if rng.random() < 0.2:
                    bound = rng.randrange(CHUNKS)
                    await volume.inodes.set_attributes(ino, Changes(size=bound * size), CALLER)
                    written = {index for index in written if index < bound}
                await volume.inodes.set_attributes(ino, Changes(size=CHUNKS * size), CALLER)
                for index in rng.sample(range(CHUNKS), rng.randrange(6)):
                    await volume.files.write(handle, index * size, bytes(size))
                    written.add(index)
                await compare(volume, ino, size, written)
            await volume.files.release(handle)


async def compare(volume: Volume, ino: int, size: int, written: set[int]) -> None:
    """``written``: chunks that are data as a whole; the others are holes."""
    for index in range(CHUNKS):
        later = [number for number in range(index, CHUNKS) if number in written]
        absent = [number for number in range(index, CHUNKS + 1) if number not in written]
        offset = index * size + 5
        data = max(later[0] * size, offset) if later else None
        assert await next_of(volume, ino, offset, data=True) == data
        assert await next_of(volume, ino, offset, data=False) == max(absent[0] * size, offset)
