"""Slabs that have no slot size, and which of them is used next.

It is the lowest one; where slabs are on several devices, the lowest one of the device whose turn it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple, TypeVar

_T = TypeVar("_T")


class Stripe(NamedTuple):
    """Where slabs are that share a device."""

    name: bytes
    weight: int
    domain: str = ""
    """stripes of one name fail together"""


WHOLE = Stripe(b"", 1)
"""where slabs are on one device, or nothing is known of devices"""


class Spread(ABC):
    """On which devices the slabs of a volume are; that may change."""

    @abstractmethod
    def stripe(self, slab: int) -> Stripe:
        """Where a slab is."""

    @property
    @abstractmethod
    def window(self) -> int:
        """So many slabs in turn are on all devices, about."""


class Turns:
    """Whose turn it is: one of twice the weight has two turns while another has one.

    Stripes of one domain do not follow each other where one of another domain is due soon. One that had no slabs for a
    while has no turns to make up for.
    """

    def __init__(self) -> None:
        self._next: dict[bytes, float] = {}
        self._now = 0.0
        self._last = ""

    def take(self, stripes: Iterable[Stripe]) -> Stripe:
        """The next one of those that have a slab."""
        due = {stripe: max(self._next.get(stripe.name, 0.0), self._now) for stripe in stripes}
        self._now = min(due.values())
        stripe = min(
            due, key=lambda stripe: due[stripe] + (stripe.domain != "" and stripe.domain == self._last) / stripe.weight
        )
        self._next[stripe.name] = due[stripe] + 1 / stripe.weight
        self._last = stripe.domain
        return stripe

    def copy(self) -> Turns:
        other = Turns()
        other._next, other._now, other._last = dict(self._next), self._now, self._last
        return other


class FreeSlabs:
    """Free slabs: some known by number, and all from ``unused_start`` on."""

    def __init__(self, unused_start: int) -> None:
        self.unused_start = unused_start
        """this slab and all after it are free: never used, or not since the start"""
        self.spread: Spread | None = None
        self._stripes: dict[bytes, tuple[Stripe, list[int]]] = {}
        """heaps of those below ``unused_start``, none of them empty"""
        self._count = 0
        self._turns = Turns()

    def count(self, end: int) -> int:
        """Free slabs, of which none is behind ``end``."""
        return self._count + max(0, end - self.unused_start)

    def __iter__(self) -> Iterator[int]:
        """Those below ``unused_start``, ascending."""
        return iter(sorted(slab for _, heap in self._stripes.values() for slab in heap))

    def add(self, slab: int) -> None:
        stripe = self.spread.stripe(slab) if self.spread is not None else WHOLE
        heappush(self._stripes.setdefault(stripe.name, (stripe, []))[1], slab)
        self._count += 1

    def replace(self, slabs: Iterable[int]) -> None:
        """Have these below ``unused_start``."""
        self._stripes.clear()
        self._count = 0
        for slab in slabs:
            self.add(slab)

    def remove(self, slab: int) -> None:
        """ValueError: it is not free."""
        while self.unused_start <= slab:
            self._use_next()
        name = next((name for name, (_, heap) in self._stripes.items() if slab in heap), None)
        if name is None:
            raise ValueError(f"slab {slab} is not free")
        heap = self._stripes[name][1]
        heap.remove(slab)
        heapify(heap)
        self._shrunk(name)

    def take(self, end: int) -> int:
        """The next one; there is one before ``end``."""
        if self.spread is not None:
            self._widen(self.spread, end)
        if not self._count:
            self.unused_start += 1
            return self.unused_start - 1
        name = self._turns.take(sorted(stripe for stripe, _ in self._stripes.values())).name
        slab = heappop(self._stripes[name][1])
        self._shrunk(name)
        return slab

    def next(self, count: int, end: int) -> list[int]:
        """What `take` would give, so many times."""
        while True:
            turns, start = self._turns.copy(), self.unused_start
            found = [self.take(end) for _ in range(min(count, self.count(end)))]
            self._turns = turns
            if self.spread is None:
                self.unused_start = start
            for slab in found:
                if slab < self.unused_start:
                    self.add(slab)
            if self.unused_start == start:  # else others are known by now than when the first was taken
                return found

    def _shrunk(self, name: bytes) -> None:
        self._count -= 1
        if not self._stripes[name][1]:
            del self._stripes[name]

    def _widen(self, spread: Spread, end: int) -> None:
        """Know enough of them by number to have one of each device, if it has any soon."""
        while self._count < spread.window and self.unused_start < end:
            self._use_next()

    def _use_next(self) -> None:
        self.add(self.unused_start)
        self.unused_start += 1
