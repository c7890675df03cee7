"""A sync that failed is over once the disk is well: what it was to vouch for is written again, and is there after a
loss of power; what cannot be written again is told, once to each descriptor.

The segments here have a page cache, as Linux treats it: after a failed sync all pages count as clean, whether they are
on the disk or not, and the next sync succeeds.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import inside
import pytest
import trio
from volume_lab import CALLER, MIB, Chaos, Disk, MemoryRecords, MemorySegments, check, lab_options, opened

from kvfuse.errors import EngineError, MediumError
from kvfuse.kept.keeper import MemoryKeeper
from kvfuse.remote.segments.api import Transfer
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.opening.held_volume import HeldVolume
from kvfuse.volume.running import run_volume
from kvfuse.volume.views.health import COMMIT, SYNC
from kvfuse.volume.volume import Volume

SIZE = 700_000
LARGE = 9 * MIB
"""bytes of a file with chunks that have records of their own"""
PATIENCE_S = 60.0


class CachedSegments(MemorySegments):
    """`disk.segments` is what the page cache shows."""

    def __init__(self, disk: Disk, chaos: Chaos) -> None:
        super().__init__(disk, chaos)
        self.durable = {number: bytearray(image) for number, image in disk.segments.items()}
        self._dirty: list[tuple[int, int, int]] = []
        self.is_sick = False

    async def create(self, segment: int, size: int) -> None:
        await super().create(segment, size)
        self.durable.setdefault(segment, bytearray(size))

    async def write(self, batch: list[Transfer]) -> None:  # type: ignore[override]
        await super().write(batch)
        self._dirty += [(segment, offset, len(buffer)) for segment, offset, buffer in batch]

    async def sync(self) -> None:
        dirty, self._dirty = self._dirty, []
        await super().sync()
        if self.is_sick:
            raise EngineError("injected: sync")
        for segment, offset, size in dirty:
            self.durable[segment][offset : offset + size] = self.disk.segments[segment][offset : offset + size]

    def evict(self) -> None:
        """Clean pages leave the cache: the disk's bytes are what is read. What was written since is there."""
        image_of = self.disk.segments
        dirty = [(number, offset, image_of[number][offset : offset + size]) for number, offset, size in self._dirty]
        for segment, image in self.durable.items():
            self.disk.segments[segment][:] = image
        for segment, offset, data in dirty:
            self.disk.segments[segment][offset : offset + len(data)] = data

    def after_power_cut(self) -> Disk:
        disk = self.disk.copy()
        disk.segments = {number: bytearray(image) for number, image in self.durable.items()}
        return disk


class Lab:
    """One volume over such segments."""

    def __init__(self, disk: Disk, segments: CachedSegments, volume: Volume, chaos: Chaos) -> None:
        self.disk, self.segments, self.volume, self.chaos = disk, segments, volume, chaos

    async def write(self, name: bytes, data: bytes) -> FileHandle:
        handle, _ = await self.volume.tree.create(ROOT_INODE, name, 0o644, CALLER, os.O_RDWR)
        await self.volume.files.write(handle, 0, data)
        return handle

    async def open(self, name: bytes, flags: int = os.O_RDWR) -> FileHandle:
        node = await self.volume.tree.lookup(ROOT_INODE, name)
        return await self.volume.files.open(node.ino, flags, CALLER)

    async def fail_fsync(self, handle: FileHandle) -> None:
        self.segments.is_sick = True
        with pytest.raises(EngineError):
            await self.volume.files.fsync(handle)
        self.segments.is_sick = False

    @property
    def reasons(self) -> list[str]:
        return [row["reason"] for row in self.volume.stats()["degraded"]]

    async def heal(self) -> None:
        """Until all that was in doubt is written again."""
        await wait_until(lambda: not inside.core(self.volume).doubt.is_any)


@asynccontextmanager
async def running(disk: Disk, keeper: MemoryKeeper | None = None, **options: int) -> AsyncIterator[Lab]:
    chaos = Chaos(random.Random(0))
    segments = CachedSegments(disk, chaos)
    held = HeldVolume(disk.superblock, MemoryRecords(disk, chaos), segments)
    given = lab_options(capacity=64 * MIB, tier_size=0, **options)
    async with run_volume(given, held, *(() if keeper is None else (keeper,))) as volume:
        yield Lab(disk, segments, volume, chaos)


@pytest.fixture
def disk() -> Disk:
    return Disk.format(lab_options(capacity=64 * MIB))


@pytest.fixture
async def lab(disk: Disk, autojump_clock: trio.testing.MockClock) -> AsyncIterator[Lab]:
    async with running(disk) as made:
        yield made


