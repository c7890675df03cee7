"""What is mounted where, by the kernel's table: no mount is touched, as its daemon may hang."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

DEAD = frozenset({errno.ENOTCONN, errno.ECONNABORTED})
"""what the kernel answers for a FUSE mount whose daemon is gone, the second for the first moments"""
FILE_SYSTEM = "fuse.kvfuse"
"""of kvfuse's mounts"""
LINKS_MAX = 40
"""that are followed, as many as the kernel follows"""


@dataclass(frozen=True)
class Mounted:
    """One row of /proc/self/mountinfo."""

    point: Path
    file_system: str
    source: str
    device: str
    """MAJOR:MINOR"""
    read_only: bool
    user: int | None = None
    """who mounted it, of a FUSE file system"""
    root: str = "/"
    """the folder of the file system that is seen there: "/", but for bind mounts"""
    is_shared: bool = False
    """mounts and unmounts here are seen by other mount namespaces, and theirs here"""

    @property
    def st_dev(self) -> int:
        """What stat(2) says of its files."""
        return os.makedev(*map(int, self.device.split(":")))


def _unescape(field: str) -> str:
    text = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
    return text.encode("latin-1").decode("utf-8", "surrogateescape")


def parse_mountinfo(text: str) -> list[Mounted]:
    """Rows in the order of mounting: where several share a point, the last is on top.

    The kernel escapes a newline of a name, and none of the other bytes at which `str.splitlines` ends a line.
    """
    rows = []
    for line in filter(None, text.split("\n")):
        before, _, after = line.partition(" - ")
        device, root, point, options, *propagation = before.split(" ")[2:]
        file_system, source, *others = after.split(" ")
        is_read_only = "ro" in options.split(",")
        found = re.search(r"(?:^|,)user_id=(\d+)", others[0]) if others else None
        user = int(found[1]) if found else None
        is_shared = any(word.startswith("shared:") for word in propagation)
        place, root = Path(_unescape(point)), _unescape(root)
        rows.append(Mounted(place, file_system, _unescape(source), device, is_read_only, user, root, is_shared))
    return rows


def all_mounts() -> list[Mounted]:
    """Those of this process's mount namespace."""
    return parse_mountinfo(Path("/proc/self/mountinfo").read_bytes().decode("latin-1"))


def seen_elsewhere(mounted: Mounted) -> str | None:
    """Where a file system is mounted besides, in words: a path of ours, or a process that has mounts of its own."""

    def is_copy(row: Mounted) -> bool:
        return (row.device, row.file_system, row.source) == (mounted.device, mounted.file_system, mounted.source)

    for row in filter(is_copy, all_mounts()):
        return str(row.point)
    looked_at = {os.readlink("/proc/self/ns/mnt")}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            namespace = os.readlink(process / "ns/mnt")
            if namespace in looked_at:
                continue
            rows = parse_mountinfo((process / "mountinfo").read_bytes().decode("latin-1"))
            name = os.fsdecode((process / "comm").read_bytes()).strip()
        except OSError:  # it has ended, or is somebody else's
            continue
        looked_at.add(namespace)
        for row in filter(is_copy, rows):
            return f"{row.point} in the mount namespace of process {process.name} ({name})"
    return None


def top_mount(point: Path) -> Mounted | None:
    """What is mounted at this path, or where it leads to as a symbolic link. The mount is not touched."""
    on_top = {str(row.point): row for row in all_mounts()}
    path = os.path.abspath(point)
    for _ in range(LINKS_MAX):
        if path in on_top:
            return on_top[path]
        folder, name = os.path.split(path)
        path = os.path.join(os.path.realpath(folder), name)
        if path in on_top:
            return on_top[path]
        try:
            path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
        except OSError:  # not a link
            return None
    return None
