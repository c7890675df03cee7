"""Segments in a bucket: each is cut into objects ``SEGMENT/NUMBER``, of which those that were never written are absent.

* An object ``SEGMENT/segment`` has the segment's size. It is made first and deleted last: it says that there is one.
* A put is whole and conditional: it replaces the object that this store knows, by its tag. So a write of a part is a
  read, a change and a put, again where another write was faster; and a put that was given up, and comes late, changes
  nothing once a later one has taken its place. Writes of one store to one object wait for each other.
* An object ends with the last byte that was written to it. What is behind reads as zeros.
* A put that was answered is durable: ``sync`` has nothing to do.

Objects are put in one request each, as they have 64 MiB at the most: conditions do not go with uploads in parts.
"""

from __future__ import annotations

import contextlib
import struct
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Self

import trio

from kvfuse.errors import EngineError
from kvfuse.options.options import S3Options
from kvfuse.remote.bucket import ABSENT, Bucket, Changed, NoObject, Range
from kvfuse.remote.segments.api import NoSegment, SegmentInfo, SegmentLimits, SegmentStore, Transfer
from kvfuse.remote.segments.users import UsedSegment, Users

SEGMENT_FACTS = struct.Struct("<8sQQ")
"""magic, bytes of the segment, bytes of an object"""
SEGMENT_MAGIC = b"KVFS3SEG"
Part = tuple[int, int]
"""segment, and the number of an object of it"""
Ranges = list[Range]
ATTEMPTS = 8
"""of a write that others are faster than"""


