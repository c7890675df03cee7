"""Evictions that remember what they evicted: ARC and S3-FIFO."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvfuse.policy.books import NONE, Books, Lists
from kvfuse.policy.eviction import Eviction
from kvfuse.policy.pace import Pace

SMALL_SHARE = 0.1
"""of the bytes: what S3-FIFO's queue for new blocks may have"""
FREQUENCY_MAX = 3


class Ghosts:
    """Keys and sizes of evicted blocks, the oldest forgotten first."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[int, int] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, key: int, size: int) -> None:
        self.take(key)
        self._sizes[key] = size
        self.size += size

    def take(self, key: int) -> bool:
        """Forget the key; whether it was there."""
        size = self._sizes.pop(key, 0)
        self.size -= size
        return size > 0

    def trim(self, size: int) -> None:
        while self.size > size:
            self.size -= self._sizes.popitem(last=False)[1]


class SizedList:
    """A list of rows that knows its bytes."""

    def __init__(self, books: Books, lists: Lists) -> None:
        self._books = books
        self._lists = lists
        self.head = lists.make()
        self.size = 0

    def place(self, row: int, parent: int) -> None:
        self._lists.place(self.head, row, parent)
        self.size += self._books.sizes[row]

    def first(self) -> int:
        return self._lists.first(self.head)

    def unlink(self, row: int) -> None:
        self._lists.unlink(row)
        self.size -= self._books.sizes[row]


class Arc(Eviction):
    """Adaptive replacement cache: blocks used once and blocks used again, each in the order of their last use.

    Evicted keys of either list are remembered. One that is stored again says that its list was too short, and moves
    the target of the first list's bytes towards it. The cache's capacity, of which ARC has its limits, is what is on
    the books.
    """

    def __init__(self, books: Books, pace: Pace) -> None:
        self._books = books
        self._lists = Lists(books)
        self._once, self._again = SizedList(books, self._lists), SizedList(books, self._lists)
        self._once_ghosts, self._again_ghosts = Ghosts(), Ghosts()
        self._target = 0.0

    def insert(self, row: int, now: float, parent: int, follows: bool) -> None:
        key, size = self._books.keys[row], self._books.sizes[row]
        once, again = self._once_ghosts.size, self._again_ghosts.size
        if self._once_ghosts.take(key):
            self._target = min(self._target + size * max(1.0, again / once), self._books.size)
        elif self._again_ghosts.take(key):
            self._target = max(self._target - size * max(1.0, once / again), 0.0)
        else:
            self._once.place(row, parent)
            return
        self._again.place(row, parent)

    def touch(self, rows: Sequence[int], now: float, follows: bool) -> None:
        for row in reversed(rows):
            self.remove(row)
            self._again.place(row, NONE)

    def pick(self, now: float) -> int:
        capacity = self._books.size
        once, again = self._once.first(), self._again.first()
        from_once = once != NONE and (again == NONE or self._once.size > self._target)
        source, ghosts = (self._once, self._once_ghosts) if from_once else (self._again, self._again_ghosts)
        row = once if from_once else again
        if row != NONE:
            source.unlink(row)
            ghosts.add(self._books.keys[row], self._books.sizes[row])
            self._once_ghosts.trim(max(0, capacity - self._once.size))
            self._again_ghosts.trim(max(0, capacity - self._once_ghosts.size))
        return row

    def remove(self, row: int) -> None:
        (self._once if self._lists.home[row] == self._once.head else self._again).unlink(row)

    def put_back(self, row: int, now: float) -> None:
        key = self._books.keys[row]
        self._once_ghosts.take(key)
        self._again_ghosts.take(key)
        self._again.place(row, NONE)


class S3Fifo(Eviction):
    """Three queues: new blocks in a small one, those that were used there in the main one, and ghosts of the rest.

    Use only counts, up to three. A block that leaves the small queue (a tenth of the bytes) goes into the main one if
    it was used more than once, else it is evicted and remembered; stored again it is main at once. The main queue
    gives a block another round for each use.
    """

    def __init__(self, books: Books, pace: Pace) -> None:
        self._books = books
        self._lists = Lists(books)
        self._uses = books.integers("b")
        self._small, self._main = SizedList(books, self._lists), SizedList(books, self._lists)
        self._ghosts = Ghosts()
        self._newest = NONE

    def insert(self, row: int, now: float, parent: int, follows: bool) -> None:
        self._uses[row] = 0
        queue = self._main if self._ghosts.take(self._books.keys[row]) else self._small
        queue.place(row, parent if parent == self._newest else NONE)
        self._newest = row

    def touch(self, rows: Sequence[int], now: float, follows: bool) -> None:
        uses = self._uses
        for row in rows:
            if uses[row] < FREQUENCY_MAX:
                uses[row] += 1

    def pick(self, now: float) -> int:
        small_max = SMALL_SHARE * (self._small.size + self._main.size)
        while (row := self._small.first()) != NONE and (self._small.size > small_max or not self._main.size):
            self.remove(row)
            if self._uses[row] <= 1:
                self._ghosts.add(self._books.keys[row], self._books.sizes[row])
                self._ghosts.trim(self._books.size)
                return row
            self._uses[row] = 0
            self._main.place(row, NONE)
        while (row := self._main.first()) != NONE:
            self.remove(row)
            if not self._uses[row]:
                return row
            self._uses[row] -= 1
            self._main.place(row, NONE)
        return NONE

    def remove(self, row: int) -> None:
        (self._small if self._lists.home[row] == self._small.head else self._main).unlink(row)
        if row == self._newest:
            self._newest = NONE

    def put_back(self, row: int, now: float) -> None:
        self._ghosts.take(self._books.keys[row])
        self._uses[row] = 1
        self._main.place(row, NONE)
