"""What the backend moved, as SGLang's own metrics have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

KEPT = 1000
"""transfers between two questions"""


class Direction:
    """Pages and GB/s of each transfer."""

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.speeds: list[float] = []

    @contextmanager
    def timed(self, page_size: int) -> Iterator[Callable[[int], None]]:
        """Call what it yields with the number of pages that were moved."""
        started = perf_counter()

        def done(count: int) -> None:
            if count and len(self.pages) < KEPT:
                self.pages.append(count)
                self.speeds.append(count * page_size / (1 << 30) / max(perf_counter() - started, 1e-9))

        yield done

    def take(self) -> tuple[list[int], list[float]]:
        pages, self.pages = self.pages, []
        speeds, self.speeds = self.speeds, []
        return pages, speeds


class TransferMetrics:
    """Both directions. ``prefetch``: to the host pool; ``backup``: from it."""

    def __init__(self) -> None:
        self.prefetch, self.backup = Direction(), Direction()

    def stats(self) -> Any:
        """SGLang's ``StorageMetrics``."""
        try:
            from sglang.srt.observability.metrics_collector import StorageMetrics
        except ImportError:  # before 0.5.10
            from sglang.srt.metrics.collector import StorageMetrics
        stats = StorageMetrics()
        stats.prefetch_pgs, stats.prefetch_bandwidth = self.prefetch.take()
        stats.backup_pgs, stats.backup_bandwidth = self.backup.take()
        return stats
