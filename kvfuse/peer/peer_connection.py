"""A connection to another host: questions go out as they gather, answers land where their readers want them."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from math import inf

import numpy as np
import trio

from kvfuse.peer.destinations import Destinations
from kvfuse.peer.peer_reads import Read
from kvfuse.peer.peer_wire import (
    ANSWER,
    ANSWER_MAGIC,
    HEAD_SIZE,
    PARENT_MAGIC,
    PLACES,
    QUESTION_BYTES_MAX,
    QUESTION_MAGIC,
    ROWS_MAX,
    USES_MAGIC,
    MessageHead,
    Rows,
    WireError,
    check_answer,
    pack_question,
    parse_head,
    plain,
)
from kvfuse.peer.read_link import ReadLink
from kvfuse.peer.read_plans import PLACE, Places, check_counts, split_places
from kvfuse.peer.stream import BROKEN, PeerStream
from kvfuse.volume.views.neighbours import Answer, Uses

NO_PLACES = np.empty(0, PLACE)
SLACK_SECONDS = 0.25
"""by so much, or half of it, the patience is exceeded: who asked has given up by then"""


class _Sending:
    """What is on its way out."""

    def __init__(self) -> None:
        self.work = trio.Event()
        self.unsent: list[memoryview] = []
        """of a question"""
        self.is_busy = False


class PeerConnection:
    """Greeted, and running as long as `run`. Event loop only.

    ``own_load``: bytes that this host has still to send to others. ``told``: called with the other one's load.
    ``link``: to read by RDMA what the other one has; it is closed with the connection, which outlives it.
    ``is_traced``: the other one takes the spans that questions belong to.
    """

    def __init__(
        self, stream: PeerStream, patience: float, own_load: Callable[[], int], told: Callable[[int], None],
        link: ReadLink | None = None, *, is_traced: bool = False,
    ) -> None:  # fmt: skip
        self.bytes = 0
        """that were asked for, and have not come"""
        self._stream = stream
        self._patience = patience
        """seconds without a byte, while some are expected"""
        self._own_load, self._told = own_load, told
        self._open: set[Read] = set()
        """reads that are not finished"""
        self._waiting: deque[Read] = deque()
        self._sent: deque[tuple[int, Sequence[Read]]] = deque()
        self._sending = _Sending()
        self._uses: list[memoryview] = []
        """a message that tells of uses, and waits to be sent"""
        self._scope = trio.CancelScope()
        self._count = 0
        self.link = link
        self._is_traced = is_traced
        self.is_replaced = False
        """there is another one, or will be soon"""
        self._fetching: trio.Nursery | None = None
        self._is_leaving = False

    def ask(self, reads: Sequence[Read]) -> None:
        """Each is finished some time."""
        for read in reads:
            self.bytes += read.size
            self._open.add(read)
            self._waiting.append(read)
        if self.link is None and not (self._sending.unsent or self._sending.is_busy):
            self._sending.unsent = self._stream.send_now(self._question(self._next(), ()))
        if self._sending.unsent or self._waiting:
            self._sending.work.set()

    def tell_uses(self, uses: Uses) -> None:
        """Send it by and by; one that waits for a slow host is replaced."""
        self._uses = [memoryview(MessageHead(len(uses), 0, self._own_load()).pack(USES_MAGIC)), plain(uses)]
        self._sending.work.set()

    def leave(self) -> None:
        """End it when nothing is asked by it any more: there is another one."""
        self._is_leaving = True
        if not self._open:
            self._scope.cancel()

    async def run(self) -> None:
        """Until the connection breaks, or nothing comes although something should. WireError."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self._fetching = nursery
                    nursery.start_soon(self._ended, self._send, nursery.cancel_scope)
                    await self._ended(self._receive, nursery.cancel_scope)
        except* WireError as group:
            raise WireError(str(group.exceptions[0])) from group
        finally:
            self._stream.close()
            if self.link is not None:
                self.link.close()
            self._finish(list(self._open))

    async def _ended(self, work: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
        """Work until the connection breaks."""
        try:
            await work()
        except BROKEN:
            scope.cancel()

    def _finish(self, reads: Sequence[Read]) -> None:
        for read in reads:
            self._open.remove(read)
            self.bytes -= read.size
            read.finish()
        if self._is_leaving and not self._open:
            self._scope.cancel()

    def _expect(self) -> None:
        """Something has come, or is to come."""
        deadline = trio.current_time() + self._patience + SLACK_SECONDS if self._sent else inf
        if not 0 <= deadline - self._scope.deadline < SLACK_SECONDS / 2:  # setting it takes long
            self._scope.deadline = deadline

    # -- questions -----------------------------------------------------------------------------------

    async def _send(self) -> None:
        """Questions that `ask` did not send itself, or not wholly."""
        while True:
            await self._sending.work.wait()
            self._sending.is_busy = True
            while self._sending.unsent or self._uses or (reads := self._next()):
                if self._sending.unsent:
                    pieces, self._sending.unsent = self._sending.unsent, []
                elif self._uses:
                    pieces, self._uses = self._uses, []
                else:
                    pieces = self._question(reads, await self.link.welcome(reads) if self.link is not None else ())
                await self._stream.send(pieces)
            self._sending.is_busy = False
            self._sending.work = trio.Event()

    def _question(self, reads: Sequence[Read], are_welcome: Sequence[bool]) -> list[memoryview]:
        """That wants these, as it is sent now. ``are_welcome``: which may be answered by places; empty: none."""
        if not reads:
            return []
        self._count += 1
        self._sent.append((self._count, reads))
        if len(self._sent) == 1:
            self._expect()
        rows = pack_question([(read.wanted, read.flags, read.without) for read in reads])
        if any(are_welcome):
            rows["flags"] |= np.where(are_welcome, PLACES, 0).astype(np.uint32)
        load = self._own_load()
        question = [memoryview(MessageHead(len(reads), self._count, load).pack(QUESTION_MAGIC)), plain(rows)]
        if self._is_traced and (parent := reads[0].parent):
            return [memoryview(MessageHead(1, self._count, load).pack(PARENT_MAGIC) + parent), *question]
        return question

    def _next(self) -> list[Read]:
        """Reads of the next question: all belong to the same span, or to none."""
        reads: list[Read] = []
        size = 0
        while self._waiting and len(reads) < ROWS_MAX:
            read = self._waiting[0]
            if size and (size + read.size > QUESTION_BYTES_MAX or read.parent != reads[0].parent):
                break
            self._waiting.popleft()
            if read.target is None:
                self._finish([read])
                continue
            reads.append(read)
            size += read.size
        return reads

    # -- answers -------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            if not self._sent:
                await self._stream.readable()  # when it answers it is known what it was asked
            row_count = len(self._sent[0][1]) if self._sent else 0
            data = memoryview(bytearray(HEAD_SIZE + ANSWER.itemsize * row_count))
            have = await self._stream.receive_more(data, 0, HEAD_SIZE)
            head = parse_head(data[:HEAD_SIZE], ANSWER_MAGIC)
            if not self._sent or (self._sent[0][0], row_count) != (head.number, head.row_count):
                raise WireError("it answers what it was not asked")
            await self._stream.receive_more(data, have, len(data))
            rows = np.frombuffer(data, ANSWER, offset=HEAD_SIZE)
            self._told(head.load)
            self._expect()
            _, reads = self._sent[0]
            answers, places = check_answer(rows), await self._places(rows, reads)
            destinations, fetched, others = [], [], []
            for read, answer, named, own in zip(reads, answers, rows["named"].tolist(), places, strict=True):
                read.answer, read.named = answer, [client for client in named if client]
                if len(own):
                    fetched.append((read, own))
                elif answer is Answer.HERE:
                    destinations.append(read)
                else:
                    others.append(read)
            self._finish(others)  # now: while bytes land, their readers may ask for them anew
            if fetched and self.link is not None and self._fetching is not None:
                self._fetching.start_soon(self.link.fetch, fetched, self._fetched)
            if destinations:
                await self._land(destinations)
            self._sent.popleft()
            self._expect()
            if self._sent:
                await trio.lowlevel.checkpoint()

    async def _places(self, rows: Rows, reads: Sequence[Read]) -> list[Places]:
        """Of each row of an answer; empty: it has none. WireError."""
        if not any(rows["places"].tolist()):
            return [NO_PLACES] * len(reads)
        counts = check_counts(rows, are_welcome=self.link is not None)
        places = np.empty(sum(counts), PLACE)
        await self._stream.receive_into(plain(places))
        return split_places(places, counts, [read.size for read in reads])

    def _fetched(self, read: Read) -> None:
        """By RDMA, or not."""
        self._finish([read])

    async def _land(self, reads: Sequence[Read]) -> None:
        destinations = Destinations(reads, lambda read: self._finish([read]))

        def count_received(byte_count: int, row_count: int) -> None:
            self._expect()
            destinations.count_received(byte_count, row_count)

        await self._stream.land(destinations.rows, destinations.left, count_received)
