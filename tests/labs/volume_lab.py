"""A volume over engines in memory: slow, failing, and copied between any two steps as a crash would leave them.

What a killed daemon leaves is what its engines had applied: a commit wholly or not at all, a segment
write in any part. ``Disk.copy`` taken at any moment is therefore a crash, without a process to kill.

A *shared* disk (``Disk.format(options, shared=True)``) is open in several volumes at once: their stores see each
other's commits and watches, leases end by trio's clock, and every client has a ``Chaos`` of its own, so that one of
them can be slow, frozen or cut off while the others go on.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import inside
import numpy as np
import numpy.typing as npt
import trio
from kept_memory import free
from memory_index import Entries

from kvfuse.checksum import granule_checksums
from kvfuse.errors import EngineError, EngineTimeout
from kvfuse.kept.keeper import NO_KEEPER, Keeper
from kvfuse.options.options import CacheOptions, MountOptions, Options, PublishOptions, VolumeOptions
from kvfuse.remote.mapguard import GuardedMap
from kvfuse.remote.records.api import (
    ABSENT,
    Change,
    Following,
    Lease,
    Record,
    RecordLimits,
    RecordStore,
    Versioned,
)
from kvfuse.remote.records.lmdb.local import LocalFollowing
from kvfuse.remote.records.lmdb.store import LIMITS
from kvfuse.remote.segments.api import Fetch, NoSegment, SegmentInfo, SegmentLimits, SegmentStore, Transfer
from kvfuse.slab.layout import FEATURE_PACKED, PAGE_SIZE, Geometry, Superblock, pack_superblock
from kvfuse.volume.api import Caller
from kvfuse.volume.check.evidence import CheckReport, Evidence
from kvfuse.volume.check.volume_check import run_check
from kvfuse.volume.inodes.metadata_budget import weigh
from kvfuse.volume.opening.formatting import first_records
from kvfuse.volume.opening.held_volume import HeldVolume
from kvfuse.volume.running import run_volume
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume

CALLER = Caller(0, 0)
MIB = 1 << 20
SECTOR = 512
"""what a medium writes wholly or not at all"""


SHARED_LIMITS = dataclasses.replace(
    LIMITS, shared=True, commit_operations_max=128, commit_bytes_max=3 * MIB // 2, deadline=5.0
)


@dataclass
class Disk:
    """All that survives a daemon."""

    superblock: Superblock
    records: dict[bytes, Versioned] = field(default_factory=dict)
    version: int = 0
    segments: dict[int, bytearray] = field(default_factory=dict)
    shared: bool = False
    mappable: bool = False
    """segments can be mapped, as those of a shared file system can; if not shared, they always can"""
    is_direct: bool = False
    """segments bypass the page cache, and cannot be mapped"""
    watches: weakref.WeakSet[MemoryFollowing] = field(default_factory=weakref.WeakSet)
    """of all stores of this disk"""
    fences: bool = False
    """segments' clients have identities, and may be cut off"""
    fenced: set[bytes] = field(default_factory=set)
    durable: bool = False
    """every write and every commit is, when its call returns"""
    quarantine: float = 0.0
    leases: dict[bytes, LeaseState] = field(default_factory=dict)
    """by identity"""
    index: Entries = field(default_factory=Entries)
    """of blocks that hosts share"""
    joins: Counter[int] = field(default_factory=Counter)
    """host -> how often it joined as a new client"""
    audit: Callable[[Mapping[bytes, bytes], Collection[bytes]], None] | None = None
    """looks at the records after each commit, with what it put and deleted"""

    @classmethod
    def format(cls, options: Options, *, shared: bool = False) -> Disk:
        geometry = Geometry.choose(options.volume.capacity, None, options.volume.segment_size)
        disk = cls(Superblock(random.randbytes(16), geometry, 1, features=FEATURE_PACKED), shared=shared)
        disk.apply(first_records(options), ())
        return disk

    @property
    def limits(self) -> RecordLimits:
        return dataclasses.replace(SHARED_LIMITS if self.shared else LIMITS, durable=self.durable)

    def copy(self) -> Disk:
        """As after a crash of all: nobody watches the copy, and no lease of it ends."""
        segments = {number: bytearray(image) for number, image in self.segments.items()}
        return Disk(self.superblock, dict(self.records), self.version, segments, self.shared)

    async def change_superblock(self, change: Callable[[Superblock], Superblock]) -> Superblock:
        self.superblock = change(self.superblock)
        if self.shared:
            self.apply({schema.SUPERBLOCK: pack_superblock(self.superblock)}, ())
        return self.superblock

    def apply(self, puts: Mapping[bytes, bytes], deletes: Collection[bytes]) -> None:
        self.version += 1
        changes = [Change(key, value, self.version) for key, value in puts.items()]
        changes += [Change(key, None, self.version) for key in deletes if key in self.records]
        for key, value, version in changes:
            if value is None:
                del self.records[key]
            else:
                self.records[key] = Versioned(value, version)
        if self.audit is not None:
            self.audit(puts, deletes)
        for watch in list(self.watches):
            for change in changes:
                watch.offer(change)


