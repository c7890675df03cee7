"""The blocks that go next, a few percent of all, in their order: so no eviction looks at every row.

A *candidate* was found by a scan over all rows, or was given a place before the last of those since. Whoever takes it
looks at its row again: it counts if it is the same block, on a list of this queue, and due when it was. What was used
since is due later, and beyond the last candidate: the next scan finds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from kvfuse.policy.blockrows import DEAD, HELD, UNTOLD, Numbers, Places, PolicyRows

CANDIDATES_MIN = 4096
CHUNK = 16_384
"""rows that are scanned at once: they fit in the processor's cache"""
_SAMPLE = 65_536
_SAMPLED_MIN = 32
"""rows of a sample that are below the limit which it gives"""
_LATE_MAX = 8192

DUE, TABLE, ROW_OF, SEQUENCE = range(4)
"""lines of a matrix of candidates, which has a column for each"""

EVERYTHING = np.iinfo(np.int64).max


def no_candidates() -> Numbers:
    return np.empty((4, 0), dtype=np.int64)


def make_candidates(number: int, dues: Numbers, rows: Places, sequences: Numbers) -> Numbers:
    found = np.empty((4, len(rows)), dtype=np.int64)
    found[DUE], found[TABLE], found[ROW_OF], found[SEQUENCE] = dues, number, rows, sequences
    return found


def by_table(candidates: Numbers) -> Iterator[tuple[int, Places | slice]]:
    """(number of a table, which of the candidates are in it)."""
    numbers = candidates[TABLE]
    if not len(numbers):
        return
    first = int(numbers[0])
    if (numbers == first).all():
        yield first, slice(None)
        return
    for number in np.unique(numbers).tolist():
        yield number, np.flatnonzero(numbers == number)


def _sorted(candidates: Numbers) -> Numbers:
    return candidates[:, np.argsort(candidates[DUE], kind="stable")]


class CandidateQueue:
    """Candidates of one list, or of lists that go together, in the order of being due."""

    def __init__(self) -> None:
        self.horizon = -1
        """what gets a place up to here is a candidate at once (`push`)"""
        self._main = self._late = no_candidates()
        self._pushed: list[Numbers] = []

    def fill(self, candidates: Numbers) -> None:
        """In place of all that are there."""
        self._main, self._late = _sorted(candidates), no_candidates()
        self._pushed.clear()
        self.horizon = int(self._main[DUE, -1]) if self._main.size else -1

    def push(self, candidates: Numbers) -> None:
        self._pushed.append(candidates)

    def next(self, count: int) -> Numbers:
        """The first ones, up to ``count``; they stay."""
        self._sort_pushed()
        main, late = self._main[:, :count], self._late[:, :count]
        return _sorted(np.concatenate((main, late), axis=1))[:, :count] if late.size else main

    def drop(self, count: int) -> None:
        """As many of the first ones, no more than ``next`` gave."""
        late = 0
        if self._late.size:
            dues = np.concatenate((self._main[DUE, :count], self._late[DUE, :count]))
            late = int((np.argsort(dues, kind="stable")[:count] >= min(count, self._main.shape[1])).sum())
        self._main, self._late = self._main[:, count - late :], self._late[:, late:]

    def drop_table(self, number: int) -> None:
        self._sort_pushed()
        self._main = self._main[:, self._main[TABLE] != number]
        self._late = self._late[:, self._late[TABLE] != number]

    def _sort_pushed(self) -> None:
        if self._pushed:
            self._late = _sorted(np.concatenate((self._late, *self._pushed), axis=1))
            self._pushed.clear()
        if self._late.shape[1] > _LATE_MAX:
            self._main = _sorted(np.concatenate((self._main, self._late), axis=1))
            self._late = no_candidates()


class Scan:
    """One look at all rows. ``share``: of each queue that become candidates; ``skip``: flags of blocks that do not go.

    ``lists``: the lists of each queue.
    """

    def __init__(
        self, tables: Mapping[int, PolicyRows], lists: tuple[tuple[int, ...], ...], share: float, skip: int
    ) -> None:
        self.counts = np.zeros(256, dtype=np.int64)
        """blocks of each list"""
        self.restless: dict[int, list[Places]] = {}
        """table -> rows of blocks that are untold, or held"""
        self._lists = lists
        self._skip = np.uint32(skip)
        self._found: list[list[Numbers]] = [[] for _ in lists]
        self._limits = self._sample(tables, share)
        for number, table in tables.items():
            for start in range(0, len(table), CHUNK):
                self._look(number, table, start)

    def candidates(self, queue: int) -> Numbers:
        return np.concatenate((no_candidates(), *self._found[queue]), axis=1)

    def _sample(self, tables: Mapping[int, PolicyRows], share: float) -> list[int]:
        """What is due up to here is about the share of each queue; EVERYTHING where that is little."""
        step = max(1, sum(map(len, tables.values())) // _SAMPLE) | 1
        which = slice(None, None, step)
        dues, codes = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.uint8)]
        for table in tables.values():
            dues.append(table.due[which])
            codes.append(np.where(table.flags[which] & self._skip, np.uint8(DEAD), table.lists_of(which)))
        all_dues, all_codes = np.concatenate(dues), np.concatenate(codes)
        limits = []
        for lists in self._lists:
            chosen = all_dues[np.isin(all_codes, lists)]
            wanted = max(_SAMPLED_MIN, int(share * len(chosen)), CANDIDATES_MIN // step)
            limits.append(int(np.partition(chosen, wanted)[wanted]) if wanted < len(chosen) else EVERYTHING)
        return limits

    def _look(self, number: int, table: PolicyRows, start: int) -> None:
        which = slice(start, start + CHUNK)
        codes = table.lists_of(which)
        counts = np.bincount(codes, minlength=256)
        self.counts += counts
        if counts[UNTOLD] or counts[HELD]:
            rows = start + np.flatnonzero((codes == UNTOLD) | (codes == HELD))
            self.restless.setdefault(number, []).append(rows)
        dues = table.due[which]
        for lists, limit, found in zip(self._lists, self._limits, self._found, strict=True):
            fits = codes == lists[0]
            for other in lists[1:]:
                fits |= codes == other
            if limit != EVERYTHING:
                fits &= dues <= limit
            if self._skip:
                fits &= (table.flags[which] & self._skip) == 0
            places = np.flatnonzero(fits)
            if len(places):
                found.append(make_candidates(number, dues[places], start + places, table.sequences[which][places]))
