"""Figures of one namespace of blocks: how often blocks were asked for and found, stored and removed, and why.

A *key* is the first half of a name's fingerprint. One request
of an engine often asks for a block twice, whether it is there, and then for its bytes: that is one use.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfuse.policy.estimate import HitEstimate
from kvfuse.policy.seen import NEVER, SeenKeys
from kvfuse.volume.measures.measures import AGE_BOUNDS, MISSES, REASONS, Histogram, SegmentsTier

FOLLOWED_MAX, FOLLOWED_MIN = 1 << 12, 1 << 9
"""keys that the estimate of other capacities follows; fewer where these are used much"""
FOLLOWED_USES_MAX = 5000
"""of them in a second"""
_ASKED_SIZE = 1 << 16
_GONE_SIZE = 1 << 17
"""keys of removed blocks that are remembered, so that a miss is known to be one of those"""
_SAMPLED = np.uint64(15)
"""a key is followed for gaps between uses where these bits are 0"""
_GAPS_SIZE = 1 << 20
_WORDS = ("", *dict(MISSES))
"""why a block went, by its number"""

Words = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
Ages = npt.NDArray[np.float64]


class _Keys:
    """The latest keys, of which one may take the place of another: 8 bytes each."""

    def __init__(self, size: int) -> None:
        self.table: Words = np.zeros(size, np.uint64)
        self._mask = np.uint64(size - 1)

    def places(self, keys: Words) -> npt.NDArray[np.intp]:
        return (keys & self._mask).astype(np.intp)

    def add(self, keys: Words) -> None:
        self.table[self.places(keys)] = keys

    def take(self, keys: Words) -> Mask:
        """Forget keys; which of them were there."""
        places = self.places(keys)
        found: Mask = self.table[places] == keys
        self.table[places[found]] = 0
        return found


class BlockBooks:
    """``lock``: of whoever calls it, in any thread. Times are seconds of one clock that never runs backwards."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counters: Counter[str] = Counter()
        """as of `Cache.counters`, but for present blocks that had to be read: ``copied`` from the disk tier,
        ``brought`` from elsewhere"""
        self.residence = Histogram(AGE_BOUNDS)
        self.reuse_gap = Histogram(AGE_BOUNDS)
        self._estimate = HitEstimate(FOLLOWED_MAX)
        self._followed_uses = 0
        self._looked_at = 0.0
        self._asked = _Keys(_ASKED_SIZE), _Keys(_ASKED_SIZE)
        """keys of blocks that were absent, and that were there; those not read since"""
        self._gone = _Keys(_GONE_SIZE)
        self._reasons: npt.NDArray[np.uint8] = np.zeros(_GONE_SIZE, np.uint8)
        self._uses = SeenKeys(_GAPS_SIZE)

    # -- what happens to blocks ------------------------------------------------------------------------

    def asked(self, keys: Words, found: Mask, now: float) -> None:
        """Somebody asked whether a chain of blocks is there, root first."""
        self._count(keys, found, now)
        for number, known in enumerate(self._asked):
            known.add(keys[found == bool(number)])

    def read(self, keys: Words, found: Mask, now: float) -> Mask:
        """Somebody read blocks, or tried to. Which of these are uses: `asked` had not counted them."""
        counts = np.ones(len(keys), np.bool_)
        for number, known in enumerate(self._asked):  # who asked before it was stored uses it another time
            which = found == bool(number)
            counts[which] = ~known.take(keys[which])
        self._count(keys[counts], found[counts], now)
        return counts

    def _count(self, keys: Words, found: Mask, now: float) -> None:
        counters, absent = self.counters, keys[~found]
        counters["asked"] += len(keys)
        counters["present"] += len(keys) - len(absent)
        if len(absent):
            places = self._gone.places(absent)
            why = np.where(self._gone.table[places] == absent, self._reasons[places], 0)
            for number, count in enumerate(np.bincount(why).tolist()):
                counters[f"missed_{_WORDS[number]}" if number else "absent"] += count
        self._followed_uses += self._estimate.ask(keys)
        sampled = np.unique(keys[(keys & _SAMPLED) == 0])
        if len(sampled):
            gaps = self._uses.ask_column(sampled, now)
            self.reuse_gap.add_column(gaps[gaps != NEVER].astype(np.float64))

    def stored(self, keys: Words) -> None:
        """Blocks were put."""
        self.counters["stored"] += len(keys)
        self._estimate.stored_column(keys)
        self._gone.take(keys)

    def gone(self, keys: Words, reason: str, ages: Ages) -> None:
        """Blocks are gone. ``ages``: seconds since they were stored."""
        self.counters[reason] += len(keys)
        self._gone.add(keys)
        self._reasons[self._gone.places(keys)] = _WORDS.index(reason)
        self.residence.add_column(ages)

    def slow(self, count: int) -> None:
        """So many of the blocks that were `asked` for last are there, and not worth reading."""
        self.counters["present"] -= count
        self.counters["missed_slow"] += count

    def brought(self, are_copies: Mask) -> None:
        """Blocks that were not in memory are read; which of them from the disk tier."""
        copied = int(np.count_nonzero(are_copies))
        self.counters["copied"] += copied
        self.counters["brought"] += len(are_copies) - copied

    def look(self, now: float) -> None:
        """From time to time: follow fewer keys, if these are used so much that it takes long."""
        if self._followed_uses > FOLLOWED_USES_MAX * max(1.0, now - self._looked_at):
            self._estimate.shrink(FOLLOWED_MIN)
        elif now < self._looked_at + 1:
            return
        self._looked_at, self._followed_uses = now, 0

    # -- figures -----------------------------------------------------------------------------------------

    def statistics(
        self, blocks: int, size: int, unread: Mapping[str, int] = MappingProxyType({}), tier: SegmentsTier = "disk"
    ) -> dict[str, Any]:
        """As `Cache.statistics`, of a namespace that has so many blocks, of ``size`` bytes."""
        counters = self.counters.copy()
        counters["asked"] += unread.get("refused", 0)
        present = max(0, counters["present"] - sum(unread.values()) + unread.get("refused", 0))
        copied = min(present, counters["copied"])
        brought = min(present - copied, counters["brought"])
        hits = {"dram": present - copied - brought, "disk": copied, "remote": 0}
        hits[tier] += brought
        return {
            **{name: counters[name] for name in ("asked", "absent", "stored", "refused", *REASONS)},
            "present": present,
            "hits": hits,
            "misses": {
                "absent": counters["absent"],
                **{word: counters[f"missed_{reason}"] for reason, word in MISSES},
                **unread,
            },
            "hit_ratio": round(present / counters["asked"], 4) if counters["asked"] else None,
            "blocks": blocks,
            "bytes": size,
            "residence": self.residence.statistics(),
            "reuse_gap": self.reuse_gap.statistics(),
            "estimated_hit_ratio": {
                f"{factor:g}x": round(ratio, 4) for factor, ratio in self._estimate.ratios(max(blocks, 1)).items()
            },
        }
