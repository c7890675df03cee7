"""``kvfuse bench gpu``: blocks to memory of a GPU and back."""

from __future__ import annotations

from pathlib import Path

import click

from kvfuse.cli import Failure
from kvfuse.cli.console import print_json, print_table, say
from kvfuse.errors import DeviceError
from kvfuse.sizes import format_size
from kvfuse_bench.gpu import bench_gpu

NO_FIGURES = "The processor stood in for a GPU (--device cpu): these are no figures of a GPU."


@click.command("gpu")
@click.argument(
    "mount", type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path), metavar="MNT"
)
@click.option("--device", type=click.Choice(["gpu", "cpu"]), default="gpu", help="cpu: try the calls without a GPU.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def gpu(mount: Path, device: str, as_json: bool) -> None:
    """Measure blocks between the mount MNT and a GPU, beside bare copies from pinned memory; GB/s, medians.

    Every byte that came to the GPU is copied back and compared. Needs 64 MiB of the volume, in a folder that is
    removed again.
    """
    try:
        rows = bench_gpu(mount, on_cpu=device == "cpu")
    except DeviceError as error:
        raise Failure(f"{error}; see: kvfuse doctor gpu (--device cpu tries it without a GPU)") from error
    if as_json:
        print_json({"device": device, "blocks": [row._asdict() for row in rows]})
        return
    columns = ("block", "way", "get", "put", "bare copy to it", "bare copy from it")
    print_table(columns, [(format_size(row.size), *row[1:]) for row in rows])
    say("What was got was copied back and is what was put.")
    if device == "cpu":
        say(NO_FIGURES)
