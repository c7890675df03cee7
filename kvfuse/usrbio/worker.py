"""The thread of one ring: takes submissions, has them served by priority, posts completions, sleeps.

A completion is posted by whoever ends an operation, under a lock: the queue has one producer at a time. No more is
taken than completions have room for.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvfuse.usrbio.call import Call, Entry, Tables
from kvfuse.usrbio.columns import as_words
from kvfuse.usrbio.ring import Bell, Entries, RingMemory
from kvfuse.usrbio.server import Server
from kvfuse.usrbio.wire import CQE, CQE_STRUCT, SQE, SQE_STRUCT, Op, Priority, Word

log = logging.getLogger(__name__)

TURN_ENTRIES = 256
TURN_BYTES = 16 << 20
"""What is served before higher priorities are looked for again."""
THREAD_NAME = "kvfuse-ring"
LOW_TURN = 8
"""Each so manieth turn goes to the priority that has waited for longest."""
SPIN_SECONDS = 100e-6
"""How long it looks for more before it sleeps, while submissions come faster than that."""
FULL_SECONDS = 0.01
"""between looks at a ring whose client does not take its completions, or when there is no memory for an entry"""
_PRIORITY_BITS = np.uint64(0xFF00)
"""in the first word of an SQE"""
CLASSES = (Priority.HIGH, Priority.NORMAL, Priority.LOW)


class _Waiting(NamedTuple):
    """Entries that were taken and wait for their turn."""

    rows: Entries
    taken_at: float


class Worker:
    """See the module. ``op_mask``: bit n allows operation n."""

    def __init__(self, tables: Tables, memory: RingMemory, sq_bell: int, cq_bell: int, op_mask: int) -> None:
        self._tables = tables
        self._memory = memory
        self._sq = memory.sq
        self._cq = memory.cq
        self._own_bell = Bell(memory.words, Word.DAEMON_SLEEPS, sq_bell)
        self._client_bell = Bell(memory.words, Word.CLIENT_SLEEPS, cq_bell)
        self._lock = threading.Lock()
        self._under_way = 0
        """entries taken and not completed"""
        self._waiting: dict[int, deque[_Waiting]] = {kind: deque() for kind in CLASSES}
        self._single: tuple[Entry, float] | None = None
        """an entry that came alone, and when it was taken: its turn comes before any other's"""
        self._inbox: deque[Callable[[], None]] = deque()
        self._turn = 0
        self._served_at = dict.fromkeys(reversed(CLASSES), 0)
        """priority -> the last turn that it had; the lowest first"""
        self.server = Server(self, tables, memory.aux, op_mask)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """wakes the thread from within the daemon: of the bell the client has a descriptor, too, and may empty it"""
        self._poll = select.epoll()
        for descriptor in (sq_bell, self._wake):  # neither is ever read, which the client could make wait
            self._poll.register(descriptor, select.EPOLLIN | select.EPOLLET)
        self._rests = 0.0
        self._is_reading = False
        """it may be in the middle of a copy; once it is seen to be not, it looks at maps anew"""
        self._is_short = False
        """there is no memory for what waits"""
        self.stopped = False
        self.thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    # -- from other threads --------------------------------------------------------------------------

    def stop(self) -> None:
        """Have the thread end after what it does now. Nothing is posted any more."""
        with self._lock:
            self.stopped = True
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """After the thread has ended: let go of the ring's memory, its descriptors, and pins that nobody heard of."""
        with self._lock:  # who comes later finds the ring stopped, and touches nothing
            self.server.close()
            unread = min(max(self._cq.position - self._cq.taken, 0), len(self._cq))
            self._unpin([self._cq.place(self._cq.position - number - 1) for number in range(unread)])
            del self._memory, self._sq, self._cq, self._own_bell, self._client_bell
        self._poll.close()
        os.close(self._wake)

    def run_here(self, job: Callable[[], None]) -> bool:
        """Let the ring thread call ``job`` soon. False, and it will not, if the ring has ended."""
        with self._lock:
            if self.stopped:
                return False
            self._inbox.append(job)
            os.eventfd_write(self._wake, 1)
            return True

    def tell_when_done(self, told: Callable[[], None]) -> bool:
        """See `volume.core.ReadingThread`."""
        with self._lock:
            if not self._is_reading:
                return False
            self._inbox.append(lambda: self._tables.in_loop(told))
            os.eventfd_write(self._wake, 1)
            return True

    def complete(self, call: Call, result: int, offset: int = 0, arena: int = 0, pin: int = 0) -> bool:
        """End an operation, once. False when it had ended before: whatever was done is not told."""
        with self._lock:
            if call.ended or self.stopped:
                return False
            call.ended = True
            self._publish(CQE_STRUCT.pack(call.entry.user_data, result, offset, arena, pin), 1)
            return True

    def complete_many(self, rows: list[tuple[Call, int]]) -> None:
        """End operations that have not ended before."""
        with self._lock:
            rows = [row for row in rows if not row[0].ended]
            if not rows or self.stopped:
                return
            for call, _ in rows:
                call.ended = True
            packed = b"".join([CQE_STRUCT.pack(call.entry.user_data, result, 0, 0, 0) for call, result in rows])
            self._publish(packed, len(rows))

    def give_up(self, call: Call, number: int, then: Callable[[], object] = lambda: None) -> None:
        """End an operation with an errno before it is done - once the ring thread is not at it - and call ``then``."""
        with self._lock:
            if call.busy:
                call.doom = lambda: self.give_up(call, number, then)
                return
        self.complete(call, -number)
        then()

    def write_if_wanted(self, call: Call, write: Callable[[], None]) -> bool:
        """Write into the client's memory, unless the call has ended. Never later than its completion."""
        with self._lock:
            if call.ended or self.stopped:
                return False
            write()
            return True

    def attempt(self, call: Call, attempt: Callable[[], bool]) -> bool:
        """Keep others from ending the call meanwhile. True when it has ended, or nobody waits for it any more."""
        with self._lock:
            if call.ended or self.stopped:
                return True
            call.busy = True
        try:
            return attempt()
        except OSError as error:
            self.complete(call, -(error.errno or errno.EIO))
            return True
        finally:
            with self._lock:
                call.busy = False
                doom, call.doom = call.doom, None
            if doom is not None:
                doom()

    # -- the loop ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self.stopped:
                if not self.step():
                    self._wait()
        except Broken as error:
            self._tables.failed(str(error))
        except Exception:  # one client's ring ends with its thread; the daemon and the others go on
            log.exception("a ring's thread failed")
            self._tables.failed("the ring could not be served")
        finally:
            with self._lock:
                self.stopped = True
                self._is_reading = False
            while self._inbox:  # the kernel has to hear of changes, whether or not anybody waits for them
                self._inbox.popleft()()

    def step(self) -> bool:
        """Take what was submitted, and serve some of it; False when there was nothing to serve."""
        self._take()
        self._is_reading = True
        while self._inbox:
            self._inbox.popleft()()
        has_served = self._serve_turn()
        self._is_reading = False
        return has_served

    def _take(self) -> None:
        """Copy what was submitted, as far as its completions will have room."""
        sq, cq = self._sq, self._cq
        count = sq.given - sq.position
        if not count:
            return
        unread, under_way = self._claims()
        if not 0 <= count <= len(sq) or not 0 <= unread <= len(cq) or not self._memory.header_is_whole():
            raise Broken("the ring's header or indices were overwritten")
        count = min(count, len(cq) - unread - under_way)
        if count <= 0:
            return
        packed = sq.read_packed(count)
        sq.take(count)
        with self._lock:
            self._under_way += count
        now = time.monotonic()
        if count == 1 and packed[0] != Op.CANCEL and not any(self._waiting.values()):
            self._single = Entry._make(SQE_STRUCT.unpack(packed)), now
            return
        rows = sq.unpacked(packed)
        start = 0
        for cancel in _cancels(packed):  # at once: it concerns what came before, alone
            self._line_up(rows[start:cancel], now)
            self.server.serve(rows[cancel : cancel + 1], now)
            start = cancel + 1
        self._line_up(rows[start:] if start else rows, now)

    def _line_up(self, rows: Entries, taken_at: float) -> None:
        """Let entries wait for their turn."""
        if not len(rows):
            return
        if not np.count_nonzero(as_words(rows)[:, 0] & _PRIORITY_BITS):
            self._waiting[Priority.NORMAL].append(_Waiting(rows, taken_at))
            return
        priorities = rows["priority"]
        for kind in CLASSES:  # an unknown priority is refused later
            chosen = rows[priorities == kind if kind else ~np.isin(priorities, CLASSES[::2])]
            if len(chosen):
                self._waiting[kind].append(_Waiting(chosen, taken_at))

    def _serve_turn(self) -> bool:
        """Serve some of the highest priority that waits. False when nothing does, or there is no memory for any."""
        if self._single is not None:
            (entry, taken_at), self._single = self._single, None
            if self.server.serve_one(entry, taken_at):
                return True
            self._line_up(np.frombuffer(SQE_STRUCT.pack(*entry), SQE), taken_at)
        kinds = [kind for kind in CLASSES if self._waiting[kind]]
        self._turn += 1
        if self._turn % LOW_TURN == 0:
            kinds = [kind for kind in sorted(self._served_at, key=self._served_at.__getitem__) if kind in kinds]
        self._is_short = False
        for kind in kinds:
            for _ in range(len(self._waiting[kind])):
                if self._serve_some(self._waiting[kind]):
                    self._served_at[kind] = self._turn
                    return True
        self._is_short = bool(kinds)
        return False

    def _serve_some(self, queue: deque[_Waiting]) -> bool:
        """Serve the first of a queue. False when there was no memory for any of it: then it is the last."""
        rows, taken_at = queue[0]
        count = min(len(rows), TURN_ENTRIES)
        if count > 1:
            total = 0
            for number, length in enumerate(rows["length"][:count].tolist()):
                total += length
                if total > TURN_BYTES and number:
                    count = number
                    break
        if count == len(rows):
            queue.popleft()
        else:
            queue[0] = _Waiting(rows[count:], taken_at)
        waiting = self.server.serve(rows[:count], taken_at)
        if len(waiting):
            queue.append(_Waiting(waiting, taken_at))
        return len(waiting) < count

    def _wait(self) -> None:
        """Until there is more to do. Looks for a moment longer while submissions come one after the other."""
        started = time.perf_counter()
        if self._rests < 4 * SPIN_SECONDS:
            while time.perf_counter() - started < SPIN_SECONDS:
                if self._has_work():
                    self._rests = 0.75 * self._rests
                    return
                os.sched_yield()
        self._own_bell.going_to_sleep()
        is_full = self._is_short or (self._sq.given != self._sq.position and not self._has_work())
        while not self._has_work() and not self.stopped:
            if self._poll.poll(FULL_SECONDS if is_full else None) or is_full:
                break
        self._own_bell.awake()
        self._rests = 0.75 * self._rests + 0.25 * (time.perf_counter() - started)

    def _has_work(self) -> bool:
        if self._inbox:
            return True
        if self._sq.given == self._sq.position:
            return False
        return sum(self._claims()) < len(self._cq)

    # -- completions ---------------------------------------------------------------------------------

    def _claims(self) -> tuple[int, int]:
        """Places of the completion queue that are not free: (unread, of entries under way), both of one moment."""
        with self._lock:  # what another thread posts goes from one to the other
            return self._cq.position - self._cq.taken, self._under_way

    def post(self, user_data: npt.ArrayLike, results: npt.ArrayLike) -> None:
        """Post many completions: their numbers, and their results."""
        results = np.asarray(results, np.int64)
        words = np.zeros((len(results), 4), np.uint64)
        words[:, 0] = user_data
        words[:, 1] = results.view(np.uint64)
        with self._lock:
            if len(words) and not self.stopped:
                self._publish(words.tobytes(), len(words))

    def publish(self, packed: bytes, count: int) -> None:
        """Post completions that are packed already."""
        with self._lock:
            if not self.stopped:
                self._publish(packed, count)
            else:
                self._unpin(np.frombuffer(packed, CQE))

    def _unpin(self, rows: Iterable[np.void]) -> None:
        """Nobody will read these completions."""
        for row in rows:
            if row["pin"]:
                self._tables.unpin(int(row["pin"]))

    def _publish(self, packed: bytes, count: int) -> None:
        """Under the lock: give completions to the client, and wake it if it sleeps."""
        self._cq.write_packed(packed)
        self._cq.publish(count)
        self._under_way -= count
        self._client_bell.ring()

    # -- for the server --------------------------------------------------------------------------------

    def pass_over(self) -> None:
        """An entry that was taken has no completion."""
        with self._lock:
            self._under_way -= 1

    def withdraw(self, user_data: int) -> bool:
        """End an entry that still waits for its turn with -ECANCELED; False if there is none."""
        for queue in self._waiting.values():
            for number, (rows, taken_at) in enumerate(queue):
                found = np.flatnonzero(rows["user_data"] == user_data)
                if len(found):
                    queue[number] = _Waiting(np.delete(rows, found[0]), taken_at)
                    if not len(queue[number].rows):
                        del queue[number]
                    self.post([user_data], [-errno.ECANCELED])
                    return True
        return False


def _cancels(packed: bytearray) -> list[int]:
    """Which entries are CANCEL."""
    ops = packed[:: SQE.itemsize]
    return [number for number, op in enumerate(ops) if op == Op.CANCEL] if Op.CANCEL in ops else []


class Broken(Exception):
    """The client wrote over what is not its own."""
