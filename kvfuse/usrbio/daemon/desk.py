"""Schedules calls of rings that wait for the event loop: users take turns here, too.

Starting a call takes the event loop some ten microseconds, which is often most of its cost. So calls are not
started as they arrive, but a few in each pass of the event loop: all other tasks run between two passes, above all
the kernel's requests. The next call is of the user with the least work done since it has calls waiting.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import trio

from kvfuse.usrbio.daemon.call import Call, Ring
from kvfuse.usrbio.protocol.wire import MANY_KEY_OPS

PASS_COST = 16.0
"""Calls that are started in one pass of the event loop, about: a millisecond"""
PIECE = 16
"""calls of one ring that are started together"""
KEYS_PER_CALL = 64
"""keys that cost as much as one call"""


class _Job(NamedTuple):
    """Calls of one ring, and the function that does them; or a caller that waits for a turn. ``cost``: in calls."""

    cost: float
    do: Callable[..., None]
    calls: Sequence[Call] = ()

    @property
    def ring(self) -> Ring | None:
        return self.calls[0].ring if self.calls else None


class _Line:
    """The waiting jobs of one user. ``cost``: of its done jobs, beginning at the last served line's cost."""

    def __init__(self, cost: float) -> None:
        self.jobs: deque[_Job] = deque()
        self.cost = cost


class Desk:
    """Queues the calls of all rings; `Limits` owns it. `put` is for any thread, all else for the event loop."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._lock = threading.Lock()
        self._lines: dict[Hashable, _Line] = {}
        """of users with waiting jobs"""
        self._cost = 0.0
        """of the line that was served last"""
        self._is_called = False
        """`_begin` or `run` will serve waiting jobs"""
        self._more = trio.Event()

    def put(self, user: Hashable, calls: list[Call], do: Callable[[list[Call]], None]) -> None:
        """Have the event loop call ``do`` with these calls of one ring, some at a time, in this order."""
        pieces = [calls[start : start + PIECE] for start in range(0, len(calls), PIECE)]
        self._put(user, [_Job(_cost_of(piece), do, piece) for piece in pieces])

    async def turn(self, user: Hashable, cost: float) -> None:
        """Wait for the user's turn for work of this cost, in calls. Event loop only."""
        came = trio.Event()
        self._put(user, [_Job(cost, lambda _: came.set())])
        await came.wait()

    def _put(self, user: Hashable, jobs: list[_Job]) -> None:
        with self._lock:
            line = self._lines.get(user)
            if line is None:
                line = self._lines[user] = _Line(self._cost)
            line.jobs.extend(jobs)
            if self._is_called:
                return
            self._is_called = True
        with suppress(trio.RunFinishedError):  # the daemon has ended: nobody waits for an answer
            self._token.run_sync_soon(self._begin)

    async def run(self) -> None:
        """Serve jobs that do not fit into one pass, until cancelled."""
        while True:
            await self._more.wait()
            self._more = trio.Event()
            while self._serve_some():
                await trio.lowlevel.checkpoint()

    def calls_of(self, ring: Ring) -> Iterator[Call]:
        """The waiting calls of a ring."""
        with self._lock:
            jobs = [job for line in self._lines.values() for job in line.jobs if job.ring is ring]
        return (call for job in jobs for call in job.calls)

    def drop(self, rings: set[Ring]) -> None:
        """Drop waiting jobs of rings that have ended."""
        with self._lock:
            for line in self._lines.values():
                line.jobs = deque(job for job in line.jobs if job.ring not in rings)

    def _begin(self) -> None:
        if self._serve_some():
            self._more.set()

    def _serve_some(self) -> bool:
        """Do one pass of jobs. True: more wait."""
        cost = 0.0
        while cost < PASS_COST:
            with self._lock:
                job = self._next()
            if job is None:
                return False
            cost += job.cost
            job.do(job.calls)
        return True

    def _next(self) -> _Job | None:
        """With the lock: the next job; None for none, then `put` must schedule `_begin`."""
        while self._lines:
            user, line = min(self._lines.items(), key=lambda item: item[1].cost)
            if line.jobs:
                job = line.jobs.popleft()
                self._cost = line.cost
                line.cost += job.cost
                return job
            del self._lines[user]
        self._is_called = False
        return None


def _cost_of(calls: list[Call]) -> float:
    if calls[0].entry.op not in MANY_KEY_OPS:
        return len(calls)
    return sum(1 + len(call.names) / KEYS_PER_CALL for call in calls)
