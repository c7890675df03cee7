"""Requests to RADOS objects, many at a time, awaited in trio.

librados announces each operation in a thread of its own. The callback there only notes it and wakes the event loop,
once for all that ended meanwhile; everything else happens in the event loop.

A call ends when all of its operations ended: librados then touches no memory of the caller any more. One that is
cancelled or late cancels them first, which they obey at once, whatever the servers do.
"""

from __future__ import annotations

import errno
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import trio

from kvfuse.errors import EngineTimeout
from kvfuse.remote.segments import librados
from kvfuse.remote.segments.api import SegmentCounters
from kvfuse.remote.segments.objects import ReadRequest, Request

_T = TypeVar("_T")

INLINE_BYTES_MAX = 1 << 20
"""Bytes that are copied on the event loop's thread: less than a thread costs."""
THREADS_MAX = 16
HEDGES_MAX = 3
"""More tries for a read that is late. Each goes to a replica drawn by lot, which may be the late one again."""
HEDGES_FREE = 64
HEDGE_SHARE = 0.1
"""Hedges beyond the first few stay below this share of all operations: a merely busy cluster gets no more work."""


class _Call:
    """Requests that are waited for together, and their operations that did not end yet."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.unanswered = set(requests)
        self.answered = trio.Event()
        self.in_flight: dict[int, Request] = {}
        self.completions: dict[int, int] = {}
        """tag -> completion, of all operations that were started; released when none is in flight"""
        self.idle = trio.Event()

    def ended(self, tag: int, code: int) -> None:
        request = self.in_flight.pop(tag)
        if request.ended(tag, code):
            self.unanswered.discard(request)
        if not self.unanswered:
            self.answered.set()
        if not self.in_flight:
            self.idle.set()


class Dispatcher:
    """Performs requests on one connection. Made by ``connect``, in trio's thread.

    ``deadline``: seconds for ``in_flight_max`` requests, which are under way together. ``hedge_delay``: seconds after
    which a read is also asked of another replica; 0: never.
    """

    def __init__(
        self,
        place: librados.Place,
        counters: SegmentCounters,
        *,
        deadline: float,
        in_flight_max: int,
        hedge_delay: float,
    ) -> None:
        self.place = place
        self.deadline = deadline
        self.in_flight_max = in_flight_max
        self.hedge_delay = hedge_delay
        self.counters = counters
        self._tags = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._ended: deque[tuple[int, int]] = deque()
        self._loop = trio.lowlevel.current_trio_token()
        self._threads = trio.CapacityLimiter(THREADS_MAX)
        self._callback = librados.Callback(self._announce)

    async def connect(self) -> None:
        """Waits as long as monitors may take to answer. EngineError, EngineTimeout."""
        self._pool = await self.in_thread(lambda: librados.Pool.connect(self.place, self._callback))

    async def aclose(self) -> None:
        """Nothing may be under way."""
        await self.in_thread(self._pool.close)

    async def available_bytes(self) -> int | None:
        """As ``Pool.available_bytes``."""
        return await self.in_thread(self._pool.available_bytes)

    def address(self) -> bytes:
        """As ``Pool.address``."""
        return self._pool.address()

    async def cut_off(self, address: bytes) -> bool:
        """As ``Pool.cut_off``."""
        return await self.in_thread(lambda: self._pool.cut_off(address))

    async def in_thread(self, call: Callable[[], _T]) -> _T:
        """Never abandoned: a call that was cancelled waits for its thread."""
        return await trio.to_thread.run_sync(call, limiter=self._threads)

    async def perform(self, requests: Sequence[Request]) -> None:
        """Have every request answered. EngineError of the first that failed, EngineTimeout; others may have been done.

        Reads are filled with zeros where objects have no bytes. Requests are started in order, and those on
        one object done in that order.
        """
        for first in range(0, len(requests), self.in_flight_max):
            await self._perform_together(requests[first : first + self.in_flight_max])

    async def _perform_together(self, requests: Sequence[Request]) -> None:
        call = _Call(requests)
        try:
            await self._sized(sum(request.copied_bytes for request in requests), lambda: self._start(call, requests))
            with trio.move_on_after(self.deadline):
                await self._wait(call)
        finally:
            await self._let_go(call)
        self._check(call)
        reads = [request for request in requests if isinstance(request, ReadRequest) and request.absent_bytes]
        if reads:
            await self._sized(sum(read.absent_bytes for read in reads), lambda: _fill(reads))

    async def _sized(self, byte_count: int, work: Callable[[], object]) -> None:
        """Do what touches so many bytes: here, or in a thread when the event loop would be held up."""
        if byte_count <= INLINE_BYTES_MAX:
            work()
        else:
            await self.in_thread(work)

    def _start(self, call: _Call, requests: Sequence[Request]) -> None:
        """In either thread: operations that end meanwhile are taken out of ``in_flight`` by the event loop."""
        for request in requests:
            tag = next(self._tags)
            call.in_flight[tag] = request
            self._calls[tag] = call
            try:
                call.completions[tag] = request.start(self._pool, tag)
            except BaseException:
                del call.in_flight[tag], self._calls[tag]
                raise
        self.counters.operations += len(requests)

    async def _wait(self, call: _Call) -> None:
        """Until all is answered, with hedges for reads that are late."""
        for _ in range(HEDGES_MAX if self.hedge_delay else 0):
            with trio.move_on_after(self.hedge_delay):
                await call.answered.wait()
                return
            allowed = HEDGES_FREE + int(HEDGE_SHARE * self.counters.operations) - self.counters.hedges
            late = [request for request in call.unanswered if request.hedgeable][: max(allowed, 0)]
            self.counters.hedges += len(late)
            self._start(call, late)
        await call.answered.wait()

    async def _let_go(self, call: _Call) -> None:
        """Returns when none of the call's operations is under way, however it ended."""
        with trio.CancelScope(shield=True):
            if call.in_flight:
                late = [call.completions[tag] for tag in call.in_flight]
                call.idle = trio.Event()  # anew: between two starts there may have been nothing under way
                await self.in_thread(lambda: self._cancel(late))
                if call.in_flight:
                    await call.idle.wait()
        for completion in call.completions.values():
            self._pool.release(completion)

    def _cancel(self, completions: Sequence[int]) -> None:
        for completion in completions:
            self._pool.cancel(completion)

    def _check(self, call: _Call) -> None:
        """EngineError where a request was not answered, or failed."""
        for request in call.requests:
            what = f"{request.verb} object {request.name.decode()} ({self.place})"
            if request in call.unanswered or request.code == -errno.ECANCELED:
                raise EngineTimeout(
                    f"{what}: no answer within {self.deadline:g} s"
                    + ("" if request.hedgeable else "; whether it was done is unknown")
                )
            if request.failure:
                raise librados.engine_error(request.failure, what)

    def _announce(self, completion: int, tag: int) -> None:
        """In a thread of librados."""
        self._ended.append((completion, tag))
        self._loop.run_sync_soon(self._take_ended, idempotent=True)

    def _take_ended(self) -> None:
        while self._ended:
            completion, tag = self._ended.popleft()
            self._calls.pop(tag).ended(tag, self._pool.code(completion))


def _fill(reads: Sequence[ReadRequest]) -> None:
    for read in reads:
        read.fill()
