"""A write with O_DIRECT returns when the chunks that are whole with it are in the segment."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import inside
import pytest
import trio
from shared_lab import put
from volume_lab import CALLER, MIB, Chaos, Disk, check, lab_options, opened

from kvfuse.errors import EngineError, NoSpace, NotFound
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.volume import Volume

GRANULE = 256 << 10


@dataclass
class Lab:
    """A volume with chunks of 1 MiB, and a file in it that is open with O_DIRECT."""

    disk: Disk
    volume: Volume
    handle: FileHandle
    chaos: Chaos
    content: bytearray = field(default_factory=bytearray)

    @property
    def staged(self) -> int:
        return inside.journal(self.volume).flusher.staged_bytes

    async def write(self, offset: int, data: bytes) -> None:
        assert await self.volume.files.write(self.handle, offset, data, by_kernel=True) == len(data)

    async def read(self) -> bytes:
        return bytes(await self.volume.files.read(self.handle, 0, 8 * MIB))

    def in_segments(self, index: int) -> bytes:
        """A chunk's bytes where its extents say that they are."""
        data = b""
        for extent in self.handle.node.chunks[index].extents:
            segment, offset = inside.core(self.volume).locate(extent.addr)
            data += self.disk.segments[segment][offset : offset + extent.length]
        return data

    @asynccontextmanager
    async def stalled(self) -> AsyncIterator[trio.Nursery]:
        """The engine does not go on with what it writes until the end of the block, which waits for its tasks."""
        self.chaos.stalled, self.chaos.first_write = trio.Event(), trio.Event()
        async with trio.open_nursery() as nursery:
            yield nursery
            self.chaos.stalled.set()


async def begun() -> None:
    """What was started has come to where it waits."""
    for _ in range(50):
        await trio.lowlevel.checkpoint()


@asynccontextmanager
async def lab(flags: int = os.O_RDWR | os.O_DIRECT) -> AsyncIterator[Lab]:
    options, chaos = lab_options(capacity=16 * MIB), Chaos(random.Random(0))
    disk = Disk.format(options)
    async with opened(disk, options, chaos) as volume:
        await put(volume, b"other", b"makes the segment")
        await volume.sync()
        handle, _ = await volume.tree.create(ROOT_INODE, b"file", 0o644, CALLER, flags)
        yield Lab(disk, volume, handle, chaos)
        await volume.files.release(handle)
    assert (await check(disk)).clean


@pytest.mark.parametrize("size", [GRANULE, 100_000, MIB, 5 * MIB // 2])
async def test_whole_chunks_are_in_the_segment_when_the_write_returns(size: int, rng: random.Random) -> None:
    """What is less than a chunk waits for the rest of it."""
    async with lab() as found:
        content = rng.randbytes(5 * MIB)
        for start in range(0, len(content), size):
            await found.write(start, content[start : start + size])
            end = min(start + size, len(content))
            assert found.staged == end % MIB
            for index in range(end // MIB):
                assert found.in_segments(index) == content[index * MIB : (index + 1) * MIB]
        assert await found.read() == content


async def test_other_writes_do_not_wait_for_the_segment(rng: random.Random) -> None:
    async with lab(os.O_RDWR) as found, found.stalled():
        await found.write(0, rng.randbytes(MIB))
        assert found.staged == MIB


async def test_an_error_of_the_engine_is_that_of_the_write(rng: random.Random) -> None:
    """What was taken of the chunk before is not lost."""
    async with lab() as found:
        content = rng.randbytes(MIB)
        await found.write(0, content[: 3 * GRANULE])
        found.chaos.write_error = 1
        with pytest.raises(EngineError, match="injected"):
            await found.write(3 * GRANULE, content[3 * GRANULE :])
        found.chaos.write_error = 0
        await found.volume.files.fsync(found.handle)
        assert found.staged == 0
        assert await found.read() == content == found.in_segments(0)


async def test_a_write_without_room_fails_by_itself(rng: random.Random) -> None:
    async with lab() as found:
        with pytest.raises(NoSpace):
            for index in range(20):
                await found.write(index * MIB, rng.randbytes(MIB))
        assert found.staged == 0


@pytest.mark.parametrize("first", [0, 1])
async def test_writes_that_complete_a_chunk_together(first: int, rng: random.Random) -> None:
    async with lab() as found:
        content = rng.randbytes(MIB)
        halves = [(0, content[: MIB // 2]), (MIB // 2, content[MIB // 2 :])]
        async with found.stalled() as nursery:
            nursery.start_soon(found.write, *halves[first])
            await begun()
            nursery.start_soon(found.write, *halves[1 - first])
            await found.chaos.first_write.wait()
        assert found.staged == 0
        assert await found.read() == content == found.in_segments(0)


async def test_a_write_over_one_that_is_under_way(rng: random.Random) -> None:
    async with lab() as found:
        content, patch = rng.randbytes(MIB), rng.randbytes(5000)
        async with found.stalled() as nursery:
            nursery.start_soon(found.write, 0, content)
            await found.chaos.first_write.wait()
            nursery.start_soon(found.write, 1000, patch)
            await begun()
        assert found.staged == 0
        assert await found.read() == content[:1000] + patch + content[6000:] == found.in_segments(0)


@pytest.mark.parametrize("size", [0, 100_000, 3 * MIB // 2])
async def test_a_file_that_is_cut_while_it_is_written(size: int, rng: random.Random) -> None:
    async with lab() as found:
        content = rng.randbytes(2 * MIB)
        async with found.stalled() as nursery:
            nursery.start_soon(found.write, 0, content)
            await found.chaos.first_write.wait()
            nursery.start_soon(found.volume.inodes.set_attributes, found.handle.node.ino, Changes(size=size), CALLER)
            await begun()
        assert await found.read() == content[:size]


async def test_a_file_that_is_removed_while_it_is_written(rng: random.Random) -> None:
    async with lab() as found:
        content = rng.randbytes(MIB)
        async with found.stalled() as nursery:
            nursery.start_soon(found.write, 0, content)
            await found.chaos.first_write.wait()
            await found.volume.tree.unlink(ROOT_INODE, b"file")
        assert await found.read() == content
        node = found.handle.node
    assert not any(chunk.extents or chunk.staged for chunk in node.chunks.values())


async def test_a_crash_before_the_commit_leaves_free_slots(rng: random.Random) -> None:
    async with lab() as found:
        found.chaos.stalled_commits = trio.Event()
        content = rng.randbytes(MIB)
        await found.write(0, content)
        crashed = found.disk.copy()
        assert (await check(crashed)).clean
        async with opened(crashed, lab_options(capacity=16 * MIB)) as volume:
            with pytest.raises(NotFound):
                await volume.tree.lookup(ROOT_INODE, b"file")
        assert (await check(crashed)).clean
        found.chaos.stalled_commits.set()
