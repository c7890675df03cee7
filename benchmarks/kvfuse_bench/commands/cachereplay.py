"""``kvfuse replay`` on a cache: the run, tables of it beside simulations, and pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from kvfuse.cli import Failure
from kvfuse.cli.console import bars, note, print_table
from kvfuse.cli.mounts import mount_of
from kvfuse.sizes import format_size
from kvfuse_bench.cachefolder import namespace_for
from kvfuse_bench.cachereplay import CacheReplay, replay_on_cache
from kvfuse_bench.measures import disk_rates
from kvfuse_bench.plot import plot_replays, require_matplotlib
from kvfuse_bench.replay import ReplayPlan
from kvfuse_bench.simulate import Setup, Tally
from kvfuse_bench.textplot import chart
from kvfuse_bench.traffic import Request, measure

DISK_SIZE = 256 << 20
"""bytes by which the disk below is measured"""
COLUMNS = 60
"""of charts in the terminal"""

Requests = Callable[[], Iterable[Request]]
"""begins the traffic anew"""


def run_on_cache(
    requests: Requests, target: Path, plan: ReplayPlan, setups: Sequence[Setup], picture: Path | None
) -> None:
    """Replay on the cache that ``target`` is in, or on namespaces made in it, one for each of ``setups``.

    Failure, if a block was wrong; ConfigError where the picture cannot be made, before anything is replayed.
    """
    if picture:
        require_matplotlib()
    disk = _disk_below(target)
    results = []
    tried: Sequence[Setup | None] = setups or [None]
    for setup in tried:
        with namespace_for(target, setup) if setup else nullcontext(target) as folder:
            results.append(_run_one(requests(), folder, plan))
    if not all(result.requests for result in results):
        note("no request is within the limits")
        return
    for result in results:
        print_table(("what", "figure"), _rows(result, disk), _title(result))
    if len(results) > 1:
        print_table(
            ("policy", "blocks", "hit ratio", "simulated", "LRU", "written", "simulated", "LRU"), _compared(results)
        )
    for line in _charts(results[-1]):
        note(line)
    if picture:
        plot_replays(results, picture)
        note(f"plotted in {picture}")
    for detail in (detail for result in results for detail in result.wrong_details):
        note(f"wrong block: {detail}")
    if wrong := sum(result.wrong for result in results):
        raise Failure(f"{wrong} blocks were wrong")


def _disk_below(target: Path) -> tuple[float, float] | None:
    """GB/s that can be written to and read from the disk of the volume; None where that cannot be measured."""
    try:
        return disk_rates(Path(mount_of(target).source), DISK_SIZE)
    except OSError:
        return None


def _run_one(requests: Iterable[Request], folder: Path, plan: ReplayPlan) -> CacheReplay:
    with bars() as progress:

        def show(result: CacheReplay) -> None:
            tally = result.tally
            done = max(
                len(result.requests) / (plan.request_max or float("inf")),
                tally.asked / (plan.block_max or float("inf")),
                result.seconds / (plan.duration or float("inf")),
            )
            wrong = f", {result.wrong} wrong" if result.wrong else ""
            text = f"{tally.asked:,} blocks, {tally.hit_ratio:.1%} hits, {result.evicted:,} evicted{wrong}"
            progress.show(folder.name, min(done, 1.0), 1.0, text)

        return replay_on_cache(requests, folder, plan, show)


def _title(result: CacheReplay) -> str:
    setup, plan = result.tally.setup, result.plan
    size = f"{setup.capacity:,} blocks of {format_size(plan.block_size)}"
    return f"{len(result.requests):,} requests of {plan.model} on a cache of {size}, {setup.name}"


def _rows(result: CacheReplay, disk: tuple[float, float] | None) -> Iterator[tuple[str, str]]:
    tally, block_size = result.tally, result.plan.block_size
    simulated = (result.simulated(), result.simulated_lru()) if result.begins_empty else None
    yield "blocks asked for", f"{tally.asked:,}"
    yield "hit ratio", f"{tally.hit_ratio:.1%}"
    if simulated:
        yield "  the same policy, simulated", f"{simulated[0].hit_ratio:.1%}"
        yield "  the least recently used evicted, of the same size, simulated", f"{simulated[1].hit_ratio:.1%}"
    else:
        yield "  simulated", f"n/a: {result.found_blocks:,} blocks were there before"
    yield "  of a cache that starts empty and never forgets", f"{measure(result.requests).hit_ratio:.1%}"
    yield "blocks read and verified", f"{tally.hits:,}"
    yield "blocks written", _beside(tally.written, simulated)
    yield "  not stored: not admitted, or no room", f"{result.refused:,}"
    yield "  evicted", f"{result.evicted:,}"
    yield "wrong", f"{result.wrong:,}"
    rates = (disk and disk[1], disk and disk[0])
    yield "read", _rate(tally.hits * block_size, result.read_seconds, rates[0])
    offered = tally.written + result.refused
    yield "put, with those that were not stored", _rate(offered * block_size, result.write_seconds, rates[1])
    span = (result.requests[-1].arrival_ms - result.requests[0].arrival_ms) / 60_000
    yield "time", f"{span:,.0f} min of traffic in {result.seconds:,.0f} s"


def _beside(written: int, simulated: tuple[Tally, Tally] | None) -> str:
    more = "" if simulated is None else f" (simulated: {simulated[0].written:,}, LRU {simulated[1].written:,})"
    return f"{written:,}{more}"


def _rate(size: int, seconds: float, disk: float | None) -> str:
    """Of a transfer, beside what the disk below allows."""
    below = f"; the disk below: {disk:.2f} GB/s" if disk else ""
    return f"{size / seconds / 1e9:.2f} GB/s{below}" if seconds else f"n/a{below}"


def _compared(results: Sequence[CacheReplay]) -> Iterator[tuple[str, ...]]:
    for result in results:
        tally, same, lru = result.tally, result.simulated(), result.simulated_lru()
        ratios = (f"{one.hit_ratio:.3f}" for one in (tally, same, lru))
        written = (f"{one.written:,}" for one in (tally, same, lru))
        yield tally.setup.name, f"{tally.setup.capacity:,}", *ratios, *written


def _charts(result: CacheReplay) -> Iterator[str]:
    setup, samples = result.tally.setup, result.samples
    ratios = [ratio for _, ratio in result.tally.hit_ratios(COLUMNS)]
    yield from chart("hit ratio over the time of the traffic", ratios, 1.0, "100 %")
    held = [samples[place * len(samples) // COLUMNS] for place in range(COLUMNS)]
    blocks = [sample.blocks for sample in held]
    yield from chart("blocks in the cache; the line is its capacity", blocks, 1.2 * setup.capacity, "", setup.capacity)
    evicted = [sample.evicted for sample in held]
    yield from chart("blocks evicted so far", evicted, max(evicted), f"{max(evicted):,}")
