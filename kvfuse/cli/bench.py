"""``kvfuse bench``: figures of this machine, each beside a reference of the same run."""

from __future__ import annotations

import json
import os
import platform
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvfuse import __version__
from kvfuse.bench.rounds import Figure
from kvfuse.bench.suite import BENCHES, LARGE_BENCHES, Setting, scratch_folders
from kvfuse.cli import Failure
from kvfuse.cli.console import print_table
from kvfuse.errors import KvfuseError

MEMORY_FOLDER = Path("/dev/shm")


@click.command()
@click.option(
    "--only", multiple=True, type=click.Choice([*BENCHES, *LARGE_BENCHES]), help="Run this one; may be repeated."
)
@click.option("--large", is_flag=True, help="Also a million small files: minutes, 8 GiB of disk.")
@click.option("--quick", is_flag=True, help="A tenth of the work: a look, no figures to publish.")
@click.option("--rounds", "round_count", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("/var/tmp"),
    show_default=True,
    help="Volumes are made below it: the disk to measure.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("bench-results"),
    show_default=True,
    help="Folder for the JSON result.",
)
def bench(only: tuple[str, ...], large: bool, quick: bool, round_count: int, folder: Path, output: Path) -> None:
    """Measure this machine: a volume in FOLDER beside a bare file system, tmpfs and memcpy.

    Rounds alternate between both sides and the median counts. Exit status 1 if a benchmark could not run; a target
    that is missed is shown, and is no failure.
    """
    selected = {**BENCHES, **LARGE_BENCHES} if large or only else BENCHES
    console = Console(stderr=True)
    figures: list[Figure] = []
    failures: dict[str, str] = {}
    for name in only or selected:
        with console.status(name) as status, scratch_folders(folder, MEMORY_FOLDER) as (volumes, memory):
            setting = Setting(
                volumes,
                memory,
                round_count,
                scale=0.1 if quick else 1.0,
                small_file_count=100_000 if quick else 1_000_000,
                progress=lambda text, name=name, status=status: status.update(f"{name}: {text}"),  # type: ignore[misc]
            )
            try:
                figures += selected[name](setting)
            except (KvfuseError, OSError) as error:
                failures[name] = str(error)
                console.print(f"[red]{name}:[/] {error}", highlight=False, soft_wrap=True)
    print_table(("what", "kvfuse", "reference", "ratio", "target", ""), map(_row, figures))
    path = write_result(output, figures, failures, quick)
    console.print(f"written to {path}", highlight=False)
    if failures:
        raise Failure(f"could not run: {', '.join(failures)}")


def _row(figure: Figure) -> tuple[str, ...]:
    """One figure as people read it."""
    reference = f"{_number(figure.reference.value)} {figure.reference.name}" if figure.reference else ""
    return (
        figure.name,
        f"{_number(figure.measured.value)} {figure.unit}".strip(),
        reference,
        "" if figure.ratio is None else f"{figure.ratio:.2f}",
        _target(figure),
        {None: "", True: "met", False: "missed"}[figure.met],
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _target(figure: Figure) -> str:
    sign = "≤" if figure.less_is_better else "≥"
    parts = [f"{sign} {figure.target:,g}"] if figure.target is not None else []
    parts += [f"{sign} {figure.ratio_target:g}x"] if figure.ratio_target is not None else []
    return ", ".join(parts)


def write_result(output: Path, figures: list[Figure], failures: dict[str, str], quick: bool) -> Path:
    """The JSON file of a run, named by its time."""
    now = datetime.now().astimezone()
    result = {
        "time": now.isoformat(timespec="seconds"),
        "version": __version__,
        "quick": quick,
        "machine": _machine(),
        "figures": [figure.to_json() for figure in figures],
        "failures": failures,
    }
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"{now:%Y-%m-%d-%H%M%S}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path


def _machine() -> dict[str, Any]:
    return {
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "python": platform.python_version(),
    }
