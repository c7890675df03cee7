"""The names of a directory in an index of its blocks: which keys certainly have no block (`kvfuse/blockindex`).

Names are taken from the moment on in which somebody begins to read those that are stored. Once these are read the
filter is complete. It is not any more when a name cannot be in it, or when names may come of which nobody tells.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvfuse.blockindex import COMPLETE, FILTER_BITS_MIN, Fingerprints, Table, fingerprints_of
from kvfuse.keys import HASHED, key_of

NAMES_MAX = 1 << 18
"""of a directory; to read more takes too long"""
NAME_BITS, NAME_BITS_MIN = 64, 8
"""for each name: at first, and at last, when a larger table takes the place of this one. With 8 bits 3 % of the absent
names are asked of the daemon"""
FILTER_BITS_MOST = NAME_BITS * NAMES_MAX
"""2 MiB: a filter that is full of names that are no more is read anew, and need not be larger"""


class NameFilter:
    """Of one table. `Residents` has the lock under which it is called."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._bytes = table.filter.data
        self.count = 0
        """names in it, those among them that are no more"""
        self.is_begun = False
        """somebody reads, or has read, all names, or nobody needs to"""
        self.takes = False
        """it has, or will have, all names"""
        self.folder: object = None
        """kept in memory as long as the filter takes names: what other hosts change of it is heard then"""

    @property
    def bits_wanted(self) -> int:
        """Of the filter that takes the place of this one."""
        bits = FILTER_BITS_MIN
        while bits < min(NAME_BITS * self.count, FILTER_BITS_MOST):
            bits *= 2
        return bits

    def begin(self, folder: object) -> None:
        """The caller reads all names from here on; the others are added as they come."""
        self.is_begun = self.takes = True
        self.folder = folder

    def add(self, names: Sequence[bytes]) -> bool:
        """The names may mean something from now on. False: there are too many."""
        if not self.takes:
            return True
        keys = [key for name in names if (key := key_of(name)) is not None]
        if len(keys) < len(names) and any(name.startswith(HASHED) for name in names):
            self.give_up()  # which bits it has is not known
            return True
        if keys:
            found = fingerprints_of(self._table.multipliers, keys)
            self.count += self._set(*found[0].tolist()) if len(keys) == 1 else self._set_all(found)
        return self.count * NAME_BITS_MIN <= 8 * len(self._bytes)

    def _set(self, first: int, second: int) -> bool:
        """`_set_all` of one, at less expense."""
        mask, is_new = 8 * len(self._bytes) - 1, False
        for number in (first, first >> 32, second, second >> 32):
            place, bit = (number & mask & 0xFFFFFFFF) >> 3, 1 << (number & 7)
            if not self._bytes[place] & bit:
                self._bytes[place] |= bit
                is_new = True
        return is_new

    def _set_all(self, found: Fingerprints) -> int:
        where, bits = self._table.bits_of(found)
        count = int(np.count_nonzero((self._table.filter[where] & bits != bits).any(1)))
        np.bitwise_or.at(self._table.filter, where, bits)
        return count

    def complete(self) -> None:
        """All names were added."""
        self._table.words[COMPLETE] = self.takes

    def fail(self) -> None:
        """They could not be read: somebody may begin anew."""
        if self.takes:
            self.is_begun = self.takes = False
            self.folder = None

    def give_up(self) -> None:
        """Nobody is told of absent names until the table ends, if anybody was."""
        if self.takes:
            self.takes, self._table.words[COMPLETE] = False, 0
            self.folder = None
