"""Segments in Ceph: ranges of fixed-size objects in one pool and RADOS namespace, for any number of hosts.

* ``objects.py`` says how segments become objects. They are not made in advance: absent bytes are zeros, and take no
  space. ``create`` therefore only looks whether the cluster has as much room, and a full pool is met by a later write.
* The object ``segments`` is a table of all segments' sizes, so that a list is one read and not a walk over the pool.
* Small transfers of one batch that lie in one object are one operation. Up to ``in_flight_max`` are under way.
* RADOS answers a write when it is on all replicas, on their disks. So ``sync`` has nothing to wait for.
* Reads go straight into the caller's buffers; librados copies writes when they are started.
* Every ``in_flight_max`` operations have ``deadline`` seconds. Within it librados sends again what a lost server did
  not answer, when the cluster map names another. A write that was late is unknown: a server that was only
  stalled may still carry it out. It cannot come after a later write of this store to the same object, as RADOS keeps
  the order of one client's writes to one object; it may come after another client's.
* A read that is late by ``hedge_delay`` is also asked of another replica. That one answers only while it holds the
  first one's promise (most of the heartbeat grace), and only what it knows to be whole everywhere: not what was written
  last in that placement group. So hedges help readers of settled blocks through a short stall, and nobody else.
* An object that was late is not waited for again until it answers a probe (`dispatcher.py`): so a stalled OSD costs
  one deadline, and not one for each call, until the cluster names another.
* ``servers.write_some`` does not wait for the deadline, but for a few times of what changes take (`lateness.py`).
  ``servers.probe`` tells which other objects answer, by a change of nothing: a read would ask one replica alone.

Hosts that share a volume agree elsewhere (in the record store) on who creates, removes or writes what. This
store only promises that a segment which another host created is found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Self

import trio

from kvfuse.errors import EngineError, EngineFull
from kvfuse.remote.segments.api import NoSegment, SegmentInfo, SegmentLimits, SegmentStore, Servers, Transfer
from kvfuse.remote.segments.rados.dispatcher import Dispatcher
from kvfuse.remote.segments.rados.librados import PoolPlace
from kvfuse.remote.segments.rados.objects import (
    READ_BYTES_MAX,
    WRITE_BYTES_MAX,
    ObjectPiece,
    ReadRequest,
    RemoveRequest,
    TouchRequest,
    WriteRequest,
    object_name,
    pieces_by_object,
    spans,
)
from kvfuse.remote.segments.users import UsedSegment, Users

TABLE_NAME = b"segments"
TABLE_HEADER = Struct("<8sQ")
"""magic, object size; then for every segment its size, 0: there is none"""
TABLE_MAGIC = b"KVFSEGS1"
TABLE_ENTRY = Struct("<Q")
TABLE_READ_SIZE = 64 << 10
SEGMENT_MAX = 0xFFFFF
"""so that the table has 8 MiB at the most"""


class RadosSegments(SegmentStore):
    """The segments of one namespace. Made by ``open``; any number of hosts may have it open."""

    def __init__(self, place: PoolPlace) -> None:
        options = place.options
        super().__init__(
            SegmentLimits(mappable=False, durable=True, deadline=options.deadline, part_size=options.object_size)
        )
        self.place = place
        self._object_size = options.object_size
        self._dispatcher = Dispatcher(place, self.counters)
        self._segments: dict[int, UsedSegment] = {}
        self._names_lock = trio.Lock()
        self._closed = False
        self._calls = Users()
        self.servers = RadosServers(self)

    @classmethod
    async def open(cls, place: PoolPlace) -> Self:
        """Connect. EngineError says what is missing: library, monitors, key, pool; EngineTimeout."""
        store = cls(place)
        await store._dispatcher.connect()
        try:
            await store.list()
        except BaseException:
            await store.aclose()
            raise
        return store

    async def free_bytes(self) -> int | None:
        """Bytes that the pool has room for; None where nobody counts them. EngineError, EngineTimeout."""
        with self._working():
            return await self._dispatcher.available_bytes()

    async def create(self, segment: int, size: int) -> None:
        if not 0 <= segment <= SEGMENT_MAX or size <= 0:
            raise ValueError(f"segment {segment} of {size} bytes; numbers go to {SEGMENT_MAX}")
        with self._working():
            async with self._names_lock:
                existing = await self._stored_size(segment)
                if existing not in (0, size):
                    raise ValueError(f"segment {segment} exists with {existing} bytes, not {size}")
                if not existing:
                    await self._check_room(segment, size)
                    await self._store_size(segment, size)
                self._segments.setdefault(segment, UsedSegment(size))

    async def remove(self, segment: int) -> None:
        """One that failed may have dropped a part of the bytes; the segment is still listed, remove it again."""
        with self._working():
            async with self._names_lock:
                size = await self._stored_size(segment) if 0 <= segment <= SEGMENT_MAX else 0
                if not size:
                    return
                known = self._segments.setdefault(segment, UsedSegment(size))
                known.removed = True
                try:
                    await known.idle.wait()
                    object_count = -(-size // self._object_size)
                    await self._dispatcher.perform(
                        [RemoveRequest(object_name(segment, index)) for index in range(object_count)]
                    )
                    await self._store_size(segment, 0)
                finally:
                    self._segments.pop(segment, None)

    def recheck(self) -> None:
        """Those in the middle of a removal are this client's to know."""
        self._segments = {segment: known for segment, known in self._segments.items() if known.removed}

    async def discard(self) -> None:
        """The table of sizes goes last: it says which objects there may be."""
        await super().discard()
        with self._working():
            await self._dispatcher.perform([RemoveRequest(TABLE_NAME)])

    async def list(self) -> list[SegmentInfo]:
        with self._working():
            table = await self._read_table()
            sizes = [size for (size,) in TABLE_ENTRY.iter_unpack(table)]
            return [SegmentInfo(segment, size) for segment, size in enumerate(sizes) if size]

    async def read(self, batch: Sequence[Transfer]) -> None:
        for segment, offset, buffer in batch:
            if memoryview(buffer).readonly:
                raise ValueError(f"a buffer to read into is not writable (segment {segment}, offset {offset})")
        with self._working(), contextlib.ExitStack() as in_use:
            self.counters.read_bytes += await self._use(batch, in_use)
            self.counters.reads += len(batch)
            pieces = pieces_by_object(batch, self._object_size, READ_BYTES_MAX)
            await self._dispatcher.perform([ReadRequest(*of_object) for of_object in pieces])

    async def write(self, batch: Sequence[Transfer], late: set[bytes] | None = None) -> None:
        """``late``: gets the names of objects that are late, for which this does not wait then."""
        with self._working(), contextlib.ExitStack() as in_use:
            self.counters.written_bytes += await self._use(batch, in_use)
            self.counters.writes += len(batch)
            pieces = pieces_by_object(batch, self._object_size, WRITE_BYTES_MAX)
            requests = [WriteRequest(*of_object) for of_object in pieces]
            if late is None:
                await self._dispatcher.perform(requests)
            else:
                late |= await self._dispatcher.change_some(requests)

    async def sync(self) -> None:
        """Nothing to wait for: a write that returned is on all replicas."""
        with self._working():
            self.counters.syncs += 1
            await trio.lowlevel.checkpoint()

    def identity(self) -> bytes:
        """The address of its connection, which no other ever has."""
        return self._dispatcher.address()

    async def fence(self, identity: bytes) -> bool:
        """Put it on the cluster's blocklist. The user needs a monitor capability for that."""
        with self._working():
            return bool(identity) and await self._dispatcher.cut_off(identity)

    async def renew(self) -> None:
        """Connect anew. Calls that are under way end as they are; then the old connection is closed."""
        if self._closed:
            raise EngineError(f"{self.place} is closed")
        dispatcher = Dispatcher(self.place, self.counters)
        await dispatcher.connect()
        old, calls = self._dispatcher, self._calls
        self._dispatcher, self._calls = dispatcher, Users()
        with trio.CancelScope(shield=True):
            await calls.idle.wait()
            await old.aclose()

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        with trio.CancelScope(shield=True):
            await self._calls.idle.wait()
            await self._dispatcher.aclose()

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """A call on an open store; closing waits for it."""
        if self._closed:
            raise EngineError(f"{self.place} is closed")
        with self._calls:
            yield

    # -- which segments there are ------------------------------------------------------------------------

    async def _use(self, batch: Sequence[Transfer], in_use: contextlib.ExitStack) -> int:
        """The bytes of the batch, whose segments are there and stay as long as ``in_use``; else ValueError."""
        for segment in {transfer.segment for transfer in batch} - self._segments.keys():
            if 0 <= segment <= SEGMENT_MAX:  # this store did not meet it yet
                async with self._names_lock:
                    size = await self._stored_size(segment)
                    if size:
                        self._segments.setdefault(segment, UsedSegment(size))
        # No await from here on, and none above with a segment in use: a removal waits for its users.
        byte_count = 0
        for segment in {transfer.segment for transfer in batch}:
            if segment in self._segments:
                in_use.enter_context(self._segments[segment])
        for segment, offset, buffer in batch:
            length = memoryview(buffer).nbytes
            known = self._segments.get(segment)
            if known is None or known.removed:
                raise NoSegment(f"{self.place} has no segment {segment}", segment)
            if offset < 0 or length < 0 or offset + length > known.size:
                raise ValueError(f"{length} bytes at {offset} of segment {segment}, which has {known.size}")
            byte_count += length
        return byte_count

    async def _check_room(self, segment: int, size: int) -> None:
        available = await self._dispatcher.available_bytes()
        if available is not None and available < size:
            raise EngineFull(
                f"{self.place}: segment {segment} has {size} bytes, the cluster {available} free: add OSDs"
            )

    # -- the table of sizes ------------------------------------------------------------------------------

    async def _stored_size(self, segment: int) -> int:
        """0: no such segment."""
        known = self._segments.get(segment)
        if known is not None:
            return known.size
        entry = await self._read_whole(TABLE_HEADER.size + segment * TABLE_ENTRY.size, TABLE_ENTRY.size)
        return int(TABLE_ENTRY.unpack(entry)[0]) if len(entry) == TABLE_ENTRY.size else 0

    async def _store_size(self, segment: int, size: int) -> None:
        if not await self._read_whole(0, TABLE_HEADER.size):
            header = TABLE_HEADER.pack(TABLE_MAGIC, self._object_size)
            request = WriteRequest(TABLE_NAME, [ObjectPiece(0, memoryview(header))], exclusive=True)
            await self._dispatcher.perform([request])
            await self._read_table()  # another host may have been first, with another object size
        entry = memoryview(TABLE_ENTRY.pack(size))
        offset = TABLE_HEADER.size + segment * TABLE_ENTRY.size
        await self._dispatcher.perform([WriteRequest(TABLE_NAME, [ObjectPiece(offset, entry)])])

    async def _read_table(self) -> bytes:
        """All whole entries. EngineError where the table is not one of this store."""
        table = b""
        while len(part := await self._read_whole(len(table), TABLE_READ_SIZE)) == TABLE_READ_SIZE:
            table += part
        table += part
        if not table:
            return b""
        where = f"object {TABLE_NAME.decode()} ({self.place})"
        if len(table) < TABLE_HEADER.size or not table.startswith(TABLE_MAGIC):
            raise EngineError(f"{where} is no table of segments: give the volume a namespace of its own")
        _, object_size = TABLE_HEADER.unpack_from(table)
        if object_size != self._object_size:
            raise EngineError(f"{where}: segments are in objects of {object_size} bytes: set segments.object_size so")
        entries_size = (len(table) - TABLE_HEADER.size) // TABLE_ENTRY.size * TABLE_ENTRY.size
        return table[TABLE_HEADER.size :][:entries_size]

    async def _read_whole(self, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes of the table, as many as there are."""
        buffer = bytearray(length)
        request = ReadRequest(TABLE_NAME, [ObjectPiece(offset, memoryview(buffer))])
        await self._dispatcher.perform([request])
        return bytes(buffer[: request.lengths[0]])


class RadosServers(Servers):
    """Those of the objects of a store."""

    def __init__(self, store: RadosSegments) -> None:
        super().__init__(store)
        self._store = store

    def _names(self, segment: int, offset: int, length: int) -> Iterator[bytes]:
        """Of the objects that have these bytes."""
        return (object_name(segment, index) for index, *_ in spans(offset, length, self.store.limits.part_size))

    async def write_some(self, batch: Sequence[Transfer]) -> set[int]:
        late: set[bytes] = set()
        await self._store.write(batch, late)
        if not late:
            return set()
        return {
            index
            for index, (segment, offset, buffer) in enumerate(batch)
            if not late.isdisjoint(self._names(segment, offset, memoryview(buffer).nbytes))
        }

    def answers(self, segment: int, offset: int, length: int) -> bool | None:
        lateness = self._store._dispatcher.lateness
        if not lateness.since:
            return True
        found = {lateness.answers(name) for name in self._names(segment, offset, length)}
        return False if False in found else None if None in found else True

    async def probe(self, places: Sequence[tuple[int, int, int]]) -> None:
        names = {name for place in places for name in self._names(*place)}
        with self._store._working():
            dispatcher = self._store._dispatcher
            unknown = sorted(name for name in names if dispatcher.lateness.answers(name) is None)
            await dispatcher.change_some([TouchRequest(name) for name in unknown])
