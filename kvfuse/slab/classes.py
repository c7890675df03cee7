"""Slot sizes: which there are, and which of them an extent of a given length takes.

Sizes are multiples of 4 KiB. A slot size costs more than itself where it does not tile a slab evenly: its
*share* is the slab's size divided by the slots that fit. An extent wastes the shares of its slots
less its own length, rounded up to 4 KiB.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from kvfuse.slab.layout import PAGE_SIZE

PLAN_PIECES_MAX = 4
WASTE_ACCEPTED = 0.03
"""A plan that wastes no more than this part of its length needs no more pieces."""

LEARN_AFTER = 64
"""Requests of one size after which an exact class for it is considered."""
LEARN_GAIN_MIN = 0.01
"""Part of its length that such a class must save, unless it saves pieces."""
LEARNED_MAX = 64

_STEPS = (4, 5, 6, 7)
"""Geometric sizes per doubling, in quarters of the power of two below them."""


class SizeClasses:
    """The slot sizes of one slab size: four per doubling, exact ones that were given, and learned ones."""

    def __init__(self, slab_size: int, exact: Iterable[int] = (), learned_max: int = LEARNED_MAX) -> None:
        """ValueError if one of ``exact`` is no multiple of 4 KiB or larger than a slab."""
        self.slab_size = slab_size
        self._slab_pages = slab_size // PAGE_SIZE
        self._pages = sorted({*_geometric_pages(self._slab_pages), *map(self._exact_pages, exact)})
        self._plans: dict[int, tuple[int, ...]] = {}
        self._requests: dict[int, int] = {}
        self._learned_left = learned_max

    @property
    def sizes(self) -> list[int]:
        """All slot sizes, ascending."""
        return [pages * PAGE_SIZE for pages in self._pages]

    def class_for(self, length: int) -> int:
        """The smallest slot size that holds ``length`` bytes. ValueError above the slab's size."""
        return self._class_pages(self._length_pages(length)) * PAGE_SIZE

    def plan(self, length: int) -> tuple[int, ...]:
        """The slot sizes, in order, that ``length`` bytes (1..slab_size) take; all but the last are filled wholly.

        The fewest pieces that waste no more than 3 %, else those up to 4 that waste least.
        """
        pages = -(-length // PAGE_SIZE)
        plan = self._plans.get(pages)
        if plan is None:
            self._length_pages(length)
            plan = self._plans[pages] = tuple(piece * PAGE_SIZE for piece in self._make_plan(pages))
        return plan

    def request(self, length: int) -> tuple[int, ...]:
        """The `plan` of an extent to be stored: a size asked often gets its exact class, if that saves space."""
        pages = -(-length // PAGE_SIZE)
        requests = self._requests.get(pages, 0)
        if requests < LEARN_AFTER and 0 < length <= self.slab_size:
            self._requests[pages] = requests + 1
            if requests + 1 == LEARN_AFTER:
                self._consider(pages)
        return self._plans.get(pages) or self.plan(length)

    def adopt(self, slot_size: int) -> None:
        """Take a slot size that an earlier life of the volume had learned. ValueError as for exact ones."""
        self._add(self._exact_pages(slot_size))

    def _consider(self, pages: int) -> None:
        """Learn the size itself, or else the exact size of its last piece, where that saves enough space or pieces."""
        plan = [size // PAGE_SIZE for size in self.plan(pages * PAGE_SIZE)]
        waste = self._share(plan) - pages
        last = pages - sum(plan[:-1])
        for candidate, exact_plan in ((pages, [pages]), (last, [*plan[:-1], last])):
            exact_waste = self._share(exact_plan) - pages
            saves = len(exact_plan) < len(plan) or waste - exact_waste > LEARN_GAIN_MIN * pages
            if saves and exact_waste <= WASTE_ACCEPTED * pages:
                self._add(candidate)
                return

    def _add(self, pages: int) -> None:
        if self._learned_left and pages not in self._pages:
            self._learned_left -= 1
            insort(self._pages, pages)
            self._plans.clear()

    def _make_plan(self, pages: int) -> tuple[int, ...]:
        plans: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
        best = self._cheapest(pages, 1, plans)
        for pieces_max in range(2, PLAN_PIECES_MAX + 1):
            if best[0] - pages <= WASTE_ACCEPTED * pages:
                break
            best = min(best, self._cheapest(pages, pieces_max, plans), key=lambda plan: plan[0])
        return best[1]

    def _cheapest(
        self, pages: int, pieces_max: int, plans: dict[tuple[int, int], tuple[float, tuple[int, ...]]]
    ) -> tuple[float, tuple[int, ...]]:
        """(share, pieces) of the cheapest plan for ``pages``; ``plans`` remembers what was found so far."""
        found = plans.get((pages, pieces_max))
        if found is not None:
            return found
        single = self._class_pages(pages)
        best: tuple[float, tuple[int, ...]] = (self._slab_pages / (self._slab_pages // single), (single,))
        if pieces_max > 1:
            # The largest of n pieces is at least an n-th of the whole; put it first.
            start = bisect_left(self._pages, -(-pages // pieces_max))
            for first in self._pages[start : bisect_left(self._pages, pages)]:
                rest_share, rest = self._cheapest(pages - first, pieces_max - 1, plans)
                share = self._slab_pages / (self._slab_pages // first) + rest_share
                if share < best[0]:
                    best = (share, (first, *rest))
        plans[pages, pieces_max] = best
        return best

    def _share(self, plan: list[int]) -> float:
        """Pages of slab that the pieces of a plan use up."""
        return sum(self._slab_pages / (self._slab_pages // piece) for piece in plan)

    def _class_pages(self, pages: int) -> int:
        return self._pages[bisect_left(self._pages, pages)]

    def _length_pages(self, length: int) -> int:
        if not 0 < length <= self.slab_size:
            raise ValueError(f"no slots for {length} bytes: an extent has 1 to {self.slab_size}")
        return -(-length // PAGE_SIZE)

    def _exact_pages(self, slot_size: int) -> int:
        if not 0 < slot_size <= self.slab_size or slot_size % PAGE_SIZE:
            raise ValueError(f"slot size {slot_size}: it must be a multiple of {PAGE_SIZE}, up to {self.slab_size}")
        return slot_size // PAGE_SIZE


def _geometric_pages(slab_pages: int) -> Iterable[int]:
    """1, 2, ... then four steps for each doubling, up to a whole slab."""
    power = 1
    while power < slab_pages:
        yield from (-(-power * step // 4) for step in _STEPS)
        power *= 2
    yield slab_pages
