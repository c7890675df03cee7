"""Defines operations of a ring: entries that clients submit, calls that the event loop executes for them, completions.

Each operation gets one completion. Any thread may post it, under a lock, as the queue has one producer at a time.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.errors import EngineError
from kvfuse.traceparent import SIZE
from kvfuse.usrbio.daemon.client_memory import MappedIov
from kvfuse.usrbio.daemon.device_iovs import DeviceIov
from kvfuse.usrbio.daemon.device_memory import DevicePiece
from kvfuse.usrbio.daemon.interpreter import Interpreter, Seat
from kvfuse.usrbio.daemon.jobs import Jobs
from kvfuse.usrbio.daemon.registered_things import NamespaceHandle, OpenFile
from kvfuse.usrbio.daemon.ring_journal import Places, RingJournal
from kvfuse.usrbio.protocol.queues import Bell, Entries, RingMemory
from kvfuse.usrbio.protocol.wire import CQE, CQE_STRUCT, SQE, Word
from kvfuse.volume.measures.profiling import PROFILE

PIECE = 4 << 20
"""Bytes that are read at once into memory of the daemon."""


class Entry(NamedTuple):
    """One SQE; see `wire.SQE`. ``user_data``: its place, see `ring_journal`; the client's own number where it has
    none."""

    op: int
    priority: int
    flags: int
    handle: int
    iov: int
    key_length: int
    offset: int
    iov_offset: int
    length: int
    key_offset: int
    user_data: int
    timeout_us: int
    parent: int


class Completion(NamedTuple):
    """The contents of a completion; see `wire.CQE`."""

    result: int
    offset: int = 0
    arena: int = 0
    pin: int = 0


@dataclass(eq=False, slots=True)
class Call:
    """A checked operation for the event loop. It is completed once: see `Completions.complete`."""

    ring: ServedRing
    entry: Entry
    deadline: float
    """monotonic seconds; inf: none"""
    file: OpenFile | None = None
    namespace: NamespaceHandle | None = None
    iov: MappedIov | None = None
    device: DeviceIov | None = None
    """GET, READ: the target, instead of ``iov``"""
    piece: DevicePiece | None = None
    """bytes that the adapter copies there"""
    names: Sequence[bytes] = ()
    """file names of the keys"""
    data: Any = None
    """PUT, WRITE: a copy of the bytes; with a piece: what keeps its bytes"""
    again: Callable[[Call], Completion | None] = lambda call: None
    """tried by the ring's thread after the event loop's preparation: see `Completions.attempt`"""
    size: int = 0
    """bytes that it has of its connection's share of memory, until its task has ended"""
    weight: int = 0
    """its part of its user's calls in flight, until its task has ended"""
    busy: bool = False
    """the ring's thread is working on it"""
    doom: Callable[[], None] | None = None
    """called to give it up as soon as ``busy`` ends"""
    ended: bool = False
    scope: trio.CancelScope | None = None
    """scope of its task; None: the event loop has not begun it"""

    def cancel(self) -> None:
        if self.scope is not None:
            self.scope.cancel()

    async def try_again(self) -> bool:
        """Have the ring's thread try ``again``. True: the call is completed, or its ring has stopped."""
        return await self.attempt(self.again)

    async def attempt(self, attempt: Callable[[Call], Completion | None]) -> bool:
        """Have the ring's thread try ``attempt``; see `Completions.attempt`. True as for `try_again`."""
        completions = self.ring.completions
        return await self.ring.jobs.ask_thread(partial(completions.attempt, self, attempt)) or completions.stopped


class Done(NamedTuple):
    """A successful call that changed something, and its changes."""

    call: Call
    result: int
    content: int = 0
    """inode whose bytes changed"""
    directory: int = 0
    """inode of the directory whose names changed"""
    names: Sequence[tuple[bytes, int]] = ()
    """(name, its former inode, 0 for none)"""
    found: Sequence[bool] | None = None
    """the answer for each key of a call with many"""


class RefusedEntry(Exception):
    """The daemon answers an entry with this errno alone."""

    def __init__(self, number: int) -> None:
        self.number = number


class Short(Exception):
    """There is no memory for an entry now: it must wait."""


