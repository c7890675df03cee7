"""The order in which blocks go, on columns of rows. Each is the eviction of that name, which says why (`eviction`).

A *moment* of a block is its place in time: where an order goes by time, it is ``due`` then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from kvfuse.policy.blockrows import FIRST, UNTOLD, Keys, Mask, Numbers, Places
from kvfuse.policy.blockset import MICROSECONDS, BlockSet
from kvfuse.policy.candidates import DUE
from kvfuse.policy.pace import Pace
from kvfuse.policy.taking import Taking


class Order(ABC):
    """Gives blocks their places in a `BlockSet`, and takes from it those that go next."""

    needs_seen = False
    """uses ``follows``"""
    lists: tuple[tuple[int, ...], ...] = ((UNTOLD, FIRST),)
    """of each queue"""

    def __init__(self, blocks: BlockSet, pace: Pace) -> None:
        self.blocks = blocks
        self.pace = pace

    @abstractmethod
    def insert(self, number: int, rows: Places, keys: Keys, moments: Numbers, follows: Mask) -> None:
        """Blocks were stored. ``follows``: the chain of each did."""

    @abstractmethod
    def insert_one(self, number: int, row: int, key: int, moment: int, follows: bool) -> None:
        """``insert`` for one block."""

    @abstractmethod
    def touch(self, number: int, rows: Places, moments: Numbers, follows: bool) -> None:
        """Blocks of one chain were used."""

    @abstractmethod
    def touch_one(self, number: int, row: int, moment: int, follows: bool) -> None:
        """``touch`` for one block."""

    def pick(self, taking: Taking) -> None:
        """Take what goes next."""
        taking.take(0)

    def settle(self, number: int, rows: Places, moments: Numbers) -> None:
        """Blocks are there of which nothing is known, or that were kept."""
        self.blocks.place(number, rows, FIRST, moments)

    def begin(self) -> None:
        """Rows of an order of the same name are there."""
        return

    def room_changed(self, rows: int) -> None:
        """The tables have so many rows."""
        return


class FifoColumns(Order):
    """By the time of the storing."""

    def insert(self, number: int, rows: Places, keys: Keys, moments: Numbers, follows: Mask) -> None:
        self.blocks.place(number, rows, FIRST, moments)

    def insert_one(self, number: int, row: int, key: int, moment: int, follows: bool) -> None:
        self.blocks.place_one(number, row, FIRST, moment)

    def touch(self, number: int, rows: Places, moments: Numbers, follows: bool) -> None:
        pass

    def touch_one(self, number: int, row: int, moment: int, follows: bool) -> None:
        pass


class LruColumns(FifoColumns):
    """By the time of the last use."""

    def touch(self, number: int, rows: Places, moments: Numbers, follows: bool) -> None:
        self.blocks.place(number, rows, FIRST, moments)

    def touch_one(self, number: int, row: int, moment: int, follows: bool) -> None:
        self.blocks.place_one(number, row, FIRST, moment)


class ChainColumns(Order):
    """By the time of the last use, later by ``Pace.bonus`` where the chain followed an earlier one."""

    needs_seen = True

    def __init__(self, blocks: BlockSet, pace: Pace) -> None:
        super().__init__(blocks, pace)
        self._later = 0
        """what the last chain that followed another got, in microseconds"""
        self._latest = 0
        """the latest that a used block of such a chain is due"""

    def insert(self, number: int, rows: Places, keys: Keys, moments: Numbers, follows: Mask) -> None:
        later = max(self._later, int(self.pace.bonus * MICROSECONDS))
        self.blocks.place(number, rows, FIRST, moments + follows * later)

    def insert_one(self, number: int, row: int, key: int, moment: int, follows: bool) -> None:
        later = max(self._later, int(self.pace.bonus * MICROSECONDS)) if follows else 0
        self.blocks.place_one(number, row, FIRST, moment + later)

    def touch(self, number: int, rows: Places, moments: Numbers, follows: bool) -> None:
        dues = moments + self._delay(int(moments[-1]), int(moments[0])) if follows else moments
        self.blocks.place(number, rows, FIRST, dues, never_sooner=not follows)

    def touch_one(self, number: int, row: int, moment: int, follows: bool) -> None:
        due = moment + self._delay(moment, moment) if follows else moment
        self.blocks.place_one(number, row, FIRST, due, never_sooner=not follows)

    def _delay(self, first: int, last: int) -> int:
        """How much later blocks of these moments are due: not before others that were used before them.

        So the bonus may fall, and what got it when it was larger does not outlive what is used now.
        """
        self._later = max(int(self.pace.bonus * MICROSECONDS), self._latest + 1 - first)
        self._latest = last + self._later
        return self._later


USES_MAX = 255
_RANK_SHIFT = 44
"""below the rank of a block in `LfuColumns.due` is its moment: half a year of it"""
_MOMENT_MASK = (1 << _RANK_SHIFT) - 1
_RANK_MAX = (1 << 18) - 1


class LfuColumns(Order):
    """By uses, up to `USES_MAX`, and the cache's age at the last one; of equals by the time of the last use."""

    lists = ((FIRST,), (UNTOLD,))

    def __init__(self, blocks: BlockSet, pace: Pace) -> None:
        super().__init__(blocks, pace)
        self._age = 0

    def begin(self) -> None:
        lowest = [
            table.due[which][table.lists_of(which) == FIRST] >> _RANK_SHIFT
            for _, table, _, which in self.blocks.chunks()
        ]
        ranks = np.concatenate((np.empty(0, dtype=np.int64), *lowest))
        self._age = int(ranks.min()) if len(ranks) else 0

    def insert(self, number: int, rows: Places, keys: Keys, moments: Numbers, follows: Mask) -> None:
        self.settle(number, rows, moments)

    def insert_one(self, number: int, row: int, key: int, moment: int, follows: bool) -> None:
        self.blocks.tables[number].uses_bytes[row] = 1
        self.blocks.place_one(number, row, FIRST, self._rank(1) << _RANK_SHIFT | moment & _MOMENT_MASK)

    def settle(self, number: int, rows: Places, moments: Numbers) -> None:
        self.blocks.tables[number].uses[rows] = 1
        self.blocks.place(number, rows, FIRST, self._rank(1) << _RANK_SHIFT | moments & _MOMENT_MASK)

    def touch(self, number: int, rows: Places, moments: Numbers, follows: bool) -> None:
        column = self.blocks.tables[number].uses
        uses = np.minimum(column[rows].astype(np.int64) + 1, USES_MAX)
        column[rows] = uses
        ranks = np.minimum(self._age + uses, _RANK_MAX)
        self.blocks.place(number, rows, FIRST, ranks << _RANK_SHIFT | moments & _MOMENT_MASK)

    def touch_one(self, number: int, row: int, moment: int, follows: bool) -> None:
        column = self.blocks.tables[number].uses_bytes
        uses = column[row] = min(column[row] + 1, USES_MAX)
        self.blocks.place_one(number, row, FIRST, self._rank(uses) << _RANK_SHIFT | moment & _MOMENT_MASK)

    def pick(self, taking: Taking) -> None:
        taking.take(0)
        if taking.taken:
            self._age = int(taking.taken[-1][DUE, -1]) >> _RANK_SHIFT
        taking.take(1)

    def _rank(self, uses: int) -> int:
        return min(self._age + uses, _RANK_MAX)
