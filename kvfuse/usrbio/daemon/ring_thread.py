"""Runs the thread of one ring: takes submissions, has them served by priority, does jobs of the event loop, sleeps.

It works in turns, as `interpreter.py` says. It takes no more than completions have room for.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
import time
from contextlib import ExitStack

import numpy as np

from kvfuse.usrbio.daemon.call import Completions
from kvfuse.usrbio.daemon.charges import Charge
from kvfuse.usrbio.daemon.client_registry import ClientRegistry
from kvfuse.usrbio.daemon.entries import EntryServer
from kvfuse.usrbio.daemon.interpreter import Seat
from kvfuse.usrbio.daemon.jobs import Jobs
from kvfuse.usrbio.daemon.kept_records import KeptRing
from kvfuse.usrbio.daemon.lines import TURN_ENTRIES
from kvfuse.usrbio.daemon.penalty import BOUND, Penalty
from kvfuse.usrbio.daemon.ring_journal import RingJournal
from kvfuse.usrbio.daemon.ring_profile import RingProfile
from kvfuse.usrbio.protocol.queues import Bell, Entries, RingMemory
from kvfuse.usrbio.protocol.wire import SQE, Layout, Op, Word, own_id

log = logging.getLogger(__name__)

TAKE_ENTRIES = 1024
"""taken at once: between two such parts others may work"""
THREAD_NAME = "kvfuse-ring"
SPIN_SECONDS = 100e-6
"""How long it looks for more before it sleeps, while submissions follow each other faster than that."""
FULL_SECONDS, FULL_SECONDS_MAX = 0.01, 0.08
"""time between looks at a ring whose client takes no completions, or at an entry without memory"""


class RingThread:
    """Serves one ring in a thread of its own; the connection owns it. `stop` and `close` are for the event loop.

    ``op_mask``: bit n allows operation n.
    """

    def __init__(
        self,
        registered: ClientRegistry,
        memory: RingMemory,
        sq_bell: int,
        cq_bell: int,
        op_mask: int,
        journal: RingJournal,
    ) -> None:
        self._registered = registered
        self._memory = memory
        self._own_bell = Bell(memory.words, Word.DAEMON_SLEEPS, sq_bell)
        self.completions = Completions(memory, cq_bell, registered.pins.give, journal)
        self.completions.profile = RingProfile(registered.pid, registered)
        self.jobs = Jobs(registered.run_in_loop)
        self.turns = registered.bell_watcher.interpreter
        self.seat = Seat(registered.user)
        self.server = EntryServer(self, registered, memory.aux, op_mask)
        self._single: tuple[bytearray, float] | None = None
        """an entry that was alone in the queue, and when it was seen: it is served before any other, and taken then"""
        self._penalty = Penalty()
        self._poll = select.epoll()
        for descriptor in (sq_bell, self.jobs.wake):  # the thread reads neither: the client could make a read wait
            self._poll.register(descriptor, select.EPOLLIN | select.EPOLLET)
        registered.bell_watcher.add(self._poll.fileno())
        self._rests = 0.0
        self._full_seconds = FULL_SECONDS
        self._is_short = False
        """there is no memory for what waits"""
        self.thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def stop(self) -> None:
        """Have the thread end after what it does now. It posts nothing more."""
        self.completions.stop()
        self.jobs.stop()

    def pause(self) -> bool:
        """Take no more entries. True: some are in flight."""
        return self.completions.pause()

    def close(self, *, hands_over: bool = False) -> None:
        """Free the ring's memory, its descriptors, and pins that the client never received. The thread has ended.

        ``hands_over``: the next daemon owns those pins.
        """
        self._registered.share.forget(self.jobs.nudge)
        self.server.close()
        self.completions.close(hands_over=hands_over)
        del self._memory, self._own_bell
        self._registered.bell_watcher.remove(self._poll.fileno())
        self._poll.close()
        self.jobs.close()

    def restore(self) -> None:
        """Queue again what was in flight when the former daemon ended. Before the thread starts."""
        rows, times = self.completions.restore()
        for cancel in np.flatnonzero(rows["op"] == Op.CANCEL).tolist():
            self._aim_cancel(rows, cancel)
        for taken_at in np.unique(times):  # each has the deadline that it had
            self.server.lines.add(rows[times == taken_at], float(taken_at))

    def _run(self) -> None:
        try:
            while not self.jobs.stopped:
                if not self.step() or (self.server.lines.is_empty and not self._has_work()):
                    self._wait()
                if self._penalty.seconds:
                    self._drop_turn()
                    self._rest(self._penalty.seconds)
        except Broken as error:
            self._registered.disconnect(str(error))
        except Exception:  # one client's ring ends with its thread; the daemon and the others continue
            log.exception("a ring's thread failed")
            self._registered.disconnect("the ring could not be served")
        finally:
            self.completions.stop()
            self._drop_turn()
            self.jobs.end()

    def step(self) -> bool:
        """Take what was submitted, and serve some of it; False when there was nothing to serve."""
        jobs = self.jobs
        if jobs.here or jobs.in_turn:
            self._do_jobs()
        if self.seat.has_turn:
            self.seat.has_turn = False
        else:
            self.turns.take_turn(self.seat)
        try:
            while self._take():
                self.turns.pause(self.seat)
            jobs.is_reading = True
            has_served = self._serve()
            if self.server.bad_count or self._penalty.excess:
                self._judge()
            return has_served
        finally:
            jobs.is_reading = False
            self.turns.give_turn(self.seat)

    def _do_jobs(self) -> None:
        """Do the jobs that the event loop queued: ``here`` without the turn, ``in_turn`` with it."""
        self._drop_turn()
        jobs = self.jobs
        while jobs.here:
            jobs.here.popleft()()
        if not jobs.in_turn:
            return
        self.turns.take_turn(self.seat)
        try:
            jobs.is_reading = True
            while jobs.in_turn:
                jobs.in_turn.popleft()()
                self.turns.pause(self.seat)
        finally:
            jobs.is_reading = False
            self.turns.give_turn(self.seat)

    def serve_copied(self, rows: Entries, taken_at: float) -> None:
        """Serve entries again, which were counted before; see `call.ServedRing`."""
        self.server.count -= len(rows)
        self.server.lines.add(self.server.serve(rows, taken_at, in_place=False), taken_at)

    def _drop_turn(self) -> None:
        """Give back the turn with which the thread woke up, where it has not used it."""
        if self.seat.has_turn:
            self.seat.has_turn = False
            self.turns.give_turn(self.seat)

    def _judge(self) -> None:
        """Give the penalty the counts of entries served since the last call. Broken where too many were malformed."""
        self._penalty.judge(self.server.count, self.server.bad_count)
        self.server.count = self.server.bad_count = 0
        if self._penalty.is_broken:
            raise Broken(f"{BOUND} more of a ring's entries were malformed than good")

    def _take(self) -> bool:
        """Copy what was submitted, as far as its completions will have room. True: there may be more."""
        sq, capacity = self._memory.sq, len(self._memory.cq)
        given = sq.given - sq.position
        if not given:
            return False
        unread, under_way = self.completions.count_claims()
        if not 0 <= given <= len(sq) or not 0 <= unread <= capacity or not self._memory.header_is_whole():
            raise Broken("the ring's header or indices were overwritten")
        count = min(given, capacity - unread - under_way, TAKE_ENTRIES)
        if count <= 0:
            return False
        packed = sq.read_packed(count)
        now, lines = time.monotonic(), self.server.lines
        if count == 1 and packed[0] != Op.CANCEL and lines.is_empty:
            self._single = packed, now
            return False
        self.completions.take(packed, now)
        rows = sq.unpacked(packed)
        start = 0
        for cancel in _find_cancels(packed):  # at once: it concerns earlier entries alone
            lines.add(rows[start:cancel], now)
            self._aim_cancel(rows, cancel)
            lines.add(self.server.serve(rows[cancel : cancel + 1], now), now)
            start = cancel + 1
            self.turns.pause(self.seat)
        lines.add(rows[start:] if start else rows, now)
        return count < given

    def _aim_cancel(self, rows: Entries, cancel: int) -> None:
        """Let a CANCEL name its target's place."""
        entry = rows[cancel]
        entry["offset"] = self.completions.find(int(entry["offset"]), int(entry["user_data"]))

    def _serve(self) -> bool:
        """Serve some of what waits. False when nothing does, or there is no memory for any."""
        lines = self.server.lines
        if self._single is not None:
            (packed, taken_at), self._single = self._single, None
            if self.server.serve_one(packed, taken_at):
                return True
            lines.add(self._memory.sq.unpacked(packed), taken_at)
        has_served = lines.serve(self._penalty.entries_max(TURN_ENTRIES))
        self._is_short = not (has_served or lines.is_empty)
        return has_served

    def _wait(self) -> None:
        """Sleep until there is more to do; while submissions follow each other fast, look for more a moment before."""
        started = time.perf_counter()
        if self._rests < 4 * SPIN_SECONDS and self.turns.may_look():
            has_work = self._look_for_work(started)
            self.turns.end_look(self.seat, time.perf_counter() - started)
            if has_work:
                self._rests = 0.75 * self._rests
                return
        self._own_bell.going_to_sleep()
        is_full = self._is_short or (self._memory.sq.given != self._memory.sq.position and not self._has_work())
        self._full_seconds = min(2 * self._full_seconds, FULL_SECONDS_MAX) if is_full else FULL_SECONDS
        has_slept = self._sleep(self._full_seconds if is_full else None)
        self._own_bell.awake()
        if has_slept and not is_full and not self._has_work():
            self._penalty.count_idle_ring()
        self._rests = 0.75 * self._rests + 0.25 * (time.perf_counter() - started)

    def _sleep(self, seconds: float | None) -> bool:
        """Sleep until the client or the event loop rings, or for ``seconds``. False: there was work at once."""
        has_slept = False
        while not self._has_work() and not self.jobs.stopped:
            if has_slept:
                return True
            if seconds is not None:
                self._poll.poll(seconds)
            elif self.turns.may_sleep_alone(self.seat.user):
                self._poll.poll()
                self.turns.end_sleep_alone(self.seat.user)
            else:
                self._registered.bell_watcher.watch(self._poll.fileno(), self.seat)
                self.turns.sleep(self.seat)
                self._poll.poll(0)
            has_slept = True
        return has_slept

    def _look_for_work(self, started: float) -> bool:
        """Look for work for ``SPIN_SECONDS``, as long as no seat has the turn. True: there is some."""
        is_quiet = self.turns.token
        while time.perf_counter() - started < SPIN_SECONDS and is_quiet:
            if self._has_work():
                return True
            os.sched_yield()
        return False

    def _rest(self, seconds: float) -> None:
        """Ignore the client's bell for ``seconds``; do jobs of the event loop meanwhile."""
        end = time.monotonic() + seconds
        self._poll.modify(self._own_bell.descriptor, 0)
        while not self.jobs.stopped and (left := end - time.monotonic()) > 0:
            self._poll.poll(left)
            self._do_jobs()
        self._poll.modify(self._own_bell.descriptor, select.EPOLLIN | select.EPOLLET)

    def _has_work(self) -> bool:
        if self.jobs.here or self.jobs.in_turn:
            return True
        sq = self._memory.sq
        return sq.given != sq.position and sum(self.completions.count_claims()) < len(self._memory.cq)


