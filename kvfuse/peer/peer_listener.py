"""Answers other hosts from the tiers of this one: in the order of their questions, one at a time a connection."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import trio

from kvfuse.native._peers import Server, Spread
from kvfuse.peer.greeting import BLOCKS, Greeted, HostIdentity, welcome
from kvfuse.peer.peer_wire import (
    ANSWER,
    ANSWER_MAGIC,
    FINAL,
    HEAD_SIZE,
    PARENT,
    PARENT_MAGIC,
    PLACES,
    QUESTION,
    QUESTION_MAGIC,
    ROWS_MAX,
    USES_MAGIC,
    MessageHead,
    Rows,
    WireError,
    check_parent,
    check_question,
    magic_of,
    parse_head,
    plain,
)
from kvfuse.peer.rdma import Rdma
from kvfuse.peer.read_link import ReadLink, answer_link
from kvfuse.peer.read_plans import Places
from kvfuse.peer.served_spans import note_spans
from kvfuse.peer.stream import BROKEN, PeerStream
from kvfuse.traceparent import HEARD, TRACES
from kvfuse.volume.hosts.neighbourhood import Neighbourhood
from kvfuse.volume.views.neighbours import USE, Answer, Wanted

GREETING_SECONDS = 5.0
STRANGERS_MAX = 64
"""connections that have not proved anything yet"""
CALLER_CONNECTIONS_MAX = 64
"""of both kinds, twice as many as a mount may have: while one is made anew there are two"""
SEND_SECONDS = 10.0
"""for an answer, and one more for each `SEND_RATE` bytes of it: then its reader is given up"""
SEND_RATE = 10 << 20
REFERRED_SIZE = 64 << 10
"""bytes of a row from which on its reader is sent elsewhere: less is sent sooner than said"""
STORED_AT_ONCE = 8
"""reads of the disk tier for one answer"""
FORMS = {QUESTION_MAGIC: QUESTION, USES_MAGIC: USE, PARENT_MAGIC: PARENT}
"""with what a message begins -> its rows"""

log = logging.getLogger(__name__)


@dataclass
class ServedCounters:
    connections: int = 0
    refused: int = 0
    """connections that did not prove that they are of the volume, or were too many"""
    questions: int = 0
    rows: int = 0
    here: int = 0
    bytes: int = 0
    placed: int = 0
    """of these rows: readers were told where their bytes lie, to read them by RDMA"""
    placed_bytes: int = 0
    absent: int = 0
    moved: int = 0
    elsewhere: int = 0
    busy: int = 0
    malformed: int = 0
    given_up: int = 0
    """readers that did not take their answer"""


class _Room:
    """Bytes of one answer that are to be sent, among those of its caller's other connections."""

    def __init__(self, sending: Counter[int], caller: int, limit: int) -> None:
        self._sending, self._caller, self._limit = sending, caller, limit
        self._size = 0

    def __enter__(self) -> _Room:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back(self._size)

    def take(self, size: int) -> bool:
        """Whether there is room for them."""
        if self._sending[self._caller] + size > self._limit:
            return False
        self._sending[self._caller] += size
        self._size += size
        return True

    def give_back(self, size: int) -> None:
        self._sending[self._caller] -= size
        self._size -= size


