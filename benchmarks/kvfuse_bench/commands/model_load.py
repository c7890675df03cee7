"""``kvfuse bench model-load``: a model loaded by the loaders of inference engines, cold and warm."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from kvfuse.cli import Failure
from kvfuse.cli.console import note, print_table
from kvfuse.sizes import parse_size
from kvfuse_bench.commands.measuring import measure_each, measuring_options, result_of, write_result
from kvfuse_bench.loading.loaders import LOADERS
from kvfuse_bench.loading.loads import PROCESSOR, SIDES, LoadSetting, bench_loads, missing_modules, versions
from kvfuse_bench.rounds import Conditions, Figure

TITLE = "GB/s, medians; in parentheses processor seconds for each GB, of loader and daemon"


@click.command("model-load")
@measuring_options(LOADERS)
@click.option(
    "--python",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=Path(sys.executable),
    metavar="PYTHON",
    help="An interpreter whose environment has torch, safetensors, runai-model-streamer, fastsafetensors.",
)
@click.option("--size", default="1GiB", show_default=True, help="Bytes of the model.")
@click.option("--shards", type=click.IntRange(1, 64), default=4, show_default=True, help="Files that it has.")
@click.option("-o", "words", multiple=True, metavar="WORD", help="Mount option of the volume; may be repeated.")
def model_load(
    only: tuple[str, ...],
    quick: bool,
    round_count: int,
    folder: Path,
    output: Path,
    python: Path,
    size: str,
    shards: int,
    words: tuple[str, ...],
) -> None:
    """Load a model of random weights from a volume, a folder of the disk below it, and tmpfs.

    Cold: the daemon was just started, and neither its mount nor the disk have anything in the page cache. Warm: again,
    by the same process. All bytes end in memory of the loader, and are compared. A loader that --python does not have
    is left out.
    """
    python = python.absolute()
    names = [name for name in only or LOADERS if _can_run(python, name)]

    def measure(name: str, conditions: Conditions) -> list[Figure]:
        setting = LoadSetting(**vars(conditions), python=python, size=_bytes_of(size), shards=shards, words=words)
        return bench_loads(name, setting)

    figures, failures = measure_each(names, measure, quick=quick, round_count=round_count, folder=folder)
    if figures:
        print_table(("loader", *SIDES), _rows(figures), TITLE)
    packages = versions(python)
    note(packages)
    result = result_of(figures, failures, quick) | {"size": size, "shards": shards, "packages": packages}
    note(f"written to {write_result(output, result)}")
    if failures:
        raise Failure(f"could not run: {', '.join(failures)}")


def _bytes_of(size: str) -> int:
    try:
        return parse_size(size)
    except ValueError as error:
        raise click.UsageError(f"--size {size}: {error}") from error


def _can_run(python: Path, name: str) -> bool:
    reason = missing_modules(python, name)
    if reason:
        note(f"no row {name!r}: {reason}")
    return not reason


def _rows(figures: Sequence[Figure]) -> Iterator[tuple[str, ...]]:
    processor = {figure.name: _sides(figure) for figure in figures if figure.unit == PROCESSOR}
    for figure in figures:
        if figure.unit != PROCESSOR:
            rates, seconds = _sides(figure), processor[figure.name]
            cells = (f"{rates[side]:.2f} ({seconds[side]:.2f})" if side in rates else "" for side in SIDES)
            yield (figure.name, *cells)


def _sides(figure: Figure) -> dict[str, float]:
    sides = [figure.measured, *([figure.reference] if figure.reference else []), *figure.others]
    return {side.name: side.value for side in sides}
