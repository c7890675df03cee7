"""One ring of the daemon: entries are numbered, placed and published, and their completions taken back.

It ends with its connection. `Ring`, which callers have, goes on with another one.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from errno import EAGAIN, ECANCELED, EIO, ETIMEDOUT
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvfuse.errors import Disconnected
from kvfuse.usrbio.client.files import File, Namespace
from kvfuse.usrbio.client.gpu.gpu_memory import DeviceCopy, GpuIov, is_staged, staging
from kvfuse.usrbio.client.gpu.prepared import DeviceEntries, Ending
from kvfuse.usrbio.client.iov import Iov
from kvfuse.usrbio.client.key_area import KEY_CELL, Found, KeyArea
from kvfuse.usrbio.client.parent_spans import ParentSpans, current_span
from kvfuse.usrbio.client.session import Session, close_all
from kvfuse.usrbio.client.tickets import Numbers, Tickets
from kvfuse.usrbio.client.waiting import Waiter
from kvfuse.usrbio.protocol.queues import Bell, Entries, RingMemory, heeds_parents
from kvfuse.usrbio.protocol.wire import CQE, ENTRIES_MAX, KEY_OPS, SQE, SQE_STRUCT, Layout, Op, Request, Word, pack_keys

SPANS_SIZE = 1 << 20
TIMEOUT_US_MAX = (1 << 32) - 1
NO_ENTRY = (1 << 64) - 1
"""the number of no ticket: what a cancel of something that is not under way names"""
_TICKET = struct.Struct("<Q")
"""the first word of a CQE"""

_TRACES = int(Word.DAEMON_TRACES)  # a plain number: it is looked at for each submission
_TIMEOUT = struct.Struct("<I")
_TIMEOUT_OFFSET = 56
"""of timeout_us in an SQE, in bytes"""
_IOV = struct.Struct("<I")
_IOV_OFFSET = 8
"""of the iov in an SQE, in bytes"""

Memory = Iov | GpuIov
Column = npt.ArrayLike
"""an array with a value for each entry, or one value for all"""


class Shape(NamedTuple):
    """The sizes and operations that a ring asks of the daemon, each time that it is attached."""

    entries: int
    places: int
    """of the queue: pins go back beside the entries"""
    cells_size: int
    """bytes of the aux area: a key for each entry"""
    aux_size: int
    op_mask: int

    @classmethod
    def of(cls, entries: int, aux_size: int | None, ops: Iterable[Op] | None) -> Self:
        """As `Client.ring` was told. ValueError."""
        allowed = frozenset(Op) if ops is None else frozenset(ops) | {Op.CANCEL, Op.RELEASE}
        cells_size = entries * KEY_CELL if allowed & KEY_OPS else 0
        if aux_size is None:
            aux_size = cells_size + SPANS_SIZE if cells_size else 0
        if aux_size < cells_size:
            raise ValueError(f"keys for {entries} entries need an aux area of at least {cells_size} bytes")
        Layout.of(entries, aux_size)
        places = min(2 * entries, ENTRIES_MAX) if Op.GET in allowed else entries
        return cls(entries, places, cells_size, aux_size, sum(1 << op for op in allowed))


class AttachedRing:
    """Nothing is under way at first. `Ring` owns it, and lets go of it when its session is not the present one."""

    def __init__(self, session: Session, shape: Shape) -> None:
        self.session = session
        self._shape = shape
        self._handle, memory, descriptors = _add_ring(session, shape)
        self.let_go = weakref.finalize(self, close_all, descriptors)
        self._bell = Bell(memory.words, Word.DAEMON_SLEEPS, descriptors[0])
        self._waiter = Waiter(memory.cq, Bell(memory.words, Word.CLIENT_SLEEPS, descriptors[1]), descriptors[2])
        self._sq, self._cq = memory.sq, memory.cq
        self._sq_bytes = memory.bytes.data[memory.layout.sq_offset : memory.layout.cq_offset]
        self._words = memory.words
        self._parents = ParentSpans(memory.parents)
        self._keys = KeyArea(memory.aux[: shape.aux_size], shape.cells_size)
        self.tickets = Tickets(shape.entries)
        self._prepared = 0
        self._before_submit: list[Callable[[], None]] = []
        self._endings: dict[int, Ending] = {}
        self._on_devices = DeviceEntries(self._endings)

    def close(self) -> None:
        """Returns when the daemon touches no iov for this ring any more. Forgets what was under way. TimeoutError."""
        self.session.drop(Request.DROP_RING, self._handle)
        if not self.session.has_ended:  # else the daemon may yet touch them
            self._forget()
        self._endings.clear()
        self.let_go()

    def retract(self) -> None:
        """Have the daemon time out at once what it has not taken yet, so that it uses no buffer of that.

        It may take entries at this moment: it reads each once, with the one timeout or the other.
        """
        untaken = min(self._sq.position - self._sq.taken, self._shape.places)
        for number in range(self._sq.position - untaken, self._sq.position):
            place = number % self._shape.places * SQE_STRUCT.size
            if self._sq_bytes[place] != Op.RELEASE:
                _TIMEOUT.pack_into(self._sq_bytes, place + _TIMEOUT_OFFSET, 1)

    def settle(self) -> bool:
        """Drop the completions of entries that nobody waits for any more: call it when all waits were given up.

        True: nobody touches their buffers from here on. All of them have completed, or no process serves the ring any
        more, nor keeps it for the next daemon. It waits for nothing, and also answers when the connection has ended.
        """
        with suppress(Disconnected):  # it completes nothing that was under way
            self._reap(self._given(), None, is_late=True)
        if self.tickets.free + self._prepared == self._shape.entries:
            return True
        if self._waiter.is_served:
            return False
        self._forget()
        return True

    def _forget(self) -> None:
        """Nobody completes what is under way, nor touches its memory."""
        for ending in self._endings.values():
            ending(-ECANCELED, False)
        self._endings.clear()

    # -- placing entries -----------------------------------------------------------------------------

    def need_room(self, count: int) -> None:
        """BlockingIOError unless ``count`` more entries can be placed."""
        untaken = self._sq.position - self._sq.taken
        if not 0 <= untaken <= self._shape.places:
            raise self.session.broken("it took entries that nobody gave")
        if count > min(self.tickets.free, self._shape.places - untaken - self._prepared):
            entries = self._shape.entries
            raise BlockingIOError(
                EAGAIN, f"{entries - self.tickets.free} of the ring's {entries} entries are under way"
            )

    def _place(
        self, op: Op, handle: int, iov: int, offset: int, iov_offset: int, length: int,
        user_data: int, priority: int, timeout: float | None, flags: int, key_offset: int, key_length: int,
    ) -> int:  # fmt: skip
        """One entry, after `need_room`. Its ticket. ValueError for a number that is negative or too large."""
        place = ((self._sq.position + self._prepared) % self._shape.places) * SQE_STRUCT.size
        try:
            SQE_STRUCT.pack_into(
                self._sq_bytes, place, op, priority, flags, handle, iov, key_length, offset, iov_offset, length,
                key_offset, self.tickets.next(), _microseconds(timeout), 0,
            )  # fmt: skip
            ticket = self.tickets.take(user_data)
        except (struct.error, ValueError) as error:
            raise ValueError(f"{op.name}: {error}") from error
        self._prepared += 1
        return ticket

    def _place_columns(self, count: int, user_data: Column, timeout: float | None, **columns: Any) -> Numbers:
        """``count`` entries, after `need_room`; a column is an array of as many or one value. Their tickets."""
        rows = np.zeros(count, SQE)
        for name, column in columns.items():
            rows[name] = column
        rows["timeout_us"] = _microseconds(timeout)
        tickets = self.tickets.take_many(count, user_data)
        rows["user_data"] = tickets
        self._sq.write(rows, self._prepared)
        self._prepared += count
        return tickets

    def place_one(
        self, op: Op, handle: int, iov: Memory | None, iov_offset: int, offset: int, length: int,
        user_data: int, priority: int, timeout: float | None, flags: int = 0, key: bytes | None = None,
    ) -> int:  # fmt: skip
        """Whatever is no list of keys. ``handle``: of the file or the namespace. Its ticket."""
        if key is not None:
            self._keys.check_one(key)
        self.need_room(1)
        if is_staged(op, iov, flags):
            terms = user_data, priority, timeout, flags, key
            with staging(op, [iov], [iov_offset], [length], flags=flags) as staged:
                ticket = self.place_one(op, handle, staged.iovs[0], staged.offsets[0], offset, length, *terms)
                self._on_devices.attend(op, self._prepared - 1, [ticket], staged)
            return ticket
        iov_handle, place = (0, iov_offset) if iov is None else (iov.handle, iov.at(iov_offset))
        key_offset, key_length = (0, 0) if key is None else (self._keys.put(self.tickets.next(), key), len(key))
        ticket = self._place(
            op, handle, iov_handle, offset, place, length,
            user_data, priority, timeout, flags, key_offset, key_length,
        )  # fmt: skip
        if isinstance(iov, GpuIov):
            self._on_devices.follow(self._prepared - 1, [ticket], [iov])
        elif iov is not None and iov.mirror is not None:
            self._copy(op, ticket, iov, iov_offset, length)
        return ticket

    def place_files(
        self, op: Op, iov: Memory, iov_offsets: Column, file: File, offsets: Column, lengths: Column,
        user_data: Column, priority: int, timeout: float | None,
    ) -> int:  # fmt: skip
        """Many READ or WRITE. How many."""
        count = max(map(np.size, (iov_offsets, offsets, lengths, user_data)))
        places = _places(iov_offsets)
        self.need_room(count)
        columns = {"handle": file.handle, "offset": offsets, "length": lengths, "priority": priority}
        if is_staged(op, iov):
            with staging(op, [iov] * count, *_rows(count, places, lengths)) as staged:
                columns |= {"iov": staged.handles, "iov_offset": staged.offsets}
                tickets = self._place_columns(count, user_data, timeout, op=op, **columns)
                self._on_devices.attend(op, self._prepared - count, tickets.tolist(), staged)
            return count
        columns |= {"iov": iov.handle, "iov_offset": places + np.uint64(iov.base)}
        tickets = self._place_columns(count, user_data, timeout, op=op, **columns)
        if isinstance(iov, GpuIov):
            self._on_devices.follow(self._prepared - count, tickets.tolist(), [iov] * count)
        elif iov.mirror is not None:
            self._copy_columns(op, tickets, [iov] * count, places, lengths)
        return count

    def place_keys(
        self, op: Op, iovs: Sequence[Memory | None] | Iov, iov_offsets: Column, namespace: Namespace,
        keys: Sequence[bytes], lengths: Column, user_data: Column, flags: int, priority: int, timeout: float | None,
        hints: int = 0,
    ) -> Numbers:  # fmt: skip
        """Many GET or PUT; one iov for all, or one for each. Their tickets."""
        count = len(keys)
        if isinstance(iovs, Iov):
            if iovs.mirror is None:
                return self._place_keys(
                    op, iovs.handle, _places(iov_offsets) + np.uint64(iovs.base), namespace, keys, lengths,
                    user_data, flags, priority, timeout, hints,
                )  # fmt: skip
            iovs = [iovs] * count
        if any(is_staged(op, iov, flags) for iov in iovs):
            self.need_room(count)
            with staging(op, iovs, *_rows(count, _places(iov_offsets), lengths), flags=flags) as staged:
                terms = user_data, flags, priority, timeout, hints
                tickets = self.place_keys(op, staged.iovs, staged.offsets, namespace, keys, lengths, *terms)
                self._on_devices.attend(op, self._prepared - count, tickets.tolist(), staged)
            return tickets
        handles = np.fromiter((iov.handle if iov is not None else 0 for iov in iovs), np.uint32, count)
        bases = np.fromiter((iov.base if iov is not None else 0 for iov in iovs), np.uint64, count)
        places = _places(iov_offsets)
        terms = user_data, flags, priority, timeout, hints
        tickets = self._place_keys(op, handles, places + bases, namespace, keys, lengths, *terms)
        if any(isinstance(iov, GpuIov) for iov in iovs):
            self._on_devices.follow(self._prepared - count, tickets.tolist(), iovs)
        if any(iov is not None and iov.mirror is not None for iov in iovs):
            self._copy_columns(op, tickets, iovs, places, lengths)
        return tickets

    def _place_keys(
        self, op: Op, iov_handles: Column, iov_offsets: Column, namespace: Namespace, keys: Sequence[bytes],
        lengths: Column, user_data: Column, flags: int, priority: int, timeout: float | None, hints: int,
    ) -> Numbers:  # fmt: skip
        """Many GET or PUT of memory that the daemon maps. ``iov_offsets``: in the registered memory. Their tickets."""
        count, key_sizes = len(keys), self._keys.check(keys)
        self.need_room(count)
        key_offsets = self._keys.put_many(self.tickets.next_many(count), keys)
        return self._place_columns(
            count, user_data, timeout, op=op, priority=priority, flags=flags, handle=namespace.handle, iov=iov_handles,
            offset=hints, iov_offset=iov_offsets, length=lengths, key_length=key_sizes, key_offset=key_offsets,
        )  # fmt: skip

    def place_key_list(
        self, op: Op, namespace: Namespace, keys: Sequence[bytes],
        user_data: int, flags: int, priority: int, timeout: float | None,
    ) -> Found:  # fmt: skip
        """An EXISTS, DELETE or PREFETCH of many keys. The answers, filled in when it is reaped."""
        packed = pack_keys(keys)
        found = np.zeros(len(keys), np.uint8)
        self.need_room(1)
        span = self._keys.take_span(packed, len(keys))
        answers = span + len(packed)
        try:
            ticket = self._place(
                op, namespace.handle, 0, answers, 0, len(keys),
                user_data, priority, timeout, flags, span, len(packed),
            )  # fmt: skip
        except ValueError:
            self._keys.spans.give_back(span)
            raise

        def end(result: int, viewed: bool) -> None:
            if result >= 0:
                self._keys.read_answers(answers, found)
            self._keys.spans.give_back(span)

        self._endings[ticket] = end
        return found.view(np.bool_)

    def place_cancel(self, target_user_data: int, user_data: int, priority: int, timeout: float | None) -> None:
        """A CANCEL of the oldest entry with ``target_user_data``."""
        ticket = self.tickets.find(target_user_data)
        target = NO_ENTRY if ticket is None else ticket
        self.place_one(Op.CANCEL, 0, None, 0, target, 0, user_data, priority, timeout)

    # -- copies for memory that the daemon cannot map ------------------------------------------------

    def _copy(self, op: Op, ticket: int, iov: Iov, offset: int, length: int) -> None:
        """To the mirror before the entry is submitted, or from it when it has completed."""
        if op in (Op.WRITE, Op.PUT):
            self._before_submit.append(partial(iov.to_mirror, offset, length))
            return

        def end(result: int, viewed: bool) -> None:
            if result > 0 and not viewed:
                iov.from_mirror(offset, min(result, length))

        self._endings[ticket] = end

    def _copy_columns(
        self, op: Op, tickets: Numbers, iovs: Sequence[Memory | None], offsets: Column, lengths: Column
    ) -> None:
        columns = _rows(len(tickets), offsets, lengths)
        for ticket, iov, offset, length in zip(tickets.tolist(), iovs, *columns, strict=True):
            if isinstance(iov, Iov) and iov.mirror is not None:
                self._copy(op, ticket, iov, offset, length)

    # -- submitting and reaping ----------------------------------------------------------------------

    def submit(self) -> int:
        """Give the prepared entries to the daemon. How many. Also gives back the pins of views that died."""
        for copy in self._before_submit:
            copy()
        self._before_submit.clear()
        self._on_devices.prepare(self._spoil)
        count = self._prepared
        if self._words[_TRACES] and heeds_parents(self._words) and (span := current_span()):
            places = [(self._sq.position + number) % self._shape.places for number in range(count)]
            self._parents.name(span, self._sq_bytes, places)
        self._publish(count + self._place_releases() if self.session.unpins else count)
        return count

    def _spoil(self, number: int) -> None:
        """Have the daemon refuse a prepared entry."""
        place = (self._sq.position + number) % self._shape.places * SQE_STRUCT.size
        _IOV.pack_into(self._sq_bytes, place + _IOV_OFFSET, 0)

    def _publish(self, count: int) -> None:
        self._prepared = 0
        if count:
            self._sq.publish(count)
            self._bell.ring()

    def _place_releases(self) -> int:
        unpins = self.session.unpins
        room = self._shape.places - (self._sq.position - self._sq.taken) - self._prepared
        pins: list[int] = []
        with suppress(IndexError):  # other rings take of them, too
            while len(pins) < room:
                pins.append(unpins.popleft())
        rows = np.zeros(len(pins), SQE)
        rows["op"] = Op.RELEASE
        rows["offset"] = pins
        self._sq.write(rows, self._prepared)
        return len(pins)

    def wait(self, min_results: int, timeout: float | None, max_results: int | None) -> Entries:
        """At least ``min_results`` completions, or as many as are there after ``timeout`` seconds."""
        wanted = min(min_results, self._shape.entries - self.tickets.free - self._prepared)
        given = self._given()
        if given < wanted:
            self._waiter.wait(self._cq.position + wanted, timeout)
            given = self._given()
        return self._reap(given, max_results)

    async def wait_async(self, min_results: int, timeout: float | None, max_results: int | None) -> Entries:
        """As `wait`; other tasks of the thread go on. It changes nothing before the completions are there."""
        wanted = min(min_results, self._shape.entries - self.tickets.free - self._prepared)
        await self._waiter.wait_async(self._cq.position + wanted, timeout)
        return self._reap(self._given(), max_results)

    def peek(self, max_results: int | None) -> Entries:
        """Completions that are there. Disconnected if there are none and the connection has ended."""
        given = self._given()
        if not given:
            self._waiter.check()
        return self._reap(given, max_results)

    def _given(self) -> int:
        """Completions to be reaped."""
        count = self._cq.given - self._cq.position
        if not 0 <= count <= self._shape.entries - self.tickets.free:
            raise self.session.broken("it completed entries that nobody gave")
        return count

    def _reap(self, given: int, max_results: int | None, *, is_late: bool = False) -> Entries:
        """``is_late``: nobody waits for them any more: their views are given back, and nothing is copied."""
        count = given if max_results is None else min(given, max_results)
        if not count:
            return np.zeros(0, CQE)
        packed = self._cq.read_packed(count)
        self._cq.take(count)
        rows = self._cq.unpacked(packed)
        try:
            if count == 1:  # what waits for each by itself waits for every microsecond
                (ticket,) = _TICKET.unpack_from(packed)
                _TICKET.pack_into(packed, 0, self.tickets.give_back_one(ticket))
                tickets = [ticket]
            else:
                numbers, rows["user_data"] = self.tickets.give_back(rows["user_data"])
                tickets = numbers.tolist() if self._endings or self._parents.of else []
        except ValueError as error:
            raise self.session.broken(str(error)) from error
        if is_late:
            self.session.unpins.extend(rows["pin"][rows["arena"] != 0].tolist())
            rows["result"], rows["arena"] = -ETIMEDOUT, 0
        if self._parents.of:
            self._parents.completed(tickets)
        if self._endings:
            self._end(tickets, rows)
        if not self._prepared and len(self.session.unpins) > self._shape.entries // 2:
            self._publish(self._place_releases())  # where every submit fills the ring, none has room for them
        return rows

    def _end(self, tickets: Sequence[int], rows: Entries) -> None:
        results, arenas = rows["result"].tolist(), rows["arena"].tolist()
        destinations: list[tuple[int, DeviceCopy]] = []
        for row, (ticket, result, arena) in enumerate(zip(tickets, results, arenas, strict=True)):
            ending = self._endings.pop(ticket, None)
            if ending is not None and (landing := ending(result, arena != 0)) is not None:
                destinations.append((row, landing))
        for row, landing in destinations:  # all have begun: each ends while the next one is under way
            if landing.finish() is not None:
                rows["result"][row] = -EIO


def _add_ring(session: Session, shape: Shape) -> tuple[int, RingMemory, list[int]]:
    """(handle, memory, descriptors: the daemon's bell, ours, one that reports a hangup). OSError, Disconnected."""
    reply, descriptors = session.request(Request.ADD_RING, shape.places, shape.aux_size, shape.op_mask)
    try:
        memory_descriptor, _, _ = descriptors
        memory = RingMemory.attach(memory_descriptor)
        os.close(descriptors.pop(0))
        if memory.layout != Layout.of(shape.places, shape.aux_size):
            raise ValueError(f"a ring of {shape.places} entries was asked for, another one came")
        descriptors.append(session.hangup_descriptor())
        session.heed(memory.words)
    except ValueError as error:
        close_all(descriptors)
        raise session.broken(str(error)) from error
    except BaseException:
        close_all(descriptors)
        raise
    return reply.values[0], memory, descriptors


def _places(offsets: Column) -> npt.NDArray[np.uint64]:
    """Offsets in iovs, as `Iov.at` takes them one by one."""
    numbers = np.asarray(offsets)
    if numbers.dtype.kind != "u" and numbers.size and numbers.min() < 0:
        raise ValueError(f"the offset {numbers.min()} in an iov")
    return numbers.astype(np.uint64)


def _rows(count: int, *columns: Column) -> Iterator[list[int]]:
    """Columns as lists of ``count`` numbers."""
    return (np.broadcast_to(np.asarray(column), count).tolist() for column in columns)


def _microseconds(timeout: float | None) -> int:
    """0: none. The field has 32 bits, so a longer timeout becomes the longest one."""
    return 0 if timeout is None else min(max(int(timeout * 1e6), 1), TIMEOUT_US_MAX)
