"""Requests replayed on a folder in a cache, beside exact simulations of it.

The replay is faster than the traffic was, so before each request the cache's clock is advanced to the time at which it
came: policies go by the seconds between requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from kvfuse_bench.cachefolder import CacheFolder, ChainAnswer
from kvfuse_bench.replay import ReplayPlan, engine_blocks, engine_key
from kvfuse_bench.simulate import Setup, Tally, simulate
from kvfuse_bench.traffic import Request

FOLDER = "blocks"
TIERS = ("dram", "disk", "remote")
"""where blocks come from: memory, the disk tier, the segments"""
SAMPLE_SECONDS = 0.5
_WRONG_NAMED_MAX = 20


class Sample(NamedTuple):
    """What the cache has at a time of the traffic, in seconds."""

    now: float
    blocks: int
    evicted: int
    """since the replay began"""
    hits: tuple[int, ...] = (0, 0, 0)
    """blocks since the replay began that came from each of `TIERS`"""


@dataclass
class CacheReplay:
    """One run. Sizes in bytes, times in seconds."""

    plan: ReplayPlan
    tally: Tally
    """its capacity is known at the end"""
    requests: list[Request] = field(default_factory=list)
    """as they were asked, in blocks of the engine"""
    samples: list[Sample] = field(default_factory=list)
    estimates: list[tuple[float, float]] = field(default_factory=list)
    """(blocks, hit ratio that a cache of so many would have), as the volume estimates it"""
    found_blocks: int = 0
    """that the cache had at the start"""
    refused: int = 0
    wrong: int = 0
    wrong_details: list[str] = field(default_factory=list)
    """of the first wrong blocks"""
    seconds: float = 0.0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    _known: dict[Setup, Tally] = field(default_factory=dict)
    """what was simulated"""

    @property
    def evicted(self) -> int:
        return self.samples[-1].evicted

    @property
    def begins_empty(self) -> bool:
        """So that simulations can be compared with it."""
        return self.found_blocks == 0

    def add(self, request: Request, answer: ChainAnswer) -> None:
        """``request``: as far as it was done, so that simulations are asked for the same."""
        self.requests.append(request)
        self.tally.count(request.arrival_ms / 1000, len(request.block_ids), answer.hits, answer.stored)
        self.refused += answer.refused
        self.wrong += len(answer.wrong)
        self.wrong_details += answer.wrong[: _WRONG_NAMED_MAX - len(self.wrong_details)]
        self.read_seconds += answer.read_seconds
        self.write_seconds += answer.write_seconds

    def simulated(self, factor: float = 1.0) -> Tally:
        """The same policy, with its water marks, on the same requests. ``factor``: times the capacity."""
        return self._simulated(_times(self.tally.setup, factor))

    def simulated_lru(self, factor: float = 1.0) -> Tally:
        """What evicts what was not used for longest, and stores everything, at the same size."""
        return self._simulated(_times(Setup("lru", "all", self.tally.setup.capacity), factor))

    def _simulated(self, setup: Setup) -> Tally:
        known = self._known.get(setup)
        if known is None or len(known.requests) != len(self.requests):
            known = self._known[setup] = simulate(self.requests, setup)
        return known


def _times(setup: Setup, factor: float) -> Setup:
    return setup._replace(capacity=max(1, round(setup.capacity * factor)))


def replay_on_cache(
    requests: Iterable[Request], target: Path, plan: ReplayPlan, progress: Callable[[CacheReplay], None]
) -> CacheReplay:
    """Ask a folder in ``target`` for every chain of ``requests``, in order. ``progress`` is called meanwhile."""
    with CacheFolder(target / FOLDER, plan.block_size) as folder:
        before = folder.statistics()
        result = CacheReplay(plan, Tally(_setup_of(before, plan)), found_blocks=before["cache"]["blocks"])
        result.samples.append(Sample(0.0, result.found_blocks, 0))
        start, sampled, asked = time.monotonic(), 0.0, 0

        def goes_on() -> bool:
            result.seconds = time.monotonic() - start
            progress(result)
            return _has_time(plan, start)

        for request in islice(requests, plan.request_max):
            numbers = tuple(islice(engine_blocks(request, plan), plan.block_max and plan.block_max - asked))
            if not numbers:
                continue
            first = result.requests[0].arrival_ms if result.requests else request.arrival_ms
            folder.advance_to((request.arrival_ms - first) / 1000)
            answer = folder.ask([engine_key(number, plan) for number in numbers], goes_on)
            if answer.done:
                result.add(request._replace(block_ids=numbers[: answer.done]), answer)
            asked += len(numbers)
            result.seconds = time.monotonic() - start
            if result.seconds - sampled >= SAMPLE_SECONDS:
                sampled = result.seconds
                _sample(result, folder.statistics(), before)
            progress(result)
            if not goes_on() or asked == plan.block_max:
                break
        _sample(result, folder.statistics(), before)
        _finish(result, folder.statistics())
    return result


def _has_time(plan: ReplayPlan, start: float) -> bool:
    return plan.duration is None or time.monotonic() - start < plan.duration


def _sample(result: CacheReplay, found: dict[str, Any], before: dict[str, Any]) -> None:
    now = result.requests[-1].arrival_ms / 1000 if result.requests else 0.0
    evicted = found["cache"]["room"] - before["cache"]["room"]
    hits = tuple(found["cache"]["hits"][tier] - before["cache"]["hits"][tier] for tier in TIERS)
    result.samples.append(Sample(now, found["cache"]["blocks"], evicted, hits))


def _setup_of(found: dict[str, Any], plan: ReplayPlan) -> Setup:
    settings, cache = found["settings"], found["cache"]
    block_size = cache["bytes"] / cache["blocks"] if cache["blocks"] else plan.block_size
    capacity = int(found["capacity"] / block_size)
    if settings["blocks"]:
        capacity = min(capacity, settings["blocks"])
    return Setup(settings["eviction"], settings["admission"], capacity, settings["low_water"], settings["high_water"])


def _finish(result: CacheReplay, found: dict[str, Any]) -> None:
    """Now that the cache has blocks it is known how many of them fit, and what others would find."""
    result.tally.setup = _setup_of(found, result.plan)
    cache = found["cache"]
    for factor, ratio in cache["estimated_hit_ratio"].items():
        result.estimates.append((float(factor.removesuffix("x")) * max(cache["blocks"], 1), ratio))