def _find_cancels(packed: bytearray) -> list[int]:
    """Indices of CANCEL entries among packed SQEs."""
    ops = packed[:: SQE.itemsize]
    return [number for number, op in enumerate(ops) if op == Op.CANCEL] if Op.CANCEL in ops else []


class Broken(Exception):
    """The client overwrote the ring's header or indices, or submitted too many malformed entries."""


class OwnedRing:
    """A ring of a connection, and its thread. ``descriptors``: memory, journal, the daemon's bell, the client's.

    It takes the last two over; the others stay the caller's, who keeps them for the next daemon.
    """

    def __init__(
        self, registered: ClientRegistry, layout: Layout, op_mask: int, descriptors: list[int], charge: Charge, *,
        is_left: bool = False,
    ) -> None:  # fmt: skip
        self.size = layout.size
        self.layout = layout
        self.op_mask = op_mask
        self._shown = descriptors
        memory_descriptor, journal_descriptor, bell, client_bell = descriptors
        with ExitStack() as undo:
            undo.callback(os.close, bell)
            undo.callback(os.close, client_bell)
            undo.enter_context(charge.hold_ring(memory_descriptor, layout.size, is_left=is_left))
            memory = RingMemory(memory_descriptor, layout)
            memory.sign(own_id())
            journal = RingJournal(journal_descriptor, layout.entries)
            self.loop = RingThread(registered, memory, bell, client_bell, op_mask, journal)
            self._end = undo.pop_all()

    @classmethod
    def create(
        cls, registered: ClientRegistry, layout: Layout, op_mask: int, shown: list[int], charge: Charge
    ) -> OwnedRing:  # fmt: skip
        """Make a ring, and start its thread. ``shown``: the client's descriptors, and the journal's; the caller closes
        them once they were sent, and kept."""
        with ExitStack() as undo:
            _, descriptor = RingMemory.create(layout)
            shown.append(descriptor)
            bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, bell)
            shown.append(os.dup(bell))
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            undo.callback(ours.close)
            shown.append(theirs.detach())
            ours.shutdown(socket.SHUT_RD)  # else bytes from the client would stay until the daemon closes it
            _, journal_descriptor = RingJournal.create(layout.entries)
            shown.append(journal_descriptor)
            undo.pop_all()
        ring = cls(registered, layout, op_mask, [descriptor, journal_descriptor, bell, ours.detach()], charge)
        ring.start()
        return ring

    def describe(self) -> tuple[object, list[int]]:
        """Pack what the next daemon needs, while the descriptors are open."""
        layout = self.layout
        return KeptRing(layout.entries, layout.size - layout.aux_offset, self.op_mask), self._shown

    def start(self) -> None:
        """Start the thread. OSError, and the ring is closed, where the machine cannot."""
        try:
            self.loop.thread.start()
        except RuntimeError as error:
            self.close()
            raise OSError(errno.EAGAIN, str(error)) from error

    def close(self, *, hands_over: bool = False) -> None:
        """Close the ring and its descriptors. Its thread has ended. ``hands_over``: see `RingThread.close`."""
        self.loop.close(hands_over=hands_over)
        self._end.close()
