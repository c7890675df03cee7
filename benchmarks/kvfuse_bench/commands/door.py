"""``kvfuse bench door``: the file door beside file systems that do less, in one table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from kvfuse.cli import Failure
from kvfuse.cli.console import note, print_json, print_table
from kvfuse.errors import KvfuseError
from kvfuse_bench.commands.measuring import measure_each, measuring_options, result_of, write_result
from kvfuse_bench.daemons import compile_passthrough, signals_raised
from kvfuse_bench.door import PASSTHROUGH, PROCESSOR, WORKS, DoorSetting, bench_door
from kvfuse_bench.rounds import Conditions, Figure, Measured

TITLE = "medians; in parentheses microseconds of the serving process's processor time for each file, name or page"


@click.command()
@measuring_options(WORKS)
@click.option("--disk", is_flag=True, help="Also a volume in FOLDER, beside that folder itself.")
@click.option("--scale", type=click.FloatRange(0, min_open=True), default=1.0, help="Less work: 0.1 is a tenth.")
@click.option("-o", "words", multiple=True, metavar="WORD", help="Mount option of the volumes; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON on stdout, instead of the table.")
def door(
    only: tuple[str, ...],
    quick: bool,
    round_count: int,
    folder: Path,
    output: Path,
    disk: bool,
    scale: float,
    words: tuple[str, ...],
    as_json: bool,
) -> None:
    """Measure the file door: a volume in memory beside two file systems that do nothing of their own, and tmpfs.

    Stores, reads, absent names, many names, tools of a shell, and pages of 2 MiB; in a folder of files and in one of
    blocks. The file systems are one in C, which needs a compiler and libfuse's headers, and one in Python.
    """
    program: Path | None = None
    try:
        program = compile_passthrough()
    except KvfuseError as error:
        note(f"no column {PASSTHROUGH!r}: {error}")

    def measure(name: str, conditions: Conditions) -> list[Figure]:
        fields = vars(conditions) | {"scale": conditions.scale * scale}
        return bench_door(name, DoorSetting(**fields, passthrough=program, on_disk=disk, words=words))

    with signals_raised():
        figures, failures = measure_each(only or WORKS, measure, quick=quick, round_count=round_count, folder=folder)
    result = result_of(figures, failures, quick) | {"scale": scale, "options": words}
    if as_json:
        print_json(result)
    elif figures:
        _print_figures(figures)
    note(f"written to {write_result(output, result)}")
    if failures:
        raise Failure(f"could not run: {', '.join(failures)}")


def _print_figures(figures: list[Figure]) -> None:
    sides = list(dict.fromkeys(side.name for figure in figures for side in _sides(figure)))
    reference = figures[0].reference
    columns = ("what", "", *sides, f"of {reference.name}" if reference else "")
    rows = []
    for figure in figures:
        cells = {side.name: _figure_of(side.value) for side in _sides(figure)}
        for other in figure.others:
            side, _, kind = other.name.partition(": ")
            if kind == PROCESSOR:
                cells[side] += f" ({_figure_of(other.value)})"
        rows.append((figure.name, figure.unit, *(cells.get(name, "") for name in sides), _speed(figure)))
    print_table(columns, rows, TITLE)


def _sides(figure: Figure) -> Iterator[Measured]:
    yield figure.measured
    if figure.reference is not None:
        yield figure.reference
    yield from (other for other in figure.others if PROCESSOR not in other.name)


def _speed(figure: Figure) -> str:
    """Ours as a part of the reference's speed."""
    ratio = figure.ratio
    return "" if not ratio else f"{1 / ratio if figure.less_is_better else ratio:.2f}"


def _figure_of(value: float) -> str:
    """Three digits at least; many rows are parts of a second."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
