"""Which keys were ever asked for, and when: a table of fixed size that forgets those which were not asked for longest.

A key has a place in one row of ``WAYS`` entries, the most recent first; a new one pushes the last out. An entry is a
fingerprint of 32 bits and the second of the last request: eight bytes for each key instead of some hundred in a dict,
and a batch is looked up by a dozen array operations. A key is taken for another one with a probability of
``WAYS`` / 2**32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WAYS = 8
DEFAULT_SIZE = 16 << 20
"""bytes: two million keys: an hour of 500 new blocks a second"""

_PLACES = np.arange(WAYS)
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_STEP_WORD, _FIRST_WORD, _SECOND_WORD = np.uint64(_STEP), np.uint64(_FIRST), np.uint64(_SECOND)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_WORD = (1 << 64) - 1
_HALF_WORD = (1 << 32) - 1
_MARK, _HALF, _ONE = np.uint64(_HALF_WORD), np.uint64(32), np.uint64(1)
NEVER = -1
"""seconds since a key was asked for that was not"""
SMALL_BATCH = 8
"""keys: fewer are looked up faster one by one"""


def mix(keys: Sequence[int] | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Uniform hashes (the finalizer of splitmix64) of keys, which may be small numbers."""
    hashes = np.array(keys, dtype=np.uint64)
    hashes += _STEP_WORD
    hashes ^= hashes >> _SHIFTS[0]
    hashes *= _FIRST_WORD
    hashes ^= hashes >> _SHIFTS[1]
    hashes *= _SECOND_WORD
    hashes ^= hashes >> _SHIFTS[2]
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
        self._row_bits = max(1, (size // (8 * WAYS)).bit_length() - 1)
        self._table = np.zeros((1 << self._row_bits, WAYS), dtype=np.uint64)
        """last second in the upper half, fingerprint in the lower"""
        self._flat = self._table.reshape(-1)
        # A view reads one place faster than an array. Types of Python 3.11 do not say that an array is a buffer.
        self._places = memoryview(self._flat)  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    def ask(self, keys: Sequence[int], now: float) -> list[int]:
        """Whole seconds since each of ``keys`` was last asked for, or NEVER; from now on all of them were."""
        if len(keys) < SMALL_BATCH:
            second = int(now) & _HALF_WORD
            return [self._ask_one(mix_one(key), second) for key in keys]
        gaps: list[int] = self.ask_column(np.array(keys, dtype=np.uint64), now).tolist()
        return gaps

    def ask_one(self, key: int, now: float) -> int:
        """``ask`` for one key."""
        return self._ask_one(mix_one(key), int(now) & _HALF_WORD)

    def ask_column(self, keys: NDArray[np.uint64], now: float) -> NDArray[np.int64]:
        """``ask`` for a column of keys, each once."""
        second = int(now) & _HALF_WORD
        rows, marks, entries, places = self._find(keys)
        found, last = self._at(entries, places, marks)
        gaps: NDArray[np.int64] = np.where(found, second - last, NEVER)
        places[~found] = WAYS  # the last one goes
        self._bring_first(rows, entries, marks | np.uint64(second << 32), places)
        return gaps

    def forget_column(self, keys: NDArray[np.uint64], now: float) -> NDArray[np.int64]:
        """Whole seconds since each key was last asked for, or NEVER; from now on none of them ever was."""
        rows, marks, entries, places = self._find(keys)
        found, last = self._at(entries, places, marks)
        self._flat[WAYS * rows[found] + places[found]] = 0
        gaps: NDArray[np.int64] = np.where(found, (int(now) & _HALF_WORD) - last, NEVER)
        return gaps

    def _find(
        self, keys: NDArray[np.uint64]
    ) -> tuple[NDArray[np.intp], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.intp]]:
        """Of each key: its row, its mark, the entries of the row, and the place among them where it may be."""
        hashes = mix(keys)
        marks = (hashes & _MARK) | _ONE  # 0 is an empty place
        rows = (hashes >> np.uint64(64 - self._row_bits)).astype(np.intp)
        entries = self._table[rows]
        return rows, marks, entries, ((entries & _MARK) == marks[:, None]).argmax(axis=1)

    @staticmethod
    def _at(
        entries: NDArray[np.uint64], places: NDArray[np.intp], marks: NDArray[np.uint64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Whether the entry at each place is of that mark, and its second."""
        chosen = entries.reshape(-1)[np.arange(0, WAYS * len(places), WAYS) + places]
        return (chosen & _MARK) == marks, (chosen >> _HALF).astype(np.int64)

    def _ask_one(self, hashed: int, second: int) -> int:
        start = WAYS * (hashed >> 64 - self._row_bits)
        places = self._places[start : start + WAYS]
        mark, row = hashed & _HALF_WORD | 1, places.tolist()
        gap, last = NEVER, WAYS - 1
        for place, entry in enumerate(row):
            if entry & _HALF_WORD == mark:
                gap, last = second - (entry >> 32), place
                break
        if last:
            places[1 : last + 1] = places[:last]
        places[0] = second << 32 | mark
        return gap

    def _bring_first(
        self,
        rows: NDArray[np.intp],
        entries: NDArray[np.uint64],
        new: NDArray[np.uint64],
        places: NDArray[np.intp],
    ) -> None:
        """Put each new entry first in its row; those before its place move by one."""
        if not places.any():  # all are the first ones already
            self._flat[WAYS * rows] = new
            return
        moved = np.empty_like(entries)
        moved[:, 0], moved[:, 1:] = new, entries[:, :-1]
        self._table[rows] = np.where(places[:, None] >= _PLACES, moved, entries)
        lost = np.flatnonzero(self._flat[WAYS * rows] != new)  # of several keys in one row the last was written
        for index in lost.tolist():
            row = self._table[rows[index]]
            if new[index] not in row:
                row[1:] = np.concatenate(([new[index]], row[1:-1]))
