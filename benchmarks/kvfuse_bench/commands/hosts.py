"""``kvfuse bench hosts``: a trace on two mounts of one shared volume, through the store that adapters use."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import click
import numpy as np

from kvfuse.cli import Failure
from kvfuse.cli.console import doing, note, print_json, print_table
from kvfuse.errors import ConfigError
from kvfuse.sizes import GIB, format_size
from kvfuse_bench.commands.measuring import MEMORY_FOLDER
from kvfuse_bench.hosts import HOST_COUNT, HostsReplay, Served, replay_on_hosts, two_mounts
from kvfuse_bench.models import MODELS
from kvfuse_bench.plot import plot_hosts, require_matplotlib
from kvfuse_bench.replay import ReplayPlan
from kvfuse_bench.suite import scratch_folders
from kvfuse_bench.traffic import DEFAULT_SEED, Generator, read_trace, share_of

CAPACITY = 8 * GIB
QUANTILES = (0.5, 0.9, 0.99)
HOSTS: dict[int | None, str] = {**{number: f"host {'AB'[number]}" for number in range(HOST_COUNT)}, None: "both"}


@click.command()
@click.argument("mounts", nargs=-1, type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path))
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="JSON lines; see above.")
@click.option(
    "--share",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.01,
    show_default=True,
    help="Of the conversations, whole.",
)
@click.option("--requests", "request_max", type=click.IntRange(1), help="Stop after so many requests.")
@click.option("--model", type=click.Choice(sorted(MODELS)), default="qwen2.5-0.5b", show_default=True)
@click.option(
    "--tokens-per-block",
    "block_tokens",
    type=click.Choice([16, 32, 64, 128, 256, 512]),
    default=64,
    show_default=True,
    help="Tokens of one block of the engine.",
)
@click.option("--block-size", type=click.IntRange(32), help="Bytes of a block, instead of the model's.")
@click.option(
    "--prefill",
    type=click.FloatRange(0, min_open=True),
    default=10_000.0,
    show_default=True,
    help="Tokens a second that the engine computes.",
)
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    default=Path("/var/tmp"),
    show_default=True,
    help="The volume is made below it, where no MOUNTS are given.",
)
@click.option(
    "--plot",
    "picture",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write a PNG (needs matplotlib).",
)
@click.option("--json", "as_json", is_flag=True, help="For programs, instead of tables.")
def hosts(
    mounts: tuple[Path, ...], trace: Path | None, share: float, request_max: int | None, model: str, block_tokens: int,
    block_size: int | None, prefill: float, folder: Path, picture: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Serve requests on two hosts that share a volume: hits on what the other host wrote, time to first token.

    Requests go to the hosts in turn. Each asks for the longest prefix of its prompt that is there, gets it (measured,
    every byte verified) and puts the rest. The time to first token is that of loading and, at --prefill, of computing
    what is left; without queues. MOUNTS are two mounts of one shared volume, here; without them an etcd of this machine
    and a folder below --folder make one.

    A TRACE has a request a line: "timestamp" (ms), "input_length" (tokens), "hash_ids" (of 512 tokens each). Without
    one, requests are generated.

    \b
    Examples:
      kvfuse bench hosts --trace FILE --share 0.01 --plot hosts.png
      kvfuse bench hosts /mnt/kv-a /mnt/kv-b --trace FILE --model llama-3-8b --prefill 12000
    """
    if len(mounts) not in (0, HOST_COUNT):
        raise click.UsageError(f"two mounts of one volume, or none, not {len(mounts)}")
    if trace is None and request_max is None:
        raise click.UsageError("--requests is needed: generated traffic does not end")
    if picture:
        require_matplotlib()
    size = block_size or MODELS[model].block_size(block_tokens)
    plan = ReplayPlan(model, block_tokens, size, request_max=request_max)
    requests = share_of(read_trace(trace) if trace else Generator(DEFAULT_SEED), share)
    with doing("mounting") as tell, ExitStack() as stack:
        points: Sequence[Path] = mounts
        if not mounts:
            disk, _ = stack.enter_context(scratch_folders(folder, MEMORY_FOLDER))
            points = stack.enter_context(two_mounts(disk, CAPACITY))
        namespace = f"bench-hosts-{secrets.token_hex(4)}"
        result = replay_on_hosts(requests, points, namespace, plan, prefill, _shown(tell))
    if not result.served:
        raise ConfigError("no request is within the share")
    _show(result, picture=picture, as_json=as_json)


