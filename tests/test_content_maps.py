"""Content maps: what a thread finds through one beside the event loop is what the file has, or it is told to ask.

``map_read`` is a ring thread's read in its plainest form. A model compares it with the volume after every operation;
then threads read all the time while files are written, cut, removed, and their slots become other files'.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.testing
from volume_lab import CALLER, MIB, Chaos, Disk, MemoryRecords, check, lab_options, opened

from kvfuse.checksum import GRANULE_SIZE, crc32c
from kvfuse.errors import Corrupt, EngineError, NoSpace, Stale
from kvfuse.remote.segments.api import Transfer
from kvfuse.remote.segments.file import FileSegments
from kvfuse.volume import content as content_module
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.maps import ContentMap, MapRow
from kvfuse.volume.node import DISCARDED, Node
from kvfuse.volume.volume import FileHandle, Volume, run_volume

CHUNK = 64 << 10


def map_read(shown: ContentMap, offset: int, length: int, pause: Callable[[], object] = lambda: None) -> bytes | None:
    """Bytes of the file as a thread reads them that does not wait for the event loop; None: it has to ask.

    ``pause``: what goes on elsewhere between the look at a row and the copy.
    """
    version = shown.version
    size = shown.size
    if size < 0:
        return None
    end = min(offset + length, size)
    parts = []
    position = offset
    while position < end:
        index, start = divmod(position, shown.chunk_size)
        part = min(end - position, shown.chunk_size - start)
        row = shown.rows.get(index)
        if row is None:
            return None
        pause()
        if not is_verified(row):
            assert shown.version != version, "a row shows other bytes than its checksums say"
            return None
        parts.append(copied(row, start, part))
        position += part
    return b"".join(parts) if shown.version == version else None


def is_verified(row: MapRow) -> bool:
    for number in range(len(row.checksums) // 4):
        if row.source is not None and not row.verified >> number & 1:
            low = row.start + number * GRANULE_SIZE
            part = row.source.bytes[low : min(low + GRANULE_SIZE, row.start + row.length)]
            if crc32c(part.data) != int.from_bytes(row.checksums[4 * number : 4 * number + 4], "little"):
                return False
            row.verified |= 1 << number
    return True


def copied(row: MapRow, start: int, length: int) -> bytes:
    """``length`` bytes of a chunk from ``start`` on. numpy lets go of the interpreter lock while it copies."""
    result = np.zeros(length, np.uint8)
    stored = min(row.length - start, length)
    if row.source is not None and stored > 0:
        np.copyto(result[:stored], row.source.bytes[row.start + start : row.start + start + stored])
    return result.tobytes()


# -- every operation ----------------------------------------------------------------------------------


@dataclass
class Case:
    """A file of three chunks, stored, sealed and shown; and what it holds."""

    volume: Volume
    handle: FileHandle
    data: bytearray

    @property
    def shown(self) -> ContentMap:
        return self.volume.content_map(self.handle)

    @property
    def ino(self) -> int:
        return self.handle.node.ino

    async def put(self, offset: int, data: bytes) -> None:
        assert await self.volume.write(self.handle, offset, data) == len(data)
        self.data[len(self.data) :] = bytes(max(0, offset - len(self.data)))
        self.data[offset : offset + len(data)] = data

    async def cut(self, size: int) -> None:
        await self.volume.set_attributes(self.ino, Changes(size=size), CALLER)
        self.data[:] = self.data[:size].ljust(size, b"\0")


@pytest.fixture
def small_rewrites(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of these tests are small: let them be changed in place all the same."""
    monkeypatch.setattr(content_module, "REWRITE_SIZE_MAX", 8192)


@pytest.fixture
async def case(rng: random.Random, autojump_clock: trio.testing.MockClock) -> AsyncIterator[Case]:
    options = lab_options(capacity=24 * MIB, chunk=CHUNK, nodes=64)
    disk = Disk.format(options)
    async with opened(disk, options) as volume:
        handle, _ = await volume.create(ROOT_INODE, b"file", 0o644, CALLER, os.O_RDWR)
        case = Case(volume, handle, bytearray())
        await case.put(0, rng.randbytes(2 * CHUNK + 10_000))
        await volume.sync()
        await volume.show(handle, 0, 2)
        assert len(case.shown.rows) == 3
        yield case
    report = await check(disk)
    assert report.clean, [problem.text for problem in report.problems]


