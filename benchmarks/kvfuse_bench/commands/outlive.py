"""``kvfuse bench outlive``: a mount whose daemon is killed, and what its tier is worth then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import click

from kvfuse.cli.console import doing, note, print_table
from kvfuse.sizes import format_size, parse_size
from kvfuse_bench.commands.measuring import MEMORY_FOLDER, machine_of, write_result
from kvfuse_bench.outlive import BLOCK_SIZES, GOAL_SECONDS, GOAL_SIZE, SIZES, Fit, Outlived, cells, measure
from kvfuse_bench.plot import plot_outlived, require_matplotlib
from kvfuse_bench.suite import scratch_folders

QUICK_SCALE = 0.1


@click.command()
@click.option("--size", "sizes", multiple=True, help="Bytes of the tier, as 2GiB; may be repeated. [0.25 to 8 GB]")
@click.option("--block-size", "block_sizes", multiple=True, help="May be repeated. [64KiB, 1MiB, 4MiB]")
@click.option("--quick", is_flag=True, help="Tiers of a tenth: a look, no figures to publish.")
@click.option("--rounds", "round_count", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    default=Path("/var/tmp"),
    show_default=True,
    help="Volumes are made below it; one and a half times the largest tier has to be free.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("bench-results"),
    show_default=True,
    help="Folder for the JSON result.",
)
@click.option(
    "--plot",
    "picture",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write a PNG of times over the size of the tier (needs matplotlib).",
)
def outlive(
    sizes: tuple[str, ...], block_sizes: tuple[str, ...], quick: bool, round_count: int, folder: Path, output: Path,
    picture: Path | None,
) -> None:  # fmt: skip
    """Kill the daemon of a mount that outlives it, and measure for how long calls wait.

    For each size of the shared-memory tier and of its blocks: blocks are put into a new volume (BlockStore), a quarter
    more than the tier has room for, and each is read once. Then the daemon is killed, all are read once more, it is
    killed some more times, and replaced by 'kvfuse upgrade'. The smallest and the largest tier are measured again with
    a daemon that stands by. Memory for the largest tier has to be free.

    \b
    What to look at:
      adoption      seconds in which the next daemon takes over the tier, of those in which calls wait
      from memory   share of reads that memory answered, before and after the kill: they are to be the same
      reads         seconds of all reads before, and after, when each block is compared with its checksums first

    \b
    Examples:
      kvfuse bench outlive --quick
      kvfuse bench outlive --size 2GiB --size 16GiB --block-size 64KiB --plot outlive.png
    """
    if picture:
        require_matplotlib()
    scale = QUICK_SCALE if quick else 1.0
    try:
        chosen = cells(
            [parse_size(text) for text in sizes] or [round(scale * size) for size in SIZES],
            [parse_size(text) for text in block_sizes] or BLOCK_SIZES,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    results = []
    with doing("outlive") as tell, scratch_folders(folder, MEMORY_FOLDER) as (disk, _):

        def progress(text: str) -> None:
            tell(f"outlive: {text}")

        for cell in chosen:
            results.append(measure(cell, disk, round_count, progress))
    adoption, stall = Fit.of(results, lambda one: one.adoption), Fit.of(results, lambda one: one.stalls)
    print_table(
        ("tier", "block", "", "blocks", "arenas", "adoption", "a kill: calls wait", "an upgrade", "from memory",
         "after the kill", "reads", "after the kill"),
        _rows(results),
        "A daemon that is killed; medians, in milliseconds",
    )  # fmt: skip
    print_table(
        ("block", "adoption", "calls wait"),
        _extrapolated(results, adoption, stall),
        f"A tier of {GOAL_SIZE / 1e9:.0f} GB, by a fit of these; the goal is an adoption of {GOAL_SECONDS:g} s",
    )
    result = {
        **machine_of(quick),
        "cells": [one.to_json() for one in results],
        "fits": {"adoption": adoption.to_json(), "stall": stall.to_json()},
    }
    note(f"written to {write_result(output, result)}")
    if picture:
        plot_outlived(results, adoption, picture)
        note(f"plotted in {picture}")


def _rows(results: Sequence[Outlived]) -> Iterator[tuple[str, ...]]:
    for one in results:
        yield (
            f"{one.cell.size / 1e9:g} GB",
            format_size(one.cell.block_size),
            "stand-by" if one.cell.standby else "",
            f"{one.blocks:,}",
            f"{one.arenas}",
            f"{1000 * median(one.adoption):.1f}",
            f"{1000 * median(one.stalls):.0f}",
            f"{1000 * median(one.upgrades):.0f}",
            f"{one.ratio_before:.2%}",
            f"{one.ratio_after:.2%}",
            f"{1000 * one.read_before:,.0f}",
            f"{1000 * one.read_after:,.0f}",
        )


def _extrapolated(results: Sequence[Outlived], adoption: Fit, stall: Fit) -> Iterator[tuple[str, ...]]:
    for block_size in dict.fromkeys(one.cell.block_size for one in results):
        yield (
            format_size(block_size),
            f"{adoption.seconds(GOAL_SIZE, block_size):.2f} s",
            f"{stall.seconds(GOAL_SIZE, block_size):.2f} s",
        )
