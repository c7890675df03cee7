"""Waiting for completions: spin a short while if recent waits were short, else sleep until the bell or a hangup."""

from __future__ import annotations

import os
import select
from time import perf_counter_ns

from kvfuse.errors import Disconnected
from kvfuse.usrbio.client import event_loops
from kvfuse.usrbio.protocol.queues import Bell, Queue

SPIN_NS = 300_000
"""Two sleeps and wakenings cost about as much: this one's, and that of the daemon, which finds nothing to do meanwhile.
Longer waits are slept through from the start."""
REMEMBERED_NS = 1_000_000
"""the longest wait that is remembered as such, so that one long wait does not outweigh many short ones"""
TRIAL_WAITS = 16
"""Each so manieth wait is spun for although the last ones were long: sleeping makes short ones long, and hides them."""

HANGUP = select.EPOLLHUP | select.EPOLLERR


class Waiter:
    """For what the daemon publishes in ``queue``, of which ``bell`` tells. ``hangup``: a descriptor that reports a
    hangup when the connection ends."""

    def __init__(self, queue: Queue, bell: Bell, hangup: int) -> None:
        self._queue = queue
        self._bell = bell
        self._poll = select.epoll()
        self._poll.register(bell.descriptor, select.EPOLLIN)
        self._poll.register(hangup, 0)  # a hangup is reported whatever one asks for
        self._usual_ns = 0
        """what waits took lately"""
        self._slept = 0
        """waits since the last spin"""

    def wait(self, tail: int, timeout: float | None) -> None:
        """Return when the daemon has published ``tail``, or ``timeout`` seconds have passed. Disconnected."""
        started = perf_counter_ns()
        deadline = None if timeout is None else started + int(timeout * 1e9)
        if not self._spin(tail, started, deadline):
            self._sleep(tail, deadline)
        self._usual_ns += (min(perf_counter_ns() - started, REMEMBERED_NS) - self._usual_ns) // 4

    async def wait_async(self, tail: int, timeout: float | None) -> None:
        """As `wait`, without a spin: other tasks have the thread. Cancelled, it leaves nothing behind."""
        deadline = None if timeout is None else perf_counter_ns() + int(timeout * 1e9)
        await event_loops.checkpoint()
        while self._queue.given < tail:
            self._bell.going_to_sleep(tail)
            try:
                remaining = _seconds_until(deadline)
                if self._queue.given >= tail or remaining == 0:
                    return
                await event_loops.readable(self._poll.fileno(), remaining)
                self._look(tail, 0)
            finally:
                self._bell.woken()

    def check(self) -> None:
        """Disconnected if the connection has ended."""
        if any(event & HANGUP for _, event in self._poll.poll(0)):
            raise Disconnected("the daemon ended the connection")

    @property
    def is_served(self) -> bool:
        """A process has the other end of the bell: it serves the ring, or keeps it for the next daemon.

        Also after the connection has ended: the daemon lets go of the bell when it is over with the ring.
        """
        poll = select.poll()
        poll.register(self._bell.descriptor, 0)
        return not poll.poll(0)

    def _spin(self, tail: int, started: int, deadline: int | None) -> bool:
        is_trial = self._usual_ns > 2 * SPIN_NS
        if is_trial:
            self._slept += 1
            if self._slept < TRIAL_WAITS:
                return False
        self._slept = 0
        end = started + SPIN_NS * (1 + is_trial)
        if deadline is not None:
            end = min(end, deadline)
        while perf_counter_ns() < end:
            if self._queue.given >= tail:
                if is_trial:
                    self._usual_ns = 0
                return True
            os.sched_yield()  # on few cores the daemon may need this one
        return self._queue.given >= tail

    def _sleep(self, tail: int, deadline: int | None) -> None:
        while self._queue.given < tail:
            self._bell.going_to_sleep(tail)
            try:
                remaining = _seconds_until(deadline)
                if self._queue.given >= tail or remaining == 0:
                    return
                self._look(tail, remaining)
            finally:
                self._bell.woken()

    def _look(self, tail: int, timeout: float | None) -> None:
        """Wait for the bell or a hangup. Disconnected, unless what was waited for came before it."""
        rung = self._poll.poll(timeout)
        if any(event & HANGUP for _, event in rung) and self._queue.given < tail:
            raise Disconnected("the daemon ended the connection")


def _seconds_until(deadline_ns: int | None) -> float | None:
    return None if deadline_ns is None else max(deadline_ns - perf_counter_ns(), 0) / 1e9
