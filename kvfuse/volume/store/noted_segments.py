"""Notes where writes of this client may still happen: in these slabs another host may not write yet.

A write that failed, was late, or was cancelled may happen after its call has ended. It is *late* until its servers
answer again, and some time more: an engine carries out what one client asks of the same bytes in that order. So a
client may write there again at once, but another one may not: its bytes would be overwritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio

from kvfuse.remote.segments.api import NoSegment, SegmentStore, Servers, Transfer
from kvfuse.remote.segments.decorators import SegmentDecorator
from kvfuse.slab.layout import Geometry


@dataclass
class NotedWrites:
    """The writes of one membership. ``seconds``: for which one may still happen once its servers answer."""

    geometry: Geometry
    servers: Servers
    seconds: float
    _begun: dict[int, Sequence[Transfer]] = field(default_factory=dict)
    """calls under way: what they write"""
    _late: dict[tuple[int, int, int], float] = field(default_factory=dict)
    """(slab, segment, file offset that one set of servers has) -> when it may be forgotten"""
    _number: int = 0

    @contextmanager
    def begun(self, batch: Sequence[Transfer]) -> Iterator[None]:
        """The body writes these; what it raises leaves all of them late."""
        self._number += 1
        number = self._number
        self._begun[number] = batch
        try:
            yield
        except BaseException:
            self.note_late(batch)
            raise
        finally:
            del self._begun[number]

    def note_late(self, batch: Iterable[Transfer]) -> None:
        until, part_size = trio.current_time() + self.seconds, self.servers.store.limits.part_size
        for slab, one in self._slabs(batch):
            end = one.offset + memoryview(one.buffer).nbytes
            starts = range(one.offset // part_size * part_size, end, part_size) if part_size else [0]
            self._late.update(dict.fromkeys([(slab, one.segment, start) for start in starts], until))

    def _slabs(self, batch: Iterable[Transfer]) -> Iterator[tuple[int, Transfer]]:
        for one in batch:
            for slab in self.geometry.slabs_at(one.segment, one.offset, memoryview(one.buffer).nbytes):
                yield slab, one

    def slabs(self) -> set[int]:
        """Slabs in which something may still be written that this client has begun."""
        now = trio.current_time()
        for place, until in list(self._late.items()):
            if self.servers.answers(*place[1:], 1) is False:
                self._late[place] = now + self.seconds
            elif until <= now:
                del self._late[place]
        return {slab for slab, _, _ in self._late}.union(
            slab for batch in self._begun.values() for slab, _ in self._slabs(batch)
        )


class NotedSegments(SegmentDecorator):
    """Notes the writes of one membership. ``geometry``: of the volume, as it is from time to time."""

    def __init__(self, inner: SegmentStore, geometry: Geometry, seconds: float) -> None:
        super().__init__(inner)
        self.noted = NotedWrites(geometry, inner.servers, seconds)
        self.servers = _NotedServers(inner.servers, self.noted)

    async def read(self, batch: Sequence[Transfer]) -> None:
        """Of a segment that another host has removed it gets zeros, which no checksum takes for anybody's bytes: who
        has not heard yet that bytes moved looks again."""
        while batch:
            try:
                await self.inner.read(batch)
                break
            except NoSegment as error:
                for one in batch:
                    if one.segment == error.segment:
                        view = memoryview(one.buffer).cast("B")
                        view[:] = bytes(len(view))
                batch = [one for one in batch if one.segment != error.segment]

    async def write(self, batch: Sequence[Transfer]) -> None:
        with self.noted.begun(batch):
            await self.inner.write(batch)


class _NotedServers(Servers):
    """Notes what is late."""

    def __init__(self, inner: Servers, noted: NotedWrites) -> None:
        super().__init__(inner.store)
        self._inner, self._noted = inner, noted

    def answers(self, segment: int, offset: int, length: int) -> bool | None:
        return self._inner.answers(segment, offset, length)

    async def write_some(self, batch: Sequence[Transfer]) -> set[int]:
        with self._noted.begun(batch):
            late = await self._inner.write_some(batch)
        if late:
            self._noted.note_late([batch[index] for index in late])
        return late

    async def probe(self, places: Sequence[tuple[int, int, int]]) -> None:
        await self._inner.probe(places)
