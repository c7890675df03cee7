"""What hit ratio a cache of another size would have: an estimate from a sample of the keys, in fixed memory.

Spatially hashed sampling (SHARDS): a key is followed if its hash is below a threshold, so all requests for it are seen
or none. The reuse distance of a followed key, which is how many other followed keys were asked for since, times the
inverse of the sampled share, is its distance among all keys; least recently used eviction hits where the cache has
more blocks than that. When more keys are followed than there is memory for, those with the largest hashes are dropped
and the threshold falls to theirs.

A few keys, such as the block that all prompts start with, make up much of the requests, and are in the sample or not.
The sampled requests are counted with the inverse of the share at their time; what these sums lack of the true count of
requests is added to the shortest distances (SHARDS-adj), since that is where such keys are.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from kvfuse.policy.seen import mix, mix_one

FOLLOWED_MAX = 16_384
"""keys; some 250 bytes each. The error is about 1 % of all requests, and falls with the root of it"""
FACTORS = (0.5, 1.0, 2.0, 4.0, float("inf"))
"""times the capacity: what ``ratios`` answers for"""

_STEPS = 8
"""bins of distances for each doubling"""
_BINS = 48 * _STEPS
_HASHES = 1 << 64
_NEVER = -1


class HitEstimate:
    """Follows a sample of all requests for blocks. Of chains it expects what ``Policy.used`` is given."""

    def __init__(self, followed_max: int = FOLLOWED_MAX) -> None:
        self._followed_max = followed_max
        self._threshold = _HASHES - 1
        """the largest hash that is followed"""
        self._rows: dict[int, int] = {}
        self._last_use = np.full(followed_max, _NEVER, dtype=np.int64)
        self._largest: list[tuple[int, int]] = []
        """heap of (- hash, key)"""
        self._clock = 0
        self._requests = 0
        self._sampled = 0.0
        self._bins = np.zeros(_BINS)

    def ask(self, keys: Sequence[int]) -> None:
        """Blocks were asked for, present or not: a chain, root first."""
        self._requests += len(keys)
        hashes = mix(keys)
        followed = np.flatnonzero(hashes <= np.uint64(self._threshold)).tolist()
        weight = _HASHES / (self._threshold + 1)
        self._sampled += weight * len(followed)
        for index in followed:
            self._count(keys[index], weight)
        for index in reversed(followed):  # the root is the most recent, as in the policies
            self._touch(keys[index], int(hashes[index]))

    def stored(self, key: int) -> None:
        """A block was stored. One that nobody had asked for can be hit from now on: not all who store look before."""
        if key not in self._rows:
            self._touch(key, mix_one(key))

    def hit_ratio(self, blocks: float) -> float:
        """Hits of a cache of so many blocks among all requests so far; of an endless one where it is infinite."""
        if not self._requests:
            return 0.0
        reach = min(_bin_of(blocks), _BINS)
        whole = int(reach)
        hits = float(self._bins[:whole].sum())
        if whole < _BINS:
            hits += (reach - whole) * float(self._bins[whole])
        return min(1.0, max(0.0, (hits + self._requests - self._sampled) / self._requests))

    def ratios(self, capacity_blocks: float) -> dict[float, float]:
        """Factor of ``FACTORS`` -> hit ratio of so many times ``capacity_blocks``."""
        return {factor: self.hit_ratio(factor * capacity_blocks) for factor in FACTORS}

    def _count(self, key: int, weight: float) -> None:
        row = self._rows.get(key)
        if row is not None:
            distance = weight * np.count_nonzero(self._last_use > self._last_use[row])
            self._bins[min(int(_bin_of(distance)), _BINS - 1)] += weight

    def _touch(self, key: int, hashed: int) -> None:
        if hashed > self._threshold:
            return
        row = self._rows.get(key)
        if row is None:
            row = self._row_for(key, hashed)
        if row != _NEVER:
            self._last_use[row] = self._clock
            self._clock += 1

    def _row_for(self, key: int, hashed: int) -> int:
        """A row for a new key, of another one if need be; _NEVER if the key itself is dropped."""
        if len(self._rows) < self._followed_max:
            heapq.heappush(self._largest, (-hashed, key))
            row = self._rows[key] = len(self._rows)
            return row
        largest, dropped = heapq.heappushpop(self._largest, (-hashed, key))
        self._threshold = -largest - 1
        if dropped == key:
            return _NEVER
        row = self._rows[key] = self._rows.pop(dropped)
        return row


def _bin_of(distance: float) -> float:
    return _STEPS * float(np.log2(1 + distance))
