"""``kvfuse replay --simulate``: policies alone on a run of requests, as a table and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from kvfuse.cli.console import bars, note, print_table
from kvfuse_bench.runpage import write_page
from kvfuse_bench.runreport import Table, report_of_simulations
from kvfuse_bench.simulate import Setup, Tally, simulate
from kvfuse_bench.traffic import Request, measure

CAPACITIES_DEFAULT = (1_000, 5_000, 10_000, 30_000, 50_000)
REQUESTS_DEFAULT = 12_000
"""of generated traffic: about an hour"""


def run_simulation(requests: Sequence[Request], setups: Sequence[Setup], page: Path | None) -> None:
    """Prints the table, and writes the ``page``. ConfigError: it cannot be written."""
    results = []
    done, total = 0, len(setups) * len(requests)
    with bars() as progress:
        for setup in setups:
            what = f"{setup.name}, {setup.capacity:,} blocks"

            def advance(count: int, what: str = what) -> None:
                nonlocal done
                done += count
                progress.show("simulate", done, total, what)

            results.append(simulate(requests, setup, advance))
    ideal = measure(requests)
    title = (
        f"{ideal.requests:,} requests for {ideal.blocks:,} blocks: hit ratio / blocks written, by capacity in blocks."
        f" A cache that never forgets: {ideal.hit_ratio:.3f}"
    )
    capacities = list(dict.fromkeys(setup.capacity for setup in setups))
    columns, rows = ["policy", *(f"{capacity:,}" for capacity in capacities)], list(_rows(results, capacities))
    print_table(columns, rows, title)
    if page:
        table = Table("Hit ratio / blocks written, by capacity in blocks", columns, [list(row) for row in rows])
        write_page(report_of_simulations(results, requests, "Policies alone, simulated", [table]), page)
        note(f"a page of it: {page}")


def _rows(results: Sequence[Tally], capacities: Sequence[int]) -> Iterator[tuple[str, ...]]:
    cells = {(result.setup.name, result.setup.capacity): result for result in results}
    for name in dict.fromkeys(result.setup.name for result in results):
        row = (cells[name, capacity] for capacity in capacities)
        yield name, *(f"{result.hit_ratio:.3f} / {result.written:,}" for result in row)
