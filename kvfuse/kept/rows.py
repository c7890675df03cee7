"""Rows of one size in shared memory, whose descriptor a keeper has: what they say, the next daemon finds.

A row that is free has a zero as its key, eight bytes somewhere in it, and so has one of which only a part was written:
whoever fills a row writes the key last. Nothing of what is found is trusted by itself: who reads a row checks it.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct

import numpy as np
import numpy.typing as npt

from kvfuse.kept.keeper import Keeper

log = logging.getLogger(__name__)

COUNT_MIN = 1024
"""rows at first"""
HEAD = struct.Struct("<II")
"""what is kept beside the descriptor: format, bytes of a row"""
_KEY = struct.Struct("<Q")


class Rows:
    """One table. ``name``: what the keeper knows it by; ``form``: number of the rows' format; ``key_at``: offset of the
    key in a row, both multiples of eight bytes.

    Of another format, or damaged, what is found is dropped with a warning. Event loop only.
    """

    def __init__(self, keeper: Keeper, name: str, form: int, row_size: int, count_max: int, key_at: int = 0) -> None:
        self.row_size = row_size
        self._key_at = key_at
        self._count_max = count_max
        head = HEAD.pack(form, row_size)
        descriptor = _take_table(keeper, name, head)
        self.was_kept = descriptor is not None
        """a daemon before this one left it"""
        if descriptor is None:
            descriptor = os.memfd_create(f"kvfuse-{name.replace('/', '-')}", os.MFD_CLOEXEC)
            os.posix_fallocate(descriptor, 0, COUNT_MIN * row_size)
            keeper.keep(name, head, [descriptor])
        self._descriptor = descriptor
        self.memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size // row_size * row_size)
        """all rows, one behind the other"""
        self.count = len(self.memory) // row_size
        keys = self._read_keys()
        self._free: list[int] = np.flatnonzero(keys == 0)[::-1].tolist()

    def _read_keys(self) -> npt.NDArray[np.uint64]:
        """A copy, as memory with views of it cannot grow."""
        rows = np.frombuffer(self.memory, np.uint64).reshape(self.count, self.row_size // 8)
        return rows[:, self._key_at // 8].copy()

    def list_used(self) -> list[int]:
        """Offsets in `memory`, in bytes, of rows that are not free."""
        return [place * self.row_size for place in np.flatnonzero(self._read_keys()).tolist()]

    def take_row(self) -> int | None:
        """The offset of a free row, for the caller to fill. None: there is no room for more."""
        if not self._free and not self._add_rows():
            return None
        return self._free.pop() * self.row_size

    def free_row(self, offset: int) -> None:
        """Free a row, filled or not."""
        _KEY.pack_into(self.memory, offset + self._key_at, 0)
        self._free.append(offset // self.row_size)

    def _add_rows(self) -> bool:
        count = min(2 * self.count, self._count_max)
        if count <= self.count:
            return False
        try:
            os.posix_fallocate(self._descriptor, 0, count * self.row_size)  # or a write might find no memory
            self.memory.resize(count * self.row_size)
        except OSError as error:
            log.warning("no room for more than %d rows that outlive this daemon: %s", self.count, error.strerror)
            self._count_max = self.count
            return False
        self._free = list(range(count - 1, self.count - 1, -1))
        self.count = count
        return True

    def close(self) -> None:
        """The keeper goes on to have it."""
        self.memory.close()
        os.close(self._descriptor)


def _take_table(keeper: Keeper, name: str, head: bytes) -> int | None:
    """A descriptor of the table that a daemon before this one left; None for none of use."""
    kept = keeper.take(name)
    if kept is None:
        return None
    row_size = HEAD.unpack(head)[1]
    if kept.content == head and len(kept.descriptors) == 1 and os.fstat(kept.descriptors[0]).st_size >= row_size:
        return kept.descriptors[0]
    log.warning("%s of the daemon before this one is of another kind, and dropped", name)
    for descriptor in kept.descriptors:
        os.close(descriptor)
    return None
