"""Schedules calls of rings that wait for the event loop: users take turns here, too, and so do their namespaces.

Starting a call takes the event loop some ten microseconds, which is often most of its cost. So calls are not started as
they arrive, but a few in each pass of the event loop: all other tasks run between two passes, above all the kernel's
requests. The next call is of the user with the least work done since it has calls waiting; among several rings of that
user `PriorityLine` chooses, by the first waiting call of each. The calls of one ring keep their order, which CANCEL
needs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

import trio

from kvfuse.usrbio.daemon.call import Call, ServedRing
from kvfuse.usrbio.protocol.wire import MANY_KEY_OPS, Flag, Op
from kvfuse.volume.measures.fair_line import PriorityLine, WaitKind
from kvfuse.volume.measures.measures import Measures

PASS_COST = 16.0
"""Calls that are started in one pass of the event loop, about: a millisecond"""
PIECE = 16
"""calls of one ring that are started together"""
KEYS_PER_CALL = 64
"""keys that cost as much as one call"""
CALL_SIZE = 16 << 10
"""bytes that cost as much as one call"""
KINDS: dict[int, WaitKind] = {
    Op.WRITE: WaitKind.WRITE,
    Op.FSYNC: WaitKind.WRITE,
    Op.PUT: WaitKind.WRITE,
    Op.DELETE: WaitKind.WRITE,
    Op.PREFETCH: WaitKind.PREFETCH,
}
"""all others are reads"""


class _Job(NamedTuple):
    """Calls of one ring, and the function that does them; or a caller that waits for a turn. ``cost``: in calls.

    Its calls are of one namespace.
    """

    cost: float
    do: Callable[..., None]
    calls: Sequence[Call] = ()


class _Line:
    """The waiting jobs of one user. ``cost``: of its done jobs, beginning at the last served line's cost."""

    def __init__(self, cost: float) -> None:
        self.rings: dict[ServedRing | None, deque[_Job]] = {}
        """ring, or None for turns -> its jobs, at least one"""
        self.cost = cost
        self._order = PriorityLine()
        """order of rings by their first jobs, for several rings"""

    def add(self, ring: ServedRing | None, jobs: Sequence[_Job]) -> None:
        waiting = self.rings.get(ring)
        if waiting is not None:
            waiting.extend(jobs)
            return
        self.rings[ring] = deque(jobs)
        if len(self.rings) > 1:
            for other in self.rings if len(self.rings) == 2 else (ring,):
                self._enter(other)

    def take(self) -> _Job:
        """Take the next job; the line has one."""
        (ring,) = self.rings if len(self.rings) == 1 else (self._order.take(),)
        jobs = self.rings[ring]
        job = jobs.popleft()
        if not jobs:
            self._remove(ring)
        elif len(self.rings) > 1:
            self._enter(ring)
        return job

    def drop(self, rings: set[ServedRing]) -> None:
        for ring in rings & self.rings.keys():
            self._order.drop(ring)
            self._remove(ring)

    def _enter(self, ring: ServedRing | None) -> None:
        job = self.rings[ring][0]
        measures = _measures_of(job.calls[0]) if job.calls else None
        weight = measures.weight if measures is not None else 1.0
        size = job.cost * CALL_SIZE
        size += sum([call.entry.length for call in job.calls if call.entry.op not in MANY_KEY_OPS])
        self._order.enter(_kind_of(job.calls), measures, size, weight, ring)

    def _remove(self, ring: ServedRing | None) -> None:
        """Remove a ring that has no jobs."""
        del self.rings[ring]
        if len(self.rings) == 1:
            self._order = PriorityLine()


class CallQueue:
    """Queues the calls of all rings; `Limits` owns it. `put` is for any thread, all else for the event loop."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._lock = threading.Lock()
        self._lines: dict[Hashable, _Line] = {}
        """lines of users with waiting jobs"""
        self._cost = 0.0
        """cost of the line served last"""
        self._is_called = False
        """`_serve_first_pass` or `run` will serve waiting jobs"""
        self._more = trio.Event()

    def put(self, user: Hashable, calls: list[Call], do: Callable[[list[Call]], None]) -> None:
        """Have the event loop call ``do`` with these calls of one ring, some at a time, in this order."""
        self._put(user, calls[0].ring, [_Job(_cost_of(piece), do, piece) for piece in _cut_pieces(calls)])

    async def wait_turn(self, user: Hashable, cost: float) -> None:
        """Wait for the user's turn for work of this cost, in calls. Event loop only."""
        turn = trio.Event()
        self._put(user, None, [_Job(cost, lambda _: turn.set())])
        await turn.wait()

    def _put(self, user: Hashable, ring: ServedRing | None, jobs: list[_Job]) -> None:
        with self._lock:
            line = self._lines.get(user)
            if line is None:
                line = self._lines[user] = _Line(self._cost)
            line.add(ring, jobs)
            if self._is_called:
                return
            self._is_called = True
        with suppress(trio.RunFinishedError):  # the daemon has ended: nobody waits for an answer
            self._token.run_sync_soon(self._serve_first_pass)

    async def run(self) -> None:
        """Serve jobs that do not fit into one pass, until cancelled."""
        while True:
            await self._more.wait()
            self._more = trio.Event()
            while self._serve_some():
                await trio.lowlevel.checkpoint()

    def list_calls(self, ring: ServedRing) -> Iterator[Call]:
        """List the waiting calls of a ring."""
        with self._lock:
            jobs = [job for line in self._lines.values() for job in line.rings.get(ring, ())]
        return (call for job in jobs for call in job.calls)

    def drop(self, rings: set[ServedRing]) -> None:
        """Drop waiting jobs of rings that have ended."""
        with self._lock:
            for line in self._lines.values():
                line.drop(rings)

    def _serve_first_pass(self) -> None:
        if self._serve_some():
            self._more.set()

    def _serve_some(self) -> bool:
        """Do one pass of jobs. True: more wait."""
        cost = 0.0
        while cost < PASS_COST:
            with self._lock:
                job = self._take_job()
            if job is None:
                return False
            cost += job.cost
            job.do(job.calls)
        return True

    def _take_job(self) -> _Job | None:
        """Take the next job; None: `put` must schedule `_serve_first_pass`. The caller holds the lock."""
        while self._lines:
            user, line = min(self._lines.items(), key=lambda item: item[1].cost)
            if line.rings:
                job = line.take()
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


def _kind_of(calls: Sequence[Call]) -> WaitKind:
    """The kind of calls that run together: that of the one served last."""
    kinds = [
        WaitKind.READ if call.entry.flags & Flag.NEAR else KINDS.get(call.entry.op, WaitKind.READ) for call in calls
    ]
    return max(kinds, default=WaitKind.READ)


def _measures_of(call: Call) -> Measures | None:
    """Measures of the call's namespace; None: it has none."""
    of = call.namespace if call.namespace is not None else call.file
    return of.measures if of is not None else None


def _cut_pieces(calls: list[Call]) -> list[list[Call]]:
    """Calls of one ring in order, cut where they are of another namespace, and after `PIECE`."""
    if len(calls) == 1:
        return [calls]
    groups = [list(group) for _, group in groupby(calls, _measures_of)]
    return [group[start : start + PIECE] for group in groups for start in range(0, len(group), PIECE)]
