"""Counts pages of shared memory that the daemon's control group pays for. Reads /proc/kpagecgroup: CAP_SYS_ADMIN."""

from __future__ import annotations

import os
import resource
from io import FileIO
from pathlib import Path

import numpy as np

from kvfuse.machine_memory import find_own_group

PAGE = 4096
_PRESENT = 1 << 63
_FRAME = (1 << 55) - 1
"""bits of an entry in /proc/self/pagemap"""


class OwnGroup:
    """This process's control group for memory; OSError where it has none that counts, or pages cannot be looked up."""

    def __init__(self) -> None:
        self.folder = find_own_group()
        self._number = self.folder.stat().st_ino
        self._path = _path_of("self")
        with _open_raw("/proc/self/pagemap"), _open_raw("/proc/kpagecgroup"):
            pass

    def has_process(self, pid: int) -> bool:
        """Whether a process is in the group, or below it. Such a process could use up the group's memory by itself."""
        try:
            return f"{_path_of(str(pid))}/".startswith(f"{self._path}/")
        except (OSError, StopIteration):
            return False

    def shared_size(self) -> int:
        """Bytes of shared memory that the kernel charges to the group."""
        rows = (line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        return next(int(value) for name, value in rows if name == "shmem")

    def count_pages(self, address: int, length: int) -> int:
        """Count mapped pages of a range, from a page's start, that the group pays for."""
        with _open_raw("/proc/self/pagemap") as pages, _open_raw("/proc/kpagecgroup") as owners:
            entries = np.frombuffer(os.pread(pages.fileno(), -(-length // PAGE) * 8, address // PAGE * 8), np.uint64)
            frames = (entries[entries & _PRESENT != 0] & _FRAME).tolist()
            return sum(
                int.from_bytes(os.pread(owners.fileno(), 8, 8 * frame), "little") == self._number for frame in frames
            )


def count_faults() -> int:
    """Count this thread's touches of pages that were not mapped."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def _path_of(process: str) -> str:
    """A process's group for memory."""
    text = os.fsdecode(Path(f"/proc/{process}/cgroup").read_bytes())
    lines = [line.split(":", 2) for line in text.split("\n") if line]
    return next(path for _, names, path in sorted(lines, reverse=True) if "memory" in names.split(",") or not names)


def _open_raw(path: str) -> FileIO:
    return open(path, "rb", buffering=0)
