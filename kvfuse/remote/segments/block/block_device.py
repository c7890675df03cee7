"""A block device that one process has for itself, and what else may be on it. The calls are for threads."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

PAGE_SIZE = 4096
HEAD_SIZE = 1 << 20
"""Bytes at the beginning that no segment has: the first page says whose the device is, the rest is zeros."""
_PROBE_SECONDS = 10.0


def place_size(segment_size: int) -> int:
    """Bytes of a place for segments of up to ``segment_size``."""
    return HEAD_SIZE + -(-segment_size // HEAD_SIZE) * HEAD_SIZE


def is_device(path: Path) -> bool:
    """A block device, or where one would be: whatever is made in /dev takes memory, not a disk."""
    absolute = Path(os.path.abspath(path))
    return path.is_block_device() or (absolute.is_relative_to("/dev") and not absolute.is_relative_to("/dev/shm"))


class BlockDevice:
    """An open device, which neither the system nor another process uses meanwhile. Plain files do for tests."""

    def __init__(self, path: Path) -> None:
        """OSError; EBUSY and BlockingIOError where it is in use: mounted, part of a RAID, another daemon's."""
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.size = os.lseek(self.fd, 0, os.SEEK_END)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        os.close(self.fd)

    def first_page(self) -> bytes:
        return os.pread(self.fd, PAGE_SIZE, 0)

    def put_first_page(self, image: bytes) -> None:
        """Durable when it returns."""
        os.pwrite(self.fd, image, 0)
        os.fsync(self.fd)

    def foreign_content(self) -> str | None:
        """What is on a device whose first page is not ours, in words; None: nothing that anybody would miss.

        Signatures are found by `wipefs` of util-linux, which knows those at the end of a device, too. Without it,
        whatever is there counts.
        """
        known = self._signatures()
        if known:
            return f"holds {', '.join(known)}"
        ends = [0] if known is not None else [0, max(self.size - HEAD_SIZE, 0)]
        if any(any(os.pread(self.fd, HEAD_SIZE, offset)) for offset in ends):
            return "holds data of a kind that is not known"
        return None

    def _signatures(self) -> list[str] | None:
        """Types of file systems, partition tables, RAIDs and such; None: not to be found out."""
        program = shutil.which("wipefs", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
        if program is None:
            return None
        command = [program, "--noheadings", "--output", "TYPE", "--", os.path.abspath(self.path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return sorted(set(done.stdout.split()))
