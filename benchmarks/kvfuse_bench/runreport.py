"""What a run of requests came to, as its pages and pictures show it: plain data, written as JSON and read again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvfuse_bench.cachereplay import TIERS, CacheReplay
from kvfuse_bench.firsttoken import PromptEngine, first_tokens
from kvfuse_bench.models import MODELS
from kvfuse_bench.simulate import Setup, Tally
from kvfuse_bench.speeds import Speeds
from kvfuse_bench.traffic import Request, measure

Point = tuple[float, float]
LRU = "LRU, simulated"
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""of the capacity, where a run has one alone: the policies are simulated at these, too"""


@dataclass(frozen=True)
class Line:
    """One policy on the requests, as it was measured or simulated. Times in minutes of the traffic."""

    name: str
    hit_ratio: float
    hits: int
    written: int
    ratios: list[Point]
    writes: list[Point]
    """blocks written so far"""
    first_token: float | None = None
    """mean seconds"""
    saved: float | None = None
    """seconds that all first tokens together came earlier"""


@dataclass(frozen=True)
class Chart:
    """One chart of lines. ``lines``: name -> points."""

    title: str
    across: str
    lines: dict[str, list[Point]]
    is_share: bool = False
    """0 to 1, shown as percentages"""
    limit: float | None = None
    limit_name: str = ""
    is_log: bool = False
    """across"""
    is_stacked: bool = False


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    text: str


@dataclass(frozen=True)
class Bars:
    """Figures of the same kind, to be compared."""

    title: str
    bars: list[Bar]


@dataclass(frozen=True)
class Table:
    title: str
    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Report:
    """A run."""

    title: str
    subtitle: str
    glance: list[Bars]
    """what to look at first"""
    charts: list[Chart] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


