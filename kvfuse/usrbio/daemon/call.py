"""Operations of a ring: an entry as the client submitted it, a call that the event loop does, and how it ends.

Each operation ends once, and one completion says so. Whoever ends it posts the completion, under a lock: the queue has
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
from kvfuse.usrbio.daemon.interpreter import Interpreter, Seat
from kvfuse.usrbio.daemon.jobs import Jobs
from kvfuse.usrbio.daemon.registry import Namespace, OpenFile
from kvfuse.usrbio.protocol.queues import Bell, RingMemory
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
    """A checked operation that the event loop does. It ends once: see `Completions.complete`."""

    ring: Ring
    entry: Entry
    deadline: float
    """monotonic seconds; inf: none"""
    file: OpenFile | None = None
    namespace: Namespace | None = None
    iov: Iov | None = None
    names: Sequence[bytes] = ()
    """file names of the keys"""
    data: Any = None
    """PUT, WRITE: a copy of the bytes"""
    again: Callable[[Call], Answer | None] = lambda call: None
    """the ring's thread tries this once the event loop made it possible: see `Completions.attempt`"""
    size: int = 0
    """bytes of its connection's share of memory, until its task has ended"""
    weight: int = 0
    """of its user's calls under way; as its size"""
    busy: bool = False
    """the ring thread is at it"""
    doom: Callable[[], None] | None = None
    """gives it up as soon as the ring's thread is not at it any more"""
    ended: bool = False
    scope: trio.CancelScope | None = None
    """of its task; None: the event loop has not begun it, and does not once it has ended"""

    def cancel(self) -> None:
        if self.scope is not None:
            self.scope.cancel()

    async def try_again(self) -> bool:
        """Have the ring's thread try ``again``. True when the call has ended, or nobody waits for it any more."""
        return await self.attempt(self.again)

    async def attempt(self, attempt: Callable[[Call], Answer | None]) -> bool:
        """The same for something else; see `Completions.attempt`."""
        completions = self.ring.completions
        return await self.ring.jobs.ask(partial(completions.attempt, self, attempt)) or completions.stopped


class Done(NamedTuple):
    """A call that changed something, and what that was."""

    call: Call
    result: int
    content: int = 0
    """inode whose bytes changed"""
    directory: int = 0
    """inode of the directory whose names changed"""
    names: Sequence[tuple[bytes, int]] = ()
    """names, and the inodes they meant before; 0: nothing"""
    found: Sequence[bool] | None = None
    """of a call with many keys: the answer for each"""


class Refused(Exception):
    """An entry that is answered with this errno and nothing else."""

    def __init__(self, number: int) -> None:
        self.number = number


class Short(Exception):
    """There is no memory for an entry now: it has to wait."""


class Ring(Protocol):
    """A ring's thread, as those see it that serve its entries and do its calls."""

    completions: Completions
    jobs: Jobs
    turns: Interpreter
    seat: Seat


class Completions:
    """The completion queue of one ring, whose thread owns it. Any thread. ``unpin``: lets go of a pin."""

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
        """After `stop`: let go of the ring's memory, and of pins that the client did not hear of."""
        with self._lock:  # later callers find the ring stopped, and touch nothing
            queue = self._queue
            unread = min(max(queue.position - queue.taken, 0), len(queue))
            self._drop_pins([queue.place(queue.position - number - 1) for number in range(unread)])
            del self._queue, self._aux, self._bell

    def _drop_pins(self, rows: Iterable[np.void]) -> None:
        """Of completions that nobody will read."""
        for row in rows:
            if row["pin"]:
                self._unpin(int(row["pin"]))

    # -- entries -------------------------------------------------------------------------------------

    def claims(self) -> tuple[int, int]:
        """Places of the queue that are not free: (unread, of entries under way), both of one moment."""
        with self._lock:  # a completion that another thread posts moves from one to the other
            return self._queue.position - self._queue.taken, self._under_way

    def expect(self, count: int) -> None:
        """So many entries were taken; -1: one of them has no completion."""
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
        """Post completions that are packed already."""
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
        """End a call, once. False when it had ended before: the client does not hear of what was done."""
        with self._lock:
            if call.ended or self.stopped:
                return False
            call.ended = True
            self._publish(CQE_STRUCT.pack(call.entry.user_data, result, offset, arena, pin), 1)
            return True

    def complete_many(self, rows: list[tuple[Call, int]]) -> None:
        """End those calls that have not ended before."""
        with self._lock:
            rows = [row for row in rows if not row[0].ended]
            if not rows or self.stopped:
                return
            for call, _ in rows:
                call.ended = True
            packed = b"".join([CQE_STRUCT.pack(call.entry.user_data, result, 0, 0, 0) for call, result in rows])
            self._publish(packed, len(rows))

    def give_up(self, call: Call, number: int, then: Callable[[], object] = lambda: None) -> None:
        """End a call with an errno before it is done - once the ring's thread is not at it - and call ``then``."""
        with self._lock:
            if call.busy:
                call.doom = lambda: self.give_up(call, number, then)
                return
        self.complete(call, -number)
        then()

    def answer_keys(self, call: Call, found: Sequence[bool]) -> None:
        """Write a result byte for each key into the client's memory, and end the call, unless it had ended before."""
        start, results = call.entry.offset, np.asarray(found, np.uint8)
        with self._lock:
            if call.ended or self.stopped:
                return
            self._aux[start : start + len(results)] = results
            call.ended = True
            self._publish(CQE_STRUCT.pack(call.entry.user_data, int(results.sum()), 0, 0, 0), 1)

    def attempt(self, call: Call, attempt: Callable[[Call], Answer | None]) -> bool:
        """Have ``attempt`` answer the call, and keep others from ending it meanwhile. OSError is an answer, too.

        True when the call has ended, or nobody waits for it any more.
        """
        with self._lock:
            if call.ended or self.stopped:
                return True
            call.busy = True
        try:
            try:
                answer = attempt(call)
            except OSError as error:
                answer = Answer(-(error.errno or errno.EIO))
            if answer is not None and not self.complete(call, *answer) and answer.pin:
                self._unpin(answer.pin)
            return answer is not None
        finally:
            with self._lock:
                call.busy = False
                doom, call.doom = call.doom, None
            if doom is not None:
                doom()
