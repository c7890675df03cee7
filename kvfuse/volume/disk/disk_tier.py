"""The disk tier of a mount: reads copies, takes copies, and is never in the way.

A reader asks the tier for a stretch of a sealed extent, as its record describes it. The tier answers with bytes that
match the record's checksums, or not at all; then the reader asks the engine, and offers what it got. A read of the
tier that takes many times as long as usual is not waited for. The first error of the disk turns the tier off, with one
line in the log: from then on every reader asks the engine, as without a tier.

After a restart the heads of all copies are read in the background. Until that is done nothing is found, or written.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import trio

from kvfuse.checksum import CHECKSUM_SIZE, GRANULE_SIZE, crc32c, granule_checksums
from kvfuse.errors import ConfigError, EngineError
from kvfuse.options.options import CacheOptions
from kvfuse.remote.segments.api import Transfer
from kvfuse.remote.segments.block.block_device import is_device
from kvfuse.volume.disk.copies import COPY_ROW, Copy, Granule, GranuleRun, Rows, newest, parse_heads
from kvfuse.volume.disk.filler import Filler
from kvfuse.volume.disk.folder import Folder, opened_folder
from kvfuse.volume.disk.index import Index
from kvfuse.volume.disk.tier_device import examined_device, opened_device
from kvfuse.volume.measures.demand import Demand
from kvfuse.volume.measures.speeds import Speed
from kvfuse.volume.store.codec import Codec

PATIENCE_FACTOR = 10.0
PATIENCE_MIN = 0.25
PATIENCE_MAX = 1.0
"""A read is waited for up to so many times its usual seconds, within these bounds (s)."""
READS_MAX = 128
"""Reads under way, of up to 1 MiB each: with so many the engine is asked."""
LATE_MAX = 8
"""Reads that nobody waits for any more, and that go on: with so many no further one is begun."""
TABLES_BYTES = 4 << 20
"""Bytes of head tables that are read together."""
ADOPTED_AT_ONCE = 256
"""Copies that enter the index between two passes of the event loop."""

log = logging.getLogger(__name__)


@dataclass
class DiskCounters:
    """Granules, unless they say otherwise."""

    hits: int = 0
    hit_bytes: int = 0
    misses: int = 0
    read_seconds: float = 0.0
    """of all reads that hit"""
    engine_bytes: int = 0
    """that readers got from the engine instead"""
    engine_seconds: float = 0.0
    refused: int = 0
    """not worth a slot, by the policy"""
    dropped: int = 0
    """their bytes are no file's any more"""
    damaged: int = 0
    """bytes that did not match their checksum"""
    late: int = 0
    """reads that were not waited for any more"""
    errors: int = 0
    """calls that the disk failed"""
    adopted: int = 0
    adoption_seconds: float = 0.0


@dataclass(eq=False)
class _Read:
    """A read of copies, which goes on also when nobody waits for it any more."""

    found: Sequence[tuple[Granule, Copy]]
    data: memoryview
    packed: list[tuple[memoryview, memoryview]] = field(default_factory=list)
    """of compressed copies: (bytes in the slot, where they belong in ``data``)"""
    done: trio.Event = field(default_factory=trio.Event)
    is_right: bool = False
    is_late: bool = False


