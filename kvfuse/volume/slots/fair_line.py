"""The order in which callers that wait for memory get it: by weighted fair queueing of bytes over namespaces.

Each caller has a *start*: the virtual time at which its namespace has had the bytes that came before it, at a rate of
its weight. The least start is first. So of namespaces that keep waiting each gets a share of its weight, and one that
waits seldom waits for one caller of each other namespace at most.
"""

from __future__ import annotations

from bisect import insort

import trio


class Place:
    """Of one caller. ``go``: set when it may look whether there is memory; it makes it anew before it waits again."""

    __slots__ = ("go", "number", "start")

    def __init__(self, start: float, number: int) -> None:
        self.start = start
        self.number = number
        self.go = trio.Event()

    def __lt__(self, other: Place) -> bool:
        return (self.start, self.number) < (other.start, other.number)


class FairLine:
    """The waiting callers, first one first. For the event loop alone."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self._time = 0.0
        """virtual: the start of the place that was served last"""
        self._ends: dict[int, float] = {}
        """namespace -> virtual time at which it has had all that it asked for, since the line was empty"""
        self._count = 0

    def enter(self, namespace: int, size: int, weight: float) -> Place:
        """A caller of a namespace waits for ``size`` bytes."""
        start = max(self._time, self._ends.get(namespace, 0.0))
        self._ends[namespace] = start + size / weight
        self._count += 1
        place = Place(start, self._count)
        insort(self.places, place)
        return place

    def leave(self, place: Place) -> None:
        """A caller has what it waited for, or gives up. The next one may look."""
        self._time = max(self._time, place.start) if place is self.places[0] else self._time
        self.places.remove(place)
        if not self.places:
            self._time, self._ends = 0.0, {}
        self.call_first()

    def call_first(self) -> None:
        """There may be memory for the first one."""
        if self.places:
            self.places[0].go.set()

    def call_all(self) -> None:
        """Nobody need wait any more."""
        for place in self.places:
            place.go.set()