Operation = Callable[[Case, random.Random], Awaitable[None]]


async def stages_over_a_chunk(case: Case, rng: random.Random) -> None:
    await case.put(CHUNK, rng.randbytes(CHUNK))


async def changes_a_staged_chunk(case: Case, rng: random.Random) -> None:
    await case.put(CHUNK, rng.randbytes(CHUNK))
    row = MapRow(None, 0, 0)  # as of a block of the tier, that holds what is staged
    case.shown.rows[1] = row
    await case.put(CHUNK + 5, b"changed")
    assert 1 not in case.shown.rows


async def changes_in_place(case: Case, rng: random.Random) -> None:
    await case.put(CHUNK + 100, rng.randbytes(1000))


async def changes_unsealed_bytes_in_place(case: Case, rng: random.Random) -> None:
    await case.put(CHUNK + 100, b"unseals")
    await case.volume.show(case.handle, 1, 1)
    assert case.shown.rows[1].checksums == b""
    version = case.shown.version
    await case.put(CHUNK + 200, rng.randbytes(1000))
    assert case.shown.version > version


async def grows_a_chunk_in_place(case: Case, rng: random.Random) -> None:
    await case.put(len(case.data), b"x" * 10)


async def adds_a_chunk(case: Case, rng: random.Random) -> None:
    await case.put(3 * CHUNK, b"x")


async def cuts_a_chunk(case: Case, rng: random.Random) -> None:
    await case.cut(CHUNK + 10)


async def cuts_whole_chunks(case: Case, rng: random.Random) -> None:
    await case.cut(CHUNK)


async def cuts_and_extends(case: Case, rng: random.Random) -> None:
    await case.cut(CHUNK + 10)
    await case.volume.show(case.handle, 0, 2)
    await case.cut(3 * CHUNK)


async def cuts_staged_bytes(case: Case, rng: random.Random) -> None:
    await case.put(3 * CHUNK, rng.randbytes(CHUNK))
    case.shown.rows[3] = MapRow(None, 0, 0)  # as of a block of the tier
    await case.cut(3 * CHUNK + 10)
    assert 3 not in case.shown.rows


async def truncates_at_open(case: Case, rng: random.Random) -> None:
    other = await case.volume.open(case.ino, os.O_RDWR | os.O_TRUNC, CALLER)
    await case.volume.release(other)
    case.data.clear()


async def only_extends(case: Case, rng: random.Random) -> None:
    await case.cut(5 * CHUNK)


async def seals_at_close(case: Case, rng: random.Random) -> None:
    await case.put(CHUNK + 100, rng.randbytes(1000))
    await case.volume.show(case.handle, 1, 1)
    version = case.shown.version
    other, case.handle = case.handle, await case.volume.open(case.ino, os.O_RDONLY, CALLER)
    await case.volume.release(other)
    while case.volume.content.has_unsealed(case.handle.node):
        await trio.lowlevel.checkpoint()
    assert case.shown.version > version
    await case.volume.show(case.handle, 1, 1)
    assert case.shown.rows[1].checksums


CHANGES: tuple[Operation, ...] = (
    stages_over_a_chunk,
    changes_a_staged_chunk,
    changes_in_place,
    changes_unsealed_bytes_in_place,
    grows_a_chunk_in_place,
    adds_a_chunk,
    cuts_a_chunk,
    cuts_whole_chunks,
    cuts_and_extends,
    cuts_staged_bytes,
    truncates_at_open,
    only_extends,
    seals_at_close,
)