@dataclass
class Delay:
    """An answer of the store that stays on its way: what it says is what was so when it was given."""

    prefix: bytes
    """of a key that the question is about"""
    given: trio.Event = field(default_factory=trio.Event)
    arrives: trio.Event = field(default_factory=trio.Event)


@dataclass
class Chaos:
    """How the engines behave for one client: calls may be held up, or fail. Probabilities for each call."""

    random: random.Random
    delay: float = 0.0
    commit_error: float = 0.0
    """half of it before the commit, half after; 2: every commit fails"""
    commit_error_after: float = 0.0
    read_error: float = 0.0
    """of segments"""
    write_error: float = 0.0
    sync_error: float = 0.0
    fence_error: float = 0.0
    """of segments"""
    deadline: float = 5.0
    """seconds after which a call of a client that is cut off fails"""
    stalled: trio.Event | None = None
    """the client is frozen: its calls stop where they are, and go on when this is set"""
    deaf: trio.Event | None = None
    """the client hears of no changes until this is set; its calls go on"""
    stalled_commits: trio.Event | None = None
    """no commit of the client begins until this is set"""
    stalled_writes: trio.Event | None = None
    """no segment write of the client ends until this is set"""
    late: Delay | None = None
    """an answer that comes late; its call alone is held up"""
    cut: trio.Event | None = None
    """the client is cut off: its calls, those under way too, time out; it hears of no changes until this is set"""
    commits: int = 0
    durable_commits: int = 0
    events: list[str] = field(default_factory=list)
    """what the engines were asked that matters for durability, in order"""
    first_write: trio.Event = field(default_factory=trio.Event)
    """a segment write began"""
    killed: bool = False
    """the client's process is dead: nothing that it does comes to anything"""
    tears: bool = True
    """a short segment write may be done up to any sector, as after a power cut; not where a process is killed in it"""
    late_writes: trio.Event | None = None
    """segment writes under way when it was killed happen when this is set"""
    late_commits: trio.Event | None = None
    """likewise commits"""

    def end(self) -> None:
        """Whatever was held up goes on."""
        late = self.late and self.late.arrives
        for event in (self.stalled, self.deaf, self.stalled_commits, self.stalled_writes, self.cut, late):
            if event is not None:
                event.set()

    async def hold_up(self) -> None:
        await self._hold_up()
        if self.killed:
            await trio.sleep_forever()

    async def _hold_up(self) -> None:
        if self.random.random() < self.delay:
            await trio.sleep(self.random.random() * 0.01)
        await self.wait_if_stalled()
        if self.cut is not None and not self.cut.is_set():
            with trio.move_on_after(self.deadline):
                await self.cut.wait()
                return
            await self.wait_if_stalled()
            raise EngineTimeout(f"injected: no answer in {self.deadline} s")

    async def answer(self, *keys: bytes) -> None:
        """On its way from the store to the client."""
        await self.hold_up()
        if self.late is not None and any(key.startswith(self.late.prefix) for key in keys):
            late, self.late = self.late, None
            late.given.set()
            await late.arrives.wait()

    async def wait_if_stalled(self) -> None:
        while self.stalled is not None and not self.stalled.is_set():
            await self.stalled.wait()

    async def wait_if_unheard(self) -> None:
        """Return when changes reach the client."""
        if self.deaf is not None:
            await self.deaf.wait()
        await self.wait_if_stalled()
        while self.cut is not None and not self.cut.is_set():
            await self.cut.wait()
            await self.wait_if_stalled()

    def fails(self, probability: float) -> bool:
        return self.random.random() < probability


class MemoryFollowing(LocalFollowing):
    """A following whose changes reach the client when it is neither frozen nor cut off."""

    def __init__(self, chaos: Chaos) -> None:
        super().__init__()
        self._chaos = chaos

    def break_off(self) -> None:
        """As if it had fallen too far behind: the reader has to read everything anew."""
        self.fail(EngineError("injected: the watch fell behind"))

    async def catch_up(self) -> None:
        await self._chaos.hold_up()
        await super().catch_up()
        await self._chaos.hold_up()

    async def __anext__(self) -> Change:
        change = await super().__anext__()
        await self._chaos.wait_if_unheard()
        return change