@dataclass
class Listener:
    """Of one mount. ``neighbourhood``: this host's, at the moment. ``in_flight``: bytes that one caller is sent."""

    neighbourhood: Callable[[], Neighbourhood]
    in_flight: int
    rdma: Rdma | None = None
    counters: ServedCounters = field(default_factory=ServedCounters)

    def __post_init__(self) -> None:
        self.secret = b""
        """of the volume's hosts; empty until it was read"""
        self.spread = Spread()
        """who has copies, and what is still to be sent"""
        self.blocks = Server(self.spread, self.in_flight)
        self.served: Counter[int] = Counter()
        """client -> bytes of granules that it got"""
        self._callers: Counter[int] = Counter()
        """client -> its connections"""
        self._sending: Counter[int] = Counter()
        """client -> bytes on their way to it"""
        self.links: set[ReadLink] = set()
        """by which others read"""
        self._strangers = 0

    @property
    def identity(self) -> HostIdentity:
        neighbourhood = self.neighbourhood()
        return HostIdentity(neighbourhood.volume_id, neighbourhood.client, self.secret)

    @property
    def load(self) -> int:
        """Bytes that are still to be sent."""
        return self.spread.add_load(0)

    def statistics(self) -> dict[str, object]:
        self._note_ended(self.blocks.reap())
        counts, bytes_of = Counter(asdict(self.counters)), Counter(self.served)
        counts.update(self.blocks.statistics())
        bytes_of.update({client: size for client, (size, _) in self.blocks.callers().items() if size})
        served = {f"{client:016x}": count for client, count in bytes_of.most_common(64)}
        return {**counts, "load_bytes": self.load, "callers": len(self._callers), "served": served}

    async def serve(self, listening: socket.socket) -> None:
        """Accept connections, for ever."""
        with trio.socket.from_stdlib_socket(listening) as accepting:
            async with trio.open_nursery() as nursery:
                if TRACES.is_on:
                    nursery.start_soon(note_spans, self.blocks)
                try:
                    await self._accept(accepting, nursery)
                finally:
                    self._note_ended(self.blocks.close())

    def renew(self) -> None:
        """The neighbourhood is another one, or knows other hosts."""
        neighbourhood = self.neighbourhood()
        self.spread.set_clients(np.array(list(neighbourhood.places), np.uint64))
        self.blocks.end(neighbourhood.lender())
        self.blocks.set_disk(neighbourhood.has_disk)

    def _note_ended(self, clients: Sequence[int]) -> None:
        """Connections of these have ended."""
        for client in clients:
            self._callers[client] -= 1
            if not self._callers[client]:
                del self._callers[client], self._sending[client]

    async def _accept(self, accepting: trio.socket.SocketType, nursery: trio.Nursery) -> None:
        while True:
            try:
                connection, _ = await accepting.accept()
            except OSError as error:  # too many descriptors: it is tried again
                log.warning("a connection of another host was not accepted: %s", error)
                await trio.sleep(0.1)
                continue
            plain = socket.socket(fileno=connection.detach())
            if self._strangers >= STRANGERS_MAX:
                self.counters.refused += 1
                plain.close()
            else:
                self._strangers += 1
                nursery.start_soon(self._serve_one, PeerStream(plain))

    async def _serve_one(self, stream: PeerStream) -> None:
        caller: Greeted | None = None
        link: ReadLink | None = None
        lender: object | None = None
        try:
            caller = await self._admitted(stream)
            if caller is not None:
                self.counters.connections += 1
                self._callers[caller.client] += 1
                if caller.kind == BLOCKS:
                    if (lender := self.neighbourhood().lender()) is not None:
                        self.blocks.serve(stream.detach(), caller.client, lender)
                    return
                if (link := await answer_link(self.rdma, stream, caller.place)) is not None:
                    self.links.add(link)
                await self._converse(stream, caller.client, link)
        except WireError as error:
            self.counters.malformed += 1
            log.warning("another host is cut off: %s", error)
        except BROKEN:
            pass
        except trio.TooSlowError:
            self.counters.given_up += 1
        except Exception:  # a mistake of ours: nothing may depend on other hosts
            log.exception("the connection of another host failed")
        finally:
            if link is not None:
                self.links.remove(link)
                link.close()
            if lender is None:  # else a thread answers
                stream.close()
                if caller is not None:
                    self._note_ended([caller.client])

    async def _admitted(self, stream: PeerStream) -> Greeted | None:
        """Who connected; None: it is not of this volume, or has connections enough."""
        try:
            with trio.fail_after(GREETING_SECONDS):
                caller = await welcome(stream, self.identity)
        except (WireError, trio.TooSlowError) as error:
            self.counters.refused += 1
            log.warning("a connection of another host is refused: %s", str(error) or "it did not greet in time")
            return None
        finally:
            self._strangers -= 1
        self._note_ended(self.blocks.reap())
        if self._callers[caller.client] >= CALLER_CONNECTIONS_MAX:
            self.counters.refused += 1
            return None
        return caller

    async def _converse(self, stream: PeerStream, caller: int, link: ReadLink | None) -> None:
        memory, have = memoryview(bytearray(HEAD_SIZE + ROWS_MAX * QUESTION.itemsize)), 0
        while True:
            have = await stream.receive_more(memory, have, HEAD_SIZE)
            magic = magic_of(memory)
            form = FORMS.get(magic, QUESTION)
            head = parse_head(memory[:HEAD_SIZE], magic if magic in FORMS else QUESTION_MAGIC)
            size = HEAD_SIZE + head.row_count * form.itemsize
            if have < size:
                with trio.fail_after(GREETING_SECONDS):
                    have = await stream.receive_more(memory, have, size)
            rows = np.frombuffer(bytes(memory[HEAD_SIZE:size]), form)
            have -= size
            if have:  # of the next question
                memory[:have] = bytes(memory[size : size + have])
                await trio.lowlevel.checkpoint()
            if magic == USES_MAGIC:
                self.neighbourhood().used(rows)
                continue
            if magic == PARENT_MAGIC:
                check_parent(rows)
                HEARD.set(rows.tobytes())
                continue
            check_question(rows)
            self.spread.tell_load(caller, head.load)
            await self._answer(stream, caller, head, rows, link)
            if HEARD.get():
                HEARD.set(b"")

    async def _answer(
        self, stream: PeerStream, caller: int, head: MessageHead, rows: Rows, link: ReadLink | None
    ) -> None:
        answers = np.zeros(head.row_count, ANSWER)
        places: list[Places] = []
        with _Room(self._sending, caller, self.in_flight) as room:
            views = await self._find(caller, rows, answers, room, places, link)
            size = sum(map(len, views))
            load = self.spread.add_load(size)
            try:
                reply = MessageHead(head.row_count, head.number, load - size).pack(ANSWER_MAGIC)
                left = stream.send_now([memoryview(reply), plain(answers), *map(plain, places), *views])
                if left:
                    with trio.fail_after(SEND_SECONDS + size / SEND_RATE):
                        await stream.send(left)
            finally:
                self.spread.add_load(-size)
        self.served[caller] += size
        self.counters.bytes += size
        self.counters.questions += 1
        self.counters.rows += head.row_count

    async def _find(
        self, caller: int, rows: Rows, answers: Rows, room: _Room, places: list[Places], link: ReadLink | None
    ) -> Sequence[memoryview]:
        """Fill in the answers, and places of rows; the bytes that follow them."""
        neighbourhood = self.neighbourhood()
        found: dict[int, memoryview] = {}
        absent: list[tuple[int, Wanted]] = []
        for place, row in enumerate(rows.tolist()):
            ino, base, addr, generation, low, high, flags, _, without, _ = row
            wanted = Wanted(ino, base, addr, generation, low, high, b"")
            if without:
                self.spread.forget(addr, generation, without)
            answer, view = neighbourhood.resident(wanted)
            is_final = bool(flags & FINAL) or high - low < REFERRED_SIZE
            if view is not None and (named := self.spread.choose(addr, generation, caller, True, is_final)):
                answer, view = Answer.ELSEWHERE, None
                answers["named"][place, : len(named)] = named
            elif view is not None and link is not None and flags & PLACES and (own := link.places_of(view)) is not None:
                places.append(own)
                answers["places"][place] = len(own)
                self.counters.placed += 1
                self.counters.placed_bytes += len(view)
                self.served[caller] += len(view)
                view = None
            elif view is not None and not room.take(len(view)):
                answer, view = Answer.BUSY, None
            if view is not None:
                found[place] = view
            elif answer is Answer.ABSENT:
                absent.append((place, wanted))
            answers["answer"][place] = answer
        if absent:
            await self._find_stored(caller, neighbourhood, absent, answers, found, room)
        self._count(answers)
        return [found[place] for place in sorted(found)]

    async def _find_stored(
        self, caller: int, neighbourhood: Neighbourhood, absent: Sequence[tuple[int, Wanted]], answers: Rows,
        found: dict[int, memoryview], room: _Room,
    ) -> None:  # fmt: skip
        """What the disk tier has of these; else who has it."""
        turns = trio.Semaphore(STORED_AT_ONCE)

        async def find(place: int, wanted: Wanted) -> None:
            size = wanted.high - wanted.low
            async with turns:
                is_taken = room.take(size)  # before it is read: it is in memory from then on
                view = await neighbourhood.stored(wanted) if is_taken else None
            if is_taken and view is None:
                room.give_back(size)
            if view is not None:
                found[place] = view
                answers["answer"][place] = Answer.HERE
            elif named := self.spread.choose(wanted.addr, wanted.generation, caller, False, False):
                answers["named"][place, : len(named)] = named

        async with trio.open_nursery() as nursery:
            for place, wanted in absent:
                nursery.start_soon(find, place, wanted)

    def _count(self, answers: Rows) -> None:
        counts = np.bincount(answers["answer"], minlength=len(Answer) + 1).tolist()
        counters = self.counters
        counters.here += counts[Answer.HERE]
        counters.absent += counts[Answer.ABSENT]
        counters.moved += counts[Answer.MOVED]
        counters.elsewhere += counts[Answer.ELSEWHERE]
        counters.busy += counts[Answer.BUSY]
