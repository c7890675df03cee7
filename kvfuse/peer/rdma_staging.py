"""Registered memory for what is read on its way to memory that is not registered."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence

import numpy as np
import trio

from kvfuse.peer.registrations import Bytes
from kvfuse.peer.verbs import MemoryPart, RdmaDevice, Registration

STAGING_SIZE = 16 << 20
STAGED_MAX = STAGING_SIZE // 2
"""bytes that one batch may have there"""
STEP = 4096


class RdmaStaging:
    """Of one device. Its memory is made, and registered, when it is first used. Event loop only."""

    def __init__(self, device: RdmaDevice) -> None:
        self._device = device
        self._registration: Registration | None = None
        self._memory: Bytes = np.empty(0, np.uint8)
        self._making = trio.Lock()
        self._free = [(0, STAGING_SIZE)]
        """(start, end) of what is free, in order; no two touch"""
        self._given_back = trio.Event()

    async def open(self) -> None:
        """VerbsError."""
        async with self._making:
            if self._registration is None:
                self._memory = np.frombuffer(mmap.mmap(-1, STAGING_SIZE), np.uint8)
                address = self._memory.ctypes.data
                self._registration = await self._device.register(address, STAGING_SIZE, self._memory, remote=False)

    async def take(self, sizes: Sequence[int]) -> list[Bytes]:
        """Memory of these sizes, together at most `STAGED_MAX`; waits until all of it is there."""
        while True:
            taken: list[Bytes] = []
            for size in sizes:
                if (one := self._fit(size)) is None:
                    break
                taken.append(one)
            else:
                return taken
            self.give_back(taken)
            self._given_back = trio.Event()
            await self._given_back.wait()

    def _fit(self, size: int) -> Bytes | None:
        needed = -(-size // STEP) * STEP
        for place, (start, end) in enumerate(self._free):
            if end - start >= needed:
                self._free[place : place + 1] = [(start + needed, end)] if end - start > needed else []
                return self._memory[start : start + size]
        return None

    def give_back(self, taken: Iterable[Bytes]) -> None:
        for one in taken:
            start = one.ctypes.data - self._memory.ctypes.data
            self._free.append((start, start + -(-len(one) // STEP) * STEP))
        merged: list[tuple[int, int]] = []
        for start, end in sorted(self._free):
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._free = merged
        self._given_back.set()

    def parts(self, taken: Bytes) -> list[MemoryPart]:
        assert self._registration is not None
        return self._registration.parts(taken.ctypes.data, len(taken))

    def close(self) -> None:
        if self._registration is not None:
            self._registration.close()
            self._registration = None
