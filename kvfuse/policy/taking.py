"""One choice of blocks that go: candidates in the order of a policy, until their bytes are enough."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from kvfuse.policy.blockrows import Mask, Numbers, Places
from kvfuse.policy.blockset import BlockSet, Settle
from kvfuse.policy.candidates import EVERYTHING, ROW_OF, by_table, no_candidates

SHARE = 0.03
"""of the blocks of a queue: what a scan makes candidates; twice as many for each further scan of one choice"""
_SHARE_MAX = 0.25
_SCANS_MAX = 100
_COUNT_MIN, _COUNT_MAX = 32, 65_536
"""candidates that are looked at together"""


class Spare(ABC):
    """Which candidates stay for now, and what becomes of them."""

    @abstractmethod
    def stay(self, uses: NDArray[np.uint8]) -> Mask:
        """Of candidates with these uses."""

    @abstractmethod
    def put(self, number: int, rows: Places) -> None:
        """Give those that stay another place."""


class Taking:
    """Takes candidates for ``size`` bytes. ``skip``: flags of blocks that do not go."""

    def __init__(self, blocks: BlockSet, settle: Settle, size: int, now: float, skip: int) -> None:
        self.left = size
        """bytes that are to be taken yet"""
        self.now = now
        self.taken: list[Numbers] = []
        self.sizes: list[Numbers] = []
        self.ages: list[NDArray[np.float64]] = []
        """seconds since the last use of each"""
        self.skip = skip
        self.spared = 0
        """blocks that were looked at and stayed"""
        self._blocks = blocks
        self._settle = settle
        self._share = SHARE
        self._scans = 0

    def take(self, queue: int, count: int = EVERYTHING, spare: Spare | None = None) -> int:
        """Take from a queue, and look at no more than ``count`` blocks: how many were, with those spared."""
        seen = 0
        while self.left > 0 and seen < count:
            candidates = self._next(queue, min(count - seen, self._guess()))
            if not candidates.size:
                break
            seen += self._take(queue, candidates, spare)
        return seen

    def taken_since(self, part: int) -> Numbers:
        """Those of the parts of ``taken`` from this one on."""
        return np.concatenate((no_candidates(), *self.taken[part:]), axis=1)

    def _guess(self) -> int:
        mean = max(1, self._blocks.size // max(1, self._blocks.count))
        return min(_COUNT_MAX, max(_COUNT_MIN, self.left // mean * 5 // 4))

    def _next(self, queue: int, count: int) -> Numbers:
        candidates = self._blocks.queues[queue].next(count)
        if candidates.size or self._scans >= _SCANS_MAX:
            return candidates
        self._blocks.refill(self._share, self.skip, self.now, self._settle)
        self._scans += 1
        self._share = min(2 * self._share, _SHARE_MAX)
        return self._blocks.queues[queue].next(count)

    def _take(self, queue: int, candidates: Numbers, spare: Spare | None) -> int:
        blocks = self._blocks
        good, sizes, uses = blocks.check(queue, candidates, self.skip)
        places = np.flatnonzero(good)
        stay = spare.stay(uses[places]) if spare is not None else np.zeros(len(places), np.bool_)
        sums = np.cumsum(np.where(stay, 0, sizes[places]))
        used = candidates.shape[1]
        if len(places) and sums[-1] >= self.left:
            places = places[: int(np.searchsorted(sums, self.left)) + 1]
            stay, used = stay[: len(places)], int(places[-1]) + 1
        blocks.queues[queue].drop(used)
        self._leave(candidates[:, places[~stay]], sizes[places[~stay]])
        if spare is not None and stay.any():
            spared = candidates[:, places[stay]]
            self.spared += spared.shape[1]
            for number, which in by_table(spared):
                spare.put(number, spared[ROW_OF][which])
        return len(places)

    def leave_until(self, candidates: Numbers, size: int) -> None:
        """Take these, which were not asked of a queue, up to that with which they have ``size`` bytes."""
        sizes = np.empty(candidates.shape[1], np.int64)
        for number, which in by_table(candidates):
            sizes[which] = self._blocks.sizes(self._blocks.tables[number], candidates[ROW_OF][which])
        count = int(np.searchsorted(np.cumsum(sizes), size)) + 1
        self._leave(candidates[:, :count], sizes[:count])

    def _leave(self, candidates: Numbers, sizes: Numbers) -> None:
        if candidates.size:
            size = int(sizes.sum())
            self.left -= size
            self.ages.append(self._blocks.leave(candidates, size, self.now))
            self.taken.append(candidates)
            self.sizes.append(sizes)
