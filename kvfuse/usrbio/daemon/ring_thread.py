"""The thread of one ring: takes submissions, has them served by priority, posts completions, sleeps.

It works in turns, as `interpreter.py` says. A completion is posted by whoever ends an operation, under a lock: the
queue has one producer at a time. No more is taken than completions have room for.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvfuse.usrbio.daemon.call import Call, Entry, Tables
from kvfuse.usrbio.daemon.entries import Server
from kvfuse.usrbio.daemon.interpreter import Seat
from kvfuse.usrbio.daemon.lines import TURN_ENTRIES, Lines
from kvfuse.usrbio.daemon.penalty import BOUND, Penalty
from kvfuse.usrbio.protocol.queues import Bell, RingMemory
from kvfuse.usrbio.protocol.wire import CQE, CQE_STRUCT, SQE, SQE_STRUCT, Op, Word

log = logging.getLogger(__name__)

TAKE_ENTRIES = 1024
"""What is taken at once: between two such parts others may work."""
THREAD_NAME = "kvfuse-ring"
SPIN_SECONDS = 100e-6
"""How long it looks for more before it sleeps, while submissions come faster than that."""
FULL_SECONDS, FULL_SECONDS_MAX = 0.01, 0.08
"""between looks at a ring whose client does not take its completions, or when there is no memory for an entry"""


class Worker:
    """See the module. ``op_mask``: bit n allows operation n."""

    def __init__(self, tables: Tables[Worker], memory: RingMemory, sq_bell: int, cq_bell: int, op_mask: int) -> None:
        self._tables = tables
        self._memory = memory
        self._sq = memory.sq
        self._cq = memory.cq
        self._own_bell = Bell(memory.words, Word.DAEMON_SLEEPS, sq_bell)
        self._client_bell = Bell(memory.words, Word.CLIENT_SLEEPS, cq_bell)
        self._lock = threading.Lock()
        self._under_way = 0
        """entries taken and not completed"""
        self._single: tuple[Entry, float] | None = None
        """an entry that came alone, and when it was taken: its turn comes before any other's"""
        self._inbox: deque[Callable[[], None]] = deque()
        """jobs that may wait for the kernel: called without the turn"""
        self._jobs: deque[Callable[[], None]] = deque()
        """called with the turn"""
        self._turns = tables.interpreter
        self._seat = Seat(tables.user)
        self._has_turn = False
        """it woke up with the turn, and did nothing yet"""
        self._penalty = Penalty()
        self.server = Server(self, tables, memory.aux, op_mask)
        self._lines = Lines(self.server.serve)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """wakes the thread from within the daemon: of the bell the client has a descriptor, too, and may empty it"""
        self._poll = select.epoll()
        for descriptor in (sq_bell, self._wake):  # neither is ever read, which the client could make wait
            self._poll.register(descriptor, select.EPOLLIN | select.EPOLLET)
        tables.doorman.add(self._poll.fileno())
        self._rests = 0.0
        self._full_seconds = FULL_SECONDS
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
        self._tables.share.forget(self.nudge)
        with self._lock:  # who comes later finds the ring stopped, and touches nothing
            self.server.close()
            unread = min(max(self._cq.position - self._cq.taken, 0), len(self._cq))
            self._unpin([self._cq.place(self._cq.position - number - 1) for number in range(unread)])
            del self._memory, self._sq, self._cq, self._own_bell, self._client_bell
        self._tables.doorman.remove(self._poll.fileno())
        self._poll.close()
        os.close(self._wake)

    def nudge(self) -> None:
        """Have it look again at what waits."""
        with self._lock:
            if not self.stopped:
                os.eventfd_write(self._wake, 1)

    def run_here(self, job: Callable[[], None]) -> bool:
        """Let the ring thread call ``job``, which may wait, soon. False, and it will not, if the ring has ended."""
        return self._append(self._inbox, job)

    def run_in_turn(self, job: Callable[[], None]) -> bool:
        """As `run_here`, for what waits for nothing, and copies much."""
        return self._append(self._jobs, job)

    def _append(self, jobs: deque[Callable[[], None]], job: Callable[[], None]) -> bool:
        with self._lock:
            if self.stopped:
                return False
            jobs.append(job)
            os.eventfd_write(self._wake, 1)
            return True

    def tell_when_done(self, told: Callable[[], None]) -> bool:
        """As `ReadingThread.tell_when_done` says."""
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
                if not self.step() or (self._lines.is_empty and not self._has_work()):
                    self._wait()
                if self._penalty.seconds:
                    self._drop_turn()
                    self._rest(self._penalty.seconds)
        except Broken as error:
            self._tables.failed(str(error))
        except Exception:  # one client's ring ends with its thread; the daemon and the others go on
            log.exception("a ring's thread failed")
            self._tables.failed("the ring could not be served")
        finally:
            with self._lock:
                self.stopped = True
                self._is_reading = False
            self._drop_turn()
            while self._inbox:  # the kernel has to hear of changes, whether or not anybody waits for them
                self._inbox.popleft()()
            while self._jobs:
                self._jobs.popleft()()

    def step(self) -> bool:
        """Take what was submitted, and serve some of it; False when there was nothing to serve."""
        if self._inbox or self._jobs:
            self._do_jobs()
        if self._has_turn:
            self._has_turn = False
        else:
            self._turns.take(self._seat)
        try:
            while self._take():
                self.pause()
            self._is_reading = True
            has_served = self._serve()
            if self.server.bad_count or self._penalty.excess:
                self._judge()
            return has_served
        finally:
            self._is_reading = False
            self._turns.give(self._seat)

    def _do_jobs(self) -> None:
        """Those of the event loop."""
        self._drop_turn()
        while self._inbox:
            self._inbox.popleft()()
        if not self._jobs:
            return
        self._turns.take(self._seat)
        try:
            self._is_reading = True
            while self._jobs:
                self._jobs.popleft()()
                self.pause()
        finally:
            self._is_reading = False
            self._turns.give(self._seat)

    def _drop_turn(self) -> None:
        """The turn that it woke up with is somebody else's."""
        if self._has_turn:
            self._has_turn = False
            self._turns.give(self._seat)

    def _judge(self) -> None:
        """Count what was served since this was asked last. Broken."""
        self._penalty.judge(self.server.count, self.server.bad_count)
        self.server.count = self.server.bad_count = 0
        if self._penalty.is_broken:
            raise Broken(f"{BOUND} more of a ring's entries were malformed than made sense")

    def is_wanted(self) -> bool:
        """Somebody else is to work before the next entry."""
        return self._turns.is_wanted(self._seat)

    def pause(self) -> None:
        """Let others work, if they are to."""
        if self._turns.is_wanted(self._seat):
            self._turns.lend(self._seat)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Others may work during this large copy."""
        self._turns.begin_copy(self._seat)
        try:
            yield
        finally:
            self._turns.end_copy(self._seat)

    def _take(self) -> bool:
        """Copy what was submitted, as far as its completions will have room. True: there may be more."""
        sq, cq = self._sq, self._cq
        given = sq.given - sq.position
        if not given:
            return False
        unread, under_way = self._claims()
        if not 0 <= given <= len(sq) or not 0 <= unread <= len(cq) or not self._memory.header_is_whole():
            raise Broken("the ring's header or indices were overwritten")
        count = min(given, len(cq) - unread - under_way, TAKE_ENTRIES)
        if count <= 0:
            return False
        packed = sq.read_packed(count)
        sq.take(count)
        with self._lock:
            self._under_way += count
        now = time.monotonic()
        if count == 1 and packed[0] != Op.CANCEL and self._lines.is_empty:
            self._single = Entry._make(SQE_STRUCT.unpack(packed)), now
            return False
        rows = sq.unpacked(packed)
        start = 0
        for cancel in _cancels(packed):  # at once: it concerns what came before, alone
            self._lines.add(rows[start:cancel], now)
            self._lines.add(self.server.serve(rows[cancel : cancel + 1], now), now)
            start = cancel + 1
            self.pause()
        self._lines.add(rows[start:] if start else rows, now)
        return count < given

    def _serve(self) -> bool:
        """Serve some of what waits. False when nothing does, or there is no memory for any."""
        if self._single is not None:
            (entry, taken_at), self._single = self._single, None
            if self.server.serve_one(entry, taken_at):
                return True
            self._lines.add(np.frombuffer(SQE_STRUCT.pack(*entry), SQE), taken_at)
        has_served = self._lines.serve(self._penalty.entries_max(TURN_ENTRIES))
        self._is_short = not (has_served or self._lines.is_empty)
        return has_served

    def _wait(self) -> None:
        """Until there is more to do. Looks for a moment longer while submissions come one after the other."""
        started = time.perf_counter()
        if self._rests < 4 * SPIN_SECONDS and self._turns.may_look():
            has_work = self._look(started)
            self._turns.looked(self._seat, time.perf_counter() - started)
            if has_work:
                self._rests = 0.75 * self._rests
                return
        self._own_bell.going_to_sleep()
        is_full = self._is_short or (self._sq.given != self._sq.position and not self._has_work())
        self._full_seconds = min(2 * self._full_seconds, FULL_SECONDS_MAX) if is_full else FULL_SECONDS
        has_slept = self._sleep(self._full_seconds if is_full else None)
        self._own_bell.awake()
        if has_slept and not is_full and not self._has_work():
            self._penalty.ring_for_nothing()
        self._rests = 0.75 * self._rests + 0.25 * (time.perf_counter() - started)

    def _sleep(self, seconds: float | None) -> bool:
        """Until somebody rings, or for so long. False: there was work at once."""
        has_slept = False
        while not self._has_work() and not self.stopped:
            if has_slept:
                return True
            if seconds is not None:
                self._poll.poll(seconds)
            elif self._turns.may_sleep_alone(self._seat.user):
                self._poll.poll()
                self._turns.woke_alone(self._seat.user)
            else:
                self._tables.doorman.watch(self._poll.fileno(), self._seat)
                self._turns.sleep(self._seat)
                self._has_turn = True
                self._poll.poll(0)
            has_slept = True
        return has_slept

    def _look(self, started: float) -> bool:
        """Look for work as long as nobody else works."""
        is_quiet = self._turns.token
        while time.perf_counter() - started < SPIN_SECONDS and is_quiet:
            if self._has_work():
                return True
            os.sched_yield()
        return False

    def _rest(self, seconds: float) -> None:
        """Hear nothing of the client for a while; jobs of the event loop are done."""
        end = time.monotonic() + seconds
        self._poll.modify(self._own_bell.descriptor, 0)
        while not self.stopped and (left := end - time.monotonic()) > 0:
            self._poll.poll(left)
            self._do_jobs()
        self._poll.modify(self._own_bell.descriptor, select.EPOLLIN | select.EPOLLET)

    def _has_work(self) -> bool:
        if self._inbox or self._jobs:
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

    def withdraw(self, user_data: int) -> bool:
        """End an entry that still waits for its turn with -ECANCELED; False if there is none."""
        if not self._lines.remove(user_data):
            return False
        self.post([user_data], [-errno.ECANCELED])
        return True

    def pass_over(self) -> None:
        """An entry that was taken has no completion."""
        with self._lock:
            self._under_way -= 1


def _cancels(packed: bytearray) -> list[int]:
    """Which entries are CANCEL."""
    ops = packed[:: SQE.itemsize]
    return [number for number, op in enumerate(ops) if op == Op.CANCEL] if Op.CANCEL in ops else []


class Broken(Exception):
    """The client wrote over what is not its own."""
