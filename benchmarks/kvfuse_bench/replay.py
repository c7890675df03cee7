"""Requests replayed on a folder of blocks, every byte verified, and the figures of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvfuse_bench.cache import Answer, BlockFolder, Outcome
from kvfuse_bench.content import block_key
from kvfuse_bench.mountpoint import mount_of
from kvfuse_bench.traffic import TRACE_BLOCK_TOKENS, Request

WINDOW_BLOCKS = 64
"""blocks asked for at once: room is made for a window before it is written"""

_WRONG_NAMED_MAX = 20


@dataclass(frozen=True)
class ReplayPlan:
    """The traffic of one run. Ends at ``request_max``, ``block_max`` or ``duration`` (seconds), the first of them."""

    model: str
    block_tokens: int
    block_size: int
    worker_count: int = 2
    request_max: int | None = None
    block_max: int | None = None
    duration: float | None = None


class Space(NamedTuple):
    """A file system's use in bytes, and the record round trips so far (None: no kvfuse mount)."""

    used: int
    round_trips: int | None


@dataclass
class ReplayResult:
    """The counts of one run. Sizes in bytes, times in seconds."""

    block_size: int
    requests: int = 0
    ideal_hits: int = 0
    """hits of a cache that starts empty and never forgets"""
    hit_seconds: list[float] = field(default_factory=list)
    store_seconds: list[float] = field(default_factory=list)
    no_room: int = 0
    removed: int = 0
    wrong: int = 0
    wrong_details: list[str] = field(default_factory=list)
    """of the first wrong blocks"""
    seconds: float = 0.0
    payload_change: int = 0
    used_change: int = 0
    round_trips: int | None = None

    @property
    def blocks(self) -> int:
        return len(self.hit_seconds) + len(self.store_seconds) + self.no_room + self.wrong

    @property
    def hit_ratio(self) -> float:
        return len(self.hit_seconds) / self.blocks if self.blocks else 0.0

    @property
    def ideal_hit_ratio(self) -> float:
        return self.ideal_hits / self.blocks if self.blocks else 0.0

    @property
    def round_trips_per_1000(self) -> float | None:
        return None if self.round_trips is None or not self.blocks else 1000 * self.round_trips / self.blocks

    @property
    def space_overhead(self) -> float | None:
        """Bytes taken beyond the blocks' own, as a share of these; None where too few came to stay to tell."""
        enough = self.payload_change >= WINDOW_BLOCKS * self.block_size
        return self.used_change / self.payload_change - 1 if enough else None

    def stream_rate(self, seconds: list[float]) -> float | None:
        """GB/s of one worker in transfers that took ``seconds``."""
        return len(seconds) * self.block_size / sum(seconds) / 1e9 if seconds else None

    def add(self, answer: Answer) -> None:
        match answer.outcome:
            case Outcome.HIT:
                self.hit_seconds.append(answer.seconds)
            case Outcome.STORED:
                self.store_seconds.append(answer.seconds)
            case Outcome.NO_ROOM:
                self.no_room += 1
            case Outcome.WRONG:
                self.wrong += 1
                if len(self.wrong_details) < _WRONG_NAMED_MAX:
                    self.wrong_details.append(answer.detail)


def quantiles_ms(seconds: list[float]) -> tuple[float, float, float] | None:
    """Milliseconds at 50, 90 and 99 %."""
    if not seconds:
        return None
    q50, q90, q99 = (1000 * float(value) for value in np.quantile(seconds, (0.5, 0.9, 0.99)))
    return q50, q90, q99


def engine_blocks(request: Request, plan: ReplayPlan) -> Iterator[int]:
    """Numbers of a prompt's blocks in prefix order. An unfinished one is not kept, unless it is the trace's."""
    per_trace_block = max(1, TRACE_BLOCK_TOKENS // plan.block_tokens)
    if per_trace_block == 1:
        return iter(request.block_ids)
    numbers = (block_id * per_trace_block + part for block_id in request.block_ids for part in range(per_trace_block))
    return islice(numbers, request.prompt_tokens // plan.block_tokens)


def engine_key(number: int, plan: ReplayPlan) -> bytes:
    """The key of a block of `engine_blocks`."""
    return block_key(plan.model, plan.block_tokens, plan.block_size, number)


def engine_keys(request: Request, plan: ReplayPlan) -> Iterator[bytes]:
    """The keys of a prompt's blocks in prefix order."""
    return (engine_key(number, plan) for number in engine_blocks(request, plan))


def replay(
    requests: Iterable[Request], folder: BlockFolder, plan: ReplayPlan, progress: Callable[[ReplayResult], None]
) -> ReplayResult:
    """Ask ``folder`` for every block of ``requests``, in order. ``progress`` is called after each window."""
    result = ReplayResult(plan.block_size)
    seen: set[bytes] = set()
    start = time.perf_counter()
    for request in islice(requests, plan.request_max):
        keys = engine_keys(request, plan)
        while window := list(islice(keys, _window(plan, result))):
            for answer in folder.ask(window):
                result.add(answer)
            result.ideal_hits += sum(key in seen for key in window)
            seen.update(window)
            result.seconds = time.perf_counter() - start
            progress(result)
            if plan.duration is not None and result.seconds >= plan.duration:
                break
        result.requests += 1
        if _ended(plan, result):
            break
    result.removed = folder.removed_count
    return result


def _window(plan: ReplayPlan, result: ReplayResult) -> int:
    return WINDOW_BLOCKS if plan.block_max is None else min(WINDOW_BLOCKS, plan.block_max - result.blocks)


def _ended(plan: ReplayPlan, result: ReplayResult) -> bool:
    if plan.block_max is not None and result.blocks >= plan.block_max:
        return True
    return plan.duration is not None and result.seconds >= plan.duration


def run(
    requests: Iterable[Request],
    target: Path,
    plan: ReplayPlan,
    capacity: int | None,
    progress: Callable[[ReplayResult], None],
) -> ReplayResult:
    """``replay`` on the folder ``target``, with what it took of space and round trips. ``capacity`` in bytes."""
    with BlockFolder(target, plan.block_size, plan.worker_count, capacity) as folder:
        before, payload_before = _space(target), folder.used
        result = replay(requests, folder, plan, progress)
        after = _space(target)
        result.payload_change = folder.used - payload_before
        result.used_change = after.used - before.used
        if before.round_trips is not None and after.round_trips is not None:
            result.round_trips = after.round_trips - before.round_trips
        return result


def _space(target: Path) -> Space:
    figures = os.statvfs(target)
    return Space((figures.f_blocks - figures.f_bfree) * figures.f_frsize, round_trips(target))


def round_trips(target: Path) -> int | None:
    """Record round trips of the kvfuse mount that ``target`` is on; None where it is on no such mount."""
    try:
        stats = json.loads((mount_of(target) / ".kvfuse" / "stats").read_bytes())
    except OSError:
        return None
    return int(stats["records"]["round_trips"])
