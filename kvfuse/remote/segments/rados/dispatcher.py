"""Requests to RADOS objects, many at a time, awaited in trio.

librados announces each operation in a thread of its own. The callback there only notes it and wakes the event loop,
once for all that ended meanwhile; everything else happens in the event loop.

A call ends when all of its operations ended: librados then touches no memory of the caller any more. One that is
cancelled or late cancels them first, which they obey at once, whatever the servers do. Only *spare* reads, into memory
of their own, may go on behind it: hedges, and probes.

An object of which an operation was late is *silent*: it is not waited for again until a probe of it is answered. A
stopped server would else cost each call a deadline, for as long as the cluster takes to name another. The probe is
under way all the time, as librados sends it again to whoever the cluster map names then; so its answer comes, and
the object is asked again, as soon as that can do any good. Meanwhile changes are refused at once, and reads asked of
all replicas at once: a replica that has the bytes answers immediately.

A caller that can put its bytes elsewhere (`change_some`) waits for a few times of what changes take (`lateness`), and
not for the deadline. An object that was late by that measure is probed, too; others wait for it until it was silent for
a deadline.
"""

from __future__ import annotations

import errno
import itertools
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import trio

from kvfuse.errors import EngineTimeout
from kvfuse.remote.segments.api import SegmentCounters
from kvfuse.remote.segments.rados import librados
from kvfuse.remote.segments.rados.lateness import Lateness
from kvfuse.remote.segments.rados.objects import ObjectRequest, ReadRequest, SpareRead

_T = TypeVar("_T")

INLINE_BYTES_MAX = 1 << 20
"""Bytes that are copied on the event loop's thread: less than a thread costs."""
THREADS_MAX = 16
HEDGES_MAX = 3
"""More tries for a read that is late. Each goes to a replica drawn by lot, which may be the late one again."""
HEDGES_FREE = 64
HEDGE_SHARE = 0.1
"""Hedges beyond the first few stay below this share of all operations: a merely busy cluster gets no more work."""


SPARE_BYTES_MAX = 64 << 20
"""Memory of spare reads: those that a replica refused keep theirs until the silent server answers."""
CLOSE_SECONDS = 1.0
"""for which closing waits for spare reads that were cancelled"""


class _Call:
    """Requests that are waited for together, and their operations that did not end yet."""

    def __init__(self, requests: Sequence[ObjectRequest]) -> None:
        self.requests = requests
        self.began = trio.current_time()
        self.unanswered = set(requests)
        self.answered = trio.Event()
        self.in_flight: dict[int, ObjectRequest] = {}
        self.completions: dict[int, int] = {}
        """tag -> completion, of all operations that were started; released when none is in flight"""
        self.idle = trio.Event()
        self.hedges: list[_Spare] = []
        self.is_late = False
        self.is_cancelled = False
        """what ends now with -ECANCELED was ended here; a server says so, too, where a comparison does not hold"""
        self.is_over = False
        """its memory is the caller's again"""

    def ended(self, tag: int, code: int) -> None:
        request = self.in_flight.pop(tag)
        if not (self.is_cancelled and code == -errno.ECANCELED):
            request.ended(code)
        self.look_at(request)
        if not self.in_flight:
            self.idle.set()

    def look_at(self, request: ObjectRequest) -> None:
        """It may be answered now."""
        if request.code is not None:
            self.unanswered.discard(request)
        if not self.unanswered:
            self.answered.set()


class _Spare:
    """A spare read under way, and what is to be done with its answer."""

    def __init__(self, read: SpareRead, answered: Callable[[int], None]) -> None:
        self.read = read
        self.answered = answered
        self.completion = 0
        self.is_held = False
        """a thread cancels it, and releases it then"""


