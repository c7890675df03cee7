"""kvfuse hold and kvfuse serve: a mount whose holder and daemon live in containers, or units, of their own."""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from kvfuse.cli import daemon
from kvfuse.cli.checks import check_mountpoint, fuse_device_problem, outliving_problem, stands_by
from kvfuse.cli.console import note
from kvfuse.cli.mounts import is_dead
from kvfuse.errors import ConfigError, MountError
from kvfuse.holder.child import VARIABLE
from kvfuse.holder.daemon_side import Holding
from kvfuse.mounttable import FILE_SYSTEM, Mounted, top_mount
from kvfuse.options import config
from kvfuse.options.config import Effective
from kvfuse.options.words import with_whole_paths

SOCKET_FOLDER = "/run/kvfuse/hold"
Things = dict[str, tuple[str, list[int]]]
"""entry of `kept.keeper` -> (content, descriptors)"""


def _common(function: Any) -> Any:
    """The arguments that both commands have."""
    for decorate in (
        click.option(
            "--socket",
            "socket_path",
            type=Path,
            help=f"Where the two meet, in a folder that both see. [{SOCKET_FOLDER}/NAME.sock, by the mount point]",
        ),
        click.option("-o", "words", multiple=True, metavar="WORD[,WORD...]", help="Options as of 'kvfuse mount -o'."),
        click.option("-c", "--config", "file", type=Path, help="A mount.conf, beside the volume SOURCE."),
        click.argument("mountpoint", type=Path),
        click.argument("source", type=Path),
    ):
        function = decorate(function)
    return function


@click.command()
@_common
@click.option(
    "--wait",
    type=click.FloatRange(0),
    default=300.0,
    show_default=True,
    help="Seconds that calls wait while nobody serves the mount; then they get an error. 0: for ever.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0),
    default=20.0,
    show_default=True,
    help="Seconds, after SIGTERM, for a 'kvfuse serve' to come that keeps the mount. Else it is unmounted.",
)
def hold(
    source: Path,
    mountpoint: Path,
    file: Path | None,
    words: tuple[str, ...],
    socket_path: Path | None,
    wait: float,
    grace: float,
) -> None:
    """Make the mount MOUNTPOINT of the volume SOURCE, and keep it; 'kvfuse serve' serves it, in another container.

    The arguments are those of 'kvfuse mount', and the same for both commands. This process mounts, keeps what a daemon
    leaves for the next one, and does nothing else: it needs /dev/fuse and CAP_SYS_ADMIN, and is hardly ever updated.
    'kvfuse serve' opens the volume, and needs neither. Each of the two may be killed or replaced while the mount is in
    use: calls wait, and notice nothing else. Both at once end it.

    SIGTERM ends this process and leaves the mount to 'kvfuse serve'; 'kvfuse umount' ends the mount.

    \b
    Example:
      kvfuse hold  /etc/kvfuse/mount.conf /mnt/kv &
      kvfuse serve /etc/kvfuse/mount.conf /mnt/kv &
    """
    from kvfuse.fs.mount_session import build_kernel_options

    effective = config.load(source, file=file, words=words)
    point, path = _find_places(mountpoint, socket_path)
    if os.geteuid() != 0:
        raise MountError("'kvfuse hold' mounts by itself: it has to be root; 'kvfuse mount' needs no root")
    if problem := fuse_device_problem():
        raise MountError(f"{problem[0]}; as root: {problem[1]}")
    lock = _lock(path)
    living = _find_living(point)
    if living is not None:
        _become_hold(effective, point, path, lock, living, {}, wait=wait, grace=grace)
    kernel_words = build_kernel_options(effective.options.mount, source)
    row, things = _mount(effective, point, kernel_words)
    if not row.is_shared:
        note(
            f"kvfuse: {point} is not on a shared mount: other containers do not see it. Kubernetes: mountPropagation "
            "Bidirectional; docker: bind-propagation=rshared; else: mount --make-rshared"
        )
    _become_hold(effective, point, path, lock, row, things, wait=wait, grace=grace)


