"""What all sets of benchmarks share on the command line: their options, the loop over their names, the JSON file."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from kvfuse import __version__
from kvfuse.cli.console import doing, note
from kvfuse.errors import KvfuseError
from kvfuse_bench.rounds import Conditions, Figure
from kvfuse_bench.suite import scratch_folders

MEMORY_FOLDER = Path("/dev/shm")

Command = TypeVar("Command", bound=Callable[..., Any])
Answer = TypeVar("Answer")


def measuring_options(names: Iterable[str]) -> Callable[[Command], Command]:
    """The options that all sets of benchmarks have; ``names`` of one set."""
    folder = click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path)
    options = (
        click.option("--only", multiple=True, type=click.Choice(list(names)), help="Run this one; may be repeated."),
        click.option("--quick", is_flag=True, help="A tenth of the work: a look, no figures to publish."),
        click.option("--rounds", "round_count", type=click.IntRange(1), default=3, show_default=True),
        click.option(
            "--folder",
            type=folder,
            default=Path("/var/tmp"),
            show_default=True,
            help="Volumes are made below it: the disk to measure.",
        ),
        click.option(
            "--output",
            type=click.Path(file_okay=False, path_type=Path),
            default=Path("bench-results"),
            show_default=True,
            help="Folder for the JSON result.",
        ),
    )

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def measure_each(
    names: Iterable[str],
    measure: Callable[[str, Conditions], Iterable[Answer]],
    *,
    quick: bool,
    round_count: int,
    folder: Path,
) -> tuple[list[Answer], dict[str, str]]:
    """What each benchmark answers, in fresh folders; and why some could not run."""
    answers: list[Answer] = []
    failures: dict[str, str] = {}
    for name in names:
        with doing(name) as tell, scratch_folders(folder, MEMORY_FOLDER) as (volumes, memory):
            progress = partial(show, tell, name)
            try:
                answers.extend(measure(name, Conditions(volumes, memory, round_count, 0.1 if quick else 1.0, progress)))
            except (KvfuseError, OSError) as error:
                failures[name] = str(error)
                note(f"{name}: {error}")
    return answers, failures


def show(update: Callable[[str], None], name: str, text: str) -> None:
    """What benchmark ``name`` does now."""
    update(f"{name}: {text}")


def number_of(value: float) -> str:
    """As people read it."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def result_of(figures: Sequence[Figure], failures: dict[str, str], quick: bool) -> dict[str, Any]:
    """A run as plain types."""
    return {
        **machine_of(quick),
        "figures": [figure.to_json() for figure in figures],
        "failures": failures,
    }


def machine_of(quick: bool) -> dict[str, Any]:
    """When and where a run was, and of what."""
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "version": __version__,
        "quick": quick,
        "machine": _machine(),
    }


def write_result(output: Path, result: dict[str, Any]) -> Path:
    """The JSON file of a run, named by its time."""
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"{datetime.fromisoformat(result['time']):%Y-%m-%d-%H%M%S}.json"
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