class LeaseState:
    """A lease as the disk has it."""

    def __init__(self, ttl: float, disk: Disk) -> None:
        self.ttl = ttl
        self.disk = disk
        self.identity = b"lease %d" % len(disk.leases)
        self.ended = False
        self.attached: dict[bytes, int] = {}
        """key -> the version it was put with"""
        self._life = trio.CancelScope(deadline=trio.current_time() + ttl)
        disk.leases[self.identity] = self
        trio.lowlevel.spawn_system_task(self._end_in_time)

    async def _end_in_time(self) -> None:
        with self._life:
            await trio.sleep_forever()
        self.end()

    def renew(self) -> bool:
        if not self.ended:
            self._life.deadline = trio.current_time() + self.ttl
        return not self.ended

    def end(self) -> None:
        """The lease is over, as everybody sees at once."""
        records = self.disk.records
        if not self.ended:
            self.ended = True
            self._life.cancel()
            held = [key for key, version in self.attached.items() if key in records and records[key].version == version]
            if held:
                self.disk.apply({}, held)


class MemoryLease(Lease):
    """A lease that the disk ends when it was not renewed in time by trio's clock."""

    def __init__(self, store: MemoryRecords, state: LeaseState) -> None:
        self.ttl = state.ttl
        self.store = store
        self.state = state
        self.identity = state.identity

    async def keepalive(self) -> bool:
        await self.store.chaos.hold_up()
        renewed = self.state.renew()
        await self.store.chaos.hold_up()
        return renewed

    async def revoke(self) -> None:
        await self.store.chaos.hold_up()
        self.state.end()


class MemoryRecords(RecordStore):
    """The contract of ``records/api.py`` over ``Disk.records``."""

    def __init__(self, disk: Disk, chaos: Chaos, limits: RecordLimits | None = None) -> None:
        super().__init__(limits or disk.limits)
        self.disk = disk
        self.chaos = chaos
        self._order = trio.Lock()

    async def get(self, keys: Sequence[bytes]) -> list[Versioned | None]:
        self.counters.gets += 1
        await self.chaos.hold_up()
        found = [self.disk.records.get(key) for key in keys]
        await self.chaos.answer(*keys)
        return found

    async def scan(self, prefix: bytes, after: bytes = b"", limit: int = 1000) -> list[Record]:
        self.counters.scans += 1
        await self.chaos.hold_up()
        keys = sorted(key for key in self.disk.records if key.startswith(prefix) and key > after)[:limit]
        rows = [Record(key, *self.disk.records[key]) for key in keys]
        await self.chaos.answer(prefix)
        return rows

    async def commit(
        self,
        puts: Mapping[bytes, bytes],
        deletes: Collection[bytes] = (),
        expect: Mapping[bytes, int] | None = None,
        *,
        durable: bool = False,
        lease: Lease | None = None,
    ) -> int:
        self.limits.check_commit(puts, deletes, expect or {})
        before = self.chaos.commits
        try:
            return await self._commit(puts, deletes, expect or {}, durable, lease)
        except BaseException:
            late = self.chaos.late_commits
            if late is not None and self.chaos.killed and self.chaos.commits == before:
                trio.lowlevel.spawn_system_task(self._commit_late, dict(puts), list(deletes), expect or {}, lease, late)
            raise

    async def _commit_late(
        self,
        puts: Mapping[bytes, bytes],
        deletes: Collection[bytes],
        expect: Mapping[bytes, int],
        lease: Lease | None,
        when: trio.Event,
    ) -> None:
        """What was sent by then arrives."""
        await when.wait()
        self.chaos.events.append("late commit")
        if self._may(expect, lease):
            self.chaos.events.append("late commit done")
            self.disk.apply(puts, deletes)

    async def _commit(
        self,
        puts: Mapping[bytes, bytes],
        deletes: Collection[bytes],
        expect: Mapping[bytes, int],
        durable: bool,
        lease: Lease | None,
    ) -> int:
        self.counters.commits += 1
        async with self._order:
            if self.chaos.stalled_commits is not None:
                await self.chaos.stalled_commits.wait()
            await self.chaos.hold_up()
            if self.chaos.fails(self.chaos.commit_error / 2):
                raise EngineError("injected before the commit")
            if not self._may(expect, lease):
                await self.chaos.hold_up()
                return 0
            self.disk.apply(puts, deletes)
            version = self.disk.version
            if isinstance(lease, MemoryLease):
                lease.state.attached.update(dict.fromkeys(puts, version))
            self.chaos.commits += 1
            self.chaos.durable_commits += durable
            self.chaos.events.append("durable commit" if durable else "commit")
            await self.chaos.hold_up()
            if self.chaos.fails(self.chaos.commit_error / 2 + self.chaos.commit_error_after):
                raise EngineError("injected after the commit")
        return version

    def _may(self, expect: Mapping[bytes, int], lease: Lease | None) -> bool:
        """Nothing expected has moved, and the lease lasts."""
        if isinstance(lease, MemoryLease) and lease.state.ended:
            return False
        rows = {key: self.disk.records.get(key) for key in expect}
        return all((row.version if row else ABSENT) == expect[key] for key, row in rows.items())

    def follow(self) -> Following:
        following = MemoryFollowing(self.chaos)
        self.disk.watches.add(following)
        return following

    async def lease(self, ttl: float) -> Lease:
        await self.chaos.hold_up()
        return MemoryLease(self, LeaseState(ttl, self.disk))

    async def resume_lease(self, identity: bytes) -> Lease | None:
        state = self.disk.leases.get(identity)
        if state is None:
            return None
        lease = MemoryLease(self, state)
        return lease if await lease.keepalive() else None

    async def aclose(self) -> None:
        pass


