"""Content maps against a model of a file, and under threads that read while the event loop changes files."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.testing
from map_reading import CHUNK, Case, map_read
from volume_lab import CALLER, MIB, Chaos, Disk, MemoryRecords, check, lab_options, opened

from kvfuse.errors import NoSpace, Stale
from kvfuse.remote.segments.file.store import FileSegments
from kvfuse.volume.api import ROOT_INODE, Changes
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.opening.held_volume import HeldVolume
from kvfuse.volume.running import run_volume
from kvfuse.volume.views.content_map import ContentMap
from kvfuse.volume.volume import Volume

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
            handle, _ = await self.volume.tree.create(ROOT_INODE, name, 0o644, CALLER, os.O_RDWR)
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
        case.handle, old = await self.volume.files.open(case.ino, os.O_RDWR, CALLER), case.handle
        await self.volume.files.release(old)

    async def unlink(self, name: bytes, case: Case) -> None:
        shown = case.shown
        await self.volume.tree.unlink(ROOT_INODE, name)
        await self.volume.files.release(case.handle)
        self.volume.tree.forget(case.ino, 1)
        assert shown.size < 0
        del self.files[name]

    async def show(self, name: bytes, case: Case) -> None:
        first = self.rng.randrange(8)
        await self.volume.files.show(case.handle, first, first + self.rng.randrange(8))

    async def compare(self) -> None:
        for case in self.files.values():
            offset = self.rng.choice([0, self.rng.randrange(9 * CHUNK), self.rng.randrange(9) * CHUNK])
            length = self.rng.choice([CHUNK, 10 * CHUNK, 5000])
            expected = case.data[offset : offset + length]
            found = map_read(case.shown, offset, length)
            assert found is None or found == expected
            self.answers += found is not None
            assert bytes(await self.volume.files.read(case.handle, offset, length)) == expected
            target = bytearray(length)
            assert await self.volume.files.read_into(case.handle, offset, memoryview(target)) == len(expected)
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
            await volume.files.release(case.handle)
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
                trio.from_thread.run(self.volume.files.show, file.handle, first // 2, units[-1] // 2)
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
        handle, _ = await self.volume.tree.create(ROOT_INODE, b"%d" % number, 0o644, CALLER, os.O_RDWR)
        return Stamped(handle, self.volume.files.content_map(handle))

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
        await self.volume.files.write(file.handle, units[0] * UNIT, memoryview(data).cast("B"))
        file.end(units)

    async def cut(self, number: int, file: Stamped) -> None:
        size = self.rng.randrange(UNITS)
        units = range(size, UNITS)
        file.begin(units, 0)
        await self.volume.inodes.set_attributes(file.shown.ino, Changes(size=size * UNIT), CALLER)
        file.end(units)

    async def reopen(self, number: int, file: Stamped) -> None:
        old, file.handle = file.handle, await self.volume.files.open(file.shown.ino, os.O_RDWR, CALLER)
        await self.volume.files.release(old)

    async def replace(self, number: int, file: Stamped) -> None:
        await self.volume.tree.unlink(ROOT_INODE, b"%d" % number)
        await self.volume.files.release(file.handle)
        self.volume.tree.forget(file.shown.ino, 1)
        self.files[number] = await self.create(number)


@asynccontextmanager
async def on_files(path: Path) -> AsyncIterator[Volume]:
    """A small volume, its bytes in real files; clean at the end."""
    options = lab_options(capacity=8 * MIB, chunk=2 * UNIT)
    disk = Disk.format(options)
    segments = FileSegments.open(path)
    chaos = Chaos(random.Random(0))
    async with run_volume(options, HeldVolume(disk.superblock, MemoryRecords(disk, chaos), segments)) as volume:
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
            await volume.files.release(file.handle)
    assert sum(reader.answers for reader in readers) > 100
