"""Keeps tables of equal rows in shared memory, whose descriptor a keeper has: the next daemon finds the rows.

A free row has key zero (the key is eight bytes somewhere in a row), and so has a row of which only a part was written:
the writer stores the key last. Readers trust no row by itself: they check it.
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
"""content of the keeper's entry: number of the format, bytes of a row"""
_KEY = struct.Struct("<Q")


class Rows:
    """One table. ``name``: of its keeper entry; ``form``: number of the rows' format; ``key_at``: offset of a row's
    key. ``row_size`` and ``key_at`` are multiples of eight bytes.

    A former table of another format, or damaged, is dropped with a warning. Event loop only.
    """

    def __init__(self, keeper: Keeper, name: str, form: int, row_size: int, count_max: int, key_at: int = 0) -> None:
        self.row_size = row_size
        self._key_at = key_at
        self._count_max = count_max
        head = HEAD.pack(form, row_size)
        descriptor = _take_table(keeper, name, head)
        self.was_kept = descriptor is not None
        """a former daemon left it"""
        if descriptor is None:
            descriptor = os.memfd_create(f"kvfuse-{name.replace('/', '-')}", os.MFD_CLOEXEC)
            os.posix_fallocate(descriptor, 0, COUNT_MIN * row_size)
            keeper.keep(name, head, [descriptor])
        self._descriptor = descriptor
        self.memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size // row_size * row_size)
        """all rows, contiguous"""
        self.count = len(self.memory) // row_size
        keys = self._read_keys()
        self._free: list[int] = np.flatnonzero(keys == 0)[::-1].tolist()

    def _read_keys(self) -> npt.NDArray[np.uint64]:
        """A copy of all keys, as memory with views of it cannot grow."""
        rows = np.frombuffer(self.memory, np.uint64).reshape(self.count, self.row_size // 8)
        return rows[:, self._key_at // 8].copy()

    def list_used(self) -> list[int]:
        """Offsets in `memory`, in bytes, of rows in use."""
        return [place * self.row_size for place in np.flatnonzero(self._read_keys()).tolist()]

    def take_row(self) -> int | None:
        """Take a free row, for the caller to fill. Returns its offset; None: the table is full."""
        if not self._free and not self._add_rows():
            return None
        return self._free.pop() * self.row_size

    def free_row(self, offset: int) -> None:
        """Free a row, complete or not."""
        _KEY.pack_into(self.memory, offset + self._key_at, 0)
        self._free.append(offset // self.row_size)

    def _add_rows(self) -> bool:
        count = min(2 * self.count, self._count_max)
        if count <= self.count:
            return False
        try:
            os.posix_fallocate(self._descriptor, 0, count * self.row_size)  # else a write might find no memory
            self.memory.resize(count * self.row_size)
        except OSError as error:
            log.warning("no room for more than %d rows that outlive this daemon: %s", self.count, error.strerror)
            self._count_max = self.count
            return False
        self._free = list(range(count - 1, self.count - 1, -1))
        self.count = count
        return True

    def close(self) -> None:
        """Unmap the table; the keeper retains it."""
        self.memory.close()
        os.close(self._descriptor)


def _take_table(keeper: Keeper, name: str, head: bytes) -> int | None:
    """Take the descriptor of the former daemon's table. None: no usable one."""
    kept = keeper.take(name)
    if kept is None:
        return None
    row_size = HEAD.unpack(head)[1]
    if kept.content == head and len(kept.descriptors) == 1 and os.fstat(kept.descriptors[0]).st_size >= row_size:
        return kept.descriptors[0]
    log.warning("%s of the former daemon has another format, and is dropped", name)
    for descriptor in kept.descriptors:
        os.close(descriptor)
    return None
