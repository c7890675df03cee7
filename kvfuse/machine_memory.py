"""Reads how much memory this process may have: the machine's, or less where a control group (v1 or v2) limits it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath


def memory_size(root: Path = Path("/")) -> int:
    """Bytes. ``root``: folder of /proc, and of what that names."""
    size = _read_meminfo(root, "MemTotal:")
    for top, folder, limit in _find_groups(root):
        for part in (folder, *folder.parents):
            with suppress(OSError, ValueError):  # no such file in the root; "max": no limit
                size = min(size, int((part / limit).read_text()))
            if part == top:
                break
    return size


def free_memory_size(root: Path = Path("/")) -> int:
    """Bytes that the machine can give to processes without swapping. Use of a control group does not count: most of it
    is pages of files."""
    return _read_meminfo(root, "MemAvailable:")


def dirty_size_max(root: Path = Path("/")) -> int:
    """Bytes that the machine lets programs write before they wait for its disks: `vm.dirty_bytes`, or `vm.dirty_ratio`
    of the memory that this process may have."""
    settings = root / "proc/sys/vm"
    with suppress(OSError, ValueError):
        if size := int((settings / "dirty_bytes").read_text()):
            return size
        return min(free_memory_size(root), memory_size(root)) * int((settings / "dirty_ratio").read_text()) // 100
    return memory_size(root) // 5


def _read_meminfo(root: Path, name: str) -> int:
    lines = (root / "proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def find_own_group(root: Path = Path("/")) -> Path:
    """The folder of this process's control group for memory. OSError where there is none, or it cannot be limited."""
    for _, folder, limit in _find_groups(root):
        if (folder / limit).exists():
            return folder
    raise FileNotFoundError("no control group limits this process's memory")


def _find_groups(root: Path) -> list[tuple[Path, Path, str]]:
    """(where its hierarchy is mounted, this process's group, name of the file with its limit), of each version."""
    paths: dict[str, str] = {}
    for line in _read_rows(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            paths["cgroup"] = path
        elif not controllers:
            paths["cgroup2"] = path
    found = []
    for line in _read_rows(root / "proc/self/mountinfo"):
        own, _, shared = line.partition(" - ")
        kind, _, words = shared.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and "memory" not in words.split(",")):
            continue
        seen_from, point = own.split(" ")[3:5]
        group = PurePosixPath(paths[kind])
        inside = group.relative_to(seen_from) if group.is_relative_to(seen_from) else PurePosixPath()
        top = root / os.fsdecode(point).lstrip("/")
        found.append((top, top / inside, "memory.max" if kind == "cgroup2" else "memory.limit_in_bytes"))
    return found


def _read_rows(table: Path) -> list[str]:
    """Rows of a table of /proc. Names in it may have any bytes but a newline."""
    return [row for row in os.fsdecode(table.read_bytes()).split("\n") if row]
