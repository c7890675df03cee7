"""``kvfuse replay --simulate``: policies alone on a run of requests, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from kvfuse.bench.plot import plot, require_matplotlib
from kvfuse.bench.simulate import Setup, Tally, simulate
from kvfuse.bench.traffic import Request, measure
from kvfuse.cli.console import print_table

CAPACITIES_DEFAULT = (1_000, 5_000, 10_000, 30_000, 50_000)
REQUESTS_DEFAULT = 12_000
"""of generated traffic: about an hour"""


def run_simulation(requests: Sequence[Request], setups: Sequence[Setup], picture: Path | None) -> None:
    """Prints the table; ConfigError where the picture cannot be made, before anything is simulated."""
    if picture:
        require_matplotlib()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    results = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("simulate", total=len(setups) * len(requests))
        for setup in setups:
            progress.update(task, description=f"{setup.name}, {setup.capacity:,} blocks")
            results.append(simulate(requests, setup, lambda done: progress.advance(task, done)))
    ideal = measure(requests)
    title = (
        f"{ideal.requests:,} requests for {ideal.blocks:,} blocks: hit ratio / blocks written, by capacity in blocks."
        f" A cache that never forgets: {ideal.hit_ratio:.3f}"
    )
    capacities = list(dict.fromkeys(setup.capacity for setup in setups))
    print_table(("policy", *(f"{capacity:,}" for capacity in capacities)), _rows(results, capacities), title)
    if picture:
        plot(results, picture)
        console.print(f"plotted in {picture}", highlight=False, soft_wrap=True)


def _rows(results: Sequence[Tally], capacities: Sequence[int]) -> Iterator[tuple[str, ...]]:
    cells = {(result.setup.name, result.setup.capacity): result for result in results}
    for name in dict.fromkeys(result.setup.name for result in results):
        row = (cells[name, capacity] for capacity in capacities)
        yield name, *(f"{result.hit_ratio:.3f} / {result.written:,}" for result in row)
