"""Policies alone, without a volume: what hit ratio each has on a run of requests, and what it writes for it.

A request asks for its chain of trace blocks in order, and is served as far as the chain is there without a gap. Then
those of its other blocks that the policy admits are stored, and victims make room for them. The capacity counts
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, product, takewhile
from typing import NamedTuple

from kvfuse.bench.traffic import Request
from kvfuse.errors import ConfigError
from kvfuse.policy import Policy, make_policy

WINDOW_SECONDS = 120.0
"""of the traffic: one point of the hit ratio over time"""

PROGRESS_REQUESTS = 250


class Setup(NamedTuple):
    """One policy at one capacity, in blocks."""

    policy: str
    admission: str
    capacity: int

    @property
    def name(self) -> str:
        return f"{self.policy} + {self.admission}"


class Point(NamedTuple):
    """Counts of blocks in one window of the traffic."""

    asked: int
    hits: int


@dataclass
class Simulation:
    """What one setup made of the requests; counts of blocks."""

    setup: Setup
    asked: int = 0
    hits: int = 0
    """found without a gap from the start of their prompt"""
    written: int = 0
    windows: dict[int, Point] = field(default_factory=dict)
    """number of the window of ``WINDOW_SECONDS`` -> its counts"""

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.asked if self.asked else 0.0

    def count(self, now: float, asked: int, hits: int, written: int) -> None:
        self.asked += asked
        self.hits += hits
        self.written += written
        window = int(now // WINDOW_SECONDS)
        before = self.windows.get(window, Point(0, 0))
        self.windows[window] = Point(before.asked + asked, before.hits + hits)

    def hit_ratios(self) -> Iterator[tuple[float, float]]:
        """(end of the window in seconds, hit ratio in it), in the order of time."""
        for window, point in sorted(self.windows.items()):
            yield (window + 1) * WINDOW_SECONDS, point.hits / point.asked


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
) -> Simulation:
    """``progress`` is called with the number of requests done since its last call."""
    policy = make_policy(setup.policy, setup.admission)
    result = Simulation(setup)
    number = 0
    for number, request in enumerate(requests, start=1):
        keys, now = request.block_ids, request.arrival_ms / 1000
        hits = sum(1 for _ in takewhile(policy.__contains__, keys))
        result.count(now, len(keys), hits, store(policy, keys, now, setup.capacity))
        if number % PROGRESS_REQUESTS == 0:
            progress(PROGRESS_REQUESTS)
    progress(number % PROGRESS_REQUESTS)
    return result


def store(policy: Policy, keys: tuple[int, ...], now: float, capacity: int) -> int:
    """What a cache of ``capacity`` blocks does after it has served a request; the number of blocks that it writes."""
    policy.used(keys, now)
    absent = [key for key in keys if key not in policy]
    admitted = policy.admits(absent, now, len(policy) < capacity)
    new = [key for key, admits in zip(absent, admitted, strict=True) if admits][:capacity]
    excess = len(policy) + len(new) - capacity
    if excess > 0:
        policy.victims(excess, now)
    for key in new:
        policy.added(key, 1, now)
    return len(new)