def _shown(update: Callable[[str], None]) -> Callable[[HostsReplay], None]:
    def show(result: HostsReplay) -> None:
        update(f"{len(result.served):,} requests, {sum(one.hits for one in result.served):,} blocks loaded")

    return show


def _show(result: HostsReplay, *, picture: Path | None, as_json: bool) -> None:
    """Failure, if a block was wrong."""
    if as_json:
        print_json(to_json(result))
    else:
        print_table(("", *HOSTS.values()), _hit_rows(result), _title(result))
        print_table(("", "", "mean", *(f"{100 * q:g} %" for q in QUANTILES)), _time_rows(result), "ms to first token")
    if picture:
        plot_hosts(result, picture)
        note(f"plotted in {picture}")
    for detail in result.wrong:
        note(f"wrong block: {detail}")
    if result.wrong_count:
        raise Failure(f"{result.wrong_count} blocks were wrong")


def _title(result: HostsReplay) -> str:
    plan = result.plan
    return f"{plan.model}, blocks of {plan.block_tokens} tokens, {format_size(plan.block_size)}"


def _hit_rows(result: HostsReplay) -> Iterator[tuple[str, ...]]:
    def row(name: str, value: Callable[[list[Served]], str]) -> tuple[str, ...]:
        return name, *(value(result.of(host)) for host in HOSTS)

    def share(count: Callable[[Served], int]) -> Callable[[list[Served]], str]:
        return lambda some: f"{sum(map(count, some)) / max(1, sum(one.blocks for one in some)):.1%}"

    yield row("requests", lambda some: f"{len(some):,}")
    yield row("blocks asked for", lambda some: f"{sum(one.blocks for one in some):,}")
    yield row("hits", share(lambda one: one.hits))
    yield row("  on what this host wrote", share(lambda one: one.own))
    yield row("  on what the other host wrote", share(lambda one: one.others))
    yield row("hits of a cache of this host alone, endless", share(lambda one: one.alone))
    yield row("blocks stored", lambda some: f"{sum(one.stored for one in some):,}")
    for name, moved in (("own", result.from_own), ("the other host's", result.from_others), ("stored", result.stored)):
        rate = result.rate(moved)
        yield f"GB/s, {name}", "", "", "n/a" if rate is None else f"{rate:.2f}"
    yield "seconds", "", "", f"{result.seconds:,.0f}"
    yield "wrong", "", "", f"{result.wrong_count:,}"
    if result.unseen:
        yield "requests whose blocks the other host did not see", "", "", f"{result.unseen:,}"
    for reason, count in result.failures.items():
        yield f"not answered: {reason}", "", "", f"{count:,}"


def _ways(result: HostsReplay) -> dict[str, Callable[[Served], float]]:
    return {
        "all computed": result.computed,
        "a cache of this host alone": result.alone,
        "the shared volume": result.shared,
    }


def _time_rows(result: HostsReplay) -> Iterator[tuple[str, ...]]:
    for host, name in HOSTS.items():
        for way, seconds in _ways(result).items():
            times = [1000 * seconds(one) for one in result.of(host)]
            if times:
                figures = (float(np.mean(times)), *map(float, np.quantile(times, QUANTILES)))
                yield name, way, *(f"{value:,.0f}" for value in figures)


def to_json(result: HostsReplay) -> dict[str, object]:
    """Times in seconds, sizes in bytes."""
    return {
        "model": result.plan.model,
        "block_tokens": result.plan.block_tokens,
        "block_size": result.plan.block_size,
        "prefill": result.prefill,
        "requests": [
            {**one._asdict(), **{way: seconds(one) for way, seconds in _ways(result).items()}} for one in result.served
        ],
        "gigabytes_per_second": {
            "own": result.rate(result.from_own),
            "other": result.rate(result.from_others),
            "stored": result.rate(result.stored),
        },
        "wrong": result.wrong_count,
        "unseen": result.unseen,
        "failures": result.failures,
    }
