"""What is measured of one namespace: sums and histograms of a few numbers, which cost the same however many blocks.

Threads of rings add to them, too, without a lock: CPython changes threads at calls and at the ends of loops, and there
is neither between reading a number and writing the sum. Paths of a block add in a line of their own: a call costs more
than what it would do.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from time import perf_counter
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import trio

from kvfuse import errors
from kvfuse.volume.measures.fair_line import FairLine, WaitKind
from kvfuse.volume.measures.limiter import KERNEL_WAITING_MAX, Limiter, Rate, wait_for_limits

REQUEST_BOUNDS = tuple(float(f"{digit}e{power}") for power in range(-5, 1) for digit in (1, 3))
"""seconds that requests take: 10 microseconds to 3 s"""
AGE_BOUNDS = tuple(float(f"{digit}e{power}") for power in range(6) for digit in (1, 3))
"""seconds between two events of a block: 1 s to 3.5 days"""
REASONS = "room", "expired", "cleared"
"""why a block went"""
MISSES = ("room", "evicted"), ("expired", "expired"), ("cleared", "cleared"), ("slow", "slow")
"""why a block was not there that had been -> what a request for it is called"""
SegmentsTier = Literal["disk", "remote"]
"""the tier of blocks that the segments alone have: ``disk`` where one host has the volume"""
OPERATIONS = "read", "write", "get", "put", "exists"
"""of files, and of blocks by key"""
LATELY_SECONDS = 0.25
JUST_NOW_SECONDS = 0.05
"""for which a namespace that read has a share of what reads wait for"""
FAILURES: dict[str, tuple[type[Exception], ...]] = {
    "deadline": (errors.EngineTimeout, TimeoutError),
    "corrupt": (errors.Corrupt,),
    "engine": (errors.EngineError,),
    "refused": (errors.PermissionDenied, errors.NotPermitted),
    "no_room": (errors.NoSpace,),
}
"""reason of a failed request -> its errors; the first row that fits an error tells"""
TURNED_AWAY = "token", "descriptor"
"""reasons for which a client may not use a namespace: it has not shown the token, or its blocks are something else"""
UNREAD = "deadline", "corrupt", "engine", "refused"
"""why a block that is there was not read"""


class Histogram:
    """How many values were at most each of ``bounds``, and above the bound before; the last count is of those above."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = array("Q", bytes(8 * (len(bounds) + 1)))
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add_column(self, values: npt.NDArray[np.float64]) -> None:
        for place, count in enumerate(np.bincount(np.searchsorted(self.bounds, values)).tolist()):
            self.counts[place] += count
        self.sum += float(values.sum())

    def statistics(self) -> dict[str, Any]:
        return {"bounds": self.bounds, "counts": self.counts.tolist(), "sum": round(self.sum, 6)}


class Measures:
    """What callers did in one namespace, through whichever door."""

    __slots__ = (
        "failures", "kernel_waiting", "limiters", "line", "pace", "read_bytes", "readers", "reading",
        "seconds", "throttled_seconds", "unread", "weight", "written_bytes",
    )  # fmt: skip

    def __init__(self, readers: dict[Measures, float] | None = None) -> None:
        """``readers``: what all namespaces of a volume share; None: there are no others."""
        self.readers = {} if readers is None else readers
        """namespace -> when one of its callers last read in the event loop (time.perf_counter)"""
        self.reading = 0
        """bytes of reads that are under way at the segments"""
        self.line = FairLine(WaitKind.READ)
        """reads that wait for others of the namespace, see `read_turns`"""
        self.pace: Rate | None = None
        """of bytes that the event loop hands to the kernel; None: it never shared it"""
        self.read_bytes = 0
        self.written_bytes = 0
        self.seconds = {operation: Histogram(REQUEST_BOUNDS) for operation in OPERATIONS}
        """operation -> seconds from when the daemon took it to its result; all of one batch of a ring have its time"""
        self.failures = dict.fromkeys((*FAILURES, *TURNED_AWAY), 0)
        """reason -> requests that failed for it"""
        self.unread = dict.fromkeys(UNREAD, 0)
        """the same of requests to read"""
        self.limiters: tuple[Limiter, ...] = ()
        """of the namespace and those that it is in, as far as they have limits"""
        self.weight = 1.0
        """of the namespace beside others that wait for the same"""
        self.throttled_seconds = 0.0
        """that requests waited for them, together"""
        self.kernel_waiting = 0
        """requests of the kernel that wait for them now"""

    def is_beside_readers(self) -> bool:
        """Callers of another namespace read lately: work for this one is done in smaller pieces. Event loop only."""
        since = perf_counter() - LATELY_SECONDS
        return any(at > since and other is not self for other, at in self.readers.items())

    def begin_reading(self, size: int) -> None:
        """A read of ``size`` bytes begins at the segments. Event loop only."""
        self.reading += size
        self.readers[self] = perf_counter()

    def end_reading(self, size: int) -> None:
        """It is over, however it ended: another one may begin."""
        self.reading -= size
        self.line.call_first()

    def share_of_reads(self) -> float:
        """Its part beside all namespaces that read now or did just now, by weight. 1: no other one. Event loop only."""
        since = perf_counter() - JUST_NOW_SECONDS
        others = [one.weight for one, at in self.readers.items() if (at > since or one.reading) and one is not self]
        return self.weight / (self.weight + sum(others))

    async def throttle(self, size: int) -> None:
        """Wait for the limits, which there are: an operation of ``size`` bytes is about to begin. Event loop only."""
        waited = await wait_for_limits(lambda: self.limiters, size)
        self.throttled_seconds += waited

    async def throttle_kernel(self, size: int) -> None:
        """The same for a request of the kernel, which may not wait where too many do."""
        if self.kernel_waiting >= KERNEL_WAITING_MAX:
            for limiter in self.limiters:
                limiter.enter(size, trio.current_time())
            return
        self.kernel_waiting += 1
        try:
            await self.throttle(size)
        finally:
            self.kernel_waiting -= 1

    def failed(self, error: Exception, *, is_read: bool) -> None:
        """A request ended so. What is absent, or not admitted, is no failure."""
        for reason, kinds in FAILURES.items():
            if isinstance(error, kinds):
                self.failures[reason] += 1
                if is_read and reason in self.unread:
                    self.unread[reason] += 1
                return

    def statistics(self) -> dict[str, Any]:
        return {
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
            "throttled_seconds": round(self.throttled_seconds, 3),
            "failures": dict(self.failures),
            "seconds": {operation: found.statistics() for operation, found in self.seconds.items()},
        }