def report_of_caches(
    results: Sequence[CacheReplay], speeds: Speeds, prefill: float, title: str, tables: list[Table], *, has_charts: bool
) -> Report:
    """Of replays on caches, beside simulations of them; the charts over time are of the middle capacity.

    Charts take some seconds of simulations.
    """
    shown = sorted(results, key=lambda result: result.tally.setup.capacity)[len(results) // 2]
    same = [result for result in results if result.tally.setup.capacity == shown.tally.setup.capacity]
    engine = _engine(shown, speeds, prefill)
    lines = [_line("kvfuse" if len(results) == 1 else one.tally.setup.name, one.tally, one, engine) for one in same]
    if shown.begins_empty:
        lines.append(_line(LRU, shown.simulated_lru(), shown, engine))
    glance = glance_of(lines, engine, speeds)
    charts = [*_over_time(lines), *_of_the_cache(shown), _replays_over_capacity(results)] if has_charts else []
    return Report(
        _headline(lines) or title, f"{title}. {_subtitle(shown.requests)}", glance, charts, [_table(lines), *tables]
    )


def _headline(lines: Sequence[Line]) -> str:
    """What one replay came to beside LRU; empty where there is no LRU beside, or more than one replay."""
    if len(lines) != 2 or lines[1].name != LRU or not lines[1].hits or not lines[1].written:
        return ""
    hits, written = lines[0].hits / lines[1].hits, lines[0].written / lines[1].written
    return f"{hits:.2f} x the hits of LRU, with {written:.2f} x its writes"


def report_of_simulations(
    results: Sequence[Tally], requests: Sequence[Request], title: str, tables: list[Table]
) -> Report:
    """Of policies alone: what they find and write. Nothing was loaded, so no time to first token is known."""
    capacities = sorted({result.setup.capacity for result in results})
    shown = capacities[len(capacities) // 2]
    lines = [_line(one.setup.name, one, None, None) for one in results if one.setup.capacity == shown]
    curves: dict[str, list[Point]] = {one.setup.name: [] for one in results}
    writes: dict[str, list[Point]] = {one.setup.name: [] for one in results}
    for one in sorted(results, key=lambda one: one.setup.capacity):
        curves[one.setup.name].append((one.setup.capacity, one.hit_ratio))
        writes[one.setup.name].append((one.setup.capacity, one.written))
    charts = [
        *_over_time(lines),
        Chart("Hit ratio over capacity", "blocks of capacity", curves, is_share=True, is_log=True),
        Chart("Blocks written over capacity", "blocks of capacity", writes, is_log=True),
    ]
    return Report(title, _subtitle(requests), glance_of(lines, None, None), charts, [_table(lines), *tables])


def _engine(result: CacheReplay, speeds: Speeds, prefill: float) -> PromptEngine | None:
    if speeds.get is None:
        return None
    return PromptEngine(prefill, MODELS[result.plan.model].block_size(1), 1e9 * speeds.get)


def _line(name: str, tally: Tally, result: CacheReplay | None, engine: PromptEngine | None) -> Line:
    ratios = [(seconds / 60, ratio) for seconds, ratio in tally.hit_ratios()]
    writes = [(seconds / 60, count) for seconds, count in tally.writes()]
    line = Line(name, tally.hit_ratio, tally.hits, tally.written, ratios, writes)
    if result is None or engine is None:
        return line
    times = first_tokens(engine, result.requests, (one.hits for one in tally.requests), result.plan.block_tokens)
    return Line(name, tally.hit_ratio, tally.hits, tally.written, ratios, writes, times.mean, times.saved)


def _subtitle(requests: Sequence[Request]) -> str:
    ideal = measure(requests)
    minutes = (requests[-1].arrival_ms - requests[0].arrival_ms) / 60_000
    return (
        f"{ideal.requests:,} requests for {ideal.blocks:,} blocks, {minutes:,.0f} minutes of traffic. A cache that"
        f" starts empty and never forgets finds {ideal.hit_ratio:.1%}"
    )


# -- at a glance ------------------------------------------------------------------------------------


def glance_of(lines: Sequence[Line], engine: PromptEngine | None, speeds: Speeds | None) -> list[Bars]:
    """Bars of what each line found, wrote and saved, and of what this machine moves."""
    found = [Bar(line.name, line.hit_ratio, f"{line.hit_ratio:.1%}") for line in lines]
    written = [Bar(line.name, line.written, f"{line.written:,}") for line in lines]
    bars = [
        Bars(f"Blocks found again, of all asked for{_times(found)}", found),
        Bars(f"Blocks written{_times(written)}", written),
    ]
    if engine is not None:
        saved = [Bar(line.name, line.saved, f"{line.saved:,.0f} s") for line in lines if line.saved is not None]
        how = f"{engine.prefill:,.0f} tokens/s computed, {engine.load_rate / 1e9:.1f} GB/s loaded"
        if engine.load_rate < engine.prefill * engine.token_size:
            how += ": slower than computing, so nothing is loaded"
        bars.append(Bars(f"Waiting for first tokens saved, all requests together ({how})", saved))
    if speeds is not None:
        bars.append(Bars("GB/s on this machine", list(_speed_bars(speeds))))
    return bars


def _times(bars: Sequence[Bar]) -> str:
    """How the first of two bars compares."""
    return f": {bars[0].value / bars[1].value:.2f} x LRU" if len(bars) == 2 and bars[1].value else ""


def _speed_bars(speeds: Speeds) -> Iterator[Bar]:
    size = f"{speeds.block_size / (1 << 20):g} MiB"
    named = {
        f"get, blocks of {size}": speeds.get,
        f"put, blocks of {size}": speeds.put,
        "memcpy, one thread": speeds.memcpy,
        "disk below, read": speeds.disk_read,
        "disk below, write": speeds.disk_write,
    }
    return (Bar(name, rate, f"{rate:.2f}") for name, rate in named.items() if rate is not None)


# -- charts, tables ---------------------------------------------------------------------------------


def _over_time(lines: Iterable[Line]) -> list[Chart]:
    chosen = list(lines)
    return [
        Chart("Hit ratio over time", "minutes of traffic", {one.name: one.ratios for one in chosen}, is_share=True),
        Chart("Blocks written so far", "minutes of traffic", {one.name: one.writes for one in chosen}),
    ]


def _of_the_cache(result: CacheReplay) -> list[Chart]:
    samples = [sample._replace(now=sample.now / 60) for sample in result.samples]
    held = {"in the cache": [(one.now, float(one.blocks)) for one in samples]}
    held["evicted so far"] = [(one.now, float(one.evicted)) for one in samples]
    names = {"dram": "memory", "disk": "disk tier", "remote": "segments"}
    tiers = {names[tier]: [(one.now, float(one.hits[number])) for one in samples] for number, tier in enumerate(TIERS)}
    capacity = float(result.tally.setup.capacity)
    across = "minutes of traffic"
    return [
        Chart("Blocks in the cache, and evicted", across, held, limit=capacity, limit_name="capacity"),
        Chart("Where blocks came from, so far", across, tiers, is_stacked=True),
    ]


def _replays_over_capacity(results: Sequence[CacheReplay]) -> Chart:
    """Simulations of the policies and of LRU at several capacities, and what the volume estimates of LRU."""
    factors = (1.0,) if len({result.tally.setup.capacity for result in results}) > 1 else FACTORS
    lines: dict[str, dict[float, float]] = {}
    for result in results:
        for factor in factors:
            same, lru = result.simulated(factor), result.simulated_lru(factor)
            lines.setdefault(f"{_policy(result.tally.setup)}, simulated", {})[same.setup.capacity] = same.hit_ratio
            lines.setdefault(LRU, {})[lru.setup.capacity] = lru.hit_ratio
    estimates = {blocks: ratio for result in results for blocks, ratio in result.estimates if math.isfinite(blocks)}
    lines["LRU, as the volume estimates it"] = estimates
    points = {name: sorted(line.items()) for name, line in lines.items()}
    return Chart("Hit ratio over capacity", "blocks of capacity", points, is_share=True, is_log=True)


def _policy(setup: Setup) -> str:
    return f"{setup.policy} + {setup.admission}"


def _table(lines: Iterable[Line]) -> Table:
    columns = ["policy", "hit ratio", "blocks found", "blocks written", "mean time to first token", "saved by all"]
    rows = [
        [line.name, f"{line.hit_ratio:.2%}", f"{line.hits:,}", f"{line.written:,}",
         _seconds(line.first_token, 3), _seconds(line.saved, 0)]
        for line in lines
    ]  # fmt: skip
    return Table("Policies", columns, rows)


def _seconds(value: float | None, digits: int) -> str:
    return "not known" if value is None else f"{value:,.{digits}f} s"