@pytest.mark.parametrize("change", CHANGES)
async def test_a_change_raises_the_version_and_is_seen(
    small_rewrites: None, case: Case, rng: random.Random, change: Operation
) -> None:
    shown = case.shown
    first, version = shown.rows[0], shown.version
    before = map_read(shown, 0, 10 * CHUNK)
    assert before == case.data
    await change(case, rng)
    assert case.shown is shown
    assert shown.version > version
    assert map_read(shown, 0, 10 * CHUNK) in (None, case.data)
    await case.volume.sync()
    await case.volume.show(case.handle, 0, 100)
    assert map_read(shown, 0, 10 * CHUNK) == case.data
    if change is not truncates_at_open:
        assert shown.rows[0] is first, "the row of a chunk that nobody touched was taken away"


async def test_rows_are_gone_before_bytes_change_in_place(small_rewrites: None, case: Case) -> None:
    """Looked at where the engine is asked to write. A row that is shown during the write has the length of before."""
    segments = case.volume.core.segments
    write, seen = segments.write, []

    async def watched(batch: Sequence[Transfer]) -> None:
        row = case.shown.rows.get(2)
        seen.append((case.shown.version > version, row is None))
        await case.volume.show(case.handle, 2, 2)
        await write(batch)

    version = case.shown.version
    segments.write = watched  # type: ignore[method-assign]
    await case.put(len(case.data), b"in place, behind the end")
    segments.write = write  # type: ignore[method-assign]
    assert seen[-1] == (True, True)
    assert map_read(case.shown, 0, 3 * CHUNK) in (None, case.data)
    await case.volume.show(case.handle, 2, 2)
    assert map_read(case.shown, 0, 3 * CHUNK) == case.data


async def test_a_failed_unsealing_leaves_no_unverified_row(small_rewrites: None, case: Case) -> None:
    chaos = case.volume.core.records.chaos  # type: ignore[attr-defined]
    chaos.commit_error = 2
    case.shown.rows.clear()
    async with trio.open_nursery() as nursery:

        async def write() -> None:
            with pytest.raises(EngineError):
                await case.volume.write(case.handle, CHUNK + 100, b"in place")

        nursery.start_soon(write)
        while case.handle.node.chunks[1].extents[0].checksums:
            await trio.lowlevel.checkpoint()
        await case.volume.show(case.handle, 1, 1)
    chaos.commit_error = 0.0
    await case.volume.show(case.handle, 0, 2)
    assert case.shown.rows[1].checksums
    assert map_read(case.shown, 0, 3 * CHUNK) == case.data


# -- the end of a map ---------------------------------------------------------------------------------


def ended(shown: ContentMap, version: int) -> bool:
    return shown.version > version and not shown.rows and shown.size < 0


async def test_an_unlinked_file_is_shown_until_it_is_closed(case: Case) -> None:
    shown, version, node = case.shown, case.shown.version, case.handle.node
    await case.volume.unlink(ROOT_INODE, b"file")
    await case.volume.sync()
    assert map_read(shown, 0, 3 * CHUNK) == case.data
    await case.volume.release(case.handle)
    case.volume.forget(node.ino, 1)
    assert ended(shown, version)
    with pytest.raises(Stale):
        case.volume.content_map(node)


async def test_a_replaced_file_is_shown_no_more(case: Case) -> None:
    shown, version = case.shown, case.shown.version
    await case.volume.release(case.handle)
    case.volume.forget(case.ino, 1)
    other, node = await case.volume.create(ROOT_INODE, b"other", 0o644, CALLER, os.O_RDWR)
    await case.volume.release(other)
    await case.volume.rename(ROOT_INODE, b"other", ROOT_INODE, b"file", 0)
    assert ended(shown, version)
    case.volume.forget(node.ino, 1)


async def crowd(volume: Volume, node: Node) -> None:
    """Make other inodes until ``node`` had to leave memory."""
    for number in range(1000):
        handle, _ = await volume.create(ROOT_INODE, b"%d" % number, 0o644, CALLER, os.O_RDWR)
        await volume.release(handle)
        if number % 50 == 0:
            await volume.sync()
        if node not in list(volume.core.nodes):
            return
    raise AssertionError("it stays in memory")


