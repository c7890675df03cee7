"""Limits of a namespace: how many bytes and operations a second its callers may have, at all doors together.

Whoever comes pays for what it is about to do, and waits until all before it is paid for, but for the *burst*: what
may be ahead of the rate. So the order is that of arrival, a large operation is never too large, and over any time no
more passes than the rate allows, the burst, and one operation. A namespace in another one pays in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

BURST_SECONDS = 0.05
"""of the rate, where no burst is given"""
KERNEL_WAITING_MAX = 128
"""Requests of the kernel that wait at once: each holds a task and its bytes. More go on at once, and others pay."""


class Rate:
    """Of bytes, or of operations. ``rate``: in a second; 0: any. ``burst``: how many may be ahead of it."""

    __slots__ = ("_burst", "_cost", "_paid_at")

    def __init__(self, rate: float, burst: float = 0.0) -> None:
        self._cost = 1 / rate if rate else 0.0
        self._burst = burst * self._cost or BURST_SECONDS
        self._paid_at = 0.0
        """when all that was let pass is paid for"""

    def enter(self, amount: float, now: float) -> float:
        """When somebody may pass with so much more, who came now."""
        starts = max(self._paid_at, now)
        self._paid_at = starts + amount * self._cost
        return starts - self._burst

    def leave(self, amount: float) -> None:
        """Who came with so much gave up."""
        self._paid_at -= amount * self._cost


class Limiter:
    """Of one namespace. For the event loop alone."""

    def __init__(self, bandwidth: float, iops: float, burst: float) -> None:
        """``bandwidth``: bytes a second. ``iops``: operations a second. ``burst``: bytes. 0: any, or the default."""
        self.settings = bandwidth, iops, burst
        self._bytes = Rate(bandwidth, burst)
        self._operations = Rate(iops)
        self.changed = trio.Event()
        """set, and made anew, when others hold for somebody who may wait for this one"""

    def enter(self, size: int, now: float) -> float:
        """When somebody may pass with an operation of ``size`` bytes, who came now (trio's time)."""
        return max(self._bytes.enter(size, now), self._operations.enter(1, now))

    def change(self) -> None:
        """Have all who wait for this one first look which limits hold now."""
        self.changed.set()
        self.changed = trio.Event()

    def leave(self, size: int) -> None:
        self._bytes.leave(size)
        self._operations.leave(1)


async def wait_for_limits(limits: Callable[[], Sequence[Limiter]], size: int) -> float:
    """Return when an operation of ``size`` bytes may begin: after how many seconds. Cancelled, it has paid nothing.

    ``limits``: those that hold now. Where others come to hold, it pays those instead, and waits for them.
    """
    came = trio.current_time()
    while limiters := limits():
        now = trio.current_time()
        starts = max([limiter.enter(size, now) for limiter in limiters])
        if starts <= now:
            return now - came
        is_paid = False
        try:
            with trio.move_on_at(starts) as until_paid:
                await limiters[0].changed.wait()
            is_paid = until_paid.cancelled_caught
        finally:
            for limiter in limiters if not is_paid else ():
                limiter.leave(size)
        if is_paid:
            break
    return trio.current_time() - came
