"""``kvfuse bench scale``: what a host pays, by the number of hosts that share the volume."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from kvfuse.cli import Failure
from kvfuse.cli.console import doing, note, print_table
from kvfuse_bench.commands.measuring import MEMORY_FOLDER, machine_of, number_of, write_result
from kvfuse_bench.plot import plot_scales, require_matplotlib
from kvfuse_bench.scale.run import LOOKED_UP, Cost, Load, Phase, Scale, measure_scales
from kvfuse_bench.suite import scratch_folders

COUNTS = "10,100,1000"
SECONDS = 20.0


def _counts(_context: object, _option: object, text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"numbers of hosts such as {COUNTS}, not {text!r}") from None
    if min(counts) < 1:
        raise click.BadParameter("a number of hosts is 1 or more")
    return counts


@click.command()
@click.option("--hosts", "counts", default=COUNTS, show_default=True, callback=_counts, help="Numbers of hosts.")
@click.option("--seconds", type=click.FloatRange(1), default=SECONDS, show_default=True, help="Of each load.")
@click.option("--writers", type=click.IntRange(1), default=Load.writers, show_default=True)
@click.option("--readers", type=click.IntRange(1), default=Load.readers, show_default=True)
@click.option(
    "--blocks", type=click.FloatRange(1), default=Load.blocks_per_second, show_default=True, help="Put a second."
)
@click.option(
    "--looks", type=click.FloatRange(1), default=Load.looks_per_second, show_default=True, help="Names a second."
)
@click.option(
    "--files", type=click.FloatRange(1), default=Load.files_per_second, show_default=True, help="Stored a second."
)
@click.option("--index", type=click.Choice(["redis", "etcd"]), default="redis", show_default=True)
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    default=Path("/var/tmp"),
    show_default=True,
    help="Segments are made below it.",
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
    help="Write a PNG of the costs over the number of hosts (needs matplotlib).",
)
def scale(
    counts: list[int], seconds: float, writers: int, readers: int, blocks: float, looks: float, files: float,
    index: str, folder: Path, output: Path, picture: Path | None,
) -> None:  # fmt: skip
    """Open a shared volume on many hosts, store and look at the same rates, and measure what each host pays.

    Hosts are volumes without mounts, in a few processes; etcd and the index are servers of this machine, segments lie
    in a folder. A few hosts write, a few look up and get, the others are idle: what these pay must not grow with their
    number. After the blocks, two hosts store files in a strict folder. At the end the volume is checked.

    \b
    Examples:
      kvfuse bench scale --hosts 10,100,1000 --seconds 20 --plot scale.png
      kvfuse bench scale --hosts 10 --index etcd
    """
    if picture:
        require_matplotlib()
    load = Load(writers, readers, blocks, looks, files_per_second=files)
    results: list[Scale] = []
    with doing("scale") as tell, scratch_folders(folder, MEMORY_FOLDER) as folders:
        for result in measure_scales(counts, seconds, load, index, folders, lambda text: tell(f"scale: {text}")):
            results.append(result)
            show(results, index)
    written = write_result(
        output, {**machine_of(False), "load": asdict(load), "index": index, "scales": [asdict(one) for one in results]}
    )
    note(f"written to {written}")
    if picture:
        plot_scales(results, picture)
        note(f"plotted in {picture}")
    if wrong := sum(one.phase("blocks").done.get("wrong", 0) for one in results):
        raise Failure(f"{wrong} blocks were wrong")
    if unclean := [one.hosts for one in results if not one.is_clean]:
        raise Failure(f"the volume was not clean after {', '.join(map(str, unclean))} hosts")


def show(results: Sequence[Scale], index: str) -> None:
    """A table with a column for each number of hosts."""
    columns = [list(_figures(one, index)) for one in results]
    rows = [
        (row[0][0], *("" if value is None else number_of(value) for _, value in row))
        for row in zip(*columns, strict=True)
    ]
    title = "microseconds of the processor, but where it says otherwise"
    print_table(("", *(f"{one.hosts:,} hosts" for one in results)), rows, title)


def _figures(one: Scale, index: str) -> Iterator[tuple[str, float | None]]:
    """(name, value) of each row. None: there was nobody of whom it could be."""
    yield "all open after, s", one.open_seconds
    yield "  ms of the processor for each host", 1e3 * one.open_processor / one.hosts
    yield "  ms of etcd for each", 1e3 * one.open_etcd / one.hosts
    yield "all closed after, s", one.close_seconds
    yield "memory of an idle host, MB", one.memory / 1e6
    yield from _idle(one, one.phase("quiet"))
    blocks, files = one.phase("blocks"), one.phase("files")
    yield from _idle(one, blocks)
    yield from _work(blocks, "blocks")
    yield "  all writers, for each", _for_each(blocks, "writers", "blocks")
    yield "  all readers, for each name", _for_each(blocks, "readers", "looked")
    if index == "redis":
        yield "  Redis, for each", 1e6 * blocks.index_processor / _done(blocks, "blocks")
    yield "  found of those looked up, %", 100 * blocks.done.get("found", 0) / _done(blocks, "looked")
    for kind in ("put", "look", "get"):
        yield f"  ms of a {kind}", blocks.ms.get(kind)
    yield from _idle(one, files)
    yield from _work(files, "files")
    yield "  who stores, for each", _for_each(files, "readers", "files")
    yield "  ms of a file", files.ms.get("file")
    for kind in ("present", "absent"):
        yield f"ms to look up {LOOKED_UP:,} {kind} names", one.look_up_ms.get(kind)


def _idle(one: Scale, phase: Phase) -> Iterator[tuple[str, float | None]]:
    yield f"{phase.name}: an idle host, a second", _of_idle(phase, lambda cost: cost.microseconds)
    yield "  % of a core", _of_idle(phase, lambda cost: cost.microseconds / 1e4)
    yield "  wake-ups a second", _of_idle(phase, lambda cost: cost.switches / cost.hosts / cost.seconds)
    yield "  bytes sent a second", _of_idle(phase, lambda cost: cost.sent / cost.hosts / cost.seconds)
    yield "  bytes received a second", _of_idle(phase, lambda cost: cost.received / cost.hosts / cost.seconds)
    yield "  etcd, a host and second", 1e6 * phase.etcd_processor / phase.seconds / one.hosts


def _work(phase: Phase, work: str) -> Iterator[tuple[str, float | None]]:
    count = _done(phase, work)
    yield "  done a second", count / phase.seconds
    yield "  begun late", float(phase.done.get("late", 0))
    yield "  an idle host, for each", _of_idle(phase, lambda cost: 1e6 * cost.processor / cost.hosts / count)
    yield "  etcd, for each", 1e6 * phase.etcd_processor / count
    yield "  bytes that etcd sent, for each", phase.etcd_bytes[1] / count


def _of_idle(phase: Phase, value: Callable[[Cost], float]) -> float | None:
    cost = phase.costs.get("idle")
    return None if cost is None else value(cost)


def _done(phase: Phase, work: str) -> int:
    return max(1, phase.done.get(work, 0))


def _for_each(phase: Phase, role: str, work: str) -> float:
    """Of all hosts of a role."""
    return 1e6 * phase.costs[role].processor / _done(phase, work)