def torn_at(offset: int, length: int) -> int:
    """Bytes of a write before the boundary of sectors that is next to its middle: no medium writes a part of one."""
    return min(max(0, (offset + length // 2) // SECTOR * SECTOR - offset), length)


class MemorySegments(SegmentStore):
    """The contract of ``segments/api.py`` over ``Disk.segments``."""

    def __init__(self, disk: Disk, chaos: Chaos) -> None:
        mappable = disk.mappable or not (disk.shared or disk.is_direct)
        super().__init__(SegmentLimits(mappable=mappable, durable=disk.durable, quarantine=disk.quarantine))
        self.disk = disk
        self.chaos = chaos
        self._identity = random.randbytes(8)
        self._frames: list[FrameType] = []
        """of the last read and its callers: what they had views of may be seen for longer than they run"""

    def identity(self) -> bytes:
        return self._identity if self.disk.fences else b""

    async def fence(self, identity: bytes) -> bool:
        await self.chaos.hold_up()
        if self.chaos.fails(self.chaos.fence_error):
            raise EngineError("injected: a client is not cut off")
        if self.disk.fences and identity:
            self.disk.fenced.add(identity)
        return self.disk.fences and bool(identity)

    async def renew(self) -> None:
        self._identity = random.randbytes(8)

    def _check_fence(self) -> None:
        if self._identity in self.disk.fenced:
            raise EngineError("injected: this client was cut off")

    async def create(self, segment: int, size: int) -> None:
        await self.chaos.hold_up()
        image = self.disk.segments.get(segment)
        if image is None:
            image = self.disk.segments[segment] = bytearray(size)
        if len(image) != size:
            raise EngineError(f"segment {segment} has {len(image)} bytes, not {size}")

    async def remove(self, segment: int) -> None:
        self.disk.segments.pop(segment, None)

    async def list(self) -> list[SegmentInfo]:
        return [SegmentInfo(segment, len(image)) for segment, image in sorted(self.disk.segments.items())]

    def _range(self, segment: int, offset: int, length: int) -> memoryview:
        image = self.disk.segments.get(segment)
        if image is None or not 0 <= offset <= offset + length <= len(image):
            raise NoSegment(f"segment {segment} has no {length} bytes at {offset}", segment)
        return memoryview(image)[offset : offset + length]

    async def read(self, batch: Sequence[Transfer]) -> None:
        self.counters.reads += len(batch)
        if self.chaos.fails(self.chaos.read_error):
            raise EngineError("injected: a read")
        for segment, offset, buffer in batch:
            source = self._range(segment, offset, len(buffer))
            middle = len(buffer) // 2 if self.chaos.tears or len(buffer) > PAGE_SIZE else len(buffer)
            for part in (slice(0, middle), slice(middle, None)):
                await self.chaos.hold_up()
                memoryview(buffer)[part] = source[part]
            await self.chaos.hold_up()
        # Python 3.12 and later do this to whom a deadline has just passed, by the traceback of what ended the wait.
        self._frames = [frame for frame, _ in traceback.walk_stack(sys._getframe())]

    async def write(self, batch: Sequence[Transfer]) -> None:
        if self.chaos.late_writes is None:
            await self._write(batch)
            return
        copies = [(segment, offset, bytes(buffer)) for segment, offset, buffer in batch]
        try:
            await self._write(batch)
        except BaseException:
            if self.chaos.killed:
                trio.lowlevel.spawn_system_task(self._write_late, copies, self.chaos.late_writes)
            raise

    async def _write_late(self, copies: Sequence[tuple[int, int, bytes]], when: trio.Event) -> None:
        """What was sent by then arrives, unless the client was cut off since."""
        await when.wait()
        for segment, offset, data in copies if self._identity not in self.disk.fenced else ():
            self._range(segment, offset, len(data))[:] = data
            self.chaos.events.append("late write")

    async def _write(self, batch: Sequence[Transfer]) -> None:
        self.counters.writes += len(batch)
        self.chaos.events.append("write")
        self.chaos.first_write.set()
        fails = self.chaos.fails(self.chaos.write_error)
        order = self.chaos.random.sample(batch, len(batch))
        for segment, offset, buffer in order:
            if fails and self.chaos.fails(0.5):
                continue
            target = self._range(segment, offset, len(buffer))
            middle = torn_at(offset, len(buffer)) if self.chaos.tears or len(buffer) > PAGE_SIZE else len(buffer)
            for part in (slice(0, middle), slice(middle, None)):
                self._check_fence()
                target[part] = memoryview(buffer)[part]
                await self.chaos.hold_up()
                if self.chaos.stalled_writes is not None:
                    await self.chaos.stalled_writes.wait()
        self.chaos.events.append("written")
        if fails:
            raise EngineError("injected: a part of the batch was written")

    async def sync(self) -> None:
        await self.chaos.hold_up()
        self.chaos.events.append("sync")
        if self.chaos.fails(self.chaos.write_error + self.chaos.sync_error):
            raise EngineError("injected: sync")

    async def warm(self, segment: int, offset: int, length: int, threads: trio.CapacityLimiter) -> bytes:
        if not self.limits.mappable or not length:
            return b""
        buffer = bytearray(length)
        async with threads:
            await MemorySegments.read(self, [Transfer(segment, offset, buffer)])  # not what a test put in its place
        return granule_checksums(buffer)

    async def fetch(self, batch: Sequence[Fetch], threads: trio.CapacityLimiter) -> Sequence[bytes]:
        if not self.limits.mappable:
            return []
        async with threads:
            await MemorySegments.read(
                self, [Transfer(one.segment, one.offset, one.target[: one.length]) for one in batch]
            )
        return [granule_checksums(one.target[: one.length]) for one in batch]

    def view(self, segment: int, offset: int, length: int) -> memoryview | None:
        if not self.limits.mappable or self.chaos.random.random() < self.chaos.delay:
            return None
        return self._range(segment, offset, length).toreadonly()

    def source(self, segment: int) -> tuple[int, npt.NDArray[np.uint8], GuardedMap | None] | None:
        """Without a descriptor."""
        if not self.limits.mappable:
            return None
        image = self._range(segment, 0, len(self.disk.segments.get(segment, b"")))
        return -1, np.frombuffer(image.toreadonly(), np.uint8), None

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
async def opened(
    disk: Disk,
    options: Options,
    chaos: Chaos | None = None,
    limits: RecordLimits | None = None,
    keeper: Keeper = NO_KEEPER,
) -> AsyncIterator[Volume]:
    """The volume on ``disk``; flushed at the end. ``limits``: of commits, if not the disk's.

    ``keeper``: what is to outlive the daemon, and what one before it left.
    """
    chaos = chaos or Chaos(random.Random(0))
    records = MemoryRecords(disk, chaos, limits)
    if not disk.shared:
        count_inodes(disk)
    held = HeldVolume(disk.superblock, records, MemorySegments(disk, chaos), change_superblock=disk.change_superblock)
    async with run_volume(options, held, keeper) as volume:
        try:
            yield volume
        finally:
            tier = inside.tier(volume)
    free(tier)


def count_inodes(disk: Disk) -> None:
    """Record their number, as a store of one daemon counts it itself."""
    count = sum([weigh(key, row.value)[1] for key, row in disk.records.items()])
    former = disk.records.get(schema.COUNTER_FILES)
    if former is not None and schema.decode_counts(former.value).inodes != count:
        disk.apply({schema.COUNTER_FILES: schema.encode_counts(count, schema.decode_counts(former.value).size)}, ())


async def check(disk: Disk, *, verify: bool = True) -> CheckReport:
    """What fsck says of a volume that nobody has open."""
    chaos = Chaos(random.Random(0))
    records, segments = MemoryRecords(disk, chaos), MemorySegments(disk, chaos)
    found = Evidence(disk.superblock, records, segments, wants_verify=verify)
    await run_check(found)
    return found.report