async def test_a_map_ends_when_its_inode_leaves_memory(case: Case) -> None:
    volume, shown, version, node = case.volume, case.shown, case.shown.version, case.handle.node
    with pytest.raises(AssertionError, match="stays"):
        await crowd(volume, node)  # it is open
    await volume.release(case.handle)
    for number in range(1000):
        await volume.unlink(ROOT_INODE, b"%d" % number)
    await crowd(volume, node)
    assert ended(shown, version)
    case.handle = await volume.open(node.ino, os.O_RDONLY, CALLER)
    assert case.shown is not shown
    await volume.show(case.handle, 0, 2)
    assert map_read(case.shown, 0, 3 * CHUNK) == case.data


async def test_an_inode_that_left_memory_comes_back_for_its_map(case: Case) -> None:
    """Somebody still holds it; were it not found again, nobody would end its map."""
    volume, node = case.volume, case.handle.node
    await volume.release(case.handle)
    await crowd(volume, node)
    shown = volume.content_map(node)
    assert node in list(volume.core.nodes)
    assert shown.size == len(case.data)


# -- what is shown ------------------------------------------------------------------------------------


async def test_staged_bytes_and_chunks_in_pieces_are_not_shown(autojump_clock: trio.testing.MockClock) -> None:
    options = lab_options(capacity=24 * MIB)
    disk = Disk.format(options)
    async with opened(disk, options) as volume:
        handle, node = await volume.create(ROOT_INODE, b"f", 0o644, CALLER, os.O_RDWR)
        data = random.Random(0).randbytes(300 << 10)
        await volume.write(handle, 0, data)
        await volume.show(handle, 0, 0)
        assert not volume.content_map(handle).rows
        await volume.sync()
        assert len(node.chunks[0].extents) > 1, "the test needs a chunk in pieces"
        await volume.show(handle, 0, 0)
        assert not volume.content_map(handle).rows
        target = bytearray(len(data))
        assert await volume.read_into(handle, 0, memoryview(target)) == len(data)
        assert target == data
        await volume.release(handle)


async def test_a_slot_that_a_damaged_volume_may_give_away_is_not_shown(case: Case) -> None:
    case.shown.rows.clear()
    extent = case.handle.node.chunks[1].extents[0]
    state, extent.state = extent.state, DISCARDED  # as for a slot that the slabs' records call free
    await case.volume.show(case.handle, 0, 2)
    assert sorted(case.shown.rows) == [0, 2]
    extent.state = state


async def test_holes_far_chunks_and_the_end(case: Case, rng: random.Random) -> None:
    await case.put(40 * CHUNK + 7, b"far")
    await case.volume.sync()
    await case.volume.show(case.handle, 0, 1 << 40)
    shown = case.shown
    assert sorted(shown.rows) == list(range(41))
    assert shown.rows[20].source is None
    assert map_read(shown, 0, 100 * CHUNK) == case.data
    target = bytearray(b"\xff" * (42 * CHUNK))
    assert await case.volume.read_into(case.handle, 0, memoryview(target)) == len(case.data)
    assert target == case.data + b"\xff" * (len(target) - len(case.data)), "bytes behind the end were touched"
    assert await case.volume.read_into(case.handle, 41 * CHUNK, memoryview(target)) == 0
    assert await case.volume.read_into(case.handle, 3 * CHUNK - 5, memoryview(target)[:10]) == 10
    assert target[:10] == bytes(10)


async def test_read_into_verifies(case: Case) -> None:
    node = case.handle.node
    extent = node.chunks[1].extents[0]
    segment, offset = case.volume.core.locate(extent.addr)
    image = case.volume.core.segments.disk.segments[segment]  # type: ignore[attr-defined]
    image[offset] ^= 1
    with pytest.raises(Corrupt):
        await case.volume.read_into(case.handle, 0, memoryview(bytearray(2 * CHUNK)))
    image[offset] ^= 1
    target = bytearray(2 * CHUNK)
    assert await case.volume.read_into(case.handle, 0, memoryview(target)) == 2 * CHUNK
    assert target == case.data[: 2 * CHUNK]


# -- writes of memory that is kept --------------------------------------------------------------------


