"""The segment store: a few large preallocated files of bytes, read and written in batches.

This file is the whole contract; every engine and decorator passes the one conformance suite in
``tests/remote/segments/test_segments_conformance.py``.

* A segment is named by a number and has a fixed size, given when it is created. Its whole size is
  reserved then: a later write inside it never fails for lack of space where the engine can promise that.
* A fresh segment reads as zeros.
* Buffers are passed in, never returned. A read fills the buffer wholly or raises; a write takes the whole
  buffer or raises. Buffers are C-contiguous and stay the caller's: the engine touches them only until
  the call returns - also when it was cancelled (a call waits for what cannot be cancelled).
* Transfers of one batch are independent: no order among them, and after an ``EngineError`` each of a write
  batch may have happened or not.
* A write that returned is seen by every later read through the same store, and survives the death of this
  process. It survives the loss of power after a later ``sync`` returned.
* After a ``sync`` that raised, later ones vouch for nothing that was written before it: neither what it was to vouch
  for, nor what others wrote meanwhile. The caller writes it again.
* Errors: ``EngineFull`` (the medium has no space), ``EngineTimeout``, else ``EngineError``; a range outside
  the segment or an unknown segment is ``ValueError`` - the volume's own mistake, nothing was touched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.remote.mapguard import GuardedMap
from kvfuse.remote.segments.block.segment_map import DeviceRow, MapName, SegmentMap

Plan: TypeAlias = Callable[[SegmentMap], SegmentMap]
Buffer: TypeAlias = bytes | bytearray | memoryview
"""C-contiguous bytes; numpy arrays are passed as ``memoryview(array)``."""


class Transfer(NamedTuple):
    """One range of a batch: ``len(buffer)`` bytes at ``offset`` of ``segment``."""

    segment: int
    offset: int
    buffer: Buffer


class Fetch(NamedTuple):
    """``length`` bytes at ``offset`` of ``segment``, for whole pages of this process's own memory with room for them.

    What is behind them in ``target`` may become any.
    """

    segment: int
    offset: int
    length: int
    target: memoryview


class Target(Protocol):
    """Where another thread writes bytes of a segment by itself, as long as `SegmentStore.writing` keeps it."""

    descriptor: int
    start: int
    """of the segment in the file, in bytes"""
    address: int
    """at which the file is mapped, for the kernel alone to write to: it says EFAULT where others get a signal. Or 0"""

    def wrote(self) -> None:
        """After a write, before anybody hears of it: a later ``sync`` vouches for it."""

    def error(self, error: OSError, offset: int) -> Exception:
        """What a write of the engine would have raised for this error at ``offset`` of the file."""


class SegmentInfo(NamedTuple):
    """One row of ``list``."""

    segment: int
    size: int


@dataclass(frozen=True)
class SegmentLimits:
    """Limits and abilities of an engine."""

    mappable: bool
    """``view`` may answer"""
    durable: bool = False
    """what was written is durable when the call returns: ``sync`` has nothing to do"""
    deadline: float = 0.0
    """seconds after which a write that was begun is over, or given up; 0: that is not known"""
    quarantine: float = 0.0
    """seconds for which a write of a client that is gone, and that was not cut off, may still happen; 0: the volume's
    own grace is enough"""
    part_size: int = 0
    """bytes of a segment that one set of servers has, from each multiple on; 0: nothing is known of servers"""


@dataclass
class SegmentCounters:
    """Calls of an engine."""

    reads: int = 0
    read_bytes: int = 0
    writes: int = 0
    written_bytes: int = 0
    views: int = 0
    view_bytes: int = 0
    syncs: int = 0
    thread_reads: int = 0
    """transfers that were not resident and went to a thread"""
    failed_reads: int = 0
    """batches that the medium did not give (files)"""
    operations: int = 0
    """requests to servers, hedges included (engines that have servers)"""
    hedges: int = 0
    """reads that were late and asked of another replica"""
    late_writes: int = 0
    """changes that servers did not answer in time (`Servers.write_some`)"""


class Servers:
    """Of the bytes of a store, for callers that can put bytes elsewhere. As it stands here: nothing is known of any."""

    def __init__(self, store: SegmentStore) -> None:
        self.store = store

    async def write_some(self, batch: Sequence[Transfer]) -> set[int]:
        """`SegmentStore.write`, without waiting for servers that are late by the engine's measure.

        Returns the indices of transfers that are late: each may have happened, and may happen until a later write of
        this store to the same bytes returns. All others are written.
        """
        await self.store.write(batch)
        return set()

    def answers(self, segment: int, offset: int, length: int) -> bool | None:
        """Whether the servers of these bytes carry out changes. False: one is late, and still not answered.

        None: not known, while servers of other bytes are late (`probe`). True, also where none is late.
        """
        return True

    async def probe(self, places: Sequence[tuple[int, int, int]]) -> None:
        """Find out for `answers` of (segment, offset, length), without waiting for late servers. EngineError."""


class DeviceControl(ABC):
    """The devices of a store that has some, for who changes the set.

    A changed map is *prepared*: all devices get it, beside the one that counts. Then the volume's superblock names it,
    and it is *adopted*. Who prepares makes sure that nobody else does meanwhile, and that whatever was named before is
    adopted. EngineError: a device did not answer; nothing has changed then.
    """

    @property
    @abstractmethod
    def map(self) -> SegmentMap:
        """That counts, as far as this store knows."""

    @abstractmethod
    def expect(self, name: MapName) -> None:
        """The superblock names this map now: it is read when a segment is needed that the one in use does not have."""

    @abstractmethod
    async def follow(self) -> None:
        """Use the map that was expected last. EngineError: no device has it, or one of its devices is not there."""

    @abstractmethod
    async def examine(self, path: Path, weight: int, domain: str) -> DeviceRow:
        """A device that was labelled to join. VolumeError: it was not, or it is a member; EngineError.

        ``weight`` 0: as much for each place as the others have.
        """

    @abstractmethod
    async def prepare(self, plan: Plan, check: Callable[[], None]) -> MapName:
        """Store the next map. ``check`` raises where writing is not allowed any more. ValueError of the plan."""

    @abstractmethod
    async def adopt(self, name: MapName) -> None:
        """Use the map that was prepared last: the superblock names it. Devices that it does not have are let go."""

    @abstractmethod
    async def move(self, segment: int, check: Callable[[], None], commit: Callable[[MapName], Awaitable[None]]) -> None:
        """Bring a segment to another device while it is in use, and adopt the map that says so.

        ``commit`` has the superblock name it; it returns when that is so, and raises only where it will never be.
        """


class NoSegment(ValueError):
    """A transfer names a segment that is not there: a mistake, unless other clients remove segments."""

    def __init__(self, message: str, segment: int) -> None:
        super().__init__(message)
        self.segment = segment


@dataclass
class SegmentStore(ABC):
    """Interface of all segment engines and their decorators."""

    limits: SegmentLimits
    counters: SegmentCounters = field(default_factory=SegmentCounters, init=False)
    servers = cached_property(Servers)
    """what is known of those; an engine that has servers, and a decorator, put their own in its place"""
    devices: DeviceControl | None = field(default=None, init=False)

    @abstractmethod
    async def create(self, segment: int, size: int) -> None:
        """Make a segment of ``size`` bytes, reading as zeros. One that exists with that size is left alone.

        After a failure, or a cancellation, the segment is either wholly there or not listed.
        """

    @abstractmethod
    async def remove(self, segment: int) -> None:
        """Drop a segment and its bytes. Idempotent."""

    async def discard(self) -> None:
        """Remove all segments, and whatever else this store keeps on its medium; one that failed is done again.

        Nothing else is called afterwards but ``aclose``. EngineError.
        """
        for info in await self.list():
            await self.remove(info.segment)

    @abstractmethod
    async def list(self) -> list[SegmentInfo]:
        """All segments, ordered by number."""

    @abstractmethod
    async def read(self, batch: Sequence[Transfer]) -> None:
        """Fill every transfer's (writable) buffer."""

    @abstractmethod
    async def write(self, batch: Sequence[Transfer]) -> None:
        """Store every transfer's buffer."""

    @abstractmethod
    async def sync(self) -> None:
        """Make every write that returned before this call durable."""

    def distrust_cache(self) -> None:  # noqa: B027 - most engines have none
        """A sync of another process failed: what the kernel's cache has of these bytes may not be on the medium."""

    def recheck(self) -> None:  # noqa: B027
        """Other clients may have removed segments, and made others in their places: take none for what it was.

        Never waits; calls under way end as they began.
        """

    def drop_cache(self) -> None:  # noqa: B027
        """All that was in doubt after a failed sync was written again: the cache is of no use any more."""

    def view(self, segment: int, offset: int, length: int) -> memoryview | None:
        """A read-only view of resident bytes, or None where they are not resident or not mappable.

        A store that is not mappable may answer None without looking: it need not know a segment of another host.
        Never waits. The view shows later writes to the same range; the caller drops it before it awaits. It is for the
        kernel to copy from, by write(2), which says EFAULT where the medium fails meanwhile: SIGBUS for anybody else.
        """
        return None

    async def warm(self, segment: int, offset: int, length: int, threads: trio.CapacityLimiter) -> bytes:
        """Have bytes in the page cache, for `view`; the checksums of their granules (`checksum.granule_checksums`).

        One of ``threads`` reads them. A store that is not mappable does nothing, and answers b"". EngineError.
        """
        return b""

    async def fetch(self, batch: Sequence[Fetch], threads: trio.CapacityLimiter) -> Sequence[bytes]:
        """Fill each target, past the page cache where the engine can; the checksums of the granules of each, as `warm`.

        One of ``threads`` reads them. A store that is not mappable does nothing, and answers []. EngineError.
        """
        return []

    def source(self, segment: int) -> tuple[int, npt.NDArray[np.uint8], GuardedMap | None] | None:
        """(descriptor, read-only bytes, guard) of a whole segment, for other threads, which may wait for its pages.

        None where the segment cannot be mapped, or the system refuses one mapping more. Each call maps anew. All stay
        good for as long as all are held, also when the segment is removed or the store closed. The bytes show later
        writes. The copied bytes count if the guard is intact afterwards; without one they cannot fail.
        """
        return None

    @contextmanager
    def writing(self, segments: set[int]) -> Iterator[Mapping[int, Target]]:
        """Where threads may write to these segments in the body, by number; empty where this engine does all itself."""
        yield {}

    def identity(self) -> bytes:
        """This client's identity for `fence`; b"" where no client can be fenced."""
        return b""

    async def fence(self, identity: bytes) -> bool:
        """Cut off the client that had this identity, for good. Idempotent. EngineError: unknown.

        True: what it still has under way happens before a later write of this client to the same bytes, or never.
        False: this engine, or this user, cannot do that.
        """
        return False

    async def renew(self) -> None:  # noqa: B027 - most engines have nothing to do
        """Be another client from now on, which nobody has fenced. EngineError leaves everything as it was."""

    @abstractmethod
    async def aclose(self) -> None:
        """Finish what is in flight and let go of everything. Idempotent."""