class ServedRing(Protocol):
    """The interface of a ring's thread for modules that serve its entries and do its calls."""

    completions: Completions
    jobs: Jobs
    turns: Interpreter
    seat: Seat

    def serve_copied(self, rows: Entries, taken_at: float) -> None:
        """Serve entries again, from copies of the bytes of those that write. For its thread."""


class CompletionProfile(Protocol):
    """Counts completed entries, see `ring_profile`."""

    def note(
        self, heads: npt.NDArray[np.uint64], lengths: Places, taken: npt.NDArray[np.float64], *, results: Places
    ) -> None: ...
    def note_one(self, op: int, handle: int, length: int, result: int, taken_at: float) -> None: ...


class Completions:
    """The completion queue of one ring, whose thread owns it, and its `RingJournal`. Any thread.

    Entries are known by the numbers of their places in the journal (``entry.user_data``). ``unpin``: releases a pin.
    """

    def __init__(self, memory: RingMemory, bell: int, unpin: Callable[[int], None], journal: RingJournal) -> None:
        self._journal = journal
        self._taken = memory.sq
        self._queue = memory.cq
        self._aux = memory.aux
        self._parents = memory.parents
        self._bell = Bell(memory.words, Word.CLIENT_SLEEPS, bell)
        self._unpin = unpin
        self._lock = threading.Lock()
        self._under_way = 0
        """entries taken and not completed"""
        self.stopped = False
        self._paused = False
        """the ring takes no more entries"""
        self.profile: CompletionProfile | None = None

    def pause(self) -> bool:
        """Have no room for more entries. True: some are in flight."""
        with self._lock:
            self._paused = True
            return self._under_way > 0

    def stop(self) -> None:
        """Post no more completions."""
        with self._lock:
            self.stopped = True

    def close(self, *, hands_over: bool = False) -> None:
        """Release the ring's memory, and pins of completions that the client did not take. After `stop`.

        ``hands_over``: the next daemon owns those pins.
        """
        with self._lock:  # later callers find the ring stopped, and touch nothing
            queue = self._queue
            if not hands_over:
                unread = min(max(queue.position - queue.taken, 0), len(queue))
                self._drop_pins(range(queue.position - unread, queue.position))
            del self._queue, self._taken, self._aux, self._parents, self._bell, self._journal

    def _drop_pins(self, positions: Iterable[int]) -> None:
        """Release the pins of completions that the client will not take."""
        for position in positions:
            if pin := int(self._queue.place(position)["pin"]):
                self._unpin(pin)

    def restore(self) -> tuple[Entries, npt.NDArray[np.float64]]:
        """Continue where the former daemon ended: (entries in flight, oldest first; when each was taken).

        The client sees completions that the former daemon committed and did not publish; this wakes it.
        """
        with self._lock:
            journal, (taken, given) = self._journal, self._journal.read_positions()
            self._taken.position, self._queue.position = taken, given
            left = journal.read_state()
            for pin in left.pins:
                self._unpin(pin)
            self._drop_pins(left.uncommitted)
            journal.restart(left.rows)
            self._under_way = len(left.rows)
            self._taken.take(0)
            self._queue.publish(0)
            self._bell.ring_always()
            return left.rows, left.times

    # -- entries -------------------------------------------------------------------------------------

    def count_claims(self) -> tuple[int, int]:
        """(unread completions, entries in flight) at one moment: places of the queue that are not free."""
        with self._lock:  # a completion that another thread posts moves from one to the other
            under_way = len(self._queue) if self._paused else self._under_way
            return self._queue.position - self._queue.taken, under_way

    def take(self, packed: bytearray, taken_at: float) -> None:
        """Take the next entries of the submission queue, of which ``packed`` are copies, and give them places."""
        with self._lock:
            sq, count = self._taken, len(packed) // SQE.itemsize
            self._journal.enter_entries(packed, taken_at, sq.position)
            self._journal.commit(sq.position + count, self._queue.position)
            sq.take(count)
            self._under_way += count

    def take_lone(self, user_data: int, answer: Completion | None) -> None:
        """Take the next entry, which got no place, and complete it; None: it has no completion."""
        with self._lock:
            sq, queue = self._taken, self._queue
            if self.stopped:  # the entry stays in the queue
                if answer is not None and answer.pin:
                    self._unpin(answer.pin)
                return
            if answer is None:
                self._journal.commit(sq.position + 1, queue.position)
            else:
                queue.write_packed(CQE_STRUCT.pack(user_data, *answer))
                self._journal.commit(sq.position + 1, queue.position + 1)
            sq.take(1)
            if answer is not None:
                queue.publish(1)
                self._bell.ring()

    def forget_entry(self, place: int) -> None:
        """End an entry that has no completion."""
        with self._lock:
            self._journal.forget(place)
            self._under_way -= 1

    def note_pin(self, place: int | None, pin: int) -> None:
        """Note an entry's pin: the next daemon releases it if this one is killed before it posts the completion.

        None: the entry has no place.
        """
        with self._lock:
            if self.stopped:
                return
            if place is None:
                self._journal.set_lone_pin(self._taken.position, pin)
            else:
                self._journal.set_pin(place, pin)

    def read_parent(self, number: int) -> bytes:
        """The span that an entry under way names as its parent, as the client wrote it; empty: the ring has stopped."""
        with self._lock:
            return b"" if self.stopped else bytes(self._parents[(number - 1) * SIZE : number * SIZE])

    def find(self, user_data: int, before: int) -> int:
        """See `RingJournal.find`."""
        with self._lock:
            return self._journal.find(user_data, before)

    def post(self, places: npt.ArrayLike, results: npt.ArrayLike) -> None:
        """Post many completions: places of their entries, and results."""
        results, places = np.asarray(results, np.int64), np.asarray(places, np.uint64).view(np.int64)
        words = np.zeros((len(results), 4), np.uint64)
        words[:, 1] = results.view(np.uint64)
        with self._lock:
            if not self.stopped and len(places):
                words[:, 0] = self._journal.user_data_of(places)
                self._publish(words.tobytes(), places, len(places))

    def publish(self, answers: Sequence[tuple[int, Completion]]) -> None:
        """Post completions of entries, by their places."""
        with self._lock:
            if self.stopped:
                for _, answer in answers:
                    if answer.pin:
                        self._unpin(answer.pin)
            elif len(answers) == 1:
                self._publish_one(*answers[0])
            else:
                packed = b"".join([self._journal.pack(place, answer) for place, answer in answers])
                self._publish(packed, [place for place, _ in answers], len(answers))

    def _publish(self, packed: bytes, places: Places | list[int], count: int) -> None:
        """Give completions to the client, and wake it if it sleeps. The caller holds the lock."""
        queue = self._queue
        if PROFILE.is_on and self.profile is not None:
            results = np.frombuffer(packed, CQE)["result"]
            self.profile.note(*self._journal.describe(np.asarray(places, np.intp)), results=results)
        queue.write_packed(packed)
        self._journal.finish(places, self._taken.position, queue.position + count)
        queue.publish(count)
        self._under_way -= count
        self._bell.ring()

    def _publish_one(self, place: int, answer: Completion) -> None:
        """`_publish` of one."""
        queue = self._queue
        if PROFILE.is_on and self.profile is not None:
            self.profile.note_one(*self._journal.describe_one(place, answer.result))
        queue.write_packed(self._journal.pack(place, answer))
        self._journal.finish_one(place, self._taken.position, queue.position + 1)
        queue.publish(1)
        self._under_way -= 1
        self._bell.ring()

    # -- calls of the event loop ---------------------------------------------------------------------

    def complete(self, call: Call, result: int, offset: int = 0, arena: int = 0, pin: int = 0) -> bool:
        """Complete a call. False: it was completed before, or the ring has stopped, and nothing is posted."""
        with self._lock:
            if call.ended or self.stopped:
                return False
            call.ended = True
            self._publish_one(call.entry.user_data, Completion(result, offset, arena, pin))
            return True

    def complete_many(self, rows: list[tuple[Call, int]]) -> None:
        """Complete (call, result) those calls that are not completed yet."""
        with self._lock:
            rows = [row for row in rows if not row[0].ended]
            if not rows or self.stopped:
                return
            for call, _ in rows:
                call.ended = True
            places = [call.entry.user_data for call, _ in rows]
            packed = [self._journal.pack(place, Completion(row[1])) for place, row in zip(places, rows, strict=True)]
            self._publish(b"".join(packed), places, len(rows))

    def give_up(self, call: Call, number: int, then: Callable[[], object] = lambda: None) -> None:
        """Complete an unfinished call with an errno, once the ring's thread does not work on it; then call ``then``."""
        with self._lock:
            if call.busy:
                call.doom = lambda: self.give_up(call, number, then)
                return
        self.complete(call, -number)
        then()

    def begin_answers(self, call: Call) -> bytes:
        """Have the client's memory say which keys were found so far, by `note_found`, for the next daemon.

        Returns what a former daemon noted, a byte for each key: 0, where it found nothing or did not look. EngineError:
        the next daemon does the call.
        """
        entry = call.entry
        start, end = entry.offset, entry.offset + len(call.names)
        # The next daemon reads the keys again: answers must not overwrite them.
        are_keys_there = start < entry.key_offset + entry.key_length and entry.key_offset < end
        with self._lock:
            if _is_answered(call) or are_keys_there:
                return bytes(len(call.names))
            return self._begin_answers(entry, bytes(len(call.names)))

    def begin_known_answers(self, entry: Entry, found: npt.NDArray[np.bool_]) -> bytes | None:
        """As `begin_answers`, where the ring's thread knows what it ``found``, and removes it next.

        The answers lie elsewhere than the keys. None: the ring has stopped.
        """
        with self._lock:
            return None if self.stopped else self._begin_answers(entry, bytes(found))

    def _begin_answers(self, entry: Entry, found: bytes) -> bytes:
        """What a former daemon noted; else note ``found``. The caller holds the lock."""
        start, end = entry.offset, entry.offset + len(found)
        if self._journal.has_begun(entry.user_data):
            return self._aux[start:end].tobytes()
        self._aux[start:end] = np.frombuffer(found, np.uint8)
        self._journal.mark_begun(entry.user_data)
        return bytes(len(found))

    def note_found(self, call: Call, number: int) -> None:
        """Note that the key of this number exists, before the caller removes it. EngineError."""
        with self._lock:
            if not _is_answered(call) and self._journal.has_begun(call.entry.user_data):
                self._aux[call.entry.offset + number] = 1

    def answer_keys(self, call: Call, found: Sequence[bool] | bytearray) -> None:
        """Write a result byte for each key into the client's memory, and complete the call, unless it is already."""
        start = call.entry.offset
        results = np.frombuffer(found, np.uint8) if isinstance(found, bytearray) else np.asarray(found, np.uint8)
        with self._lock:
            if call.ended or self.stopped:
                return
            self._aux[start : start + len(results)] = results
            call.ended = True
            self._publish_one(call.entry.user_data, Completion(int(np.count_nonzero(results))))

    def attempt(self, call: Call, attempt: Callable[[Call], Completion | None]) -> bool:
        """Have ``attempt`` complete the call, and keep others from that meanwhile. An OSError becomes its result.

        True: the call is completed, or the ring has stopped.
        """
        if not self.hold_call(call):
            return True
        answer = None
        try:
            answer = attempt(call)
        except OSError as error:
            answer = Completion(-(error.errno or errno.EIO))
        finally:
            self.release_call(call, answer)
        return answer is not None

    def hold_call(self, call: Call) -> bool:
        """Keep others from completing a call until `release_call`. False: it is completed, or the ring has stopped."""
        with self._lock:
            if call.ended or self.stopped:
                return False
            call.busy = True
            return True

    def release_call(self, call: Call, answer: Completion | None) -> None:
        """Complete a held call; None: others will. Then give it up, if somebody asked for that meanwhile."""
        try:
            if answer is not None and not self.complete(call, *answer) and answer.pin:
                self._unpin(answer.pin)
        finally:
            with self._lock:
                call.busy = False
                doom, call.doom = call.doom, None
            if doom is not None:
                doom()


def _is_answered(call: Call) -> bool:
    """Whether a call has its completion. EngineError: its ring has stopped, and the next daemon does the call."""
    if not call.ended and call.ring.completions.stopped:
        raise EngineError("the ring has stopped")
    return call.ended
