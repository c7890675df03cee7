"""A matrix of operations, sizes and depths: what the ring benchmarks compare, and in which units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvfuse.sizes import KIB, format_size
from kvfuse_bench.rounds import Figure, Measured, Side, alternate

Timing = Callable[[int], list[float]]
"""Told the round's number: the seconds of each batch of that round."""

LISTS = frozenset({"exists", "absent"})
"""operations that name many keys in one call: those are the depth"""
SMALL_SIZE = 64 * KIB
"""below it operations a second are the figure, from it on bytes"""


class Cell(NamedTuple):
    """One place of the matrix that is measured."""

    operation: str
    size: int
    """bytes of each file range or block"""
    depth: int
    """operations of a batch, all under way at once"""

    @property
    def name(self) -> str:
        if self.operation in LISTS:
            return f"{self.operation}, {self.depth:,} keys a call"
        return f"{self.operation} {format_size(self.size)}, {self.depth} at once"

    @property
    def moves_bytes(self) -> bool:
        return self.operation != "view"

    @property
    def unit(self) -> str:
        if not self.moves_bytes:
            return "us each"
        return "/s" if self.size < SMALL_SIZE else "GB/s"

    def value(self, batch_seconds: list[float]) -> float:
        """In ``unit``."""
        per_second = self.depth * len(batch_seconds) / sum(batch_seconds)
        if not self.moves_bytes:
            return 1e6 / per_second
        return per_second if self.size < SMALL_SIZE else per_second * self.size / 1e9


@dataclass
class Watched:
    """A side's timing, and what its rate does not show."""

    timing: Timing
    medians: list[float] = field(default_factory=list)
    """microseconds of a batch, one figure a counted round"""
    tails: list[float] = field(default_factory=list)
    """the 99th percentile of the same"""

    def __call__(self, round_number: int) -> list[float]:
        times = self.timing(round_number)
        if round_number > 0:
            median, tail = np.percentile(times, (50, 99)) * 1e6
            self.medians.append(float(median))
            self.tails.append(float(tail))
        return times

    def measured(self) -> tuple[Measured, Measured]:
        return Measured("batch median us", self.medians), Measured("batch 99 % us", self.tails)


def compare(cell: Cell, kvfuse: Timing, references: Mapping[str, Timing], round_count: int) -> Figure:
    """The figure of ``kvfuse`` beside its references; the ratio is to the first of them."""
    watched = Watched(kvfuse)
    timings: dict[str, Timing] = {"kvfuse": watched, **references}

    def side(timing: Timing) -> Side:
        return lambda round_number: cell.value(timing(round_number))

    sides = {name: side(timing) for name, timing in timings.items()}
    measured, *others = alternate(sides, round_count)
    first = others.pop(0) if others else None
    beside = (*watched.measured(), *others)
    return Figure(cell.name, cell.unit, measured, first, less_is_better=not cell.moves_bytes, others=beside)
