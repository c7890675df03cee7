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
import math
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvfuse.policy.seen import SMALL_BATCH, mix, mix_one

FOLLOWED_MAX = 16_384
"""keys; some 250 bytes each. The error is about 1 % of all requests, and falls with the root of it"""
FACTORS = (0.5, 1.0, 2.0, 4.0, float("inf"))
"""times the capacity: what ``ratios`` answers for"""

_STEPS = 8
"""bins of distances for each doubling"""
_BINS = 48 * _STEPS
_HASHES = 1 << 64


class HitEstimate:
    """Follows a sample of all requests for blocks. Of chains it expects what ``Policy.used`` is given."""

    def __init__(self, followed_max: int = FOLLOWED_MAX) -> None:
        self._followed_max = followed_max
        self._threshold = _HASHES - 1
        """the largest hash that is followed"""
        self._last_use: dict[int, int] = {}
        """followed key -> moment of its last use; moments count the uses of followed keys"""
        self._keys = array("Q", bytes(16 * followed_max))
        """moment -> key that was used then"""
        self._is_last = np.zeros(2 * followed_max, dtype=np.bool_)
        """moment -> that was the last use of its key"""
        self._now = 0
        self._largest: list[tuple[int, int]] = []
        """heap of (- hash, key)"""
        self._requests = 0
        self._sampled = 0.0
        self._bins = [0.0] * _BINS

    def ask(self, keys: Sequence[int] | NDArray[np.uint64]) -> int:
        """Blocks were asked for, present or not: a chain, root first. How many of them are followed."""
        self._requests += len(keys)
        followed = self._followed(keys)
        weight = _HASHES / (self._threshold + 1)
        self._sampled += weight * len(followed)
        for key, _ in followed:
            if (moment := self._last_use.get(key)) is not None:
                distance = weight * np.count_nonzero(self._is_last[moment + 1 : self._now])
                self._bins[min(int(_bin_of(distance)), _BINS - 1)] += weight
        for key, hashed in reversed(followed):  # the root is the most recent, as in the policies
            self._touch(key, hashed)
        return len(followed)

    def shrink(self, count_min: int) -> None:
        """Follow half of the keys from now on, but not fewer than ``count_min``."""
        self._followed_max = max(self._followed_max // 2, min(count_min, self._followed_max))
        while len(self._largest) > self._followed_max:
            largest, key = heapq.heappop(self._largest)
            self._threshold = -largest - 1
            self._is_last[self._last_use.pop(key)] = False

    def stored(self, key: int) -> None:
        """A block was stored. One that nobody had asked for can be hit from now on: not all who store look before."""
        if key not in self._last_use and (hashed := mix_one(key)) <= self._threshold:
            self._touch(key, hashed)

    def stored_column(self, keys: NDArray[np.uint64]) -> None:
        """`stored`, for many."""
        for key, hashed in self._followed(keys):
            if key not in self._last_use:
                self._touch(key, hashed)

    def hit_ratio(self, blocks: float) -> float:
        """Hits of a cache of so many blocks among all requests so far; of an endless one where it is infinite."""
        if not self._requests:
            return 0.0
        reach = min(_bin_of(blocks), _BINS)
        whole = int(reach)
        hits = sum(self._bins[:whole])
        if whole < _BINS:
            hits += (reach - whole) * self._bins[whole]
        return min(1.0, max(0.0, (hits + self._requests - self._sampled) / self._requests))

    def ratios(self, capacity_blocks: float) -> dict[float, float]:
        """Factor of ``FACTORS`` -> hit ratio of so many times ``capacity_blocks``."""
        return {factor: self.hit_ratio(factor * capacity_blocks) for factor in FACTORS}

    def _followed(self, keys: Sequence[int] | NDArray[np.uint64]) -> list[tuple[int, int]]:
        """(key, its hash) of those that are followed."""
        if isinstance(keys, np.ndarray):
            hashes = mix(keys)
            places = np.flatnonzero(hashes <= np.uint64(self._threshold))
            return list(zip(keys[places].tolist(), hashes[places].tolist(), strict=True))
        if len(keys) < SMALL_BATCH:
            return [(key, hashed) for key in keys if (hashed := mix_one(key)) <= self._threshold]
        hashes = mix(keys)
        places = np.flatnonzero(hashes <= np.uint64(self._threshold))
        return list(zip([keys[place] for place in places.tolist()], hashes[places].tolist(), strict=True))

    def _touch(self, key: int, hashed: int) -> None:
        """A followed key is used, or becomes one."""
        former = self._last_use.pop(key, None)
        if former is not None:
            self._is_last[former] = False
        elif not self._has_place(key, hashed):
            return
        if self._now == len(self._is_last):
            self._count_anew()
        self._last_use[key], self._keys[self._now], self._is_last[self._now] = self._now, key, True
        self._now += 1

    def _has_place(self, key: int, hashed: int) -> bool:
        """A new key may be followed, if need be instead of another one."""
        if hashed > self._threshold:
            return False
        if len(self._largest) < self._followed_max:
            heapq.heappush(self._largest, (-hashed, key))
            return True
        largest, dropped = heapq.heappushpop(self._largest, (-hashed, key))
        self._threshold = -largest - 1
        if dropped != key:
            self._is_last[self._last_use.pop(dropped)] = False
        return dropped != key

    def _count_anew(self) -> None:
        """Number the last uses from 0: half of all moments or more are none any more."""
        keys = [self._keys[moment] for moment in np.flatnonzero(self._is_last).tolist()]
        self._last_use = dict(zip(keys, range(len(keys)), strict=True))
        self._keys[: len(keys)] = array("Q", keys)
        self._now = len(keys)
        self._is_last[: self._now], self._is_last[self._now :] = True, False


def _bin_of(distance: float) -> float:
    return _STEPS * math.log2(1 + distance)
