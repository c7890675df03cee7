"""Shares what large reads wait for among namespaces, by weight: a load of a model leaves its part to gets of blocks.

Two things are shared, and both only while another namespace reads, too. Of the bytes that segments are asked for at a
time each namespace has its share of WINDOW, and one read at least; further reads of it wait, in the order of arrival.
Of the bytes that the event loop hands to the kernel, mostly views of the page cache, each has its share of
LOOP_BANDWIDTH. A namespace that reads alone waits for neither.

Whoever waits holds no turn: so turns cannot wait for each other. No more reads of a namespace
wait than WAITING_MAX for the segments, and KERNEL_WAITING_MAX for the event loop: they hold the tasks that answer the
kernel, which others need, too. Further ones go on, and nobody waits longer for that.
"""

from __future__ import annotations

from math import inf

import trio

from kvfuse.volume.measures.limiter import KERNEL_WAITING_MAX, Rate
from kvfuse.volume.measures.measures import LATELY_SECONDS, Measures

WINDOW = 16 << 20
"""bytes of reads that are under way at the segments, of all namespaces that read together"""
PIECE = 1 << 20
"""bytes that work ahead of need reads in one turn, where its namespace has a share that is less than it wants"""
WAITING_MAX = KERNEL_WAITING_MAX // 2
LOOP_BANDWIDTH = 4 << 30
"""Bytes a second that the event loop hands to the kernel, of all namespaces: more than it can on most machines, so that
equal weights slow nobody down. What one copy of memory takes was measured at 0.7 and 2.7 GB/s on one busy machine."""
LARGE_READ = 128 << 10
"""bytes of a request of the kernel from which on it counts"""


class ReadTurn:
    """``async with`` it while a read of ``size`` bytes is under way at the segments. Event loop only."""

    __slots__ = ("_of", "_size")

    def __init__(self, of: Measures, size: int) -> None:
        """``of``: of the namespace that reads."""
        self._of = of
        self._size = size

    async def __aenter__(self) -> None:
        of = self._of
        if of.reading and len(of.readers) > 1 and len(of.line.places) < WAITING_MAX:
            await self._wait()
        of.begin_reading(self._size)

    async def __aexit__(self, *_: object) -> None:
        self._of.end_reading(self._size)

    async def _wait(self) -> None:
        of = self._of
        place = of.line.enter(of, self._size, of.weight)
        try:
            while of.line.places[0] is not place or (of.reading and of.reading + self._size > window_of(of)):
                place.go = trio.Event()
                await place.go.wait()
        finally:
            of.line.leave(place)


def window_of(of: Measures) -> float:
    """Bytes that a namespace may have under way at the segments now."""
    share = of.share_of_reads()
    return WINDOW * share if share < 1 else inf


async def wait_for_loop(of: Measures, size: int) -> None:
    """Return when the event loop may hand ``size`` bytes of a namespace to the kernel, or no other one reads any more.

    At once, where too many requests wait. Cancelled, or not waited for, these bytes do not count.
    """
    share = of.share_of_reads()
    if share == 1 or of.kernel_waiting >= KERNEL_WAITING_MAX:
        return
    if of.pace is None:
        of.pace = Rate(LOOP_BANDWIDTH, WINDOW)
    pace, now = of.pace, trio.current_time()
    starts = pace.enter(size / share, now)
    of.kernel_waiting += 1
    try:
        while now < starts and of.share_of_reads() < 1:
            await trio.sleep_until(min(starts, now + LATELY_SECONDS))
            now = trio.current_time()
    finally:
        of.kernel_waiting -= 1
        if now < starts:
            pace.leave(size / share)