async def test_memory_that_was_written_is_kept_until_it_is_stored_and_never_changed(
    case: Case, rng: random.Random
) -> None:
    memory = np.frombuffer(rng.randbytes(CHUNK), np.uint8).copy()
    before, gone = memory.tobytes(), weakref.ref(memory)
    view = memory.data.toreadonly()
    case.data[CHUNK : 2 * CHUNK] = before
    await case.volume.write(case.handle, CHUNK, view)
    staged = case.handle.node.chunks[1].staged
    assert staged is not None
    assert staged.pieces == [view]
    assert staged.pieces[0] is view, "it was copied"
    assert bytes(await case.volume.read(case.handle, CHUNK, CHUNK)) == before
    await case.put(CHUNK + 10, b"changed")
    assert memory.tobytes() == before
    assert bytes(await case.volume.read(case.handle, 0, 10 * CHUNK)) == case.data
    await case.put(CHUNK, memory.data[:CHUNK].tobytes())
    await case.volume.write(case.handle, CHUNK, view)
    del view, staged, memory
    await case.volume.sync()
    assert gone() is None, "somebody still holds the memory"
    assert bytes(await case.volume.read(case.handle, 0, 10 * CHUNK)) == case.data


async def test_views_of_any_size_are_written_anywhere(small_rewrites: None, case: Case, rng: random.Random) -> None:
    """Small and large, over chunks, into gaps, in place, behind what is staged, while it is being written."""
    for _ in range(150):
        data = rng.randbytes(int((3 * CHUNK) ** rng.random()))
        offset = rng.choice([len(case.data), rng.randrange(6 * CHUNK)])
        memory = np.frombuffer(data, np.uint8).copy()
        if offset + len(data) <= 8 * CHUNK:
            case.data[len(case.data) :] = bytes(max(0, offset - len(case.data)))
            case.data[offset : offset + len(data)] = data
            assert await case.volume.write(case.handle, offset, memory.data) == len(data)
        if rng.random() < 0.3:
            await case.volume.sync()
        assert bytes(await case.volume.read(case.handle, 0, 10 * CHUNK)) == case.data
        assert memory.tobytes() == data


# -- against a model ----------------------------------------------------------------------------------


class Model:
    """A few files, their bytes, and how many map reads were answered."""

    def __init__(self, volume: Volume, rng: random.Random) -> None:
        self.volume = volume
        self.rng = rng
        self.files: dict[bytes, Case] = {}
        self.answers = 0
        self.old: list[tuple[ContentMap, bytes]] = []
        """maps of files that are no more"""

    async def step(self) -> None:
        name = self.rng.choice([b"a", b"b", b"c"])
        case = self.files.get(name)
        if case is None:
            handle, _ = await self.volume.create(ROOT_INODE, name, 0o644, CALLER, os.O_RDWR)
            case = self.files[name] = Case(self.volume, handle, bytearray())
        actions = [self.write, self.cut, self.sync, self.reopen, self.unlink, self.show]
        await self.rng.choices(actions, [8, 2, 2, 1, 1, 4])[0](name, case)

    async def write(self, name: bytes, case: Case) -> None:
        offset = self.rng.choice([0, len(case.data), self.rng.randrange(8 * CHUNK), self.rng.randrange(8) * CHUNK])
        size = self.rng.choice([CHUNK, int((3 * CHUNK) ** self.rng.random())])
        version, before = case.shown.version, bytes(case.data)
        with contextlib.suppress(NoSpace):
            await case.put(offset, self.rng.randbytes(size))
        assert case.shown.version > version or case.data == before

    async def cut(self, name: bytes, case: Case) -> None:
        await case.cut(self.rng.choice([0, self.rng.randrange(8 * CHUNK), self.rng.randrange(8) * CHUNK]))

    async def sync(self, name: bytes, case: Case) -> None:
        await self.volume.sync()

    async def reopen(self, name: bytes, case: Case) -> None:
        case.handle, old = await self.volume.open(case.ino, os.O_RDWR, CALLER), case.handle
        await self.volume.release(old)

    async def unlink(self, name: bytes, case: Case) -> None:
        shown = case.shown
        await self.volume.unlink(ROOT_INODE, name)
        await self.volume.release(case.handle)
        self.volume.forget(case.ino, 1)
        assert shown.size < 0
        del self.files[name]

    async def show(self, name: bytes, case: Case) -> None:
        first = self.rng.randrange(8)
        await self.volume.show(case.handle, first, first + self.rng.randrange(8))

    async def compare(self) -> None:
        for case in self.files.values():
            offset = self.rng.choice([0, self.rng.randrange(9 * CHUNK), self.rng.randrange(9) * CHUNK])
            length = self.rng.choice([CHUNK, 10 * CHUNK, 5000])
            expected = case.data[offset : offset + length]
            found = map_read(case.shown, offset, length)
            assert found is None or found == expected
            self.answers += found is not None
            assert bytes(await self.volume.read(case.handle, offset, length)) == expected
            target = bytearray(length)
            assert await self.volume.read_into(case.handle, offset, memoryview(target)) == len(expected)
            assert target[: len(expected)] == expected