async def wait_until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.1)


async def content(disk: Disk, name: bytes) -> bytes:
    """After a loss of power; the check finds nothing to mend."""
    report = await check(disk.copy())
    assert report.clean, report.problems
    async with opened(disk, lab_options(capacity=64 * MIB)) as volume:
        node = await volume.tree.lookup(ROOT_INODE, name)
        handle = await volume.files.open(node.ino, os.O_RDONLY, CALLER)
        return bytes(await volume.files.read(handle, 0, node.size))


@pytest.mark.parametrize("size", [SIZE, LARGE])
async def test_the_next_fsync_vouches_for_what_a_failed_one_did_not(lab: Lab, rng: random.Random, size: int) -> None:
    data = rng.randbytes(size)
    handle = await lab.write(b"file", data)
    await lab.fail_fsync(handle)
    await lab.volume.files.fsync(handle)
    assert await content(lab.segments.after_power_cut(), b"file") == data


async def test_other_files_are_written_again_in_the_background(lab: Lab, rng: random.Random) -> None:
    """Small and large ones, also those that nobody has open, and of several names."""
    data = {b"small": rng.randbytes(3000), b"large": rng.randbytes(LARGE), b"linked": rng.randbytes(SIZE)}
    for name, bytes_ in data.items():
        handle = await lab.write(name, bytes_)
        await lab.volume.files.release(handle)
    node = await lab.volume.tree.lookup(ROOT_INODE, b"linked")
    await lab.volume.tree.link(node.ino, ROOT_INODE, b"other name")
    await inside.journal(lab.volume).commit()
    await lab.fail_fsync(await lab.write(b"file", b"some bytes"))
    assert SYNC in lab.reasons
    await lab.heal()
    assert lab.reasons == []
    for name, bytes_ in data.items():
        assert await content(lab.segments.after_power_cut(), name) == bytes_


async def test_all_commits_that_wait_for_a_failed_sync_fail(lab: Lab, rng: random.Random) -> None:
    """Or their callers would be told of bytes that the next sync says nothing of."""
    handles = [await lab.write(b"%d" % number, rng.randbytes(SIZE)) for number in range(3)]
    results: list[Exception | None] = []

    async def fsync(handle: FileHandle) -> None:
        try:
            await lab.volume.files.fsync(handle)
        except EngineError as error:
            results.append(error)
        else:
            results.append(None)

    lab.segments.is_sick = True
    lab.chaos.delay = 1.0
    async with trio.open_nursery() as nursery:
        for handle in handles:
            nursery.start_soon(fsync, handle)
            await trio.testing.wait_all_tasks_blocked()
    assert len(results) == 3
    assert all(results)
    lab.segments.is_sick = False
    lab.chaos.delay = 0.0
    for handle in handles:
        await lab.volume.files.fsync(handle)
    for number in range(3):
        image = await content(lab.segments.after_power_cut(), b"%d" % number)
        assert len(image) == SIZE


async def test_each_descriptor_hears_once_of_bytes_that_are_lost(lab: Lab, rng: random.Random) -> None:
    """The kernel drops its pages before they are read back. Who failed has heard it; who opens later asks in vain."""
    first = await lab.write(b"file", rng.randbytes(SIZE))
    second, reader = await lab.open(b"file"), await lab.open(b"file", os.O_RDONLY)
    await inside.journal(lab.volume).commit(first.node)
    await lab.fail_fsync(first)
    lab.segments.evict()
    await lab.volume.files.fsync(first)
    with pytest.raises(MediumError):
        await lab.volume.files.fsync(second)
    for handle in (first, second, await lab.open(b"file")):
        await lab.volume.files.fsync(handle)
        await lab.volume.files.flush(handle)
    with pytest.raises(EngineError):
        await lab.volume.files.read(reader, 0, SIZE)
    await lab.volume.files.write(second, 0, b"n" * SIZE)
    await lab.volume.files.fsync(second)
    assert await content(lab.segments.after_power_cut(), b"file") == b"n" * SIZE


async def test_bytes_that_were_written_in_place_are_written_again_and_told(lab: Lab, rng: random.Random) -> None:
    """Nothing says whether they are those that were written last: every other writer hears of it."""
    data = bytearray(rng.randbytes(MIB))
    first = await lab.write(b"file", bytes(data))
    second = await lab.open(b"file")
    await lab.volume.files.fsync(first)
    data[5000:6000] = patch = rng.randbytes(1000)
    await lab.volume.files.write(first, 5000, patch)
    assert not first.node.chunks[0].extents[0].checksums, "not written in place"
    await lab.fail_fsync(first)
    await lab.volume.files.fsync(first)
    assert await content(lab.segments.after_power_cut(), b"file") == bytes(data)
    with pytest.raises(MediumError):
        await lab.volume.files.fsync(second)
    await lab.volume.files.fsync(second)


