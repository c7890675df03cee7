"""The daemon's process: what it asks of Python."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from kvfuse.cli.daemon import calm_collector


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def count_collections(generation: int) -> int:
    return int(gc.get_stats()[generation]["collections"])


def test_a_mounted_daemon_does_not_search_all_it_knows_for_garbage_again_and_again() -> None:
    """100,000 files are known, of a few objects each: with Python's own thresholds that takes several full searches."""
    calm_collector()
    before = [count_collections(generation) for generation in range(3)]
    kept = [[[number]] for number in range(300_000)]
    young, _, full = (count_collections(generation) - before[generation] for generation in range(3))
    assert len(kept) == 300_000
    assert young > 10  # cycles are still found, when they are new
    assert full == 0


def test_what_was_there_at_the_start_is_never_searched() -> None:
    there = [[number] for number in range(1000)]
    calm_collector()
    assert gc.get_freeze_count() > len(there)
    assert gc.get_count()[0] < 1000
