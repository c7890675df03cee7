"""Eviction: the order in which blocks go. The contract, and the three classics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from sortedcontainers import SortedDict

from kvfuse.policy.books import NONE, Books, Lists
from kvfuse.policy.pace import Pace


class Eviction(ABC):
    """The order of the rows of one ``Books``. The rows it is given are open, and theirs to unlink when they go."""

    needs_seen = False
    """uses ``follows``"""

    @abstractmethod
    def insert(self, row: int, now: float, parent: int, follows: bool) -> None:
        """A block was stored. ``parent``: row of the block before it in its chain, or NONE."""

    @abstractmethod
    def touch(self, rows: Sequence[int], now: float, follows: bool) -> None:
        """Blocks of one chain were used, root first. ``Books.times`` has still their use before this one."""

    @abstractmethod
    def pick(self, now: float) -> int:
        """The row that goes next, in no list any more; NONE where there is none."""

    @abstractmethod
    def remove(self, row: int) -> None:
        """The block is gone otherwise."""

    def put_back(self, row: int, now: float) -> None:
        """A block that ``pick`` gave was kept: as if just stored, but nothing is learned from it."""
        self.insert(row, now, NONE, False)


class Lru(Eviction):
    """The least recently used block goes; of blocks that were used together, the deepest."""

    def __init__(self, books: Books, pace: Pace) -> None:
        self._lists = Lists(books)
        self._list = self._lists.make()

    def insert(self, row: int, now: float, parent: int, follows: bool) -> None:
        self._lists.place(self._list, row, parent)

    def touch(self, rows: Sequence[int], now: float, follows: bool) -> None:
        self._lists.move_to_end(self._list, reversed(rows))

    def pick(self, now: float) -> int:
        row = self._lists.first(self._list)
        if row != NONE:
            self._lists.unlink(row)
        return row

    def remove(self, row: int) -> None:
        self._lists.unlink(row)


class Fifo(Eviction):
    """The block that was stored first goes; of a chain that was stored at once, the deepest. Use changes nothing."""

    def __init__(self, books: Books, pace: Pace) -> None:
        self._lists = Lists(books)
        self._list = self._lists.make()
        self._newest = NONE

    def insert(self, row: int, now: float, parent: int, follows: bool) -> None:
        self._lists.place(self._list, row, parent if parent == self._newest else NONE)
        self._newest = row

    def touch(self, rows: Sequence[int], now: float, follows: bool) -> None:
        pass

    def pick(self, now: float) -> int:
        row = self._lists.first(self._list)
        if row != NONE:
            self.remove(row)
        return row

    def remove(self, row: int) -> None:
        self._lists.unlink(row)
        if row == self._newest:
            self._newest = NONE


class Lfu(Eviction):
    """The least frequently used block goes, with dynamic ageing (LFU-DA).

    The priority of a block is its uses plus the cache's age, which is the priority of the last victim: a block that was
    used often long ago is overtaken by new ones after as many victims' worth of age. Of blocks of one priority the
    least recently used goes.
    """

    def __init__(self, books: Books, pace: Pace) -> None:
        self._lists = Lists(books)
        self._uses = books.integers("i")
        self._priorities = books.integers("q")
        self._list_of: SortedDict = SortedDict()
        """priority -> list, where there are blocks of it"""
        self._age = 0

    def insert(self, row: int, now: float, parent: int, follows: bool) -> None:
        self._uses[row] = 1
        self._place(row, parent)

    def touch(self, rows: Sequence[int], now: float, follows: bool) -> None:
        for row in reversed(rows):
            self.remove(row)
            self._uses[row] += 1
            self._place(row, NONE)

    def pick(self, now: float) -> int:
        if not self._list_of:
            return NONE
        self._age, head = self._list_of.peekitem(0)
        row = self._lists.first(head)
        self.remove(row)
        return row

    def remove(self, row: int) -> None:
        priority, head = self._priorities[row], self._lists.home[row]
        self._lists.unlink(row)
        if self._lists.first(head) == NONE:
            del self._list_of[priority]
            self._lists.discard(head)

    def _place(self, row: int, parent: int) -> None:
        priority = self._priorities[row] = self._age + self._uses[row]
        head = self._list_of.get(priority)
        if head is None:
            head = self._list_of[priority] = self._lists.make()
        self._lists.place(head, row, parent)
