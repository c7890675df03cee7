"""Counts a ring's operations in the daemon's profile, while somebody looks: see `PROFILE`. Any thread."""

from __future__ import annotations

import time
from errno import ENOENT
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvfuse.usrbio.protocol.wire import Op
from kvfuse.volume.measures.profiling import PROFILE

GET, PUT = int(Op.GET), int(Op.PUT)
NAMES = {int(op): f"ring {op.name.lower()}" for op in Op}
OF_FILES = frozenset({int(Op.READ), int(Op.WRITE), int(Op.FSYNC)})
"""their handles are files'"""
OF_BYTES = frozenset({int(Op.READ), int(Op.WRITE), int(Op.GET)})
"""their results are bytes"""
Column = npt.NDArray[np.int64]


class HandleTables(Protocol):
    """What a client has registered, by handle."""

    files: Any
    namespaces: Any


class RingProfile:
    """Of one ring of process ``pid``."""

    def __init__(self, pid: int, registered: HandleTables) -> None:
        self._pid = pid
        self._registered = registered

    def note(
        self, heads: npt.NDArray[np.uint64], lengths: Column, taken: npt.NDArray[np.float64], *, results: Column
    ) -> None:
        """Completed entries. ``heads``: first words of the entries; ``taken``: when, in monotonic seconds."""
        seconds = np.maximum(time.monotonic() - taken, 0.0)
        kinds = heads & np.uint64(0xFFFFFFFF000000FF)  # operation and handle
        for kind in np.unique(kinds).tolist():
            are = kinds == kind
            self._note(kind & 0xFF, kind >> 32, lengths[are], results[are], seconds[are])

    def note_one(self, op: int, handle: int, length: int, result: int, taken_at: float) -> None:
        """One entry."""
        is_miss = result == -ENOENT and op == GET
        size = 0 if result < 0 else result if op in OF_BYTES else length if op == PUT else 0
        PROFILE.note_one(
            self._pid,
            self._place(op, handle),
            NAMES.get(op, "ring"),
            max(time.monotonic() - taken_at, 0.0),
            misses=is_miss,
            failed=result < 0 and not is_miss,
            size=size,
        )

    def _place(self, op: int, handle: int) -> int:
        """The inode of what an entry names; 0 where that is gone."""
        thing = (self._registered.files if op in OF_FILES else self._registered.namespaces).get(handle)
        return thing.ino if thing is not None else 0

    def _note(self, op: int, handle: int, lengths: Column, results: Column, seconds: npt.NDArray[np.float64]) -> None:
        is_done = results >= 0
        misses = int(np.count_nonzero(results == -ENOENT)) if op == GET else 0
        sizes = results if op in OF_BYTES else lengths if op == PUT else np.zeros_like(results)
        PROFILE.note(
            self._pid,
            self._place(op, handle),
            NAMES.get(op, "ring"),
            seconds,
            calls=len(results),
            misses=misses,
            failed=len(results) - int(np.count_nonzero(is_done)) - misses,
            size=int(sizes[is_done].sum()),
        )
