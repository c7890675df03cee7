"""Measurements in alternating rounds, and a figure beside its reference."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

Side = Callable[[int], float]
"""Measures once; told the round's number, 0 for the warm-up."""
RowsSide = Callable[[int], Mapping[str, float]]
"""Measures several things at once: name of a row -> value."""
Row = TypeVar("Row", bound=Hashable)
"""names one of several things that are measured at once"""


@dataclass(frozen=True)
class Conditions:
    """Where every benchmark runs, and how much it does."""

    volumes: Path
    """an empty folder for volumes and mount points, on the disk that is measured"""
    memory: Path
    """an empty folder on tmpfs, for references"""
    round_count: int = 3
    scale: float = 1.0
    """1 for figures to publish, less for a quick look"""
    progress: Callable[[str], None] = lambda text: None


class Measured(NamedTuple):
    """A figure of several rounds: the median counts, the rounds show how far to trust it."""

    name: str
    rounds: list[float]

    @property
    def value(self) -> float:
        return statistics.median(self.rounds)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "rounds": self.rounds}


class Figure(NamedTuple):
    """One row of the result: what kvfuse reached, beside what was measured in the same rounds."""

    name: str
    unit: str
    measured: Measured
    reference: Measured | None
    target: float | None = None
    """of the value"""
    ratio_target: float | None = None
    """of value / reference"""
    less_is_better: bool = False
    note: str = ""
    """what was warm, and what else must be known"""
    others: tuple[Measured, ...] = ()
    """what else was measured in the same rounds; no target looks at it"""

    @property
    def ratio(self) -> float | None:
        if self.reference is None or not self.reference.value:
            return None
        return self.measured.value / self.reference.value

    @property
    def met(self) -> bool | None:
        """Both targets are; None where there is none."""
        pairs = [(self.measured.value, self.target), (self.ratio, self.ratio_target)]
        wanted = [(value, target) for value, target in pairs if value is not None and target is not None]
        if not wanted:
            return None
        return all(value <= target if self.less_is_better else value >= target for value, target in wanted)

    def to_json(self) -> dict[str, Any]:
        """Plain types, computed values included."""
        return {
            "name": self.name,
            "unit": self.unit,
            "value": self.measured.value,
            "rounds": self.measured.rounds,
            "reference": self.reference and self.reference.to_json(),
            "ratio": self.ratio,
            "target": self.target,
            "ratio_target": self.ratio_target,
            "less_is_better": self.less_is_better,
            "met": self.met,
            "note": self.note,
            "others": [other.to_json() for other in self.others],
        }


def alternate(sides: Mapping[str, Side], round_count: int) -> list[Measured]:
    """Measure all sides in each round, in turning order, so that a noisy neighbour hits them alike.

    A first round warms up (memory that the machine hands out for the first time is slow) and does not count.
    """

    def with_one_row(side: Side) -> Callable[[int], Mapping[str, float]]:
        return lambda number: {"": side(number)}

    return alternate_rows({name: with_one_row(side) for name, side in sides.items()}, round_count)[""]


def alternate_rows(
    sides: Mapping[str, Callable[[int], Mapping[Row, float]]], round_count: int
) -> dict[Row, list[Measured]]:
    """As ``alternate``, for sides that measure several things at once: what each row has, in the order of the sides."""
    results: dict[str, dict[Row, list[float]]] = {name: {} for name in sides}
    order = list(sides)
    for number in range(round_count + 1):
        for name in order if number % 2 else reversed(order):
            for row, value in sides[name](number).items():
                if number > 0:
                    results[name].setdefault(row, []).append(value)
    rows: dict[Row, list[Measured]] = {}
    for name, values in results.items():
        for row, rounds in values.items():
            rows.setdefault(row, []).append(Measured(name, rounds))
    return rows