@click.command()
@_common
def serve(source: Path, mountpoint: Path, file: Path | None, words: tuple[str, ...], socket_path: Path | None) -> None:
    """Serve the mount MOUNTPOINT of the volume SOURCE, which 'kvfuse hold' has made, in another container.

    The arguments are those of 'kvfuse mount', and the same for both commands. Where there is no volume yet it is made
    first. This process stays, and logs to stderr. It needs neither /dev/fuse nor CAP_SYS_ADMIN, but must see the mount:
    its container has the folder above MOUNTPOINT with propagation from the host (Kubernetes: HostToContainer, docker:
    bind-propagation=rslave).

    A second 'kvfuse serve' of the same mount stands by: it goes on at once where the first one ends.

    SIGTERM stores everything and leaves the mount to the next 'kvfuse serve'; 'kvfuse umount' ends the mount.

    \b
    Example:
      kvfuse hold  /etc/kvfuse/mount.conf /mnt/kv &
      kvfuse serve /etc/kvfuse/mount.conf /mnt/kv &
    """
    load = partial(config.load, source, file=file, words=words)
    point, path = _find_places(mountpoint, socket_path)
    if VARIABLE in os.environ and (holding := Holding.from_environment()) is not None:
        daemon.run_held(load, point, holding, in_background=False)
        return
    if (problem := outliving_problem()) is not None and problem.is_final:
        raise MountError(f"no mount outlives its daemon here: {problem.detail}; {problem.remedy}")
    standby = True
    try:
        standby = stands_by(load().options.mount)
    except ConfigError as error:  # the mount may be in use: its daemon goes on with what mount.conf said before
        note(f"kvfuse: {error}; a mount that is in use goes on as it was")
    again = ["serve", str(source.absolute()), str(point), "--socket", str(path)]
    if file is not None:
        again += ["-c", str(file.absolute())]
    for word in with_whole_paths(words):
        again += ["-o", word]
    daemon.supervise(point, again, path, standby=standby)


def _find_places(mountpoint: Path, socket_path: Path | None) -> tuple[Path, Path]:
    """Find (mount point, socket), as whole paths without links above them. The mount is not touched."""
    point = mountpoint.absolute()
    point = Path(os.path.realpath(point.parent)) / point.name
    name = re.sub(r"[^A-Za-z0-9._-]", "-", os.fspath(point).strip("/")) or "root"
    return point, (socket_path or Path(SOCKET_FOLDER, f"{name}.sock")).absolute()


def _lock(path: Path) -> int:
    """Make the folder of the socket, and lock it against another 'kvfuse hold'. MountError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise MountError(f"another 'kvfuse hold' keeps this mount: {path}.lock is locked") from None
    return lock


def _find_living(point: Path) -> Mounted | None:
    """Find a kvfuse mount at ``point`` whose connection some process still has. MountError for another file system."""
    row = top_mount(point)
    if row is None:
        return None
    if row.file_system == FILE_SYSTEM:
        return None if is_dead(row.point) else row
    return None


def _mount(effective: Effective, point: Path, words: set[str]) -> tuple[Mounted, Things]:
    """Mount anew, in place of a dead mount if there is one: (its row, the entries for the first daemon)."""
    from kvfuse.fs.mount_session import set_read_ahead
    from kvfuse.holder.guarding import KEPT as SWITCH
    from kvfuse.holder.guarding import open_switch
    from kvfuse.holder.mounting_apart import mount_kernel
    from kvfuse.holder.takeover import is_dead_mount, replace_dead_mount
    from kvfuse.volume.tier import revocable
    from kvfuse.volume.tier.revocable import make_folders

    check_mountpoint(point)
    with replace_dead_mount(point) if is_dead_mount(point) else nullcontext(point) as place:
        connection, device = mount_kernel(place, words)
    row = top_mount(point)
    if row is None or row.st_dev != device:
        raise MountError(f"{point}: something else was mounted meanwhile")
    if effective.options.mount.read_ahead:
        set_read_ahead(device, effective.options.mount.read_ahead)
    things: Things = {"fuse/connection": ("", [connection]), "fuse/device": (str(device), [])}
    try:
        things[SWITCH] = ("", [open_switch(device)])
    except OSError as error:
        note(f"kvfuse: {point} cannot be aborted if nobody serves it: {error}")
    if (folders := make_folders()) is not None:
        things[revocable.KEPT] = ("", [os.dup(folders.writable), os.dup(folders.readable)])
    return row, things


def _become_hold(
    effective: Effective,
    point: Path,
    path: Path,
    lock: int,
    row: Mounted,
    things: Things,
    *,
    wait: float,
    grace: float,
) -> NoReturn:
    from kvfuse.fs import binder
    from kvfuse.holder import hold as program
    from kvfuse.holder.guarding import open_switch

    switch = None
    if not things:
        try:
            switch = open_switch(row.st_dev)
        except OSError as error:
            note(f"kvfuse: {point} cannot be aborted if nobody serves it: {error}")
    python = [sys.executable, "-I", "-S"]
    said = {
        "point": os.fspath(point),
        "socket": os.fspath(path),
        "device": row.device,
        "things": things,
        "switch": switch,
        "wait": wait,
        "grace": grace,
        "lock": lock,
        "binder": [*python, binder.__file__],
    }
    passed = [descriptor for _, descriptors in things.values() for descriptor in descriptors]
    for descriptor in (lock, *passed, *([] if switch is None else [switch])):
        os.set_inheritable(descriptor, True)
    os.execv(python[0], [*python, program.__file__, json.dumps(said)])
