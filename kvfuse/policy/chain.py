"""Eviction for chains: least recently used, but chains that go on stay longer."""

from __future__ import annotations

from collections.abc import Sequence

from kvfuse.policy.books import NONE, Books, Lists
from kvfuse.policy.eviction import Eviction
from kvfuse.policy.pace import Pace


class Chain(Eviction):
    """A block is due at its last use, or ``Pace.bonus`` seconds later where its chain followed an earlier one.

    The block that is due first goes. Most chains are asked for once; one that was continued is likely to be continued
    again. Each of the two kinds is a list in the order of being due, so the next victim is one of two. Of one chain
    the deepest goes first.
    """

    needs_seen = True

    def __init__(self, books: Books, pace: Pace) -> None:
        self._lists = Lists(books)
        self._due = books.floats()
        self._begun = self._lists.make()
        self._followed = self._lists.make()
        self._pace = pace

    def insert(self, row: int, now: float, parent: int, follows: bool) -> None:
        self._due[row] = now + self._pace.bonus if follows else now
        self._lists.place(self._followed if follows else self._begun, row, parent)

    def touch(self, rows: Sequence[int], now: float, follows: bool) -> None:
        due = self._due
        if follows:
            later = now + self._pace.bonus
            self._lists.move_to_end(self._followed, reversed(rows))
            for row in rows:
                due[row] = later
            return
        moved = [row for row in rows if due[row] <= now]
        self._lists.move_to_end(self._begun, reversed(moved))
        for row in moved:
            due[row] = now

    def pick(self, now: float) -> int:
        begun, followed = self._lists.first(self._begun), self._lists.first(self._followed)
        row = followed if begun == NONE else begun
        if begun != NONE != followed and self._due[followed] < self._due[begun]:
            row = followed
        if row != NONE:
            self._lists.unlink(row)
        return row

    def remove(self, row: int) -> None:
        self._lists.unlink(row)