@pytest.mark.parametrize("delay", [0.0, 0.3])
async def test_maps_equal_the_model_after_every_operation(
    seed: int, small_rewrites: None, autojump_clock: trio.testing.MockClock, delay: float
) -> None:
    rng = random.Random(seed)
    options = lab_options(capacity=8 * MIB, chunk=CHUNK, nodes=8)
    disk = Disk.format(options)
    async with opened(disk, options, Chaos(random.Random(seed), delay=delay)) as volume:
        model = Model(volume, rng)
        for _ in range(600):
            await model.step()
            await model.compare()
        for case in model.files.values():
            await volume.release(case.handle)
    assert model.answers > 300
    report = await check(disk)
    assert report.clean, [problem.text for problem in report.problems]


# -- threads beside the event loop --------------------------------------------------------------------

UNIT = 32 << 10
"""Bytes that are written at once: half a chunk."""
UNITS = 16
"""of a file"""


@dataclass(eq=False)
class Stamped:
    """A file whose words say which write of which unit they come from: 0, or a number that is never used again."""

    handle: FileHandle
    shown: ContentMap
    history: list[list[int]] = field(default_factory=lambda: [[0] for _ in range(UNITS)])
    """of each unit: all stamps that it was given; the last may not be there yet"""
    done: list[int] = field(default_factory=lambda: [0] * UNITS)
    """of each unit: the index of the last stamp that is there for sure"""

    def begin(self, units: range, stamp: int) -> None:
        for unit in units:
            self.history[unit].append(stamp)

    def end(self, units: range) -> None:
        for unit in units:
            self.done[unit] = len(self.history[unit]) - 1


