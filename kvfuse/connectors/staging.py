"""What adapters of engines share: memory in which blocks are gathered, and keys whose blocks are to be replaced."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvfuse.connectors.steady_store import Region, SteadyStore
from kvfuse.usrbio.client.iov import new_memory

STAGING_SIZE = 64 << 20
"""bytes; a call has one such memory, or one block if that is larger"""
DOUBTFUL_MAX = 100_000
"""keys that are remembered"""


class Doubtful:
    """Keys whose block was there when it was asked for, but could not be got: the next put replaces it."""

    def __init__(self) -> None:
        self._keys: dict[bytes, None] = {}

    def add(self, keys: Sequence[bytes]) -> None:
        if len(self._keys) + len(keys) > DOUBTFUL_MAX:
            self._keys.clear()
        self._keys.update(dict.fromkeys(keys))

    def among(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        known = self._keys
        return np.fromiter((key in known for key in keys), np.bool_, len(keys))

    def forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._keys.pop(key, None)


class GatherMemory:
    """Shared memory that blocks are gathered in. A call takes a piece of its own."""

    def __init__(self, store: SteadyStore) -> None:
        self._store = store
        self._idle: list[Region] = []
        self._late: list[Region] = []
        """a daemon that hangs may still write there"""
        self._descriptors: list[int] = []
        self._lock = threading.Lock()

    @contextmanager
    def taken(self, size: int) -> Iterator[Region]:
        """Memory of at least ``size`` bytes."""
        with self._lock:
            if self._late and self._store.is_silent:
                self._idle, self._late = self._idle + self._late, []
            fitting = [region for region in self._idle if len(region.array) >= size]
            region = fitting[0] if fitting else None
            if region is not None:
                self._idle = [other for other in self._idle if other is not region]
        region = region or self._new(max(size, STAGING_SIZE))
        try:
            yield region
        finally:
            with self._lock:
                (self._idle if self._store.is_silent else self._late).append(region)

    def _new(self, size: int) -> Region:
        array, part = new_memory(size)
        with self._lock:
            self._descriptors.append(part.descriptor)  # by which the daemon gets it
        return self._store.register(array)

    def close(self) -> None:
        with self._lock:
            self._idle, self._late = [], []
            while self._descriptors:
                os.close(self._descriptors.pop())
