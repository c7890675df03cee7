"""What is to be done with LMDB's file after a sync that failed, before it is used again: see `store`."""

from __future__ import annotations

import os
from pathlib import Path

PAGE_COUNT = 2


class MetaPages:
    """Of an open store's file, as its last commit left them. In the thread that commits. OSError.

    The one of the last commit may be on the disk or not; the kernel calls it clean, and no later sync writes it. Once
    the next commit but one reuses pages of the snapshot that the disk knows, a loss of power would leave a torn store.
    """

    def __init__(self, path: Path, page_size: int) -> None:
        self._path = path
        self._size = PAGE_COUNT * page_size
        self._known = self._read()
        self.is_doubtful = False
        """a sync failed: they may not be on the disk, nor what is written to pages that the kernel has"""

    def note(self) -> None:
        """A commit succeeded."""
        self._known = self._read()

    def renew(self) -> None:
        """Have them on the disk. By way of the kernel's cache: there the next daemon finds them where this fails."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, self._known, 0)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def _read(self) -> bytes:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(descriptor, self._size, 0)
        finally:
            os.close(descriptor)
