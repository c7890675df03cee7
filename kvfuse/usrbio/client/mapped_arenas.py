"""Arenas that a client has mapped for one index, or table, of blocks."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from kvfuse.native.blockforms import ARENA
from kvfuse.usrbio.client.iov import address_of
from kvfuse.usrbio.client.session import Bytes, Session


class MappedArenas:
    """For any number of threads."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.rows: npt.NDArray[np.void] = np.zeros(0, ARENA)
        """replaced, never changed"""
        self._held: dict[int, Bytes] = {}
        """they stay mapped for whoever copies from their addresses"""
        self._refused: set[int] = set()
        self._lock = threading.Lock()

    def size_of(self, number: int) -> int:
        """-1: it is not mapped."""
        found = self._held.get(number)
        return len(found) if found is not None else -1

    def bytes_of(self, number: int) -> Bytes:
        return self._held[number]

    def map(self, numbers: npt.NDArray[np.generic]) -> bool:
        """Map those of them that are not. False: there are no more than before."""
        rows = []
        for number in set(numbers.tolist()) - self._refused - {0}:
            if number in self._held:
                continue
            try:
                memory = self._session.arena(number)
            except OSError:  # it went meanwhile; numbers are not used again
                self._refused.add(number)
                continue
            self._held[number] = memory
            rows.append((number, address_of(memory), len(memory)))
        if rows:
            with self._lock:
                self.rows = np.concatenate([self.rows, np.array(rows, ARENA)])
        return bool(rows)
