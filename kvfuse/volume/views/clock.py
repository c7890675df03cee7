"""The clock that stamps inodes: the one that the kernel stamps files with, which ticks every few milliseconds.

"Now", when a program touches a file, comes from the kernel as the time of its last tick. With a finer
clock here a file that was just written would become older by being touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

_CLOCK_REALTIME_COARSE = 5
"""of Linux's time.h; the standard library does not name it"""
TIME_MIN, TIME_MAX = -(1 << 63), (1 << 63) - 1
"""nanoseconds since the epoch that records have room for: the years 1677 to 2262"""


now: Callable[[], int] = partial(time.clock_gettime_ns, _CLOCK_REALTIME_COARSE)
"""Nanoseconds since the epoch, at the last tick."""
fine: Callable[[], int] = time.time_ns
"""The same at this moment, for the order of what several hosts do: within a tick, too."""
TICK_MAX = 10_000_000
"""nanoseconds between two ticks, at most"""


def storable(moment: int) -> int:
    """The nearest time that can be stored, as file systems do with what is out of their range."""
    return min(max(moment, TIME_MIN), TIME_MAX)
