"""Timing batches one by one. Standard library alone: ``mooncake_store`` runs this under another interpreter."""

from __future__ import annotations

import time
from collections.abc import Callable

Batch = Callable[[int], None]
"""Does batch number n: all its operations are over when it returns."""

BATCHES_MIN = 3


def time_batches(batch: Batch, seconds: float, count_max: int) -> list[float]:
    """The seconds of each of at most ``count_max`` batches, done for about ``seconds`` altogether."""
    times: list[float] = []
    last = time.perf_counter()
    end = last + seconds
    for number in range(count_max):
        batch(number)
        now = time.perf_counter()
        times.append(now - last)
        if now >= end and number + 1 >= BATCHES_MIN:
            break
        last = now
    return times
