"""kvfuse lsof"""

from __future__ import annotations

import pwd
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from kvfuse.cli.console import note, print_json, print_table
from kvfuse.cli.mounts import kvfuse_mount_at, kvfuse_mounts, read_virtual
from kvfuse.cli.open_files import MountUse, ProcessFiles, uses_of
from kvfuse.errors import MountError
from kvfuse.mounttable import Mounted
from kvfuse.sizes import format_size


@click.command()
@click.argument("mountpoint", type=Path, required=False)
@click.option("--json", "as_json", is_flag=True, help="For programs: sizes in bytes, an object for each use.")
def lsof(mountpoint: Path | None, as_json: bool) -> None:
    """Which processes have files, rings or memory of a mount open. Without MOUNTPOINT: of all kvfuse mounts.

    Files, maps and folders are as /proc says, in containers, too, under the paths that they have there. Rings, memory
    that a process registered for them, and what it follows are as the daemon says. Root sees all processes, other users
    their own.

    \b
    What a row says:
      fd 3 rw   descriptor 3, open for reading and writing      map r   mapped, readable
      cwd       its working directory                           rings   rings of shared memory, and their bytes
      memory    its own memory that rings use in place          ns      a folder whose blocks it uses by key
      file      registered with rings, whether it is open or not
      views     blocks that it has in place, in the daemon's memory
      follows   it follows the changes of a folder's blocks

    \b
    Examples:
      kvfuse lsof /mnt/kv
      kvfuse lsof /mnt/kv --json | jq '.[].pid'
    """
    mounts = [kvfuse_mount_at(mountpoint)] if mountpoint is not None else kvfuse_mounts()
    rows = [(mount, use) for mount in mounts for use in (*uses_of(mount), *_ring_uses(mount))]
    if as_json:
        print_json([{"mountpoint": mount.point, **use._asdict()} for mount, use in rows])
        return
    if not rows:
        points = ", ".join(str(mount.point) for mount in mounts)
        note(f"nobody has anything open of {points}" if points else "no kvfuse file system is mounted")
        return
    cells = [_cells(use, mount if mountpoint is not None else None) for mount, use in rows]
    print_table(["pid", "command", "user", "what", "bytes", "name"], cells)


def _ring_uses(mount: Mounted) -> Iterator[MountUse]:
    """What clients of rings have, as far as the daemon says; of a hanging or former one nothing."""
    try:
        clients = read_virtual(mount.point, "clients").get("clients") or []
    except MountError as error:
        note(f"without what uses rings, which a daemon of before does not list: {error}")
        return
    for client in clients:
        yield from _uses_of_client(client)


def _uses_of_client(client: Mapping[str, Any]) -> Iterator[MountUse]:
    process = ProcessFiles(client["pid"])
    who = client["pid"], process.command, client["uid"]
    if client["rings"]:
        yield MountUse(*who, "rings", _counted(client["rings"], "ring"), client["ring_bytes"])
    if client["iovs"]:
        yield MountUse(*who, "memory", _counted(client["iovs"], "piece"), client["iov_bytes"])
    if client["pins"]:
        yield MountUse(*who, "views", _counted(client["pins"], "block"))
    for path in client["namespaces"]:
        yield MountUse(*who, "follows" if client["follows"] else "ns", path)
    for path in client["file_names"]:
        yield MountUse(*who, "file", path)
    if (more := client["files"] - len(client["file_names"])) > 0:
        yield MountUse(*who, "file", f"and {more:,} more")
    if client["follows"] and not client["namespaces"]:
        yield MountUse(*who, "follows", "changes of blocks")


def _cells(use: MountUse, mount: Mounted | None) -> list[Any]:
    """``mount``: paths begin below it, so that lines are short."""
    size = format_size(use.size) if use.size is not None else ""
    name = use.name
    if mount is not None and Path(name).is_relative_to(mount.point):
        name = f"/{Path(name).relative_to(mount.point)}".removesuffix(".")
    return [str(use.pid), use.command, _user(use.uid), use.what, size, name]


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"
