"""Operations of a ring: entries that clients submit, calls that the event loop does for them, and completions.

Each operation is completed once, by one completion. Any thread may complete it, under a lock, as the queue has
one producer at a time.
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

from kvfuse.usrbio.daemon.client_memory import Iov
from kvfuse.usrbio.daemon.device_iovs import DeviceIov
from kvfuse.usrbio.daemon.device_memory import Piece
from kvfuse.usrbio.daemon.interpreter import Interpreter, Seat
from kvfuse.usrbio.daemon.jobs import Jobs
from kvfuse.usrbio.daemon.registry import Namespace, OpenFile
from kvfuse.usrbio.protocol.queues import Bell, Entries, RingMemory
from kvfuse.usrbio.protocol.wire import CQE, CQE_STRUCT, Word

PIECE = 4 << 20
"""Bytes that are read at once into memory of the daemon."""


class Entry(NamedTuple):
    """One SQE; see `wire.SQE`."""

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
    reserved: int


class Answer(NamedTuple):
    """The contents of a completion; see `wire.CQE`."""

    result: int
    offset: int = 0
    arena: int = 0
    pin: int = 0


@dataclass(eq=False, slots=True)
class Call:
    """A checked operation for the event loop. It is completed once: see `Completions.complete`."""

    ring: Ring
    entry: Entry
    deadline: float
    """monotonic seconds; inf: none"""
    file: OpenFile | None = None
    namespace: Namespace | None = None
    iov: Iov | None = None
    device: DeviceIov | None = None
    """GET, READ: the target, instead of ``iov``"""
    piece: Piece | None = None
    """what is to be copied there"""
    names: Sequence[bytes] = ()
    """file names of the keys"""
    data: Any = None
    """PUT, WRITE: a copy of the bytes; with a piece: what keeps its bytes"""
    again: Callable[[Call], Answer | None] = lambda call: None
    """what the ring's thread tries after the event loop's preparation: see `Completions.attempt`"""
    size: int = 0
    """bytes of its connection's share of memory, until its task has ended"""
    weight: int = 0
    """its part of its user's calls in flight, until its task has ended"""
    busy: bool = False
    """the ring's thread is working on it"""
    doom: Callable[[], None] | None = None
    """called to give it up as soon as ``busy`` ends"""
    ended: bool = False
    is_alone: bool = False
    """a PUT that cannot be done together with others"""
    scope: trio.CancelScope | None = None
    """of its task; None: the event loop has not begun it"""

    def cancel(self) -> None:
        if self.scope is not None:
            self.scope.cancel()

    async def try_again(self) -> bool:
        """Have the ring's thread try ``again``. True: the call is completed, or its ring has stopped."""
        return await self.attempt(self.again)

    async def attempt(self, attempt: Callable[[Call], Answer | None]) -> bool:
        """Have the ring's thread try ``attempt``; see `Completions.attempt`. True as for `try_again`."""
        completions = self.ring.completions
        return await self.ring.jobs.ask(partial(completions.attempt, self, attempt)) or completions.stopped


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
    """of a call with many keys: the answer for each"""


class Refused(Exception):
    """An entry that is answered with this errno and nothing else."""

    def __init__(self, number: int) -> None:
        self.number = number


class Short(Exception):
    """There is no memory for an entry now: it must wait."""


class Ring(Protocol):
    """The interface of a ring's thread for modules that serve its entries and do its calls."""

    completions: Completions
    jobs: Jobs
    turns: Interpreter
    seat: Seat

    def serve_copied(self, rows: Entries, taken_at: float) -> None:
        """Serve entries again, from copies of the bytes of those that write. For its thread."""


