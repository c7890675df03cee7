"""kvfuse upgrade"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import click

from kvfuse.cli import Failure, holders
from kvfuse.cli.console import say
from kvfuse.cli.mounts import kvfuse_mount_at
from kvfuse.holder.main import LEAVE_SECONDS, LEFT_SECONDS

SPARE_SECONDS = 10.0


@click.command()
@click.argument("mountpoint", type=Path)
@click.option("--python", type=str, help="The Python that has the version to go on with. [the one of this command]")
@click.option(
    "--timeout",
    type=click.FloatRange(1, 3600),
    default=60.0,
    show_default=True,
    help="Seconds for the new daemon to stand by, and again to be ready; then the old one goes on.",
)
def upgrade(mountpoint: Path, python: str | None, timeout: float) -> None:
    """Let another version of kvfuse serve a mount that is in use: calls wait for a moment, and notice nothing else.

    MOUNTPOINT may also be the volume that is mounted: its folder, or the mount.conf that was named to mount it. The
    new daemon is started beside the old one, reads mount.conf and waits. Then the old one finishes what it has begun,
    stores everything, and leaves open files, shared memory and clients of rings to the new one. Where the new one
    cannot begin, nothing has changed; where it fails later, the former version goes on (docs/outlive.md).

    Install the new version into an environment of its own, and not over the old one: else there is no way back.

    \b
    Examples:
      kvfuse upgrade /mnt/kv
      kvfuse upgrade /mnt/kv --python /opt/kvfuse-next/bin/python
    """
    row = kvfuse_mount_at(mountpoint)
    program = shutil.which(python) if python is not None else sys.executable
    if program is None:
        raise Failure(f"there is no program {python}")
    answer = holders.ask(
        row,
        4 * timeout + LEAVE_SECONDS + LEFT_SECONDS + SPARE_SECONDS,
        do="upgrade",
        python=os.path.abspath(program),
        seconds=timeout,
    )
    before, version, pid, waited = map(answer.get, ("before", "version", "pid", "waited"))
    say(f"{row.point}: {before} -> {version}, pid {pid}; calls waited {waited} s")