async def test_bytes_written_in_place_and_sealed_are_in_doubt_too(lab: Lab, rng: random.Random) -> None:
    data = bytearray(rng.randbytes(MIB))
    handle = await lab.write(b"file", bytes(data))
    await lab.volume.files.fsync(handle)
    data[5000:6000] = patch = rng.randbytes(1000)
    await lab.volume.files.write(handle, 5000, patch)
    await lab.volume.files.release(handle)
    await wait_until(lambda: bool(handle.node.chunks[0].extents[0].checksums))
    await lab.fail_fsync(await lab.write(b"other", b"bytes"))
    await lab.heal()
    assert await content(lab.segments.after_power_cut(), b"file") == bytes(data)


async def test_a_removed_or_shortened_file_is_no_loss(lab: Lab, rng: random.Random) -> None:
    gone, short = await lab.write(b"gone", rng.randbytes(SIZE)), await lab.write(b"short", b"s" * LARGE)
    await lab.fail_fsync(gone)
    await lab.volume.tree.unlink(ROOT_INODE, b"gone")
    await lab.volume.inodes.set_attributes(short.node.ino, Changes(size=10), CALLER)
    await lab.heal()
    await lab.volume.files.fsync(gone)
    await lab.volume.files.fsync(short)
    assert await content(lab.segments.after_power_cut(), b"short") == b"s" * 10


async def test_the_next_daemon_knows_what_is_in_doubt(disk: Disk, rng: random.Random) -> None:
    """It hears from the disk that its sync succeeded, and knows better."""
    keeper, data = MemoryKeeper(), rng.randbytes(SIZE)
    crashed: list[tuple[Disk, dict[int, bytearray]]] = []
    async with running(disk, keeper) as lab:
        handle = await lab.write(b"file", data)
        await inside.journal(lab.volume).commit(handle.node)
        lab.segments.is_sick = True
        with pytest.raises(EngineError):
            await lab.volume.files.fsync(handle)
        crashed.append((disk.copy(), {number: bytearray(image) for number, image in lab.segments.durable.items()}))
        kept = keeper.take("volume/doubt")
        assert kept is not None
        page = bytearray(os.pread(kept.descriptors[0], 4096, 0))
        lab.segments.is_sick = False
    os.pwrite(kept.descriptors[0], page, 0)
    again, durable = crashed[0]
    async with running(again, keeper) as lab:
        lab.segments.durable = durable
        handle = await lab.open(b"file")
        await lab.volume.files.fsync(handle)
        assert await content(lab.segments.after_power_cut(), b"file") == data


async def test_headers_of_segments_are_written_again(lab: Lab) -> None:
    """A mount needs them."""
    await lab.fail_fsync(await lab.write(b"file", b"bytes"))
    await lab.heal()
    for segment, image in lab.segments.durable.items():
        assert image[:4096] == lab.disk.segments[segment][:4096]
        assert any(image[:4096])


async def test_failing_commits_are_seen_and_forgotten(lab: Lab) -> None:
    lab.chaos.commit_error = 2.0
    handle = await lab.write(b"file", b"bytes")
    with pytest.raises(EngineError):
        await lab.volume.files.fsync(handle)
    (row,) = lab.volume.stats()["degraded"]
    assert row["reason"] == COMMIT
    assert row["failures"] >= 1
    lab.chaos.commit_error = 0.0
    await lab.volume.files.fsync(handle)
    assert lab.reasons == []


async def test_a_read_goes_on_while_its_bytes_are_to_be_verified_again(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads from the middle of a granule, too, which was verified when they began."""
    data = rng.randbytes(SIZE)
    async with running(Disk.format(lab_options(capacity=64 * MIB))) as lab:
        handle = await lab.write(b"file", data)
        await lab.volume.files.fsync(handle)
        assert bytes(await lab.volume.files.read(handle, 0, SIZE)) == data
        read = lab.segments.read

        async def read_beside_a_rewriter(batch: list[Transfer]) -> None:
            await read(batch)
            for chunk in handle.node.chunks.values():
                for extent in chunk.extents:
                    extent.verified = 0

        monkeypatch.setattr(lab.segments, "read", read_beside_a_rewriter)
        for start in (0, 3595, 70_001):
            assert bytes(await lab.volume.files.read(handle, start, 29_173)) == data[start : start + 29_173]
            await lab.volume.files.read(handle, 0, SIZE)  # verified anew
