"""The client's end of one ring: entries are numbered and placed, published, and their completions taken back.

The verbs - what an entry means - are in ``ring.py``.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from errno import EAGAIN
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfuse.usrbio.client.session import Session
from kvfuse.usrbio.client.spans import Spans
from kvfuse.usrbio.client.tickets import Numbers, Tickets
from kvfuse.usrbio.client.waiting import Waiter
from kvfuse.usrbio.protocol.queues import Bell, Entries, RingMemory
from kvfuse.usrbio.protocol.wire import (
    CQE,
    ENTRIES_MAX,
    MANY_KEY_OPS,
    ONE_KEY_OPS,
    SQE,
    SQE_STRUCT,
    Layout,
    Op,
    Request,
    Word,
)

KEY_CELL = 256
"""bytes of the aux area that each ticket has for its key; behind the cells are spans for many keys and results"""
SPANS_SIZE = 1 << 20
TIMEOUT_US_MAX = (1 << 32) - 1
_TICKET = struct.Struct("<Q")
"""the first word of a CQE"""

Ending = Callable[[int, bool], None]
"""what is to be done when an entry completes: (result, whether it was answered with a view)"""


class Submission:
    """Places entries, publishes and reaps. Starts anew by itself after the client reconnected."""

    def __init__(
        self, session: Callable[[], Session], entries: int, aux_size: int | None, ops: Iterable[Op] | None
    ) -> None:
        """``session``: the client's present one."""
        allowed = frozenset(Op) if ops is None else frozenset(ops) | {Op.CANCEL, Op.RELEASE}
        self._cells_size = entries * KEY_CELL if allowed & (ONE_KEY_OPS | MANY_KEY_OPS) else 0
        if aux_size is None:
            aux_size = self._cells_size + SPANS_SIZE if self._cells_size else 0
        if aux_size < self._cells_size:
            raise ValueError(f"keys for {entries} entries need an aux area of at least {self._cells_size} bytes")
        self._place_count = min(2 * entries, ENTRIES_MAX) if Op.GET in allowed else entries  # pins go back beside them
        Layout.of(entries, aux_size)
        self.entries = entries
        self._aux_size = aux_size
        self._op_mask = sum(1 << op for op in allowed)
        self._present_session = session
        self._closed = False
        self._attach()

    # -- the ring's life -----------------------------------------------------------------------------

    def _attach(self) -> None:
        """A new ring of the client's present connection, with nothing under way."""
        if self._closed:
            raise ValueError("the ring is closed")
        session = self._present_session()
        reply, descriptors = session.request(Request.ADD_RING, self._place_count, self._aux_size, self._op_mask)
        try:
            memory_descriptor, daemon_bell, client_bell = descriptors
            memory = RingMemory.attach(memory_descriptor)
            os.close(descriptors.pop(0))
            if memory.layout != Layout.of(self._place_count, self._aux_size):
                raise ValueError(f"a ring of {self._place_count} entries was asked for, another one came")
            descriptors.append(session.hangup_descriptor())
            waiter = Waiter(memory.cq, Bell(memory.words, Word.CLIENT_SLEEPS, client_bell), descriptors[-1])
        except ValueError as error:
            _close_all(descriptors)
            raise session.broken(str(error)) from error
        except BaseException:
            _close_all(descriptors)
            raise
        self._handle = reply.values[0]
        self._let_go = weakref.finalize(self, _close_all, descriptors)
        self._daemon_bell = Bell(memory.words, Word.DAEMON_SLEEPS, daemon_bell)
        self._waiter = waiter
        self._use(session, memory)

    def _use(self, session: Session, memory: RingMemory) -> None:
        self._session = session
        self._sq, self._cq = memory.sq, memory.cq
        self._sq_bytes = memory.bytes.data[memory.layout.sq_offset : memory.layout.cq_offset]
        self._aux = memory.aux
        self._aux_bytes = memory.aux.data
        self._key_cells = memory.aux[: self._cells_size].reshape(-1, KEY_CELL)
        self._spans = Spans(self._cells_size, self._aux_size - self._cells_size)
        self._tickets = Tickets(self.entries)
        self._prepared = 0
        self._before_submit: list[Callable[[], None]] = []
        self._endings: dict[int, Ending] = {}

    def _follow(self) -> None:
        """Be a ring of the client's present connection."""
        if self._session is not self._present_session() or self._closed:
            if not self._closed:
                self._let_go()
            self._attach()

    def close(self) -> None:
        """Returns when the daemon touches no iov for this ring any more. What was under way is forgotten."""
        if self._closed:
            return
        self._closed = True
        self._let_go()
        self._session.drop(Request.DROP_RING, self._handle)

    # -- placing entries -----------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Entries prepared or submitted, and not reaped yet."""
        return self.entries - self._tickets.free

    def _need_room(self, count: int) -> None:
        """BlockingIOError unless ``count`` more entries can be placed."""
        self._follow()
        untaken = self._sq.position - self._sq.taken
        if not 0 <= untaken <= self._place_count:
            raise self._session.broken("it took entries that nobody gave")
        if count > min(self._tickets.free, self._place_count - untaken - self._prepared):
            raise BlockingIOError(EAGAIN, f"{self.in_flight} of the ring's {self.entries} entries are under way")

    def _place(
        self, op: Op, handle: int, iov: int, offset: int, iov_offset: int, length: int,
        *, user_data: int, priority: int, timeout: float | None,
        flags: int = 0, key_offset: int = 0, key_length: int = 0,
    ) -> int:  # fmt: skip
        """One entry, after `_need_room`. Its ticket. ValueError for a number that is negative or too large."""
        place = ((self._sq.position + self._prepared) % self._place_count) * SQE_STRUCT.size
        try:
            SQE_STRUCT.pack_into(
                self._sq_bytes, place, op, priority, flags, handle, iov, key_length, offset, iov_offset, length,
                key_offset, self._tickets.next(), _microseconds(timeout), 0,
            )  # fmt: skip
            ticket = self._tickets.take(user_data)
        except (struct.error, ValueError) as error:
            raise ValueError(f"{op.name}: {error}") from error
        self._prepared += 1
        return ticket

    def _place_columns(self, count: int, user_data: npt.ArrayLike, timeout: float | None, **columns: Any) -> Numbers:
        """``count`` entries, after `_need_room`; a column is an array of as many or one value. Their tickets."""
        rows = np.zeros(count, SQE)
        for name, column in columns.items():
            rows[name] = column
        rows["timeout_us"] = _microseconds(timeout)
        tickets = self._tickets.take_many(count, user_data)
        rows["user_data"] = tickets
        self._sq.write(rows, self._prepared)
        self._prepared += count
        return tickets

    # -- submitting and reaping ----------------------------------------------------------------------

    def submit(self) -> int:
        """Give the prepared entries to the daemon. How many. Also gives back the pins of views that died."""
        self._follow()
        for copy in self._before_submit:
            copy()
        self._before_submit.clear()
        count = self._prepared
        self._publish(count + self._place_releases())
        return count

    def _publish(self, count: int) -> None:
        self._prepared = 0
        if count:
            self._sq.publish(count)
            self._daemon_bell.ring()

    def _place_releases(self) -> int:
        unpins = self._session.unpins
        if not unpins:
            return 0
        room = self._place_count - (self._sq.position - self._sq.taken) - self._prepared
        pins: list[int] = []
        with suppress(IndexError):  # other rings take of them, too
            while len(pins) < room:
                pins.append(unpins.popleft())
        rows = np.zeros(len(pins), SQE)
        rows["op"] = Op.RELEASE
        rows["offset"] = pins
        self._sq.write(rows, self._prepared)
        return len(pins)

    def wait(self, min_results: int = 1, timeout: float | None = None, max_results: int | None = None) -> Entries:
        """Completions (CQE) of submitted entries: at least ``min_results``, fewer only after ``timeout`` seconds.

        ``min_results`` is lowered to what is under way. Entries without a completion stay under way after a
        timeout. Disconnected as soon as the daemon is gone.
        """
        self._follow()
        wanted = min(min_results, self.in_flight - self._prepared)
        if self._given() < wanted:
            self._waiter.wait(self._cq.position + wanted, timeout)
        return self._reap(max_results)

    async def wait_async(
        self, min_results: int = 1, timeout: float | None = None, max_results: int | None = None
    ) -> Entries:
        """As `wait`, under trio or asyncio. Cancelled, it has taken no completion."""
        self._follow()
        wanted = min(min_results, self.in_flight - self._prepared)
        await self._waiter.wait_async(self._cq.position + wanted, timeout)
        return self._reap(max_results)

    def peek(self, max_results: int | None = None) -> Entries:
        """Completions that are there already. Disconnected if there are none and the daemon is gone."""
        self._follow()
        if not self._given():
            self._waiter.check()
        return self._reap(max_results)

    def _given(self) -> int:
        """Completions to be reaped."""
        count = self._cq.given - self._cq.position
        if not 0 <= count <= self.entries - self._tickets.free:
            raise self._session.broken("it completed entries that nobody gave")
        return count

    def _reap(self, max_results: int | None) -> Entries:
        count = self._given() if max_results is None else min(self._given(), max_results)
        if not count:
            return np.zeros(0, CQE)
        packed = self._cq.read_packed(count)
        self._cq.take(count)
        rows = self._cq.unpacked(packed)
        try:
            if count == 1:  # what waits for each by itself waits for every microsecond
                (ticket,) = _TICKET.unpack_from(packed)
                _TICKET.pack_into(packed, 0, self._tickets.give_back_one(ticket))
                tickets = [ticket]
            else:
                numbers, rows["user_data"] = self._tickets.give_back(rows["user_data"])
                tickets = numbers.tolist() if self._endings else []
        except ValueError as error:
            raise self._session.broken(str(error)) from error
        if self._endings:
            self._end(tickets, rows)
        if not self._prepared and len(self._session.unpins) > self.entries // 2:
            self._publish(self._place_releases())  # where every submit fills the ring, none has room for them
        return rows

    def _end(self, tickets: Sequence[int], rows: Entries) -> None:
        results, arenas = rows["result"].tolist(), rows["arena"].tolist()
        for ticket, result, arena in zip(tickets, results, arenas, strict=True):
            ending = self._endings.pop(ticket, None)
            if ending is not None:
                ending(result, arena != 0)


def _microseconds(timeout: float | None) -> int:
    """0 is none; what is too long to be told is the longest that can be."""
    return 0 if timeout is None else min(max(int(timeout * 1e6), 1), TIMEOUT_US_MAX)


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
