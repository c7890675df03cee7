"""Policies alone, without a volume: what hit ratio each has on a run of requests, and what it writes for it.

A request asks for its chain of trace blocks in order, and is served as far as the chain is there without a gap. Then
those of its other blocks that the policy admits are stored, and victims make room for them. The capacity counts
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate, islice, product, takewhile
from typing import NamedTuple

from kvfuse.errors import ConfigError
from kvfuse.policy import Policy, make_policy
from kvfuse.policy.column_policy import ColumnPolicy
from kvfuse_bench.columncache import ColumnCache
from kvfuse_bench.traffic import Request

POINTS = 30
"""of the hit ratio over time"""

PROGRESS_REQUESTS = 250


class Setup(NamedTuple):
    """One policy at one capacity, in blocks."""

    policy: str
    admission: str
    capacity: int
    low_water: float = 1.0
    """share of the capacity that victims leave"""
    high_water: float = 1.0
    """share of the capacity beyond which victims go"""
    in_rows: bool = False
    """by the policy of columns"""

    @property
    def name(self) -> str:
        return f"{self.policy} + {self.admission}{' in rows' if self.in_rows else ''}"


class Served(NamedTuple):
    """One request, at ``now`` seconds; counts of blocks."""

    now: float
    asked: int
    hits: int
    written: int


@dataclass
class Tally:
    """What one setup made of the requests; counts of blocks."""

    setup: Setup
    asked: int = 0
    hits: int = 0
    """found without a gap from the start of their prompt"""
    written: int = 0
    requests: list[Served] = field(default_factory=list)

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.asked if self.asked else 0.0

    def count(self, now: float, asked: int, hits: int, written: int) -> None:
        self.asked += asked
        self.hits += hits
        self.written += written
        self.requests.append(Served(now, asked, hits, written))

    def hit_ratios(self, count: int = POINTS) -> list[tuple[float, float]]:
        """(end in seconds, hit ratio) of ``count`` spans of the time; those without requests are left out."""
        start, end = self.requests[0].now, self.requests[-1].now
        span = (end - start) / count or 1.0
        sums = [[0, 0] for _ in range(count)]
        for now, asked, hits, _ in self.requests:
            row = sums[min(int((now - start) / span), count - 1)]
            row[0] += asked
            row[1] += hits
        return [(start + (place + 1) * span, hits / asked) for place, (asked, hits) in enumerate(sums) if asked]

    def writes(self, count: int = POINTS) -> list[tuple[float, float]]:
        """(end in seconds, blocks written by then) of ``count`` spans of the time."""
        start, end = self.requests[0].now, self.requests[-1].now
        sums = [0] * count
        for now, _, _, written in self.requests:
            sums[min(int((now - start) * count / (end - start or 1.0)), count - 1)] += written
        ends = (start + (place + 1) * (end - start) / count for place in range(count))
        return list(zip(ends, map(float, accumulate(sums)), strict=True))


def make_setups(policies: Iterable[str], admissions: Iterable[str], capacities: Iterable[int]) -> list[Setup]:
    """Every policy with every admission at every capacity, each once."""
    return list(dict.fromkeys(Setup(*setup) for setup in product(policies, admissions, capacities)))


def limited(
    requests: Iterable[Request], request_max: int | None, block_max: int | None, seconds: float | None
) -> list[Request]:
    """The first requests, up to a number of them, of their blocks, or to a time of the traffic.

    ConfigError where none are left.
    """
    kept: list[Request] = []
    blocks = 0
    for request in islice(requests, request_max):
        blocks += len(request.block_ids)
        if (block_max and blocks > block_max) or (seconds is not None and request.arrival_ms >= 1000 * seconds):
            break
        kept.append(request)
    if not kept:
        raise ConfigError("no request is within the limits")
    return kept


def simulate(
    requests: Iterable[Request], setup: Setup, progress: Callable[[int], None] = lambda requests: None
) -> Tally:
    """``progress`` is called with the number of requests done since its last call."""
    policy = make_cache(setup)
    result = Tally(setup)
    number = 0
    for number, request in enumerate(requests, start=1):
        keys, now = request.block_ids, request.arrival_ms / 1000
        hits = sum(1 for _ in takewhile(policy.__contains__, keys))
        result.count(now, len(keys), hits, store(policy, keys, now, setup))
        if number % PROGRESS_REQUESTS == 0:
            progress(PROGRESS_REQUESTS)
    progress(number % PROGRESS_REQUESTS)
    return result


def make_cache(setup: Setup) -> Policy | ColumnCache:
    """An empty one."""
    if setup.in_rows:
        return ColumnCache(ColumnPolicy(setup.policy, setup.admission), 2 * setup.capacity + 1)
    return make_policy(setup.policy, setup.admission)


def store(policy: Policy | ColumnCache, keys: tuple[int, ...], now: float, setup: Setup) -> int:
    """What a cache does after it has served a request; the number of blocks that it writes."""
    policy.used(keys, now)
    absent = [key for key in keys if key not in policy]
    low = int(setup.capacity * setup.low_water)
    admitted = policy.admits(absent, now, len(policy) < low)
    new = [key for key, admits in zip(absent, admitted, strict=True) if admits][: setup.capacity]
    if len(policy) + len(new) > setup.capacity * setup.high_water:
        policy.victims(len(policy) + len(new) - low, now)
    if isinstance(policy, ColumnCache):
        policy.put(new, now)
        return len(new)
    for key in new:
        policy.added(key, 1, now)
    return len(new)
