"""``kvfuse replay`` on a cache: the run, tables of it beside simulations, bars, and a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from kvfuse.cli import Failure
from kvfuse.cli.console import bars, doing, note, print_table
from kvfuse.cli.mounts import mount_of
from kvfuse.sizes import format_size
from kvfuse_bench.cachefolder import namespace_for
from kvfuse_bench.cachereplay import CacheReplay, replay_on_cache
from kvfuse_bench.models import MODELS
from kvfuse_bench.replay import ReplayPlan
from kvfuse_bench.runpage import write_page
from kvfuse_bench.runreport import Report, Table, report_of_caches
from kvfuse_bench.simulate import Setup, Tally
from kvfuse_bench.speeds import Speeds, measure_speeds
from kvfuse_bench.textplot import bars as bars_of
from kvfuse_bench.textplot import chart
from kvfuse_bench.traffic import Request, measure

SPEED_TOKENS = 16
"""of the model, in a block by which speeds are measured"""
COLUMNS = 60
"""of charts in the terminal"""

Requests = Callable[[], Iterable[Request]]
"""begins the traffic anew"""


def run_on_cache(
    requests: Requests, target: Path, plan: ReplayPlan, setups: Sequence[Setup], prefill: float, page: Path | None
) -> None:
    """Replay on the cache that ``target`` is in, or on namespaces made in it, one for each of ``setups``.

    ``prefill``: tokens a second that an engine computes. Failure, if a block was wrong; ConfigError: the ``page``
    cannot be written.
    """
    results = []
    tried: Sequence[Setup | None] = setups or [None]
    for setup in tried:
        with namespace_for(target, setup) if setup else nullcontext(target) as folder:
            results.append(_run_one(requests(), folder, plan))
    if not all(result.requests for result in results):
        note("no request is within the limits")
        return
    with doing("measuring speeds, simulating policies"):
        speeds = measure_speeds(target, Path(mount_of(target).source), MODELS[plan.model].block_size(SPEED_TOKENS))
        tables = list(_tables(results, speeds))
        report = report_of_caches(results, speeds, prefill, tables[0].title, tables, has_charts=page is not None)
    _show(report, tables, results[-1])
    if page:
        write_page(report, page)
        note(f"a page of it: {page}")
    for detail in (detail for result in results for detail in result.wrong_details):
        note(f"wrong block: {detail}")
    if wrong := sum(result.wrong for result in results):
        raise Failure(f"{wrong} blocks were wrong")


def _tables(results: Sequence[CacheReplay], speeds: Speeds) -> Iterator[Table]:
    for result in results:
        yield Table(_title(result), ["what", "figure"], [list(row) for row in _rows(result, speeds)])
    if len(results) > 1:
        columns = ["policy", "blocks", "hit ratio", "simulated", "LRU", "written", "simulated", "LRU"]
        yield Table("Policies, as measured and simulated", columns, [list(row) for row in _compared(results)])


def _show(report: Report, tables: Sequence[Table], last: CacheReplay) -> None:
    for table in tables:
        print_table(table.columns, table.rows, table.title)
    for group in report.glance:
        for line in bars_of(group.title, [(bar.name, bar.value, bar.text) for bar in group.bars]):
            note(line)
    ratios = [ratio for _, ratio in last.tally.hit_ratios(COLUMNS)]
    for line in chart("Hit ratio over the time of the traffic", ratios, max(ratios), f"{max(ratios):.0%}"):
        note(line)


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


def _rows(result: CacheReplay, speeds: Speeds) -> Iterator[tuple[str, str]]:
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
    yield "read", _rate(tally.hits * block_size, result.read_seconds, speeds.disk_read)
    offered = tally.written + result.refused
    yield "put, with those that were not stored", _rate(offered * block_size, result.write_seconds, speeds.disk_write)
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