class S3Segments(SegmentStore):
    """The segments below one prefix of a bucket. Made by ``open``; any number of hosts may have it open."""

    def __init__(self, options: S3Options) -> None:
        super().__init__(
            SegmentLimits(mappable=False, durable=True, deadline=2 * options.deadline, part_size=options.object_size)
        )
        self._bucket = Bucket(options, options.deadline, options.in_flight_max)
        self._object_size = options.object_size
        self._in_flight = options.in_flight_max
        self._segments: dict[int, UsedSegment] = {}
        self._names_lock = trio.Lock()
        self._tags: dict[Part, str] = {}
        """of objects that this store has written or changed"""
        self._turns: defaultdict[Part, trio.Lock] = defaultdict(trio.Lock)
        self._calls = Users()
        self._closed = False

    @classmethod
    async def open(cls, options: S3Options) -> Self:
        """ConfigError; EngineError, EngineTimeout: the bucket does not answer, is not there, or refuses the keys."""
        store = cls(options)
        await store.list()
        return store

    async def create(self, segment: int, size: int) -> None:
        if segment < 0 or size <= 0:
            raise ValueError(f"segment {segment} of {size} bytes")
        with self._working():
            async with self._names_lock:
                existing = await self._stored_size(segment)
                if existing not in (0, size):
                    raise ValueError(f"segment {segment} exists with {existing} bytes, not {size}")
                if not existing:
                    await self._delete_parts(segment)  # of one whose removal did not come to its end
                    facts = SEGMENT_FACTS.pack(SEGMENT_MAGIC, size, self._object_size)
                    with contextlib.suppress(Changed):  # another host has just made it
                        await self._bucket.put(f"{segment}/segment", facts, ABSENT)
                self._segments.setdefault(segment, UsedSegment(size))

    async def remove(self, segment: int) -> None:
        """One that failed may have dropped a part of the bytes; the segment is still listed, remove it again."""
        with self._working():
            async with self._names_lock:
                size = await self._stored_size(segment) if segment >= 0 else 0
                if not size:
                    return
                known = self._segments.setdefault(segment, UsedSegment(size))
                known.removed = True
                try:
                    await known.idle.wait()
                    await self._delete_parts(segment)
                    await self._bucket.delete([f"{segment}/segment"])
                finally:
                    self._segments.pop(segment, None)

    def recheck(self) -> None:
        """Those in the middle of a removal are this client's to know."""
        self._segments = {segment: known for segment, known in self._segments.items() if known.removed}
        self._tags.clear()

    async def _delete_parts(self, segment: int) -> None:
        names = [one.name for one in await self._bucket.list(f"{segment}/")]
        await self._bucket.delete([name for name in names if not name.endswith("/segment")])
        for part in [part for part in self._tags if part[0] == segment]:
            del self._tags[part]

    async def list(self) -> list[SegmentInfo]:
        with self._working():
            found = []
            for name in await self._bucket.folders():
                if name.isdecimal():
                    with contextlib.suppress(NoObject):
                        found.append(SegmentInfo(int(name), await self._read_size(int(name))))
            return sorted(found)

    async def read(self, batch: Sequence[Transfer]) -> None:
        for segment, offset, buffer in batch:
            if memoryview(buffer).readonly:
                raise ValueError(f"a buffer to read into is not writable (segment {segment}, offset {offset})")
        with self._working(), contextlib.ExitStack() as in_use:
            self.counters.read_bytes += await self._use(batch, in_use)
            self.counters.reads += len(batch)
            await self._each(self._pieces(batch), self._read_part)

    async def _read_part(self, part: Part, pieces: Ranges) -> None:
        self.counters.operations += len(pieces)
        try:
            await self._bucket.read(_name(part), pieces)
        except NoObject:
            for _, target in pieces:
                target[:] = bytes(len(target))

    async def write(self, batch: Sequence[Transfer]) -> None:
        with self._working(), contextlib.ExitStack() as in_use:
            self.counters.written_bytes += await self._use(batch, in_use)
            self.counters.writes += len(batch)
            await self._each(self._pieces(batch), self._write_part)

    async def _write_part(self, part: Part, pieces: Ranges) -> None:
        async with self._turns[part]:
            for _ in range(ATTEMPTS):
                data, expected = await self._changed_part(part, pieces)
                self.counters.operations += 1
                try:
                    self._tags[part] = await self._bucket.put(_name(part), data, expected)
                except Changed:
                    self._tags[part] = await self._bucket.tag(_name(part))
                else:
                    return
        raise EngineError(f"{self._bucket.title}{_name(part)}: other writes were faster {ATTEMPTS} times")

    async def _changed_part(self, part: Part, pieces: Ranges) -> tuple[memoryview, str]:
        """The whole object as it is to be, and the tag of the one that it replaces."""
        whole = self._part_size(part)
        if len(pieces) == 1 and len(pieces[0].target) == whole:
            return pieces[0].target, self._tags.get(part, ABSENT)
        self.counters.operations += 1
        try:
            former, tag = await self._bucket.get(_name(part))
        except NoObject:
            former, tag = b"", ABSENT
        data = bytearray(former)
        end = max(offset + len(target) for offset, target in pieces)
        data += bytes(max(0, end - len(data)))
        for offset, target in pieces:
            data[offset : offset + len(target)] = target
        return memoryview(data), tag

    def _part_size(self, part: Part) -> int:
        segment, number = part
        known = self._segments.get(segment)
        if known is None:  # it is to be met anew
            return self._object_size
        return min(self._object_size, known.size - number * self._object_size)

    async def sync(self) -> None:
        """Nothing to wait for: a write that returned is durable."""
        with self._working():
            self.counters.syncs += 1
            await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        self._closed = True
        with trio.CancelScope(shield=True):
            await self._calls.idle.wait()

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """A call on an open store; closing waits for it."""
        if self._closed:
            raise EngineError(f"{self._bucket.title} is closed")
        with self._calls:
            yield

    async def _each(self, pieces: Mapping[Part, Ranges], do: Callable[[Part, Ranges], Awaitable[None]]) -> None:
        """Do something to all parts, some at the same time. The first EngineError, once all have ended."""
        failures: list[EngineError] = []
        rest = iter(pieces.items())

        async def some() -> None:
            for part, ranges in rest:
                try:
                    await do(part, ranges)
                except EngineError as error:
                    failures.append(error)

        async with trio.open_nursery() as nursery:
            for _ in range(min(len(pieces), self._in_flight)):
                nursery.start_soon(some)
        if failures:
            raise failures[0]

    def _pieces(self, batch: Sequence[Transfer]) -> dict[Part, Ranges]:
        """What the transfers are of each object."""
        pieces: defaultdict[Part, Ranges] = defaultdict(list)
        for segment, offset, buffer in batch:
            data = memoryview(buffer).cast("B")
            done = 0
            while done < len(data):
                number, start = divmod(offset + done, self._object_size)
                length = min(self._object_size - start, len(data) - done)
                pieces[segment, number].append(Range(start, data[done : done + length]))
                done += length
        return pieces

    # -- which segments there are ------------------------------------------------------------------------

    async def _use(self, batch: Sequence[Transfer], in_use: contextlib.ExitStack) -> int:
        """The bytes of the batch, whose segments are there and stay as long as ``in_use``; else ValueError."""
        for segment in {transfer.segment for transfer in batch} - self._segments.keys():
            if segment >= 0:  # this store did not meet it yet
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
                raise NoSegment(f"{self._bucket.title} has no segment {segment}", segment)
            if offset < 0 or offset + length > known.size:
                raise ValueError(f"{length} bytes at {offset} of segment {segment}, which has {known.size}")
            byte_count += length
        return byte_count

    async def _stored_size(self, segment: int) -> int:
        """0: no such segment."""
        if segment in self._segments:
            return self._segments[segment].size
        with contextlib.suppress(NoObject):
            return await self._read_size(segment)
        return 0

    async def _read_size(self, segment: int) -> int:
        """NoObject; EngineError where the object is not one of this store."""
        facts, _ = await self._bucket.get(f"{segment}/segment")
        title = f"{self._bucket.title}{segment}/segment"
        if len(facts) != SEGMENT_FACTS.size or not facts.startswith(SEGMENT_MAGIC):
            raise EngineError(f"{title} is not of a segment: give the volume a prefix of its own")
        _, size, object_size = SEGMENT_FACTS.unpack(facts)
        if object_size != self._object_size:
            raise EngineError(f"{title}: objects have {object_size} bytes: set segments.object_size so")
        return int(size)


def _name(part: Part) -> str:
    segment, number = part
    return f"{segment}/{number:08d}"
