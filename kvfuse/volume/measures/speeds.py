"""How long tiers take to answer, as their reads so far show: what a look-up expects of the next ones.

A read takes a latency, and then a time for each byte that is before it and of its own. Both come from the line that
fits the last reads best: how long each took, over the bytes that were under way when it began. Older reads count less
and less. So a tier that is busy, or has become slow, is known to be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike

FORGETTING = 0.98
"""weight of what is known beside one read more"""
COPY_SIZE = 4 << 20
"""bytes that are copied once, to know how fast memory is"""


class Tier(IntEnum):
    """Where the bytes of a block are; the lower, the sooner they are there."""

    NONE = 0
    """there is no such block"""
    DRAM = 1
    """memory of this host"""
    DISK = 2
    """the disk tier of this host"""
    REMOTE = 3
    """the segments of the volume"""
    COLD = 4
    """the cold tier"""


class Speed:
    """Of one tier. Event loop only. ``latency`` (seconds), ``bandwidth`` (bytes a second): before there are reads."""

    __slots__ = ("_latency", "_seconds_a_byte", "_sums", "under_way")

    def __init__(self, latency: float, bandwidth: float) -> None:
        self.under_way = 0
        """bytes of reads that have begun and not ended"""
        self._latency, self._seconds_a_byte = latency, 1 / bandwidth
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        """of reads, by their weights: 1, x, t, x * x, x * t, where x are the bytes under way, t the seconds"""

    @contextmanager
    def reading(self, size: int) -> Iterator[None]:
        """While a read of ``size`` bytes is under way. One that fails, or is cancelled, took at least as long."""
        self.under_way += size
        ahead, began = self.under_way, perf_counter()
        try:
            yield
        finally:
            self.under_way -= size
            self.note(ahead, perf_counter() - began)

    def note(self, size: int, seconds: float) -> None:
        """The last of ``size`` bytes that were under way together came after so many seconds."""
        new = (1.0, size, seconds, size * size, size * seconds)
        sums = [FORGETTING * old + one for old, one in zip(self._sums, new, strict=True)]
        count, x, t, xx, xt = self._sums = (sums[0], sums[1], sums[2], sums[3], sums[4])
        spread = count * xx - x * x
        slope = (count * xt - x * t) / spread if spread > 1e-6 * x * x else -1.0
        if slope <= 0:  # all were alike: nothing tells latency and bandwidth apart
            slope = t / x if x else self._seconds_a_byte
        self._seconds_a_byte = min(slope, t / x) if x else slope
        self._latency = max(0.0, (t - self._seconds_a_byte * x) / count)

    def expect(self, size: Any) -> Any:
        """Seconds until ``size`` bytes, a number or an array, are there whose reads begin now."""
        return self._latency + (self.under_way + size) * self._seconds_a_byte


@cache
def memory_bandwidth() -> float:
    """Bytes a second, measured by a copy when this is asked for first."""
    source, target = np.ones(COPY_SIZE, np.uint8), np.zeros(COPY_SIZE, np.uint8)
    began = perf_counter()
    target[:] = source
    return COPY_SIZE / max(perf_counter() - began, 1e-6)


@dataclass
class Speeds:
    """Of all tiers of one host."""

    dram: Speed = field(default_factory=lambda: Speed(20e-6, memory_bandwidth()))
    disk: Speed = field(default_factory=lambda: Speed(200e-6, 1e9))
    remote: Speed = field(default_factory=lambda: Speed(1e-3, 1e9))
    cold: Speed = field(default_factory=lambda: Speed(30e-3, 100e6))

    def arrivals(self, tiers: ArrayLike, sizes: ArrayLike) -> npt.NDArray[np.float32]:
        """Seconds until each of these blocks is there, and all before it, if their reads begin now in this order.

        Tiers answer beside each other. A block of tier NONE takes no time.
        """
        places, bytes_of = np.asarray(tiers, np.uint8), np.asarray(sizes, np.int64)
        seconds = np.zeros(len(places), np.float32)
        speeds = {Tier.DRAM: self.dram, Tier.DISK: self.disk, Tier.REMOTE: self.remote, Tier.COLD: self.cold}
        for tier, speed in speeds.items():
            which = places == tier
            seconds[which] = speed.expect(np.cumsum(bytes_of[which]))
        return np.maximum.accumulate(seconds)


def worth_reading(seconds: npt.NDArray[np.float32], sizes: ArrayLike, rate: float) -> int:
    """How many blocks of a chain, its first ones, to read, so that all of it is there soonest: the rest is computed.

    ``rate``: bytes of blocks that are computed in a second. ``seconds``: as of `Speeds.arrivals`.
    """
    gained = np.cumsum(sizes) / rate - seconds
    return int(gained.argmax()) + 1 if gained.max(initial=0) > 0 else 0
