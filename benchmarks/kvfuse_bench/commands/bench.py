"""``kvfuse bench``: figures of this machine, each beside a reference of the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import click
from click.core import ParameterSource

from kvfuse.cli import Failure
from kvfuse.cli.console import doing, note, print_table
from kvfuse_bench.cluster import CLUSTER_BENCHES
from kvfuse_bench.cluster_mounts import ClusterSetting, cluster_servers
from kvfuse_bench.commands.door import door
from kvfuse_bench.commands.engines import engines
from kvfuse_bench.commands.gpu import gpu
from kvfuse_bench.commands.hosts import hosts
from kvfuse_bench.commands.measuring import (
    MEMORY_FOLDER,
    measure_each,
    measuring_options,
    number_of,
    result_of,
    show,
    write_result,
)
from kvfuse_bench.commands.model_load import model_load
from kvfuse_bench.commands.outlive import outlive
from kvfuse_bench.commands.peers import peers
from kvfuse_bench.commands.scale import scale
from kvfuse_bench.rings import RING_BENCHES, RingSetting
from kvfuse_bench.rounds import Conditions, Figure
from kvfuse_bench.short import bench_short
from kvfuse_bench.suite import BENCHES, LARGE_BENCHES, Setting, scratch_folders


@click.group(invoke_without_command=True)
@measuring_options([*BENCHES, *LARGE_BENCHES])
@click.option("--short", is_flag=True, help="Six figures in half a minute: files, rings, and memcpy beside them.")
@click.option("--large", is_flag=True, help="Also a million small files: minutes, 8 GiB of disk.")
@click.pass_context
def bench(
    ctx: click.Context,
    only: tuple[str, ...],
    short: bool,
    large: bool,
    quick: bool,
    round_count: int,
    folder: Path,
    output: Path,
) -> None:
    """Measure this machine: a volume in FOLDER beside a bare file system, tmpfs and memcpy.

    Rounds alternate between both sides and the median counts. Exit status 1 if a benchmark could not run; a target
    that is missed is shown, and is no failure.
    """
    if ctx.invoked_subcommand is not None:
        if any(ctx.get_parameter_source(name) is not ParameterSource.DEFAULT for name in ctx.params):
            raise click.UsageError(f"options of '{ctx.invoked_subcommand}' stand behind it")
        return
    if short:
        if large or only:
            raise click.UsageError("--short has six figures of its own: leave out --large and --only")
        _run_short(quick, round_count, folder, output)
        return
    selected = {**BENCHES, **LARGE_BENCHES} if large or only else BENCHES
    small_file_count = 100_000 if quick else 1_000_000

    def measure(name: str, conditions: Conditions) -> list[Figure]:
        return selected[name](Setting(**vars(conditions), small_file_count=small_file_count))

    _run(only or selected, measure, quick, round_count, folder, output)


@bench.command()
@measuring_options(RING_BENCHES)
@click.option(
    "--mooncake",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="PYTHON",
    help="Also Mooncake's store: an interpreter whose environment has mooncake-transfer-engine-non-cuda.",
)
def ring(
    only: tuple[str, ...], mooncake: Path | None, quick: bool, round_count: int, folder: Path, output: Path
) -> None:
    """Measure rings beside memcpy, tmpfs and Mooncake's store: this process is the client of a daemon.

    Reads, writes, gets, views (zero-copy gets) and puts of 4 KiB to 16 MiB, 1 to 256 at once; exists; idle rings.
    """

    def measure(name: str, conditions: Conditions) -> list[Figure]:
        return RING_BENCHES[name](RingSetting(**vars(conditions), mooncake=mooncake and mooncake.absolute()))

    _run(only or RING_BENCHES, measure, quick, round_count, folder, output)


@bench.command()
@measuring_options(CLUSTER_BENCHES)
def cluster(only: tuple[str, ...], quick: bool, round_count: int, folder: Path, output: Path) -> None:
    """Measure a shared volume beside ceph-fuse, on servers of this machine: etcd and Ceph are started in FOLDER.

    Blocks stored relaxed and strict, absent names, cold reads, reads of what another host wrote; kvfuse on etcd and
    RADOS against ceph-fuse on a CephFS of the same OSDs. Needs root, ceph-mds and ceph-fuse, and 20 GB of disk.
    """
    with ExitStack() as stack:
        disk, _ = stack.enter_context(scratch_folders(folder, MEMORY_FOLDER))
        with doing("cluster") as tell:
            servers = stack.enter_context(cluster_servers(disk, partial(show, tell, "cluster")))

        def measure(name: str, conditions: Conditions) -> list[Figure]:
            return CLUSTER_BENCHES[name](ClusterSetting(**vars(conditions), servers=servers))

        _run(only or CLUSTER_BENCHES, measure, quick, round_count, folder, output)


def _run(
    names: Iterable[str],
    measure: Callable[[str, Conditions], list[Figure]],
    quick: bool,
    round_count: int,
    folder: Path,
    output: Path,
) -> None:
    """Each benchmark in fresh folders; then the table and the JSON file. Failure if one could not run."""
    figures, failures = measure_each(names, measure, quick=quick, round_count=round_count, folder=folder)
    _print_figures(figures, failures)
    path = write_result(output, result_of(figures, failures, quick))
    note(f"written to {path}")
    if failures:
        raise Failure(f"could not run: {', '.join(failures)}")


def _run_short(quick: bool, round_count: int, folder: Path, output: Path) -> None:
    def measure(_name: str, conditions: Conditions) -> list[Figure]:
        return bench_short(conditions)

    figures, failures = measure_each(["short"], measure, quick=quick, round_count=round_count, folder=folder)
    if failures:
        raise Failure("the short bench could not run")
    rows = [(figure.name, number_of(figure.measured.value), figure.unit, figure.note) for figure in figures]
    print_table(("what", "figure", "unit", ""), rows)
    note(f"written to {write_result(output, result_of(figures, failures, quick))}")


def _print_figures(figures: list[Figure], failures: Iterable[str]) -> None:
    """A row a figure, and a column for everything that stands beside any of them; a row for what could not run."""
    beside = list(dict.fromkeys(other.name for figure in figures for other in figure.others))
    columns = ("what", "kvfuse", "reference", "ratio", *beside, "target", "")
    rows = [_row(figure, beside) for figure in figures]
    print_table(columns, [*rows, *((name, "not run", *[""] * (len(columns) - 2)) for name in failures)])


def _row(figure: Figure, beside: list[str]) -> tuple[str, ...]:
    """One figure as people read it."""
    others = {other.name: number_of(other.value) for other in figure.others}
    reference = f"{number_of(figure.reference.value)} {figure.reference.name}" if figure.reference else ""
    return (
        figure.name,
        f"{number_of(figure.measured.value)} {figure.unit}".strip(),
        reference,
        "" if figure.ratio is None else f"{figure.ratio:.2f}",
        *(others.get(name, "") for name in beside),
        _target(figure),
        {None: "", True: "met", False: "missed"}[figure.met],
    )


def _target(figure: Figure) -> str:
    sign = "≤" if figure.less_is_better else "≥"
    parts = [f"{sign} {figure.target:,g}"] if figure.target is not None else []
    parts += [f"{sign} {figure.ratio_target:g}x"] if figure.ratio_target is not None else []
    return ", ".join(parts)


bench.add_command(door)
bench.add_command(engines)
bench.add_command(hosts)
bench.add_command(gpu)
bench.add_command(model_load)
bench.add_command(outlive)
bench.add_command(peers)
bench.add_command(scale)
