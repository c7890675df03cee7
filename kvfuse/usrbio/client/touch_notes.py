"""The page where a client notes what it reads, and asks for, without the daemon: see `kvfuse/touchpage`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import compress
from mmap import mmap

import numpy as np
import numpy.typing as npt

from kvfuse.touchpage import ASKED_MAX, ASKED_OFFSET, ASKED_SIZE, HEADER_SIZE, TOUCHES_MAX, TOUCHES_SIZE

Numbers = npt.NDArray[np.int64]


class TouchNotes:
    """Of one table; for any number of threads. ``descriptor`` stays the caller's."""

    def __init__(self, descriptor: int) -> None:
        touches = np.frombuffer(mmap(descriptor, TOUCHES_SIZE), np.uint8)
        self._count = touches[:8].view(np.uint64).data
        self._touched: npt.NDArray[np.uint32] = touches[HEADER_SIZE:ASKED_OFFSET].view(np.uint32)
        self._asked_count = touches[8:16].view(np.uint64).data
        self._asked = touches[ASKED_OFFSET:].reshape(ASKED_MAX, ASKED_SIZE)
        self._lock = threading.Lock()

    def touch(self, slots: Numbers) -> None:
        """Note that blocks were read."""
        slots = slots[-TOUCHES_MAX:]
        if not len(slots):
            return
        with self._lock:
            count = self._count[0]
            start = count % TOUCHES_MAX
            first = slots[: TOUCHES_MAX - start]
            self._touched[start : start + len(first)] = first
            if len(first) < len(slots):
                self._touched[: len(slots) - len(first)] = slots[len(first) :]
            self._count[0] = (count + len(slots)) % (1 << 64)

    def touch_one(self, slot: int) -> None:
        with self._lock:
            count = self._count[0]
            self._touched[count % TOUCHES_MAX] = slot
            self._count[0] = (count + 1) % (1 << 64)

    def ask(self, keys: Sequence[bytes]) -> None:
        """Note that blocks were asked for, of which some are absent: a cache learns from it."""
        keys = keys[: ASKED_MAX - 1]
        lengths = np.fromiter(map(len, keys), np.int64, len(keys))
        with self._lock:
            count = self._asked_count[0]
            places_in = (count + 1 + np.arange(len(keys))) % ASKED_MAX
            self._asked[count % ASKED_MAX, 0] = 0
            self._asked[places_in, 0] = lengths
            for length in set(lengths.tolist()):
                same = lengths == length
                text = b"".join(keys if same.all() else compress(keys, same.tolist()))
                self._asked[places_in[same], 1 : 1 + length] = np.frombuffer(text, np.uint8).reshape(-1, length)
            self._asked_count[0] = (count + 1 + len(keys)) % (1 << 64)
