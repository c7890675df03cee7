"""Which processes have something of a mount open, as /proc says. Nothing here asks the mount's daemon.

A mount is known by its device, so it is also found in mount namespaces of containers, under whatever path it has there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvfuse.mounttable import Mounted

PROC = Path("/proc")
MODES = {os.O_RDONLY: "r", os.O_WRONLY: "w", os.O_RDWR: "rw"}
_MAPPED = re.compile(rb"^[0-9a-f]+-[0-9a-f]+ (....) [0-9a-f]+ ([0-9a-f]+):([0-9a-f]+) \d+ +(.*)$", re.MULTILINE)


class MountUse(NamedTuple):
    """Something that a process has."""

    pid: int
    command: str
    uid: int
    what: str
    """such as "fd 3 rw", "map r", "cwd", "rings" """
    name: str
    """a path in the process's own mount namespace, or text"""
    size: int | None = None
    """bytes"""


class ProcessFiles:
    """A process in /proc. It may end at any time: what cannot be read is left out."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._folder = PROC / str(pid)

    @property
    def command(self) -> str:
        try:
            return os.fsdecode((self._folder / "comm").read_bytes()).strip()
        except OSError:
            return "?"

    @property
    def uid(self) -> int:
        try:
            return self._folder.stat().st_uid
        except OSError:
            return -1

    def uses_of(self, device: str) -> Iterator[MountUse]:
        """Open files, maps and folders of the mount with this device (MAJOR:MINOR)."""
        points = self._points_of(device)
        if not points:
            return
        command, uid = self.command, self.uid
        for what in ("cwd", "root", "exe"):
            with suppress(OSError):
                path = (self._folder / what).readlink()
                if any(path.is_relative_to(point) for point in points.values()):
                    yield MountUse(self.pid, command, uid, what, str(path))
        for descriptor, mode, name in self._descriptors(points):
            yield MountUse(self.pid, command, uid, f"fd {descriptor} {mode}", name)
        for rights, name in sorted(self._maps(device)):
            yield MountUse(self.pid, command, uid, f"map {rights}", name)

    def _points_of(self, device: str) -> dict[bytes, Path]:
        """Mount's number -> where it is, of mounts with this device that the process sees."""
        points = {}
        with suppress(OSError):
            for line in (self._folder / "mountinfo").read_bytes().split(b"\n"):
                fields = line.split(b" ", 5)
                if len(fields) > 5 and fields[2] == device.encode():
                    points[fields[0]] = Path(os.fsdecode(fields[4]))
        return points

    def _descriptors(self, mounts: Collection[bytes]) -> Iterator[tuple[str, str, str]]:
        """(number, mode, path) of those in these mounts."""
        try:
            numbers = os.listdir(self._folder / "fdinfo")
        except OSError:
            return
        for number in sorted(numbers, key=int):
            with suppress(OSError):  # it was closed meanwhile
                facts = _facts((self._folder / "fdinfo" / number).read_bytes())
                if facts.get(b"mnt_id", b"").strip() in mounts:
                    flags = int(facts[b"flags"], 8)
                    yield number, MODES.get(flags & os.O_ACCMODE, "-"), str((self._folder / "fd" / number).readlink())

    def _maps(self, device: str) -> set[tuple[str, str]]:
        """(rights, path) of files of the device that are mapped."""
        wanted = tuple(int(part) for part in device.split(":"))
        found = set()
        with suppress(OSError):
            for rights, major, minor, path in _MAPPED.findall((self._folder / "maps").read_bytes()):
                if (int(major, 16), int(minor, 16)) == wanted:
                    found.add((rights.decode().replace("-", "").rstrip("p"), os.fsdecode(path)))
        return found


def _facts(fdinfo: bytes) -> dict[bytes, bytes]:
    return dict(line.split(b":", 1) for line in fdinfo.splitlines() if b":" in line)


def uses_of(mount: Mounted) -> Iterator[MountUse]:
    """Of all processes that this user may look at."""
    for name in sorted(filter(str.isdigit, os.listdir(PROC)), key=int):
        yield from ProcessFiles(int(name)).uses_of(mount.device)
