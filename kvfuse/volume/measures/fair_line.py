"""The order in which waiting callers are served: by weighted fair queueing of bytes over namespaces.

Each caller has a *start*: the virtual time at which its namespace has had the bytes that came before it, at a rate of
its weight. The least start is first. So of namespaces that keep waiting each gets a share of its weight, and one that
waits seldom waits for one caller of each other namespace at most.

`PriorityLine` has such a line for reads, one for writes, one for prefetch: reads precede writes, and both precede
prefetch, but for one of the lower kind after `PASSED_MAX` of the higher ones that were served while it waited.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable
from enum import IntEnum
from typing import Any

import trio


class WaitKind(IntEnum):
    """Of what a caller waits to do; the lowest number first."""

    READ = 0
    WRITE = 1
    PREFETCH = 2


PASSED_MAX = {WaitKind.WRITE: 8, WaitKind.PREFETCH: 64}
"""how many callers of higher kinds are served before one of this kind that waits"""


class LinePlace:
    """Of one caller, for ``owner`` if the line is of several. ``go``: where the caller waits in a task, set when it may
    look whether it can go on; it makes it anew before it waits again."""

    __slots__ = ("go", "kind", "number", "owner", "start")

    def __init__(self, start: float, number: int, kind: WaitKind, owner: object) -> None:
        self.start = start
        self.number = number
        self.kind = kind
        self.owner: Any = owner
        self.go: trio.Event | None = None

    def __lt__(self, other: LinePlace) -> bool:
        return (self.start, self.number) < (other.start, other.number)


class FairLine:
    """The waiting callers, first one first. It has no lock."""

    def __init__(self, kind: WaitKind = WaitKind.WRITE) -> None:
        self.places: list[LinePlace] = []
        self._kind = kind
        self._time = 0.0
        """virtual: the start of the place that was served last"""
        self._ends: dict[Hashable, float] = {}
        """namespace -> virtual time at which it has had all that it asked for, since the line was empty"""
        self._count = 0

    def enter(self, namespace: Hashable, size: float, weight: float, owner: object = None) -> LinePlace:
        """A caller of a namespace waits for ``size`` bytes."""
        start = max(self._time, self._ends.get(namespace, 0.0))
        self._ends[namespace] = start + size / weight
        self._count += 1
        place = LinePlace(start, self._count, self._kind, owner)
        insort(self.places, place)
        return place

    def leave(self, place: LinePlace) -> None:
        """A caller has what it waited for, or gives up. The next one may look."""
        self._time = max(self._time, place.start) if place is self.places[0] else self._time
        self.places.remove(place)
        if not self.places:
            self._time, self._ends = 0.0, {}
        self.call_first()

    def call_first(self) -> None:
        """There may be memory for the first one."""
        if self.places and (go := self.places[0].go) is not None:
            go.set()

    def call_all(self) -> None:
        """Nobody need wait any more."""
        for place in self.places:
            if place.go is not None:
                place.go.set()


class PriorityLine:
    """A fair line for each kind of callers. It has no lock."""

    def __init__(self) -> None:
        self._lines = [FairLine(kind) for kind in WaitKind]
        self._passed = dict.fromkeys(WaitKind, 0)
        """callers of higher kinds that were served while one of this kind waited"""

    def enter(self, kind: WaitKind, namespace: Hashable, size: float, weight: float, owner: object) -> None:
        """``owner`` waits for its turn."""
        self._lines[kind].enter(namespace, size, weight, owner)

    def take(self) -> Any:
        """The owner whose turn it is; it leaves the line, in which somebody waits."""
        waiting = [kind for kind in WaitKind if self._lines[kind].places]
        overdue = [kind for kind in waiting if self._passed[kind] >= PASSED_MAX.get(kind, 1 << 62)]
        chosen = overdue[-1] if overdue else waiting[0]
        for kind in waiting:
            self._passed[kind] += kind > chosen
        self._passed[chosen] = 0
        line = self._lines[chosen]
        place = line.places[0]
        line.leave(place)
        return place.owner

    def drop(self, owner: object) -> None:
        """An owner waits no more, if it did."""
        for line in self._lines:
            for place in [place for place in line.places if place.owner == owner]:
                line.leave(place)
