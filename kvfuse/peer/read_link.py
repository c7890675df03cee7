"""The queue pair of a connection: on the asking side what reads by it, on the other side what may be read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Self

import trio

from kvfuse.checksum import granule_checksums
from kvfuse.peer.peer_reads import Read
from kvfuse.peer.peer_wire import WireError
from kvfuse.peer.queue_pair import NO_PLACE, QueuePair, gid_of
from kvfuse.peer.rdma import Adapter, Rdma, span_of
from kvfuse.peer.rdma_staging import STAGED_MAX
from kvfuse.peer.read_plans import PLACES_MAX, Places, places_of, plan
from kvfuse.peer.registrations import Bytes
from kvfuse.peer.stream import PeerStream
from kvfuse.peer.verbs import MemoryPart, VerbsError
from kvfuse.volume.views.neighbours import Answer

VERIFIED_BYTES = 1 << 20
"""that are verified without turns for others, about"""

log = logging.getLogger(__name__)


class ReadLink:
    """Until `end`. A READ that fails ends it, for all that is read by it: the connection is then to be made anew."""

    def __init__(self, adapter: Adapter, pair: QueuePair) -> None:
        self.pair = pair
        self.over = trio.Event()
        """a READ failed, or was given up"""
        self.settled = trio.Event()
        """set, and made anew, when a batch of READs has ended"""
        self._adapter = adapter

    @classmethod
    def begun(cls, rdma: Rdma, number: int) -> Self:
        """For a connection that is being made. VerbsError."""
        adapter = rdma.of_number(number)
        return cls(adapter, rdma.make_pair(adapter))

    @classmethod
    async def answered(cls, rdma: Rdma, place: bytes) -> Self:
        """To one that was begun by another host. VerbsError, WireError."""
        adapter = rdma.towards(gid_of(place))
        link = cls(adapter, rdma.make_pair(adapter, reads=False))
        try:
            await link.pair.connect(place)
        except BaseException:
            link.close()
            raise
        return link

    # -- the side that asks --------------------------------------------------------------------------

    async def welcome(self, reads: Sequence[Read]) -> list[bool]:
        """For which of these places may be the answer. Their targets are registered by this, if they can be."""
        staged, found = 0, []
        for read in reads:
            target = read.target
            span = span_of(target) if target is not None else None
            if self.pair.ended or target is None:
                found.append(False)
            elif span is not None:
                found.append(await self._adapter.cover(span))
            else:
                staged += read.size
                found.append(staged <= STAGED_MAX)
        if staged:
            await self._open_staging()
        return found

    async def _open_staging(self) -> None:
        try:
            await self._adapter.staging.open()
        except VerbsError as error:
            log.warning("memory for what is read by RDMA: %s", error)
            self.end("NO_STAGING")

    async def fetch(self, fetched: Sequence[tuple[Read, Places]], done: Callable[[Read], None]) -> None:
        """Read places of a host into targets, as one batch, and verify what came: ``done`` of each, right or not.

        While a target is written to, its read has this as ``link``.
        """
        rooms = await self._rooms([read for read, _ in fetched])
        try:
            status = await self._fetch(fetched, rooms, done)
        finally:
            self._adapter.staging.give_back(rooms.values())
        if status not in ("", "CLOSED", "CANCELLED"):
            self.over.set()

    async def _fetch(
        self, fetched: Sequence[tuple[Read, Places]], rooms: dict[Read, Bytes], done: Callable[[Read], None]
    ) -> str:
        """How it ended; "": well."""
        pairs, reads, lost = [], [], []
        for read, places in fetched:
            parts = self._parts(read, rooms)
            if parts is None:
                lost.append(read)
                continue
            reads.append(read)
            pairs.append((places, parts))
            read.link = self if read not in rooms else None
        for read in lost:
            done(read)
        planned = plan(pairs)
        try:
            outcome = await self.pair.read(planned.reads)
        finally:
            for read in reads:
                read.link = None
            self.settled.set()
            self.settled = trio.Event()
        unseen = 0
        for read, end in zip(reads, planned.ends, strict=True):
            if end <= outcome.whole:
                _verify(read, rooms.get(read))
            else:
                read.failure = outcome.status
            done(read)
            unseen += read.size
            if unseen >= VERIFIED_BYTES:
                unseen = 0
                await trio.lowlevel.checkpoint()
        return outcome.status

    async def _rooms(self, reads: Sequence[Read]) -> dict[Read, Bytes]:
        """Memory for what cannot be read straight into its target."""
        staged = [read for read in reads if read.target is not None and span_of(read.target) is None]
        if sum([read.size for read in staged]) > STAGED_MAX:
            raise WireError("an answer has more places than were asked for")
        taken = await self._adapter.staging.take([read.size for read in staged])
        return dict(zip(staged, taken, strict=True))

    def _parts(self, read: Read, rooms: dict[Read, Bytes]) -> list[MemoryPart] | None:
        if read.target is None:
            return None
        if read in rooms:
            return self._adapter.staging.parts(rooms[read])
        return self._adapter.parts(read.target)

    # -- the side that answers -----------------------------------------------------------------------

    def places_of(self, view: memoryview) -> Places | None:
        """Where the other side may read these bytes; None: nowhere yet, they are to be sent."""
        parts = self._adapter.lend(view)
        return places_of(parts) if parts is not None and len(parts) <= PLACES_MAX else None

    # -- the end -------------------------------------------------------------------------------------

    def end(self, why: str) -> None:
        """From now on nothing is written to any target by it."""
        self.pair.end(why)
        self.over.set()

    def close(self) -> None:
        self.pair.close()


def _verify(read: Read, room: Bytes | None) -> None:
    """All bytes are there. Wrong ones are those of a slot's next life: nobody kept them while they were read."""
    if read.target is None:
        return
    data = read.target if room is None else room.data
    if granule_checksums(data) != read.wanted.checksums:
        read.answer = Answer.MOVED
        return
    if room is not None:
        read.target[:] = data
    read.is_right = True


async def answer_link(rdma: Rdma | None, stream: PeerStream, place: bytes) -> ReadLink | None:
    """What a listener says to a caller's place: its own, or that there is none. OSError."""
    if place == NO_PLACE:
        return None
    link = None
    if rdma is not None:
        try:
            link = await ReadLink.answered(rdma, place)
        except (VerbsError, WireError) as error:
            log.info("another host is answered by TCP: %s", error)
    try:
        await stream.send([memoryview(link.pair.place if link is not None else NO_PLACE)])
    except BaseException:
        if link is not None:
            link.close()
        raise
    return link
