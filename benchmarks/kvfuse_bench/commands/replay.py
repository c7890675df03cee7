"""``kvfuse replay``: KV-cache traffic on a folder, every byte verified, or on policies alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from kvfuse.cli import Failure
from kvfuse.cli.console import Bars, bars, note, print_table
from kvfuse.policy import ADMISSIONS, DEFAULT_ADMISSION, DEFAULT_POLICY, POLICIES
from kvfuse.sizes import format_size
from kvfuse_bench.cachefolder import is_in_cache
from kvfuse_bench.commands.cachereplay import run_on_cache
from kvfuse_bench.commands.simulation import CAPACITIES_DEFAULT, REQUESTS_DEFAULT, run_simulation
from kvfuse_bench.models import MODELS
from kvfuse_bench.replay import ReplayPlan, ReplayResult, quantiles_ms, round_trips, run
from kvfuse_bench.simulate import limited, make_setups
from kvfuse_bench.traffic import DEFAULT_SEED, Generator, Request, read_trace, share_of

DURATION_DEFAULT = 60.0
TOKENS_DEFAULT = 16
SMALL_TOKENS, SMALL_SIZE, SMALL_CAPACITY = 512, 16 << 10, 4096
SIMULATED = ("lru", "chain"), ("all", "adaptive")
"""policies and admissions that are simulated by default"""


class Counts(click.ParamType[tuple[int, ...]]):
    """One number or several, as in "1000,5000"."""

    name = "n[,n...]"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            counts = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            counts = ()
        if not counts or min(counts) < 1:
            self.fail(f"{value!r} is no positive number, nor several with commas between them", param, ctx)
        return counts


@click.command()
@click.argument(
    "target", required=False, type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path)
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Replay this trace (JSON lines: timestamp, input_length, hash_ids of 512-token blocks) instead of generated"
    " traffic.",
)
@click.option("--seed", default=DEFAULT_SEED, show_default=True, help="Of the generated traffic.")
@click.option(
    "--share",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Only this share of the conversations, whole: what one node of many sees.",
)
@click.option("--requests", "request_max", type=click.IntRange(1), help="Stop after so many requests.")
@click.option("--blocks", "block_max", type=click.IntRange(1), help="Stop after so many blocks.")
@click.option(
    "--duration",
    type=click.FloatRange(0, min_open=True),
    help=f"Stop after so many seconds (simulated: of the traffic);"
    f" {DURATION_DEFAULT:.0f} where no other limit is given.",
)
@click.option("--model", type=click.Choice(sorted(MODELS)), default="llama-3-8b", show_default=True)
@click.option(
    "--tokens-per-block",
    "block_tokens",
    type=click.Choice([8, 16, 32, 64, 128, 256, 512]),
    help=f"Tokens of one block of the engine. [default: {TOKENS_DEFAULT}]",
)
@click.option("--block-size", type=click.IntRange(32), help="Bytes of a block, instead of the model's.")
@click.option("--workers", "worker_count", type=click.IntRange(1, 256), default=2, show_default=True)
@click.option(
    "--capacity-blocks",
    "capacities",
    type=Counts(),
    help="Blocks that the cache may keep; all that fit where it is not given. On kvfuse and for --simulate one or"
    " several numbers, with commas between them.",
)
@click.option(
    "--simulate", is_flag=True, help="No TARGET: ask policies alone, and show what they would have hit and written."
)
@click.option(
    "--policy",
    "policies",
    type=click.Choice(list(POLICIES)),
    multiple=True,
    help="Eviction to try; may be repeated. [--simulate: lru and chain]",
)
@click.option(
    "--admission",
    "admissions",
    type=click.Choice(list(ADMISSIONS)),
    multiple=True,
    help="Admission to try, each with every --policy; may be repeated. [--simulate: all and adaptive]",
)
@click.option(
    "--small",
    is_flag=True,
    help=f"A large cache in a minute: blocks of {SMALL_TOKENS} tokens that have {format_size(SMALL_SIZE)} each,"
    f" instead of the model's, in a cache of {SMALL_CAPACITY:,}; an hour, or what"
    f" {DURATION_DEFAULT:.0f} s do of it. Policies go by blocks and times, not by bytes.",
)
@click.option(
    "--prefill",
    type=click.FloatRange(0, min_open=True),
    default=10_000.0,
    show_default=True,
    help="Of caches: tokens a second that an engine computes, for the times to first tokens.",
)
@click.option(
    "--html",
    "page",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Of caches and simulations: write a page of the run, in one file.",
)
def replay(
    target: Path | None,
    trace: Path | None,
    seed: int,
    share: float,
    request_max: int | None,
    block_max: int | None,
    duration: float | None,
    model: str,
    block_tokens: int | None,
    block_size: int | None,
    worker_count: int,
    capacities: tuple[int, ...] | None,
    simulate: bool,
    policies: tuple[str, ...],
    admissions: tuple[str, ...],
    small: bool,
    prefill: float,
    page: Path | None,
) -> None:
    """Replay KV-cache traffic on the folder TARGET, as an engine that keeps one file a block. Every byte is verified.

    In a cache of kvfuse the chain of each prompt is asked for, what is there is got and the rest put, over rings; the
    cache makes room by itself, and its clock is advanced as the traffic's time passes. --policy, --admission,
    --capacity-blocks or --small: in a namespace that is made for it in TARGET, and removed. Beside the figures are
    simulations of the same requests, what the cache saves of the times to first tokens, and the speeds of this machine.

    On other file systems each block is looked up as a file; a hit is read, a miss is written under a temporary name and
    renamed, and the least recently used blocks make room.

    Exit status 1 if any block was wrong. With --simulate nothing is read or written: the traffic goes to policies
    alone, as blocks of 512 tokens.

    \b
    Examples:
      kvfuse replay /mnt/kv --small --html run.html
      kvfuse replay /mnt/kv --trace FILE --tokens-per-block 512 --block-size 16384 --policy lru --policy chain \\
        --capacity-blocks 1000,5000,10000 --html run.html
    """

    def requests() -> Iterator[Request]:
        return share_of(read_trace(trace) if trace else Generator(seed), share)

    if simulate:
        if trace is None and request_max is block_max is duration is None:
            request_max = REQUESTS_DEFAULT
        setups = make_setups(policies or SIMULATED[0], admissions or SIMULATED[1], capacities or CAPACITIES_DEFAULT)
        run_simulation(limited(requests(), request_max, block_max, duration), setups, page)
        return
    if target is None:
        raise click.UsageError("TARGET is missing: a folder, or --simulate")
    if small:
        block_tokens, block_size = block_tokens or SMALL_TOKENS, block_size or SMALL_SIZE
        capacities = capacities or (SMALL_CAPACITY,)
    block_tokens = block_tokens or TOKENS_DEFAULT
    is_tried = bool(policies or admissions or capacities)
    on_cache = round_trips(target) is not None and (is_tried or is_in_cache(target))
    if not on_cache and (policies or admissions or page):
        raise click.UsageError(f"--policy, --admission and --html are for caches of kvfuse, and {target} is in none")
    if capacities and len(capacities) > 1 and not on_cache:
        raise click.BadParameter("one number, unless for caches of kvfuse", param_hint="--capacity-blocks")
    if request_max is block_max is duration is None:
        duration, request_max = DURATION_DEFAULT, REQUESTS_DEFAULT if small else None
    size = block_size or MODELS[model].block_size(block_tokens)
    if size % 8:
        raise click.BadParameter("a multiple of 8 bytes is needed", param_hint="--block-size")
    plan = ReplayPlan(model, block_tokens, size, worker_count, request_max, block_max, duration)
    note(f"replaying on {target}, for {_limits(plan)}")
    if on_cache:
        tried = make_setups(policies or (DEFAULT_POLICY,), admissions or (DEFAULT_ADMISSION,), capacities or (0,))
        run_on_cache(requests, target, plan, tried if is_tried else [], prefill, page)
    else:
        _run_on_folder(requests(), target, plan, capacities[0] * size if capacities else None)


def _run_on_folder(requests: Iterable[Request], target: Path, plan: ReplayPlan, capacity: int | None) -> None:
    """``capacity`` in bytes."""
    with bars() as progress:
        result = run(requests, target, plan, capacity, lambda result: _advance(progress, result, plan))
    title = f"{result.requests:,} requests as blocks of {format_size(plan.block_size)}"
    print_table(("what", "figure"), _rows(result, plan), title)
    for detail in result.wrong_details:
        note(f"wrong block: {detail}")
    if result.wrong:
        raise Failure(f"{result.wrong} of {result.blocks} blocks were wrong")


def _limits(plan: ReplayPlan) -> str:
    requests = f"{plan.request_max:,} requests" if plan.request_max else ""
    blocks = f"{plan.block_max:,} blocks" if plan.block_max else ""
    seconds = f"{plan.duration:g} s" if plan.duration else ""
    return " or ".join(filter(None, (requests, blocks, seconds)))


def _advance(progress: Bars, result: ReplayResult, plan: ReplayPlan) -> None:
    """By whichever limit is nearest."""
    done = max(
        result.requests / (plan.request_max or float("inf")),
        result.blocks / (plan.block_max or float("inf")),
        result.seconds / (plan.duration or float("inf")),
    )
    wrong = f", {result.wrong} wrong" if result.wrong else ""
    progress.show("replay", min(done, 1.0), 1.0, f"{result.blocks:,} blocks, {result.hit_ratio:.0%} hits{wrong}")


def _rows(result: ReplayResult, plan: ReplayPlan) -> Iterator[tuple[str, str]]:
    hits, stores = len(result.hit_seconds), len(result.store_seconds)
    moved = (hits + stores) * result.block_size
    yield "model, tokens a block, workers", f"{plan.model}, {plan.block_tokens}, {plan.worker_count}"
    yield "blocks asked for", f"{result.blocks:,}"
    yield "  read and verified", f"{hits:,}"
    yield "  written", f"{stores:,}"
    yield "  not stored, no room", f"{result.no_room:,}"
    yield "  wrong", f"{result.wrong:,}"
    yield "removed to make room", f"{result.removed:,}"
    yield "hit ratio", f"{result.hit_ratio:.1%}"
    yield "  of a cache that starts empty and never forgets", f"{result.ideal_hit_ratio:.1%}"
    yield "read, one worker", _unit(result.stream_rate(result.hit_seconds), "GB/s")
    yield "written, one worker", _unit(result.stream_rate(result.store_seconds), "GB/s")
    yield "both, all workers, verifying included", _unit(moved / result.seconds / 1e9 if moved else None, "GB/s")
    yield "a hit takes (50, 90, 99 %)", _milliseconds(result.hit_seconds)
    yield "a store takes (50, 90, 99 %)", _milliseconds(result.store_seconds)
    yield "record round trips per 1,000 blocks", _unit(result.round_trips_per_1000, "")
    overhead = result.space_overhead
    yield "space beyond the blocks' own bytes", "n/a" if overhead is None else f"{overhead:.2%}"


def _unit(value: float | None, unit: str) -> str:
    return "n/a" if value is None else f"{value:.2f} {unit}".rstrip()


def _milliseconds(seconds: list[float]) -> str:
    quantiles = quantiles_ms(seconds)
    return "n/a" if quantiles is None else " / ".join(f"{value:.2f}" for value in quantiles) + " ms"
