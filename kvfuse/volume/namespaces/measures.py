"""What is measured of one namespace: sums and histograms of a few numbers, which cost the same however many blocks."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import Any

REQUEST_BOUNDS = tuple(float(f"{digit}e{power}") for power in range(-5, 1) for digit in (1, 3))
"""seconds that requests take: 10 microseconds to 3 s"""
AGE_BOUNDS = tuple(float(f"{digit}e{power}") for power in range(6) for digit in (1, 3))
"""seconds between two events of a block: 1 s to 3.5 days"""
OPERATIONS = "read", "write", "get", "put", "exists"
"""of files and of blocks by key"""


class Histogram:
    """How many values were at most each of ``bounds``, and above the bound before; the last count is of those above."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = array("Q", bytes(8 * (len(bounds) + 1)))
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """``count`` values of ``value``. Paths of a block do the same in a line of their own."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def statistics(self) -> dict[str, Any]:
        return {"bounds": self.bounds, "counts": self.counts.tolist(), "sum": round(self.sum, 6)}


class Measures:
    """What callers did in one namespace, through whichever door. For the event loop alone."""

    __slots__ = ("read_bytes", "seconds", "written_bytes")

    def __init__(self) -> None:
        self.read_bytes = 0
        self.written_bytes = 0
        self.seconds = {operation: Histogram(REQUEST_BOUNDS) for operation in OPERATIONS}
        """operation -> seconds from when it reached the volume to its result; a batch of a ring counts at its end"""

    def statistics(self) -> dict[str, Any]:
        return {
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
            "seconds": {operation: found.statistics() for operation, found in self.seconds.items()},
        }
