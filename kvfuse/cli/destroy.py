"""kvfuse destroy"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvfuse.cli import Failure
from kvfuse.cli.console import ask, doing, note, print_table, say
from kvfuse.cli.mounts import kvfuse_mounts
from kvfuse.errors import KvfuseError, VolumeBusy
from kvfuse.options import config
from kvfuse.options.config import Options
from kvfuse.sizes import format_size

if TYPE_CHECKING:
    from kvfuse.volume.check.evidence import CheckReport


@click.command()
@click.argument("source", type=Path)
@click.option("-c", "--config", "file", type=Path, help="Take the volume's options from this mount.conf.")
@click.option("--yes", "name", metavar="NAME", help="The volume's name: destroy it without a question.")
@click.option(
    "--lost-devices", is_flag=True, help="Go on where devices of the volume are not found: they stay as they are."
)
def destroy(source: Path, file: Path | None, name: str | None, lost_devices: bool) -> None:
    """Remove the volume in the folder SOURCE (or of the mount.conf SOURCE) for good, with all that is in it.

    It shows what will be lost, and asks for the volume's name: that of its folder, or volume.name of mount.conf. It is
    refused while any host has the volume mounted, and says which.

    Segments, records, and entries of the index go wherever they are: folders, RADOS, etcd, Redis. Block devices lose
    their labels and can be used for anything then. Nothing else is removed: other files in those folders stay, and are
    named. Copies in 'cache.disk_path' of hosts stay, too: the next volume that uses the folder replaces them.

    Interrupted or killed, it is repeated by the same command; nobody can mount the volume meanwhile.

    \b
    Examples:
      kvfuse destroy /srv/kv
      kvfuse destroy /srv/kv --yes kv
      kvfuse destroy /etc/kvfuse/mount.conf --yes team-a
    """
    import trio

    from kvfuse.volume.opening import destroying

    _refuse_mounted(source)
    options = config.load(source, file=file).options
    is_begun = trio.run(destroying.is_begun, options)
    called = options.volume.name if options.is_shared else options.volume_path.absolute().name
    if is_begun:
        note(f"{options.title} was being destroyed: this goes on with it")
    else:
        _show_loss(options, called)
    _confirm(called, name)
    with doing(f"destroying {options.title}") as step:
        left = trio.run(partial(destroying.destroy, options, step, without_lost=lost_devices))
    for path in left:
        note(f"left alone, as it is no part of a volume: {path}")
    say(f"destroyed the volume {options.title}")


def _refuse_mounted(source: Path) -> None:
    """VolumeBusy where it is a mount point of this host, or mounted here from this path."""
    paths = {os.path.abspath(source), os.path.realpath(source)}
    for row in kvfuse_mounts():
        if str(row.point) in paths or row.source in paths:
            raise VolumeBusy(f"{row.source} is mounted on {row.point}: type: kvfuse umount {row.point}")


def _confirm(called: str, name: str | None) -> None:
    """Failure unless somebody named the volume."""
    if name is None:
        if not sys.stdin.isatty():
            raise Failure(f"nothing was removed: say --yes {called}")
        name = ask(f"All this is lost for good. Type the volume's name, {called}, to destroy it")
    if name != called:
        raise Failure(f"nothing was removed: the volume is called {called}, not {name}")


# -- what will be lost -----------------------------------------------------------------------------------


def _show_loss(options: Options, called: str) -> None:
    """As a check of the volume counts it; damage is no reason to keep it."""
    rows: list[tuple[str, Any]] = [("volume", options.title), ("name", called)]
    try:
        report = _count(options)
    except KvfuseError as error:
        rows.append(("content", f"cannot be counted: {error}"))
    else:
        rows += [
            ("files", report.files),
            ("bytes of files", format_size(report.used_bytes)),
            ("folders", report.directories),
            ("blocks", report.blocks),
            ("bytes of blocks", format_size(report.block_bytes)),
            ("namespaces", report.namespaces),
            ("mounted by", "nobody"),
        ]
    print_table(["", ""], rows)


def _count(options: Options) -> CheckReport:
    import trio

    from kvfuse.cli.fsck import check_progress
    from kvfuse.volume.check.volume_check import fsck

    with check_progress() as progress:
        return trio.run(partial(fsck, options, progress=progress))