class Completions:
    """The completion queue of one ring, whose thread owns it. Any thread. ``unpin``: releases a pin."""

    def __init__(self, memory: RingMemory, bell: int, unpin: Callable[[int], None]) -> None:
        self._queue = memory.cq
        self._aux = memory.aux
        self._bell = Bell(memory.words, Word.CLIENT_SLEEPS, bell)
        self._unpin = unpin
        self._lock = threading.Lock()
        self._under_way = 0
        """entries taken and not completed"""
        self.stopped = False

    def stop(self) -> None:
        """Post nothing any more."""
        with self._lock:
            self.stopped = True

    def close(self) -> None:
        """After `stop`: release the ring's memory, and pins of completions that the client did not take."""
        with self._lock:  # later callers find the ring stopped, and touch nothing
            queue = self._queue
            unread = min(max(queue.position - queue.taken, 0), len(queue))
            self._drop_pins([queue.place(queue.position - number - 1) for number in range(unread)])
            del self._queue, self._aux, self._bell

    def _drop_pins(self, rows: Iterable[np.void]) -> None:
        """Release the pins of completions that the client will not take."""
        for row in rows:
            if row["pin"]:
                self._unpin(int(row["pin"]))

    # -- entries -------------------------------------------------------------------------------------

    def claims(self) -> tuple[int, int]:
        """(unread completions, entries in flight) at one moment: places of the queue that are not free."""
        with self._lock:  # a completion that another thread posts moves from one to the other
            return self._queue.position - self._queue.taken, self._under_way

    def expect(self, count: int) -> None:
        """Count entries that were taken; -1: one of them has no completion."""
        with self._lock:
            self._under_way += count

    def post(self, user_data: npt.ArrayLike, results: npt.ArrayLike) -> None:
        """Post many completions: their numbers, and their results."""
        results = np.asarray(results, np.int64)
        words = np.zeros((len(results), 4), np.uint64)
        words[:, 0] = user_data
        words[:, 1] = results.view(np.uint64)
        self.publish(words.tobytes(), len(words))

    def publish(self, packed: bytes, count: int) -> None:
        """Post packed completions."""
        with self._lock:
            if not self.stopped:
                self._publish(packed, count)
            else:
                self._drop_pins(np.frombuffer(packed, CQE))

    def _publish(self, packed: bytes, count: int) -> None:
        """Under the lock: give completions to the client, and wake it if it sleeps."""
        self._queue.write_packed(packed)
        self._queue.publish(count)
        self._under_way -= count
        self._bell.ring()

    # -- calls of the event loop ---------------------------------------------------------------------

    def complete(self, call: Call, result: int, offset: int = 0, arena: int = 0, pin: int = 0) -> bool:
        """Complete a call. False: it was completed before, or the ring has stopped, and nothing is posted."""
        with self._lock:
            if call.ended or self.stopped:
                return False
            call.ended = True
            self._publish(CQE_STRUCT.pack(call.entry.user_data, result, offset, arena, pin), 1)
            return True

    def complete_many(self, rows: list[tuple[Call, int]]) -> None:
        """Complete (call, result) those calls that are not completed yet."""
        with self._lock:
            rows = [row for row in rows if not row[0].ended]
            if not rows or self.stopped:
                return
            for call, _ in rows:
                call.ended = True
            packed = b"".join([CQE_STRUCT.pack(call.entry.user_data, result, 0, 0, 0) for call, result in rows])
            self._publish(packed, len(rows))

    def give_up(self, call: Call, number: int, then: Callable[[], object] = lambda: None) -> None:
        """Complete an unfinished call with an errno, once the ring's thread does not work on it; then call ``then``."""
        with self._lock:
            if call.busy:
                call.doom = lambda: self.give_up(call, number, then)
                return
        self.complete(call, -number)
        then()

    def answer_keys(self, call: Call, found: Sequence[bool] | bytearray) -> None:
        """Write a result byte for each key into the client's memory, and complete the call, unless it is already."""
        start = call.entry.offset
        results = np.frombuffer(found, np.uint8) if isinstance(found, bytearray) else np.asarray(found, np.uint8)
        with self._lock:
            if call.ended or self.stopped:
                return
            self._aux[start : start + len(results)] = results
            call.ended = True
            self._publish(CQE_STRUCT.pack(call.entry.user_data, int(np.count_nonzero(results)), 0, 0, 0), 1)

    def attempt(self, call: Call, attempt: Callable[[Call], Answer | None]) -> bool:
        """Have ``attempt`` complete the call, and keep others from that meanwhile. An OSError becomes its result.

        True: the call is completed, or the ring has stopped.
        """
        if not self.hold(call):
            return True
        answer = None
        try:
            answer = attempt(call)
        except OSError as error:
            answer = Answer(-(error.errno or errno.EIO))
        finally:
            self.let_go(call, answer)
        return answer is not None

    def hold(self, call: Call) -> bool:
        """Keep others from completing a call until `let_go`. False: it is completed, or the ring has stopped."""
        with self._lock:
            if call.ended or self.stopped:
                return False
            call.busy = True
            return True

    def let_go(self, call: Call, answer: Answer | None) -> None:
        """Complete a held call; None: others will. Then it is given up, if somebody wanted that meanwhile."""
        try:
            if answer is not None and not self.complete(call, *answer) and answer.pin:
                self._unpin(answer.pin)
        finally:
            with self._lock:
                call.busy = False
                doom, call.doom = call.doom, None
            if doom is not None:
                doom()
