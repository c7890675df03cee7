"""kvfuse format"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from kvfuse.cli import Failure
from kvfuse.cli.console import confirm, print_table, say
from kvfuse.cli.volumes import found_on_devices, make_volume
from kvfuse.options import config
from kvfuse.options.config import Options


@click.command("format")
@click.argument("source", type=Path)
@click.option("-c", "--config", "file", type=Path, help="Take the volume's options from this mount.conf.")
@click.option("--capacity", metavar="SIZE", help="Bytes to promise [the smaller of 64GiB and half of the free space].")
@click.option("--slab-size", metavar="SIZE", help="Bytes of a slab [chosen from the capacity].")
@click.option("--segment-size", metavar="SIZE", help="Bytes of a segment [1GiB].")
@click.option(
    "--exact-size",
    "exact_sizes",
    metavar="SIZE",
    multiple=True,
    help="A block size that must fit without waste; may be repeated.",
)
@click.option("--cache", "is_cache", is_flag=True, help="A cache: when it is full, blocks make room for new ones.")
@click.option("--force", is_flag=True, help="Replace the volume that is there, and all on its devices.")
def format_command(
    source: Path,
    file: Path | None,
    capacity: str | None,
    slab_size: str | None,
    segment_size: str | None,
    exact_sizes: tuple[str, ...],
    is_cache: bool,
    force: bool,
) -> None:
    """Make a volume in the folder SOURCE (or as the mount.conf SOURCE says).

    The folder may be absent or empty, and so must be what a mount.conf names. 'kvfuse mount' makes a volume too where
    there is none; this command is for choosing its shape beforehand.

    Block devices that a mount.conf names (segments.engine = "block") are looked at before: where one has a file system,
    partitions, or anything else, this command shows what it found and asks.

    Without --cache no file ever goes by itself: a full volume refuses writes (ENOSPC). 'kvfuse namespace' makes single
    folders a cache.

    \b
    Examples:
      kvfuse format /srv/kv --capacity 200GiB --cache
      kvfuse format /srv/kv --capacity 200GiB
      kvfuse format /srv/kv --capacity 200GiB --exact-size 2MiB    # Llama-3-8B, 16 tokens a block
    """
    words = [f"{name}={value}" for name, value in (("capacity", capacity), ("slab_size", slab_size)) if value]
    words += [f"segment_size={segment_size}"] if segment_size else []
    words += [f"exact_sizes={':'.join(exact_sizes)}"] if exact_sizes else []
    words += ["cache"] if is_cache else []
    options = config.load(source, file=file, words=words).options
    overwrite = not force and _may_overwrite(options)
    say(make_volume(options, replace=force, overwrite=overwrite))


def _may_overwrite(options: Options) -> bool:
    """Whether somebody at a terminal says so of what is on the volume's devices; False: there is nothing.

    click.Abort: no. Failure where nobody can be asked.
    """
    found = found_on_devices(options)
    if not found:
        return False
    print_table(["device", "size", "found"], found)
    if not sys.stdin.isatty():
        raise Failure("nothing was written: 'kvfuse format --force' makes the volume over what is on these devices")
    confirm("Make a volume over all this? It is lost for good")
    return True