class Reader:
    """A thread that reads through maps until it is told to stop, and knows what it may find."""

    def __init__(self, writer: Writer, rng: random.Random) -> None:
        self.volume = writer.volume
        self.writer = writer
        self.rng = rng
        self.answers = self.late = 0

    def run(self) -> None:
        while not self.writer.stopped:
            self.read(self.rng.choice(self.writer.files))

    def pause(self) -> None:
        """Long enough for the slots to be given up, and to become another file's."""
        trio.from_thread.run(self.writer.wait_for_steps, self.rng.randrange(20))

    def read(self, file: Stamped) -> None:
        first = self.rng.randrange(UNITS)
        units = range(first, self.rng.randrange(first, UNITS) + 1)
        before = [file.done[unit] for unit in units]
        pauses = self.rng.random() < 0.2
        version = file.shown.version
        data = map_read(file.shown, first * UNIT, len(units) * UNIT, self.pause if pauses else lambda: None)
        if data is None:
            self.late += pauses and file.shown.version > version
            with contextlib.suppress(Stale):
                trio.from_thread.run(self.volume.show, file.handle, first // 2, units[-1] // 2)
            return
        self.answers += 1
        words = np.frombuffer(data.ljust(len(units) * UNIT, b"\0"), np.uint64).reshape(len(units), -1)
        for unit, index, row in zip(units, before, words, strict=True):
            found = set(np.unique(row).tolist())
            allowed = set(file.history[unit][index:])
            assert found <= allowed, f"unit {unit} of {file.shown.ino}: {found} instead of {allowed}"


class Writer:
    """Writes whole chunks and halves, cuts, removes files and makes others in their slots."""

    def __init__(self, volume: Volume, rng: random.Random) -> None:
        self.volume = volume
        self.rng = rng
        self.stamps = iter(range(1, 1 << 60))
        self.files: list[Stamped] = []
        self.stopped = False
        self.stepped = trio.Event()

    async def wait_for_steps(self, count: int) -> None:
        for _ in range(count):
            if not self.stopped:
                await self.stepped.wait()

    async def run(self, steps: int, readers: Sequence[Reader]) -> None:
        """So many steps at least, and until the readers have seen enough."""
        try:
            while steps > 0 or sum(reader.late for reader in readers) < 50:
                steps -= 1
                await self.step()
                self.stepped.set()
                self.stepped = trio.Event()
        finally:
            self.stopped = True
            self.stepped.set()

    async def create(self, number: int) -> Stamped:
        handle, _ = await self.volume.create(ROOT_INODE, b"%d" % number, 0o644, CALLER, os.O_RDWR)
        return Stamped(handle, self.volume.content_map(handle))

    async def step(self) -> None:
        number = self.rng.randrange(len(self.files))
        actions = [self.write, self.cut, self.reopen, self.replace]
        await self.rng.choices(actions, [12, 2, 2, 2])[0](number, self.files[number])
        if self.rng.random() < 0.3:
            await self.volume.sync()

    async def write(self, number: int, file: Stamped) -> None:
        first = self.rng.randrange(UNITS // 2) * 2
        units = range(first, first + 2) if self.rng.random() < 0.6 else range(first + 1, first + 2)
        stamp = next(self.stamps)
        file.begin(units, stamp)
        data = np.full(len(units) * UNIT // 8, stamp, np.uint64)
        await self.volume.write(file.handle, units[0] * UNIT, memoryview(data).cast("B"))
        file.end(units)

    async def cut(self, number: int, file: Stamped) -> None:
        size = self.rng.randrange(UNITS)
        units = range(size, UNITS)
        file.begin(units, 0)
        await self.volume.set_attributes(file.shown.ino, Changes(size=size * UNIT), CALLER)
        file.end(units)

    async def reopen(self, number: int, file: Stamped) -> None:
        old, file.handle = file.handle, await self.volume.open(file.shown.ino, os.O_RDWR, CALLER)
        await self.volume.release(old)

    async def replace(self, number: int, file: Stamped) -> None:
        await self.volume.unlink(ROOT_INODE, b"%d" % number)
        await self.volume.release(file.handle)
        self.volume.forget(file.shown.ino, 1)
        self.files[number] = await self.create(number)


@asynccontextmanager
async def on_files(path: Path) -> AsyncIterator[Volume]:
    """A small volume, its bytes in real files; clean at the end."""
    options = lab_options(capacity=8 * MIB, chunk=2 * UNIT)
    disk = Disk.format(options)
    segments = FileSegments.open(path)
    chaos = Chaos(random.Random(0))
    async with run_volume(options, disk.superblock, MemoryRecords(disk, chaos), segments) as volume:
        yield volume
    await segments.aclose()
    disk.segments = {int(file.stem, 16): bytearray(file.read_bytes()) for file in path.iterdir()}
    report = await check(disk)
    assert report.clean, [problem.text for problem in report.problems]


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns often."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


async def test_threads_read_what_the_file_has_while_it_changes(
    seed: int, small_rewrites: None, restless: None, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    async with on_files(tmp_path) as volume:
        writer = Writer(volume, rng)
        writer.files += [await writer.create(number) for number in range(5)]
        readers = [Reader(writer, random.Random(rng.random())) for _ in range(3)]
        async with trio.open_nursery() as nursery:
            for reader in readers:
                nursery.start_soon(trio.to_thread.run_sync, reader.run)
            with trio.fail_after(100):
                await writer.run(1500, readers)
        for file in writer.files:
            await volume.release(file.handle)
    assert sum(reader.answers for reader in readers) > 100
