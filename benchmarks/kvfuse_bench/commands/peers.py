"""``kvfuse bench peers``: blocks that hosts read from each other's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from kvfuse.cli.console import doing, note, print_table
from kvfuse.sizes import format_size
from kvfuse_bench.commands.measuring import MEMORY_FOLDER, machine_of, write_result
from kvfuse_bench.peers.blocks import CELLS, MEMCPY, ROOM, Side, measure_blocks
from kvfuse_bench.peers.hot import Spread, measure_hot
from kvfuse_bench.peers.mounts import peer_hosts
from kvfuse_bench.plot import plot_spreads, require_matplotlib
from kvfuse_bench.suite import scratch_folders

READERS = (2, 4, 8)
QUICK_SCALE = 0.1


@click.command()
@click.option(
    "--readers",
    type=click.IntRange(1, 32),
    multiple=True,
    default=READERS,
    show_default=True,
    help="Hosts that read hot blocks; may be repeated. One more writes.",
)
@click.option(
    "--mooncake",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="PYTHON",
    help="Also Mooncake's store: an interpreter whose environment has mooncake-transfer-engine-non-cuda.",
)
@click.option("--quick", is_flag=True, help="A tenth of the work: a look, no figures to publish.")
@click.option("--rounds", "round_count", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    default=MEMORY_FOLDER,
    show_default=True,
    help="Segments are made below it; they are not what is measured.",
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
    help="Write a PNG of who served hot blocks (needs matplotlib).",
)
def peers(
    readers: tuple[int, ...], mooncake: Path | None, quick: bool, round_count: int, folder: Path, output: Path,
    picture: Path | None,
) -> None:  # fmt: skip
    """Measure blocks that hosts read from each other's memory, over TCP. Needs root.

    Each host is a mount of one shared volume in a network of its own (network namespaces, a bridge between them), on
    this machine; an etcd is started. One host puts blocks, another gets each once (BlockStore), so it comes from the
    first one's memory, and every byte is compared. Beside it, in alternating rounds: memcpy, and Mooncake's store over
    TCP between the same networks. Then several hosts get the same blocks at once, each in an order of its own: the
    table says who sent how much of it.

    \b
    What to look at:
      segments    bytes that came from the segments: 0, or a host was late (a busy machine)
      CPU s/GB    processor seconds for each GB: of the daemon that has the blocks, of the one that reads, of the client
      copies      how often the writer sent each block, on the average: without help it were one for each reader

    \b
    Examples:
      kvfuse bench peers --quick --readers 2
      kvfuse bench peers --mooncake /var/tmp/mooncake/bin/python --plot peers.png
    """
    if picture:
        require_matplotlib()
    scale = QUICK_SCALE if quick else 1.0
    cells = [cell.scaled(scale) for cell in CELLS]
    with doing("peers") as tell, scratch_folders(folder, MEMORY_FOLDER) as (disk, _):

        def progress(text: str) -> None:
            tell(f"peers: {text}")

        python = mooncake and mooncake.absolute()
        with peer_hosts(disk, max(readers) + 1, ROOM, progress) as hosts:
            sides = [side for row in measure_blocks(hosts, cells, round_count, python, progress) for side in row]
            spreads = [measure_hot(hosts, count, scale, round_count, progress) for count in sorted(set(readers))]
    print_table(
        ("blocks", "", "GB/s", "blocks/s", "median ms", "99 % ms", "CPU s/GB: owner", "reader", "client", "segments",
         "late", "of memcpy"),
        _block_rows(sides),
        "Blocks of another host's memory, read over TCP",
    )  # fmt: skip
    print_table(
        ("readers", "GB/s, all", "writer sent, copies", "writer's share", "others sent, copies", "segments"),
        _spread_rows(spreads),
        "Blocks that all hosts read at once",
    )
    result = {
        **machine_of(quick),
        "blocks": [side.to_json() for side in sides],
        "hot": [spread.to_json() for spread in spreads],
    }
    note(f"written to {write_result(output, result)}")
    if picture:
        plot_spreads(spreads, picture)
        note(f"plotted in {picture}")


def _block_rows(sides: Sequence[Side]) -> Iterator[tuple[str, ...]]:
    copied = {side.cell: side.gigabytes_per_second for side in sides if side.name == MEMCPY}
    last = ""
    for side in sides:
        name, last = ("" if side.cell.name == last else side.cell.name), side.cell.name
        yield (
            name,
            side.name,
            f"{side.gigabytes_per_second:.3f}" if side.gigabytes_per_second < 1 else f"{side.gigabytes_per_second:.2f}",
            f"{side.blocks_per_second:,.0f}",
            f"{side.milliseconds(50):.3f}",
            f"{side.milliseconds(99):.3f}",
            *(_or_none(side.processor(field)) for field in ("owner", "reader", "client")),
            format_size(side.segment_bytes),
            f"{side.hedged}",
            f"{side.gigabytes_per_second / copied[side.cell]:.2f}",
        )


def _or_none(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _spread_rows(spreads: Sequence[Spread]) -> Iterator[tuple[str, ...]]:
    for one in spreads:
        others = [one.copies(host) for host in range(1, one.readers + 1)]
        yield (
            f"{one.readers}",
            f"{one.gigabytes_per_second:.2f}",
            f"{one.copies(0):.2f}",
            f"{one.share(0):.0%}",
            f"{min(others):.2f} to {max(others):.2f}",
            format_size(one.segment_bytes),
        )