class DiskTier:
    """Made by `opened_tier`, which also runs it. For the event loop alone."""

    def __init__(self, folder: Folder, *, compresses: bool, keeps_stores: bool) -> None:
        """``compresses``: makes compressed copies; those that are there are read in any case."""
        self.folder = folder
        self.keeps_stores = keeps_stores
        """what this host stores is to be kept, too"""
        self.index = Index(folder.geometry)
        self._demand = Demand()
        """reads under way at the disk"""
        self.filler = Filler(folder, self.index, Codec() if compresses else None, self._demand)
        self._codec = Codec()
        self.counters = DiskCounters()
        self.is_on = True
        self.adopted = trio.Event()
        """set when all copies of before the restart can be found"""
        self.speed = Speed(200e-6, 1e9)
        self._usual = 0.0
        """seconds of a read, about"""
        self._late_count = 0
        self._nursery: trio.Nursery | None = None

    # -- for readers ---------------------------------------------------------------------------------

    def have_copies(self, addrs: Iterable[int], generations: Iterable[int]) -> list[bool]:
        """Of which extents the tier has a copy of the first granule."""
        copies = map(self.index.copies.get, addrs)
        return [
            copy is not None and copy.generation == generation
            for copy, generation in zip(copies, generations, strict=True)
        ]

    def held(self, addr: int, generation: int, low: int, high: int) -> GranuleRun | None:
        """Granules of an extent, as the copies here have them; None: there are not copies of all."""
        found = [self.index.copies.get(addr + start) for start in range(low, high, GRANULE_SIZE)]
        copies = [copy for copy in found if copy is not None and copy.generation == generation]
        if len(copies) < len(found) or sum([copy.length for copy in copies]) != high - low:
            return None
        checksums = b"".join([copy.checksum.to_bytes(CHECKSUM_SIZE, "little") for copy in copies])
        return GranuleRun(addr, generation, high, bytes(low // GRANULE_SIZE * CHECKSUM_SIZE) + checksums, low, high)

    async def read(self, stretch: GranuleRun) -> memoryview | None:
        """The bytes of all its granules, verified; None where the engine has to be asked."""
        if not self.is_on:
            return None
        granules, now = stretch.granules(), trio.current_time()
        self.index.used(granules, now)
        found = [(granule, copy) for granule in granules if (copy := self.index.find(granule)) is not None]
        if len(found) < len(granules) or not self._may_read():
            self.counters.misses += len(granules)
            return None
        read = _Read(found, np.empty(stretch.high - stretch.low, np.uint8).data)
        assert self._nursery is not None
        self._nursery.start_soon(self._perform, read)
        with trio.move_on_after(min(max(PATIENCE_FACTOR * self._usual, PATIENCE_MIN), PATIENCE_MAX)):
            await read.done.wait()
        if not read.done.is_set():
            read.is_late = True
            self._late_count += 1
            self.counters.late += 1
        if not read.is_right:
            self.counters.misses += len(granules)
            return None
        self.counters.hits += len(granules)
        self.counters.hit_bytes += len(read.data)
        self.counters.read_seconds += trio.current_time() - now
        return read.data

    def _may_read(self) -> bool:
        """The disk answers, as far as that is known."""
        return self._nursery is not None and self._late_count < LATE_MAX and self._demand.calls < READS_MAX

    def offer(self, stretch: GranuleRun, data: memoryview, seconds: float, *, wanted: bool = True) -> None:
        """The engine gave these bytes, in so many seconds; they match the checksums, and do not change any more.

        Not ``wanted``: they are not to be kept.
        """
        self.note_engine(len(data), seconds)
        if wanted:
            self.keep(stretch, data)

    def note_engine(self, size: int, seconds: float) -> None:
        """A reader got so many bytes from the engine."""
        self.counters.engine_bytes += size
        self.counters.engine_seconds += seconds

    def keep(self, stretch: GranuleRun, data: memoryview, *, lasts: bool = True) -> None:
        """Keep these bytes where they are worth it. Waits for nothing. Not ``lasts``: they change after this."""
        if not self.is_on:
            return
        now = trio.current_time()
        for granule in stretch.granules():
            if self.index.find(granule) is not None:
                continue
            if self.index.admits(granule, now):
                start = granule.key - stretch.addr - stretch.low
                part = data[start : start + granule.length]
                self.filler.offer(granule, part if lasts else memoryview(bytes(part)))
            else:
                self.counters.refused += 1

    # -- slots whose bytes have no checksums of granules in a record ----------------------------------

    async def read_slot(self, addr: int, generation: int, size: int) -> memoryview | None:
        """The first ``size`` bytes of a slot, as its copies have them, each verified by the checksum in its head.

        None where the engine has to be asked. The caller knows what all of the bytes have to be.
        """
        held = self.held(addr, generation, 0, size) if self.is_on else None
        if held is not None:
            return await self.read(held)
        if self.is_on:
            keys = range(addr, addr + size, GRANULE_SIZE)
            self.index.used([Granule(key, generation, 0, 0) for key in keys], trio.current_time())
            self.counters.misses += len(keys)
        return None

    def keep_slot(self, addr: int, generation: int, data: memoryview, *, lasts: bool = True) -> None:
        """Keep the first bytes of a slot, as `keep`."""
        if self.is_on:
            self.keep(GranuleRun(addr, generation, len(data), granule_checksums(data), 0, len(data)), data, lasts=lasts)

    def drop(self, addr: int, length: int, generation: int | None = None) -> None:
        """The bytes of an extent are no file's any more. ``generation``: of the extent, where the slot may have another
        life by now.
        """
        for key in range(addr, addr + length, GRANULE_SIZE):
            copy = self.index.copies.get(key)
            if copy is not None and generation in (None, copy.generation):
                self.counters.dropped += self.index.drop(key)

    def statistics(self) -> dict[str, Any]:
        counters, filler = self.counters, self.filler
        asked = counters.hit_bytes + counters.engine_bytes
        return {
            "is_on": int(self.is_on),
            "is_adopted": int(self.adopted.is_set()),
            "capacity_bytes": self.folder.geometry.size,
            "used_bytes": self.index.slabs.used_bytes if self.is_on else 0,
            "kept_bytes": self.index.kept_bytes,
            "saved_bytes": self.index.saved_bytes,
            "copies": len(self.index.copies),
            **asdict(counters),
            "local_share": _share(counters.hit_bytes, asked),
            "local_bytes_per_second": _rate(counters.hit_bytes, counters.read_seconds),
            "engine_bytes_per_second": _rate(counters.engine_bytes, counters.engine_seconds),
            "written": filler.written,
            "written_bytes": filler.written_bytes,
            "skipped": filler.skipped,
            "compression_tried": filler.trials.tried,
            "compressed_to": _share(filler.trials.packed_bytes, filler.trials.tried_bytes),
            "queued_bytes": filler.queued_bytes,
            "evicted": self.index.evicted,
        }

    # -- the task ------------------------------------------------------------------------------------

    async def run(self, speed: Speed) -> None:
        """Adopt, read and write, until `stop`. ``speed``: of the tier, which learns from its reads."""
        self.speed = speed
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                await self._adopt()
                await self.filler.run()
            except Exception as error:  # also of a mistake of ours: the mount goes on without a tier
                self._turn_off(error)
                await trio.sleep_forever()
            finally:
                self._nursery = None

    def stop(self) -> None:
        """What is under way is not waited for by readers; what waits to be written is not."""
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    def _turn_off(self, error: Exception) -> None:
        self.counters.errors += 1
        if self.is_on:
            self.is_on = False
            self.index.drop_all()
            self.filler.clear()
            unforeseen = None if isinstance(error, EngineError) else error
            log.error("the disk tier is off until the next mount, its disk fails: %s", error, exc_info=unforeseen)

    async def _perform(self, read: _Read) -> None:
        began = trio.current_time()
        self._demand.calls += 1
        try:
            with self.speed.reading(len(read.data)):
                await self.folder.segments.read(self._transfers(read))
                if read.packed:
                    await trio.to_thread.run_sync(self._codec.unpack, read.packed)
            read.is_right = self._verify(read)
        except Exception as error:
            self._turn_off(error)
        finally:
            read.done.set()
            self._late_count -= read.is_late
            self._demand.calls -= 1
            if self._demand.behind:
                self._demand.ended()
        self._usual += 0.05 * (trio.current_time() - began - self._usual)

    def _transfers(self, read: _Read) -> list[Transfer]:
        transfers, position = [], 0
        for granule, copy in read.found:
            part = read.data[position : position + granule.length]
            if copy.stored < granule.length:
                read.packed.append((np.empty(copy.stored, np.uint8).data, part))
                part = read.packed[-1][0]
            transfers.append(Transfer(*self.folder.geometry.locate(copy.place), part))
            position += granule.length
        return transfers

    def _verify(self, read: _Read) -> bool:
        """All bytes are right. A copy whose bytes are not is dropped; it may have been dropped before."""
        position, is_right = 0, True
        for granule, copy in read.found:
            if crc32c(read.data[position : position + granule.length]) != granule.checksum:
                is_right = False
                if self.index.copies.get(granule.key) is copy:
                    self.counters.damaged += 1
                    self.index.drop(granule.key)
                    log.warning("a copy in the disk tier is damaged, the engine is asked: at %d", copy.place)
            position += granule.length
        return is_right

    # -- what was there before -----------------------------------------------------------------------

    async def _adopt(self) -> None:
        """Find the copies of before by their heads. EngineError."""
        began = trio.current_time()
        if not self.folder.is_new:
            rows = await self._read_heads()
            rows = await trio.to_thread.run_sync(newest, rows)
            await trio.to_thread.run_sync(self.index.restore, rows)  # nobody takes or frees a slot before
            for start in range(0, len(rows), ADOPTED_AT_ONCE):
                self.index.restore_copies(rows[start : start + ADOPTED_AT_ONCE], trio.current_time())
                await trio.lowlevel.checkpoint()
            self.counters.adopted = len(rows)
            self.counters.adoption_seconds = round(trio.current_time() - began, 3)
            log.info("disk tier: %d copies adopted in %.3f s", len(rows), self.counters.adoption_seconds)
        self.adopted.set()

    async def _read_heads(self) -> Rows:
        geometry, found = self.folder.geometry, [np.empty(0, COPY_ROW)]
        step = max(1, TABLES_BYTES // geometry.head_size)
        for first in range(0, geometry.slab_count, step):
            slabs = range(first, min(first + step, geometry.slab_count))
            tables = [np.empty(geometry.head_size, np.uint8).data for _ in slabs]
            await self.folder.segments.read(
                [Transfer(*geometry.locate_head(slab), table) for slab, table in zip(slabs, tables, strict=True)]
            )
            found += await trio.to_thread.run_sync(self._parse, slabs, tables)
        return np.concatenate(found)

    def _parse(self, slabs: Sequence[int], tables: Sequence[memoryview]) -> list[Rows]:
        geometry, volume_id = self.folder.geometry, self.folder.volume_id
        return [parse_heads(table, slab, geometry, volume_id) for slab, table in zip(slabs, tables, strict=True)]


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _rate(size: int, seconds: float) -> int | None:
    return round(size / seconds) if seconds > 0 else None


def _opened(path: Path, size: int | None, volume_id: bytes) -> AbstractAsyncContextManager[Folder]:
    """The folder or device. ConfigError: a folder needs a size."""
    if is_device(path):
        return opened_device(path, size, volume_id)
    if size is None:
        raise ConfigError(f"cache.disk_size is not set, and {path} is no device, which would have one of its own")
    return opened_folder(path, size, volume_id)


def examined_place(options: CacheOptions) -> str:
    """What the options' folder or device is like, in words, without a change. VolumeError, OSError: not usable now."""
    path = options.disk_path
    if path is None:
        return "none"
    if is_device(path):
        return examined_device(path)
    if not path.exists():
        return f"{path}, to be made"
    return f"{path}, a folder"


@asynccontextmanager
async def opened_tier(options: CacheOptions, volume_id: bytes) -> AsyncIterator[DiskTier | None]:
    """The tier of a mount, for `DiskTier.run`; None: the options name nothing, or the disk fails.

    VolumeError, VolumeBusy: the folder or device cannot be this volume's. ConfigError: the size of a folder is missing.
    """
    if options.disk_path is None:
        yield None
        return
    compresses = options.disk_compression == "zstd"
    async with AsyncExitStack() as stack:
        try:
            folder = await stack.enter_async_context(_opened(options.disk_path, options.disk_size, volume_id))
            tier = DiskTier(folder, compresses=compresses, keeps_stores=options.disk_keep == "all")
        except EngineError as error:
            log.error("there is no disk tier until the next mount, its disk fails: %s", error)
            tier = None
        yield tier
