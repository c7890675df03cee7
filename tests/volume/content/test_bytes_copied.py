"""What the volume copies of a client's bytes on their way: nothing, where the table of decision 023 says so."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import inside
import pytest
from volume_lab import CALLER, MIB, Disk, check, lab_options, opened

from kvfuse.remote.segments.api import Transfer
from kvfuse.remote.segments.file.direct import address_of
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.volume import Volume


class Watched:
    """Counts bytes that the engine is asked to write from memory of these writers, and from other memory."""

    def __init__(self, volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
        self._segments = inside.segments(volume)
        self._write = self._segments.write
        self._brought: list[bytes] = []
        self.straight = 0
        monkeypatch.setattr(self._segments, "write", self._count)

    def bring(self, data: bytes) -> bytes:
        self._brought.append(data)
        return data

    async def _count(self, batch: Sequence[Transfer]) -> None:
        for transfer in batch:
            if len(transfer.buffer):
                start = address_of(memoryview(transfer.buffer))
                end = start + len(transfer.buffer)
                own = [(address_of(memoryview(data)), len(data)) for data in self._brought]
                if any(low <= start and end <= low + size for low, size in own):
                    self.straight += len(transfer.buffer)
        await self._write(batch)


@pytest.mark.parametrize("size", [64 << 10, 100_000, 128 << 10, 300_000, MIB, 3 * MIB])
async def test_the_engine_gets_the_buffers_that_writers_brought(
    size: int, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of writes one after the other, whatever their size: granules, chunks and slots may end within a buffer."""
    options = lab_options(capacity=32 * MIB)
    disk = Disk.format(options)
    async with opened(disk, options) as volume:
        watched = Watched(volume, monkeypatch)
        handle, _ = await volume.tree.create(ROOT_INODE, b"file", 0o644, CALLER, os.O_RDWR)
        pieces = [watched.bring(rng.randbytes(size)) for _ in range(-(-9 * MIB // size))]
        for number, piece in enumerate(pieces):
            assert await volume.files.write(handle, number * size, piece, by_kernel=True) == size
        await volume.files.fsync(handle)
        content = b"".join(pieces)
        assert watched.straight == len(content)
        assert bytes(await volume.files.read(handle, 0, len(content))) == content
        await volume.files.release(handle)
    assert (await check(disk)).clean


async def test_staged_bytes_are_read_where_they_are(rng: random.Random) -> None:
    """They stay the pieces that they were, and are shown without a copy where one piece has them all."""
    options = lab_options(capacity=32 * MIB)
    async with opened(Disk.format(options), options) as volume:
        handle, _ = await volume.tree.create(ROOT_INODE, b"file", 0o644, CALLER, os.O_RDWR)
        pieces = [rng.randbytes(size) for size in (MIB, 100_000, 64 << 10, 5000, 70_000)]
        content, end = b"".join(pieces), 0
        for piece in pieces:
            await volume.files.write(handle, end, piece)
            end += len(piece)
        for _ in range(50):
            start = rng.randrange(len(content))
            length = rng.randrange(1, len(content) - start + 1)
            assert bytes(await volume.files.read(handle, start, length)) == content[start : start + length]
        shown = await volume.files.read(handle, 4096, 8192)
        assert address_of(memoryview(shown)) == address_of(memoryview(pieces[0])) + 4096
        del shown
        await volume.files.release(handle)


async def test_what_is_gathered_is_read_where_it_belongs(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read over several chunks: the engine fills the reply, but for chunks of which it shows a part of a granule."""
    options = lab_options(capacity=32 * MIB)
    async with opened(Disk.format(options), options) as volume:
        handle, _ = await volume.tree.create(ROOT_INODE, b"file", 0o644, CALLER, os.O_RDWR)
        content = bytearray(rng.randbytes(4 * MIB))
        await volume.files.write(handle, 0, bytes(content))
        await volume.files.fsync(handle)
        segments, filled = inside.segments(volume), list[memoryview]()
        read = segments.read

        async def watch(batch: Sequence[Transfer]) -> None:
            filled.extend(memoryview(transfer.buffer) for transfer in batch)
            await read(batch)

        monkeypatch.setattr(segments, "read", watch)
        for is_sealed in (True, False):
            for _ in range(30):
                start = rng.randrange(MIB - 1) // (256 << 10) * (256 << 10)
                length = rng.choice([2 * MIB, 3 * MIB - (256 << 10), 3 * MIB - 4096])
                shown = memoryview(await volume.files.read(handle, start, length))
                assert shown == content[start : start + length]
                straight = sum(len(buffer) for buffer in filled if buffer.obj is shown.obj)
                is_whole = not is_sealed or length % (256 << 10) == 0
                assert straight >= (length if is_whole else length - MIB)
                filled.clear()
            if is_sealed:
                for index in range(4):
                    patch = rng.randbytes(4096)
                    await volume.files.write(handle, index * MIB + 5000, patch)
                    content[index * MIB + 5000 : index * MIB + 9096] = patch
        del shown
        await volume.files.release(handle)
