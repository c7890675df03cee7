"""A volume over engines in memory: slow, failing, and copied between any two steps as a crash would leave them.

What a killed daemon leaves is what its engines had applied: a commit wholly or not at all, a segment
write in any part. ``Disk.copy`` taken at any moment is therefore a crash, without a process to kill.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.config import CacheOptions, MountOptions, Options, PublishOptions, VolumeOptions
from kvfuse.errors import EngineError
from kvfuse.remote.records.api import (
    ABSENT,
    Change,
    Lease,
    Record,
    RecordLimits,
    RecordStore,
    Versioned,
)
from kvfuse.remote.records.lmdb import LIMITS
from kvfuse.remote.records.local import LocalLease, Watch
from kvfuse.remote.segments.api import SegmentInfo, SegmentLimits, SegmentStore, Transfer
from kvfuse.slab.layout import Geometry, Superblock
from kvfuse.volume.api import Caller
from kvfuse.volume.format import first_records
from kvfuse.volume.fsck import Check, Report
from kvfuse.volume.volume import Volume, run_volume

CALLER = Caller(0, 0)
MIB = 1 << 20


@dataclass
class Disk:
    """All that survives a daemon."""

    superblock: Superblock
    records: dict[bytes, Versioned] = field(default_factory=dict)
    version: int = 0
    segments: dict[int, bytearray] = field(default_factory=dict)

    @classmethod
    def format(cls, options: Options) -> Disk:
        geometry = Geometry.choose(options.volume.capacity, None, options.volume.segment_size)
        disk = cls(Superblock(random.randbytes(16), geometry, 1))
        disk.apply(first_records(options), ())
        return disk

    def copy(self) -> Disk:
        segments = {number: bytearray(image) for number, image in self.segments.items()}
        return Disk(self.superblock, dict(self.records), self.version, segments)

    def apply(self, puts: Mapping[bytes, bytes], deletes: Collection[bytes]) -> None:
        self.version += 1
        self.records.update({key: Versioned(value, self.version) for key, value in puts.items()})
        for key in deletes:
            self.records.pop(key, None)


@dataclass
class Chaos:
    """How the engines behave: every call may be held up, some fail. Probabilities for each call."""

    random: random.Random
    delay: float = 0.0
    commit_error: float = 0.0
    """half of it before the commit, half after; 2: every commit fails"""
    commit_error_after: float = 0.0
    write_error: float = 0.0
    sync_error: float = 0.0
    commits: int = 0
    durable_commits: int = 0
    events: list[str] = field(default_factory=list)
    """what the engines were asked that matters for durability, in order"""
    first_write: trio.Event = field(default_factory=trio.Event)
    """a segment write began"""

    async def hold_up(self) -> None:
        if self.random.random() < self.delay:
            await trio.sleep(self.random.random() * 0.01)

    def fails(self, probability: float) -> bool:
        return self.random.random() < probability


class MemoryRecords(RecordStore):
    """The contract of ``records/api.py`` over ``Disk.records``."""

    def __init__(self, disk: Disk, chaos: Chaos, limits: RecordLimits = LIMITS) -> None:
        super().__init__(limits)
        self.disk = disk
        self.chaos = chaos
        self._order = trio.Lock()

    async def get(self, keys: Sequence[bytes]) -> list[Versioned | None]:
        self.counters.gets += 1
        await self.chaos.hold_up()
        found = [self.disk.records.get(key) for key in keys]
        await self.chaos.hold_up()
        return found

    async def scan(self, prefix: bytes, after: bytes = b"", limit: int = 1000) -> list[Record]:
        self.counters.scans += 1
        await self.chaos.hold_up()
        keys = sorted(key for key in self.disk.records if key.startswith(prefix) and key > after)[:limit]
        rows = [Record(key, *self.disk.records[key]) for key in keys]
        await self.chaos.hold_up()
        return rows

    async def commit(
        self,
        puts: Mapping[bytes, bytes],
        deletes: Collection[bytes] = (),
        expect: Mapping[bytes, int] | None = None,
        *,
        durable: bool = False,
    ) -> bool:
        self.counters.commits += 1
        self.limits.check_commit(puts, deletes, expect or {})
        async with self._order:
            await self.chaos.hold_up()
            if self.chaos.fails(self.chaos.commit_error / 2):
                raise EngineError("injected before the commit")
            for key, version in (expect or {}).items():
                row = self.disk.records.get(key)
                if (row.version if row else ABSENT) != version:
                    return False
            self.disk.apply(puts, deletes)
            self.chaos.commits += 1
            self.chaos.durable_commits += durable
            self.chaos.events.append("durable commit" if durable else "commit")
            await self.chaos.hold_up()
            if self.chaos.fails(self.chaos.commit_error / 2 + self.chaos.commit_error_after):
                raise EngineError("injected after the commit")
        return True

    def watch(self, prefix: bytes) -> AsyncIterator[Change]:
        return Watch(prefix)

    async def lease(self, ttl: float) -> Lease:
        return LocalLease(ttl)

    async def aclose(self) -> None:
        pass


class MemorySegments(SegmentStore):
    """The contract of ``segments/api.py`` over ``Disk.segments``."""

    def __init__(self, disk: Disk, chaos: Chaos) -> None:
        super().__init__(SegmentLimits(alignment=1, overwrite=True, preallocates=True, mappable=True, registers=False))
        self.disk = disk
        self.chaos = chaos

    async def create(self, segment: int, size: int) -> None:
        await self.chaos.hold_up()
        image = self.disk.segments.setdefault(segment, bytearray(size))
        if len(image) != size:
            raise EngineError(f"segment {segment} has {len(image)} bytes, not {size}")

    async def remove(self, segment: int) -> None:
        self.disk.segments.pop(segment, None)

    async def list(self) -> list[SegmentInfo]:
        return [SegmentInfo(segment, len(image)) for segment, image in sorted(self.disk.segments.items())]

    def _range(self, segment: int, offset: int, length: int) -> memoryview:
        image = self.disk.segments.get(segment)
        if image is None or not 0 <= offset <= offset + length <= len(image):
            raise ValueError(f"segment {segment} has no {length} bytes at {offset}")
        return memoryview(image)[offset : offset + length]

    async def read(self, batch: Sequence[Transfer]) -> None:
        self.counters.reads += len(batch)
        for segment, offset, buffer in batch:
            source = self._range(segment, offset, len(buffer))
            middle = len(buffer) // 2
            for part in (slice(0, middle), slice(middle, None)):
                await self.chaos.hold_up()
                memoryview(buffer)[part] = source[part]
            await self.chaos.hold_up()

    async def write(self, batch: Sequence[Transfer]) -> None:
        self.counters.writes += len(batch)
        self.chaos.events.append("write")
        self.chaos.first_write.set()
        fails = self.chaos.fails(self.chaos.write_error)
        order = self.chaos.random.sample(batch, len(batch))
        for segment, offset, buffer in order:
            if fails and self.chaos.fails(0.5):
                continue
            target = self._range(segment, offset, len(buffer))
            middle = len(buffer) // 2
            for part in (slice(0, middle), slice(middle, None)):
                target[part] = memoryview(buffer)[part]
                await self.chaos.hold_up()
        self.chaos.events.append("written")
        if fails:
            raise EngineError("injected: a part of the batch was written")

    async def zero(self, segment: int, offset: int, length: int) -> None:
        self._range(segment, offset, length)[:] = bytes(length)

    async def sync(self) -> None:
        await self.chaos.hold_up()
        self.chaos.events.append("sync")
        if self.chaos.fails(self.chaos.write_error + self.chaos.sync_error):
            raise EngineError("injected: sync")

    def view(self, segment: int, offset: int, length: int) -> memoryview | None:
        if self.chaos.random.random() < self.chaos.delay:
            return None
        return self._range(segment, offset, length).toreadonly()

    def source(self, segment: int) -> tuple[int, npt.NDArray[np.uint8]] | None:
        """Without a descriptor."""
        image = self._range(segment, 0, len(self.disk.segments.get(segment, b"")))
        return -1, np.frombuffer(image.toreadonly(), np.uint8)

    async def aclose(self) -> None:
        pass


def lab_options(
    *,
    capacity: int = 8 * MIB,
    strict: bool = False,
    nodes: int = 1000,
    staging_size: int = 64 * MIB,
    chunk: int = MIB,
    tier_size: int = 64 * MIB,
) -> Options:
    """Options of a volume in memory; ``chunk``: bytes of a chunk."""
    return Options(
        volume=VolumeOptions(path=Path("/in-memory"), capacity=capacity, chunk_size=chunk),
        publish=PublishOptions(mode="strict" if strict else "relaxed", window=0.05),
        cache=CacheOptions(nodes=nodes, staging_size=staging_size, tier_size=tier_size),
        mount=MountOptions(),
    )


@asynccontextmanager
async def opened(disk: Disk, options: Options, chaos: Chaos | None = None) -> AsyncIterator[Volume]:
    """The volume on ``disk``; flushed at the end."""
    chaos = chaos or Chaos(random.Random(0))
    async with run_volume(options, disk.superblock, MemoryRecords(disk, chaos), MemorySegments(disk, chaos)) as volume:
        yield volume


async def check(disk: Disk, *, verify: bool = True) -> Report:
    """What fsck says of a volume that nobody has open."""
    chaos = Chaos(random.Random(0))
    checker = Check(disk.superblock.geometry, MemoryRecords(disk, chaos), MemorySegments(disk, chaos))
    return await checker.run(verify)