class Dispatcher:
    """Performs requests on one connection. Made in trio's thread, connected by ``connect``."""

    def __init__(self, place: librados.PoolPlace, counters: SegmentCounters) -> None:
        self.place = place
        self.options = place.options
        self.counters = counters
        self._tags = itertools.count(1)
        self._under_way: dict[int, Callable[[int], None]] = {}
        """tag -> what is to be done with the answer"""
        self._spares: set[_Spare] = set()
        self._spare_bytes = 0
        self._spares_ended = trio.Event()
        self.lateness = Lateness(self.options.deadline)
        self._late_hedges = 0
        self._ended: deque[tuple[int, int]] = deque()
        self._loop = trio.lowlevel.current_trio_token()
        self._threads = trio.CapacityLimiter(THREADS_MAX)
        self._callback = librados.Callback(self._announce)

    async def connect(self) -> None:
        """Waits as long as monitors may take to answer. EngineError, EngineTimeout."""
        self._pool = await self.in_thread(lambda: librados.RadosPool.connect(self.place, self._callback))

    async def aclose(self) -> None:
        """No call may be under way. Spare reads that cannot be cancelled end with the connection."""
        await self._cancel((), list(self._spares))
        with trio.move_on_after(CLOSE_SECONDS):
            while self._spares:
                await self._spares_ended.wait()
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

    async def perform(self, requests: Sequence[ObjectRequest], until: float = math.inf) -> None:
        """Have every request answered. EngineError of the first that failed, EngineTimeout; others may have been done.

        Reads are filled with zeros where objects have no bytes. Requests are started in order, and those on
        one object done in that order. Nothing is started where one of them would change a silent object.
        ``until``: trio's time at which the caller's own deadline ends.
        """
        for request in requests if self.lateness.since else ():
            name, hedges = request.name, self.options.hedge_delay and isinstance(request, ReadRequest)
            if self.lateness.is_lost(name) and not hedges:
                raise EngineTimeout(self._what(request) + self.lateness.silence_of(name))
        for first in range(0, len(requests), self.options.in_flight_max):
            call = await self._call(requests[first : first + self.options.in_flight_max], self._wait, until)
            self._check(call)
            reads = [read for read in call.requests if isinstance(read, ReadRequest) and read.absent_bytes]
            if reads:
                await _sized(self.in_thread, sum(read.absent_bytes for read in reads), partial(_fill, reads))

    async def change_some(self, requests: Sequence[ObjectRequest]) -> set[bytes]:
        """As `perform` for changes, but those of objects that are late are let go: their names. EngineError."""
        silent = {request.name for request in requests if request.name in self.lateness.since}
        left = [request for request in requests if request.name not in silent]
        for first in range(0, len(left), self.options.in_flight_max):
            call = await self._call(left[first : first + self.options.in_flight_max], self._wait_some)
            late = {request.name for request in call.requests if request.code is None}
            for name in late:
                self._watch(name, trio.current_time())
            self.lateness.late += len(late)
            self.counters.late_writes += len(late)
            self._check_answers([request for request in call.requests if request.name not in late])
            if not late:
                self.lateness.took(trio.current_time() - call.began)
            silent |= late
        return silent

    async def _call(
        self, requests: Sequence[ObjectRequest], wait: Callable[[_Call], Awaitable[None]], until: float = math.inf
    ) -> _Call:
        """Start requests, and ``wait`` for their answers; none is under way when this returns."""
        call = _Call(requests)
        try:
            copied_bytes = sum(request.copied_bytes for request in requests)
            await _sized(self.in_thread, copied_bytes, lambda: self._start(call, requests))
            with trio.move_on_at(min(trio.current_time() + self.options.deadline, until)) as patience:
                await wait(call)
            call.is_late = patience.cancelled_caught
        finally:
            await self._let_go(call)
        return call

    def _start(self, call: _Call, requests: Sequence[ObjectRequest]) -> None:
        """In either thread: operations that end meanwhile are taken out of ``in_flight`` by the event loop."""
        for request in requests:
            tag = next(self._tags)
            call.in_flight[tag] = request
            self._under_way[tag] = partial(call.ended, tag)
            try:
                call.completions[tag] = request.start(self._pool, tag)
            except BaseException:
                del call.in_flight[tag], self._under_way[tag]
                raise
        self.counters.operations += len(requests)

    async def _wait_some(self, call: _Call) -> None:
        """Until all is answered, or nothing more comes by and by."""
        count = len(call.requests) + 1
        while not call.answered.is_set() and len(call.unanswered) < count:
            count = len(call.unanswered)
            with trio.move_on_after(self.lateness.patience):
                await call.answered.wait()

    async def _wait(self, call: _Call) -> None:
        """Until all is answered, with hedges for reads that are late. Less long where a silent object stays silent."""
        silent = [read for read in call.requests if isinstance(read, ReadRequest) and self.lateness.is_lost(read.name)]
        if silent:
            self._hedge(call, silent * HEDGES_MAX)
            with trio.move_on_after(self.options.hedge_delay):
                await call.answered.wait()
            if not call.unanswered.isdisjoint(silent):
                return
        for _ in range(HEDGES_MAX if self.options.hedge_delay else 0):
            with trio.move_on_after(self.options.hedge_delay):
                await call.answered.wait()
                return
            allowed = HEDGES_FREE + int(HEDGE_SHARE * self.counters.operations) - self._late_hedges
            late = [read for read in call.unanswered if isinstance(read, ReadRequest)][: max(allowed, 0)]
            self._late_hedges += len(late)
            self._hedge(call, late)
        await call.answered.wait()

    # -- spare reads ---------------------------------------------------------------------------------

    def _hedge(self, call: _Call, reads: Sequence[ReadRequest]) -> None:
        """Ask other replicas, too, as far as there is memory for their answers."""
        for read in reads:
            hedge = read.hedge()
            if self._spare_bytes + hedge.byte_count <= SPARE_BYTES_MAX:
                self.counters.hedges += 1
                call.hedges.append(self._start_spare(hedge, partial(self._hedge_ended, call, read, hedge)))

    def _hedge_ended(self, call: _Call, read: ReadRequest, hedge: SpareRead, code: int) -> None:
        if not call.is_over:
            read.hedge_ended(hedge, code)
            call.look_at(read)

    def _start_spare(self, read: SpareRead, answered: Callable[[int], None]) -> _Spare:
        spare = _Spare(read, answered)
        tag = next(self._tags)
        spare.completion = read.start(self._pool, tag)
        self._under_way[tag] = partial(self._spare_ended, spare)  # what is announced is taken up after this
        self._spares.add(spare)
        self._spare_bytes += read.byte_count
        self.counters.operations += 1
        return spare

    def _spare_ended(self, spare: _Spare, code: int) -> None:
        self._spares.discard(spare)
        self._spare_bytes -= spare.read.byte_count
        if not spare.is_held:
            self._pool.release(spare.completion)
        self._spares_ended.set()
        self._spares_ended = trio.Event()
        spare.answered(code)

    def _watch(self, name: bytes, since: float) -> None:
        """An object did not answer in time: it is silent until it does."""
        if name in self.lateness.since:
            self.lateness.since[name] = min(since, self.lateness.since[name])
        else:
            self._start_spare(SpareRead(name, [(0, 1)]), lambda code: self.lateness.heard(name))
            self.lateness.silent(name, since)

    # -- when it is over -----------------------------------------------------------------------------

    async def _let_go(self, call: _Call) -> None:
        """Returns when none of the call's operations is under way, however it ended."""
        with trio.CancelScope(shield=True):
            hedges = [spare for spare in call.hedges if spare in self._spares]
            if call.in_flight or hedges:
                call.idle = trio.Event()  # anew: between two starts there may have been nothing under way
                call.is_cancelled = True
                await self._cancel([call.completions[tag] for tag in call.in_flight], hedges)
                if call.in_flight:
                    await call.idle.wait()
        call.is_over = True
        for completion in call.completions.values():
            self._pool.release(completion)

    async def _cancel(self, completions: Sequence[int], spares: Sequence[_Spare]) -> None:
        """Have operations end that can be ended. ``completions`` are released by whoever started them."""

        def cancel() -> None:
            for completion in [*completions, *[spare.completion for spare in spares]]:
                self._pool.cancel(completion)

        for spare in spares:
            spare.is_held = True
        await self.in_thread(cancel)
        for spare in spares:
            spare.is_held = False
            if spare not in self._spares:
                self._pool.release(spare.completion)

    def _check(self, call: _Call) -> None:
        """EngineError where a request was not answered, or failed. An object that was late is silent from now on."""
        late = [request for request in call.requests if request.code is None]
        if call.is_late:
            for request in late:
                self._watch(request.name, trio.current_time() - self.options.deadline)
        if late:
            request = min(late, key=lambda request: request.name not in self.lateness.since)
            why = (
                f": no answer within {self.options.deadline:g} s"
                if call.is_late
                else self.lateness.silence_of(request.name)
            )
            unknown = "" if request.is_read else "; whether it was done is unknown"
            raise EngineTimeout(self._what(request) + why + unknown)
        self._check_answers(call.requests)
        if not all(request.is_read for request in call.requests):
            self.lateness.took(trio.current_time() - call.began)

    def _check_answers(self, requests: Sequence[ObjectRequest]) -> None:
        """EngineError of the first that failed."""
        for request in requests:
            if request.failure:
                raise librados.engine_error(request.failure, self._what(request))
            if not request.is_read:
                self.lateness.changed(request.name)

    def _what(self, request: ObjectRequest) -> str:
        return f"{request.verb} object {request.name.decode()} ({self.place})"

    def _announce(self, completion: int, tag: int) -> None:
        """In a thread of librados."""
        self._ended.append((completion, tag))
        self._loop.run_sync_soon(self._take_ended, idempotent=True)

    def _take_ended(self) -> None:
        while self._ended:
            completion, tag = self._ended.popleft()
            self._under_way.pop(tag)(self._pool.code(completion))


async def _sized(
    in_thread: Callable[[Callable[[], object]], Awaitable[object]], byte_count: int, work: Callable[[], object]
) -> None:
    """Do what touches so many bytes: here, or in a thread when the event loop would be held up."""
    if byte_count <= INLINE_BYTES_MAX:
        work()
    else:
        await in_thread(work)


def _fill(reads: Sequence[ReadRequest]) -> None:
    for read in reads:
        read.fill()
