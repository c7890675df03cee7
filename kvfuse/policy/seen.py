"""Which keys were ever asked for: a table of fixed size that forgets those which were not asked for longest.

A key has a place in one row of ``WAYS`` fingerprints of 32 bits, the most recent first; a new one pushes the last
out. Four bytes for each key instead of some hundred in a set, and a batch is looked up by a dozen array operations.
A key is taken for another one with a probability of ``WAYS`` / 2**32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WAYS = 8
DEFAULT_SIZE = 16 << 20
"""bytes: as many keys as an hour of 1,000 new blocks a second has"""

_COLUMNS = np.arange(WAYS)
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1
_SMALL_BATCH = 8
"""keys: fewer are looked up faster one by one"""


def mix(keys: Sequence[int]) -> NDArray[np.uint64]:
    """Uniform hashes (the finalizer of splitmix64) of keys, which may be small numbers."""
    hashes = np.array(keys, dtype=np.uint64)
    hashes += np.uint64(_STEP)
    hashes ^= hashes >> np.uint64(30)
    hashes *= np.uint64(_FIRST)
    hashes ^= hashes >> np.uint64(27)
    hashes *= np.uint64(_SECOND)
    hashes ^= hashes >> np.uint64(31)
    return hashes


def mix_one(key: int) -> int:
    """``mix`` of one key."""
    hashed = (key + _STEP) & _WORD
    hashed = (hashed ^ hashed >> 30) * _FIRST & _WORD
    hashed = (hashed ^ hashed >> 27) * _SECOND & _WORD
    return hashed ^ hashed >> 31


class SeenKeys:
    """The table: ``size`` bytes, rounded down to a power of two."""

    def __init__(self, size: int = DEFAULT_SIZE) -> None:
        self._row_bits = max(1, (size // (4 * WAYS)).bit_length() - 1)
        self._table = np.zeros((1 << self._row_bits, WAYS), dtype=np.uint32)
        self._places = memoryview(self._table.reshape(-1))  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    def ask(self, keys: Sequence[int]) -> list[bool]:
        """Which of ``keys`` were asked for before; from now on all of them were."""
        if len(keys) < _SMALL_BATCH:
            return [self._ask_one(mix_one(key)) for key in keys]
        hashes = mix(keys)
        marks = hashes.astype(np.uint32) | np.uint32(1)  # 0 is an empty place
        rows = (hashes >> np.uint64(64 - self._row_bits)).astype(np.intp)
        same = self._table[rows] == marks[:, None]
        found = same.any(axis=1)
        self._bring_first(rows, marks, np.where(found, same.argmax(axis=1), WAYS - 1))
        return found.tolist()  # type: ignore[no-any-return]

    def _ask_one(self, hashed: int) -> bool:
        start = WAYS * (hashed >> 64 - self._row_bits)
        places = self._places[start : start + WAYS]
        mark, row = hashed & 0xFFFFFFFF | 1, places.tolist()
        found = mark in row
        last = row.index(mark) if found else WAYS - 1
        if last:
            places[1 : last + 1] = places[:last]
        places[0] = mark
        return found

    def _bring_first(self, rows: NDArray[np.intp], marks: NDArray[np.uint32], places: NDArray[np.intp]) -> None:
        """Put each mark first in its row; those before its place move by one."""
        sources = np.where(places[:, None] >= _COLUMNS, _COLUMNS - 1, _COLUMNS)
        moved = np.take_along_axis(self._table[rows], sources, axis=1)
        moved[:, 0] = marks
        self._table[rows] = moved
        lost = np.flatnonzero(self._table[rows, 0] != marks)  # of several keys in one row the last was written
        for index in lost.tolist():
            row = self._table[rows[index]]
            if marks[index] not in row:
                row[1:] = np.concatenate(([marks[index]], row[1:-1]))
