"""Engines in memory that know what a loss of power may leave: what was synced, and any part of what came later.

Each sector of 512 bytes has those of its writes since the last sync that came before some instant, another one for each
sector. Commits since the last durable one are there in order, up to any of them.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio
from volume_lab import SECTOR, Chaos, Disk, MemoryRecords, MemorySegments

from kvfuse.errors import EngineError
from kvfuse.kept.keeper import NO_KEEPER, Keeper
from kvfuse.options.options import Options
from kvfuse.remote.records.api import Lease, Versioned
from kvfuse.remote.segments.api import Transfer
from kvfuse.slab.layout import Superblock
from kvfuse.volume.opening.held_volume import HeldVolume
from kvfuse.volume.running import run_volume
from kvfuse.volume.volume import Volume

MODES = "none", "prefix", "some", "sectors", "all"


@dataclass(frozen=True)
class Instant:
    """What was durable of a disk at one instant, and the log of what came later."""

    superblock: Superblock
    version: int
    sizes: dict[int, int]
    """of segments"""
    segments: dict[int, bytes]
    writes: Sequence[tuple[int, int, bytes]]
    records: dict[bytes, Versioned]
    commits: Sequence[dict[bytes, Versioned]]

    def cut(self, rng: random.Random, mode: str = "") -> Disk:
        """A disk as a loss of power may leave it: ``mode`` is one of `MODES`, or any of them."""
        segments = {
            number: bytearray(self.segments.get(number, size))
            for number, size in self.sizes.items()
        }  # fmt: skip
        mode = mode or rng.choice(MODES)
        writes = self.writes[: {"none": 0, "prefix": rng.randint(0, len(self.writes))}.get(mode)]
        lasts = _choose_lasts(writes, rng, each=mode == "sectors") if mode in ("some", "sectors") else None
        for order, (segment, offset, data) in enumerate(writes):
            for start, end in _pieces(offset, len(data)) if lasts is not None else [(offset, offset + len(data))]:
                if lasts is None or order <= lasts.get((segment, start // SECTOR), -1):
                    segments[segment][start:end] = data[start - offset : end - offset]
        number = rng.randint(0, len(self.commits))
        records = dict(self.commits[number - 1] if number else self.records)
        return Disk(self.superblock, records, self.version, segments)


def _pieces(offset: int, length: int) -> Iterator[tuple[int, int]]:
    """(start, end) of the part of a write in each sector."""
    start = offset
    while start < offset + length:
        end = min(offset + length, (start // SECTOR + 1) * SECTOR)
        yield start, end
        start = end


def _choose_lasts(
    writes: Sequence[tuple[int, int, bytes]], rng: random.Random, *, each: bool
) -> dict[tuple[int, int], int]:
    """(segment, sector) -> the number of the last write that it has. ``each``: sectors of a write go apart."""
    lasts, share = dict[tuple[int, int], int](), rng.random()
    for order, (segment, offset, data) in enumerate(writes):
        is_there = rng.random() < share
        for start, _ in _pieces(offset, len(data)):
            if (rng.random() < share) if each else is_there:
                lasts[segment, start // SECTOR] = order
    return lasts


@dataclass
class Medium:
    """What is durable of a disk, and what is not yet."""

    disk: Disk
    segments: dict[int, bytes] = field(default_factory=dict)
    """replaced, never changed"""
    writes: list[tuple[int, int, bytes]] = field(default_factory=list)
    records: dict[bytes, Versioned] = field(default_factory=dict)
    commits: list[dict[bytes, Versioned]] = field(default_factory=list)
    """the records after each commit since the last durable one"""
    sync_error: float = 0.0
    on_event: Callable[[], None] | None = None
    """called after each write, commit and sync"""

    def __post_init__(self) -> None:
        self.records = dict(self.disk.records)
        self.segments = {number: bytes(image) for number, image in self.disk.segments.items()}

    def freeze(self) -> Instant:
        disk = self.disk
        sizes = {number: len(image) for number, image in disk.segments.items()}
        log = dict(self.segments), tuple(self.writes), self.records, tuple(self.commits)
        return Instant(disk.superblock, disk.version, sizes, *log)

    def fork(self) -> Medium:
        """Another one in the same state."""
        fork = Medium(self.disk.copy(), sync_error=self.sync_error)
        fork.segments, fork.writes = dict(self.segments), list(self.writes)
        fork.records, fork.commits = self.records, list(self.commits)
        return fork

    def cut(self, rng: random.Random) -> Disk:
        """A disk as a loss of power may leave it now."""
        return self.freeze().cut(rng)

    def note_event(self) -> None:
        if self.on_event is not None:
            self.on_event()


class CutSegments(MemorySegments):
    def __init__(self, medium: Medium, chaos: Chaos) -> None:
        super().__init__(medium.disk, chaos)
        self.medium = medium

    async def _write(self, batch: Sequence[Transfer]) -> None:
        await trio.lowlevel.checkpoint()
        for segment, offset, buffer in batch:
            self._range(segment, offset, len(buffer))[:] = buffer
            self.medium.writes.append((segment, offset, bytes(buffer)))
            self.medium.note_event()

    async def sync(self) -> None:
        medium, count = self.medium, len(self.medium.writes)
        await trio.lowlevel.checkpoint()
        if self.chaos.fails(medium.sync_error):  # the kernel dropped the pages, and says so once
            lost, medium.writes = medium.writes[:count], medium.writes[count:]
            for segment, offset, data in lost:
                base = medium.segments.get(segment, bytes(len(self.disk.segments[segment])))
                if self.chaos.random.random() < 0.5:
                    self.disk.segments[segment][offset : offset + len(data)] = base[offset : offset + len(data)]
            raise EngineError("injected: sync")
        changed: dict[int, bytearray] = {}
        for segment, offset, data in medium.writes[:count]:
            if segment not in changed:
                size = len(self.disk.segments[segment])
                changed[segment] = bytearray(medium.segments.get(segment, size))
            changed[segment][offset : offset + len(data)] = data
        medium.segments.update({segment: bytes(image) for segment, image in changed.items()})
        del medium.writes[:count]
        medium.note_event()


class CutRecords(MemoryRecords):
    def __init__(self, medium: Medium, chaos: Chaos) -> None:
        super().__init__(medium.disk, chaos)
        self.medium = medium

    async def _commit(
        self, puts: Mapping[bytes, bytes], deletes: Collection[bytes], expect: Mapping[bytes, int], durable: bool,
        lease: Lease | None,
    ) -> int:  # fmt: skip
        version = await super()._commit(puts, deletes, expect, durable, lease)
        self.medium.commits.append(dict(self.disk.records))
        if durable:
            self.medium.records = self.medium.commits[-1]
            self.medium.commits.clear()
        self.medium.note_event()
        return version


@asynccontextmanager
async def opened_on(
    medium: Medium, options: Options, rng: random.Random, keeper: Keeper = NO_KEEPER
) -> AsyncIterator[Volume]:  # fmt: skip
    """The volume on a medium; flushed at the end."""
    chaos = Chaos(rng)
    engines = CutRecords(medium, chaos), CutSegments(medium, chaos)
    held = HeldVolume(medium.disk.superblock, *engines, change_superblock=medium.disk.change_superblock)
    async with run_volume(options, held, keeper) as volume:
        yield volume
