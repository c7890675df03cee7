"""Which blocks the cold tier has, by fingerprint: columns of 64 bytes a block, and 12 for finding them.

Rows are found in a few sorted columns of keys, of which each later one is at most half as long: a block that comes is
sorted in a logarithmic number of times, and a batch is looked for at once. The first half of a fingerprint is the key:
of two names that share it, of which there may be one pair in 10**12 blocks, only one is here.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

FREE, PENDING, ALIVE, DEAD = range(4)
"""states of a row: nothing; the object is not stored yet; it can be read; it was replaced, removed or cleared"""
ROW = np.dtype(
    [
        ("low", np.uint64),
        ("high", np.uint64),
        ("sequence", np.uint64),  # up to which it is the newest block of its name
        ("hot", np.uint64),  # sequence of the same block where it was brought back; 0: it was not
        ("object", np.uint32),
        ("place", np.uint32),  # of its bytes in the object, in `cold_format.STEP`
        ("length", np.uint32),
        ("checksum", np.uint32),
        ("expires", np.uint32),
        ("stored", np.uint32),
        ("group", np.uint32),
        ("priority", np.uint8),
        ("state", np.uint8),
        ("spare", np.uint16),
    ]
)
ROWS_MIN = 1024


class ColdGroup(NamedTuple):
    """What many blocks have in common."""

    directory: int
    namespace: int
    epoch: int
    uid: int
    gid: int
    mode: int


class ColdIndex:
    """Any thread."""

    def __init__(self) -> None:
        self.rows = np.zeros(ROWS_MIN, ROW)
        self.lock = threading.RLock()
        self.count = 0
        """rows that are alive"""
        self.bytes = 0
        """of their blocks"""
        self._used = 0
        self._free: list[npt.NDArray[np.int64]] = []
        self._levels: list[tuple[Words, npt.NDArray[np.int32]]] = []
        self.groups: list[ColdGroup] = []
        self._group_numbers: dict[ColdGroup, int] = {}
        self._directories: dict[int, int] = {}
        """directory -> blocks of it that are pending or alive"""

    def group(self, number: int) -> ColdGroup:
        return self.groups[number]

    def number_of(self, group: ColdGroup) -> int:
        with self.lock:
            number = self._group_numbers.setdefault(group, len(self.groups))
            if number == len(self.groups):
                self.groups.append(group)
            return number

    def has_directory(self, directory: int) -> bool:
        """Blocks of it are here, or about to be."""
        return self._directories.get(directory, 0) > 0

    def find(self, low: Words, high: Words) -> Rows:
        """The row of each fingerprint, whatever its state; -1: there is none."""
        with self.lock:
            found = self._find_keys(low)
            return np.where((found >= 0) & (self.rows["high"][found] == high), found, -1)

    def alive(self, low: Words, high: Words, now: int) -> Rows:
        """The row of each fingerprint whose block can be read; -1: there is none."""
        with self.lock:
            rows = self.find(low, high)
            entries = self.rows[rows]
            good = (rows >= 0) & (entries["state"] == ALIVE) & ((entries["expires"] == 0) | (entries["expires"] > now))
            return np.where(good, rows, -1)

    def add(self, entries: npt.NDArray[np.void]) -> Rows:
        """Add rows with different fingerprints. -1 for those whose key another name, or a newer block, has."""
        with self.lock:
            results: Rows = np.full(len(entries), -1, np.int64)
            before = self._find_keys(entries["low"])
            known = self.rows[before]
            is_here = (before >= 0) & (known["state"] != FREE)
            is_same = is_here & (known["high"] == entries["high"])
            wins = ~is_here | (is_same & ((known["state"] == DEAD) | (known["sequence"] <= entries["sequence"])))
            self.end(before[is_same & wins & (known["state"] != DEAD)])
            chosen = np.flatnonzero(wins)
            if not len(chosen):
                return results
            rows = self._take(len(chosen))
            self.rows[rows] = entries[chosen]
            results[chosen] = rows
            self._count(rows, 1)
            order = np.argsort(entries["low"][chosen], kind="stable")
            self._levels.append((entries["low"][chosen][order], rows[order].astype(np.int32)))
            while len(self._levels) > 1 and len(self._levels[-2][0]) < 2 * len(self._levels[-1][0]):
                self._merge()
            return results

    def _find_keys(self, low: Words) -> Rows:
        found: Rows = np.full(len(low), -1, np.int64)
        for keys, rows in self._levels:
            places = np.searchsorted(keys, low)
            places[places == len(keys)] = 0
            hits = np.flatnonzero(keys[places] == low)
            own = rows[places[hits]].astype(np.int64)
            good = (self.rows["low"][own] == low[hits]) & (self.rows["state"][own] != FREE)
            found[hits[good]] = own[good]
        return found

    def _merge(self) -> None:
        (keys, rows), (more, others) = self._levels.pop(), self._levels.pop()
        keys, rows = np.concatenate([more, keys]), np.concatenate([others, rows])
        is_current = (self.rows["low"][rows] == keys) & (self.rows["state"][rows] != FREE)
        keys, rows = keys[is_current], rows[is_current]
        order = np.argsort(keys, kind="stable")
        keys, rows = keys[order], rows[order]
        last = np.ones(len(keys), np.bool_)  # of a key that stands twice, the later row counts
        last[:-1] = keys[1:] != keys[:-1]
        keys, rows = keys[last], rows[last]
        self._levels.append((keys, rows))

    def _take(self, count: int) -> Rows:
        parts, lack = [], count
        while lack and self._free:
            some = self._free.pop()
            if len(some) > lack:
                self._free.append(some[lack:])
                some = some[:lack]
            parts.append(some)
            lack -= len(some)
        if lack:
            if self._used + lack > len(self.rows):
                grown = np.zeros(max(2 * len(self.rows), self._used + lack), ROW)
                grown[: self._used] = self.rows[: self._used]
                self.rows = grown
            parts.append(np.arange(self._used, self._used + lack, dtype=np.int64))
            self._used += lack
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def show(self, rows: Rows) -> None:
        """Rows that are pending are alive."""
        with self.lock:
            rows = rows[self.rows["state"][rows] == PENDING]
            self._count(rows, -1)
            self.rows["state"][rows] = ALIVE
            self._count(rows, 1)

    def end(self, rows: Rows) -> None:
        """Rows are dead."""
        with self.lock:
            rows = rows[np.isin(self.rows["state"][rows], (PENDING, ALIVE))]
            self._count(rows, -1)
            self.rows["state"][rows] = DEAD

    def forget(self, rows: Rows) -> None:
        """Rows are free: their object is no more."""
        with self.lock:
            self.end(rows)
            self.rows["state"][rows] = FREE
            if len(rows):
                self._free.append(rows)

    def _count(self, rows: Rows, by: int) -> None:
        states = self.rows["state"][rows]
        alive = rows[states == ALIVE]
        self.count += by * len(alive)
        self.bytes += by * int(self.rows["length"][alive].sum())
        counted = rows[(states == ALIVE) | (states == PENDING)]
        groups, counts = np.unique(self.rows["group"][counted], return_counts=True)
        for group, count in zip(groups.tolist(), counts.tolist(), strict=True):
            directory = self.groups[group].directory
            self._directories[directory] = self._directories.get(directory, 0) + by * count
