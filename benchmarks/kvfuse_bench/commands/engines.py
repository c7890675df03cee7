"""``kvfuse bench engines``: what engines do to storage, on kvfuse, on the disk below it and on tmpfs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from kvfuse.cli import Failure
from kvfuse.cli.console import note, print_json, print_table
from kvfuse.sizes import parse_size
from kvfuse_bench.commands.measuring import measure_each, measuring_options, number_of, result_of, write_result
from kvfuse_bench.engines.compare import NAMES, TMPFS, EngineSetting, Refused, Result, bench_engine
from kvfuse_bench.engines.measuring import DAEMON, DAEMON_PER_CALL, METRICS, PER_CALL, PROCESSOR
from kvfuse_bench.rounds import Conditions


def _bytes_of(ctx: click.Context, parameter: click.Parameter, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command()
@measuring_options(NAMES)
@click.option(
    "--size",
    metavar="SIZE",
    default="256MiB",
    show_default=True,
    callback=_bytes_of,
    help="Moved in each round, each way.",
)
@click.option("--json", "as_json", is_flag=True, help="The result as JSON on stdout, instead of tables.")
def engines(
    only: tuple[str, ...], quick: bool, round_count: int, folder: Path, output: Path, size: int, as_json: bool
) -> None:
    """Measure the storage patterns of inference engines: vLLM, LMCache, SGLang, NIXL, KVBM; and calls about blocks.

    Each on a fresh volume in FOLDER (files through the mount, and rings where the engine can use them), on the disk
    below it and on tmpfs, in alternating rounds; medians. Processor time is that of client and daemon together. A
    pattern that this kernel refuses is named, and no failure of the command.
    """

    def measure(name: str, conditions: Conditions) -> Iterator[Result | Refused]:
        return bench_engine(name, EngineSetting(**vars(conditions), size=size))

    answers, failures = measure_each(only or NAMES, measure, quick=quick, round_count=round_count, folder=folder)
    results = [one for one in answers if isinstance(one, Result)]
    result = result_of([figure for one in results for figure in one.to_figures()], failures, quick)
    result["refused"] = {one.title: one.reason for one in answers if isinstance(one, Refused)}
    if as_json:
        print_json(result)
    else:
        refused = [(name, f"not run: {reason}", *[""] * len(METRICS)) for name, reason in result["refused"].items()]
        print_table(("what", "side", *METRICS), [*(row for one in results for row in _rows(one)), *refused], "medians")
        columns = ("what", "ours", "ratio to", "speed", "to tmpfs", "CPU", "target", "")
        print_table(columns, map(_ratios, results), "ratios")
    note(f"written to {write_result(output, result)}")
    if failures:
        raise Failure(f"could not run: {', '.join(failures)}")


def _rows(one: Result) -> Iterator[tuple[str, ...]]:
    """A row a side; of calls that move nothing, processor time is that of each."""
    for side, metrics in one.sides.items():
        cells = [number_of(metrics[name].value) if name in metrics else "" for name in METRICS]
        for name, instead in ((PROCESSOR, PER_CALL), (DAEMON, DAEMON_PER_CALL)):
            if instead in metrics:
                cells[METRICS.index(name)] = f"{number_of(metrics[instead].value)} us a call"
        yield f"{one.title}: {one.phase}", side, *cells


def _ratios(one: Result) -> Sequence[str]:
    """Ours beside what it is compared with: speed, and processor time."""
    ours, reference = one.ours, one.reference or ""
    targets = [f"≥ {one.target:g}x"] if one.target is not None else []
    targets += [f"≥ {one.least:,.0f}/s"] if one.least is not None else []
    targets += [f"CPU ≤ {one.processor:g}x"] if one.processor is not None else []
    return (
        f"{one.title}: {one.phase}",
        ours,
        reference,
        _times(one.ratio(ours, reference, one.metric)),
        _times(one.ratio(ours, TMPFS, one.metric)),
        _times(one.ratio(ours, reference, PROCESSOR)),
        ", ".join(targets),
        {None: "", True: "met", False: "missed"}[one.met],
    )


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
