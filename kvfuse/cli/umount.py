"""kvfuse umount"""

from __future__ import annotations

import errno
import os
import select
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from kvfuse.cli import Failure, MountBusy, holders
from kvfuse.cli.console import note
from kvfuse.cli.mounts import degraded, detach, kvfuse_mount_at, read_virtual, within
from kvfuse.errors import EngineTimeout, MountError
from kvfuse.mounttable import Mounted, seen_elsewhere

LOOK_SECONDS = 1.0
"""between two looks at what may keep a daemon from ending"""
UNSTORED = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ETIMEDOUT)
"""what a daemon answers that cannot store what is new"""
PAUSES = (0.05,) * 20
"""seconds between attempts at a busy mount: who only looks at it, as df and `kvfuse status` do, is gone in a moment"""


def _follow(pid: Any) -> int | None:
    """A descriptor that becomes readable when the daemon ends; None: it cannot be seen from here."""
    try:
        return os.pidfd_open(pid)
    except (ProcessLookupError, TypeError):  # ended already, or of another process namespace
        return None


def _wait_until_gone(daemon: int, mounted: Mounted, timeout: float) -> bool:
    """False after ``timeout`` seconds. MountBusy where the daemon goes on for who has the file system mounted too.

    That counts at its second sight: a container that starts has a copy of all mounts for a moment.
    """
    poll = select.poll()
    poll.register(daemon, select.POLLIN)
    end = time.monotonic() + timeout
    seen = None
    while not poll.poll(1000 * max(min(LOOK_SECONDS, end - time.monotonic()), 0)):
        before, seen = seen, seen_elsewhere(mounted)
        is_over = time.monotonic() >= end
        if seen and (seen == before or is_over):
            raise MountBusy(f"it is unmounted here, but still mounted at {seen}: its daemon serves it there")
        if is_over:
            return False
    return True


def _wait_until_silent(mounted: Mounted, timeout: float) -> bool:
    """Wait for the end of a holder in another container, whose pid means nothing here. False: it took too long."""
    end = time.monotonic() + timeout
    while holders.look_at(mounted) is not None:
        if time.monotonic() >= end:
            return False
        time.sleep(PAUSES[0])
    return True


def _detach_soon(point: Path, *, lazy: bool) -> None:
    """As `detach`, but MountBusy only where it is busy for longer than a look takes. No event tells of its end."""
    for pause in PAUSES:
        with suppress(MountBusy):
            return detach(point, lazy=lazy)
        time.sleep(pause)
    return detach(point, lazy=lazy)


def _check_stored(point: Path, timeout: float) -> None:
    """MountError where the daemon cannot store what was written: unmounted, that would be lost."""
    try:
        within(timeout, _store, point)
    except EngineTimeout:
        raise Failure(f"{point} is still mounted, its daemon still writes after {timeout:g} s") from None
    except OSError as error:
        if error.errno in UNSTORED:
            raise MountError(
                f"{point} stays mounted, or what is not stored would be lost: {error.strerror}; 'kvfuse status' tells"
                " what to do, and --lazy unmounts all the same"
            ) from None


def _store(point: Path) -> None:
    folder = os.open(point, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@click.command()
@click.argument("mountpoint", type=Path)
@click.option(
    "-l", "--lazy", is_flag=True, help="Detach now, though files are open; the daemon ends with the last of them."
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, 86400),
    default=300.0,
    show_default=True,
    help="Seconds to wait for the daemon's last writes.",
)
def umount(mountpoint: Path, lazy: bool, timeout: float) -> None:
    """Unmount, and wait until the daemon has written everything and is gone.

    MOUNTPOINT may also be the volume that is mounted: its folder, or the mount.conf that was named to mount it. A mount
    whose daemon has died ("Transport endpoint is not connected") is removed too. One that cannot store what was written
    to it, as on a full disk, stays mounted.

    \b
    Examples:
      kvfuse umount /mnt/kv
      kvfuse umount /srv/kv
    """
    mounted = kvfuse_mount_at(mountpoint)
    point = mounted.point
    try:
        stats = read_virtual(point, "stats")
    except MountError as error:
        detach(point, lazy=True)
        note(f"kvfuse: {error}; detached")
        return
    pid = stats.get("pid")
    holder = holders.look_at(mounted)  # ends after its daemon, whichever that is by then
    is_elsewhere = holder is not None and holders.is_of_another_container(holder)
    daemon = None
    if not is_elsewhere:
        daemon = _follow(holder["holder"] if holder is not None else holders.find_parent(pid) or pid)
    if not lazy:
        _check_stored(point, timeout)
    try:
        _detach_soon(point, lazy=lazy)
        if lazy and (troubles := stats.get("degraded")):
            why = "; ".join(map(degraded, troubles))
            note(f"kvfuse: {point} is detached; what is not stored is lost, unless it works in half a minute: {why}")
        if daemon is not None and not lazy and not _wait_until_gone(daemon, mounted, timeout):
            raise Failure(f"{point} is unmounted, but its daemon (pid {pid}) still writes after {timeout:g} s")
        if is_elsewhere and not lazy and not _wait_until_silent(mounted, timeout):
            raise Failure(f"{point} is unmounted, but its daemon in another container still writes after {timeout:g} s")
    finally:
        if daemon is not None:
            os.close(daemon)
