"""Numbers for the entries of a ring that are under way, called tickets: what a submission carries as ``user_data``.

The caller's own ``user_data`` need not be unique, and keys and buffers belong to one entry; so the ring numbers its
entries itself and puts the caller's number back when one completes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.intp]
"""tickets, in the type that numpy indexes with: others are converted at each use"""
UserData = npt.NDArray[np.uint64]


class Tickets:
    """``count`` tickets. Free ones stand in a stack that is both a column and cheap to take single numbers from."""

    def __init__(self, count: int) -> None:
        self._stack = np.arange(count, dtype=np.intp)[::-1].copy()
        self._user_data = np.zeros(count, np.uint64)
        self._order = np.zeros(count, np.int64)
        self._busy = np.zeros(count, np.bool_)
        self._one_of_stack = self._stack.data
        self._one_user_data = self._user_data.data
        self._one_order = self._order.data
        self._one_busy = self._busy.data
        self._given = 0
        self.free = count

    def next(self) -> int:
        """What `take` will give next. There is a free ticket."""
        return self._one_of_stack[self.free - 1]

    def take(self, user_data: int) -> int:
        """A ticket for one entry. There is a free one. ValueError unless ``user_data`` fits 64 bits, nothing taken."""
        ticket = self._one_of_stack[self.free - 1]
        self._one_user_data[ticket] = user_data
        self._one_order[ticket] = self._given
        self._one_busy[ticket] = True
        self._given += 1
        self.free -= 1
        return ticket

    def next_many(self, count: int) -> Numbers:
        """What `take_many` will give next. There are as many free."""
        return self._stack[self.free - count : self.free].copy()

    def take_many(self, count: int, user_data: npt.ArrayLike) -> Numbers:
        """Tickets for ``count`` entries. There are as many. ``user_data``: one number each, or one for all."""
        tickets = self._stack[self.free - count : self.free].copy()
        self._user_data[tickets] = np.asarray(user_data, np.uint64)
        self._order[tickets] = np.arange(self._given, self._given + count)
        self._busy[tickets] = True
        self._given += count
        self.free -= count
        return tickets

    def give_back(self, numbers: UserData) -> tuple[Numbers, UserData]:
        """(tickets, the ``user_data`` of each) of completions. ValueError for one not taken, or given back twice."""
        if np.max(numbers) >= len(self._busy):
            raise ValueError("an entry completed that nobody prepared")
        tickets = numbers.astype(np.intp)
        self._busy[tickets] = False
        busy_count = np.count_nonzero(self._busy)
        if busy_count != len(self._busy) - self.free - len(tickets):
            raise ValueError("an entry completed that is not under way, or one twice")
        self._stack[self.free : self.free + len(tickets)] = tickets
        self.free += len(tickets)
        return tickets, self._user_data[tickets]

    def give_back_one(self, number: int) -> int:
        """As `give_back`, of one completion: its ``user_data``."""
        if number >= len(self._one_busy) or not self._one_busy[number]:
            raise ValueError("an entry completed that is not under way")
        self._one_busy[number] = False
        self._one_of_stack[self.free] = number
        self.free += 1
        return self._one_user_data[number]

    def find(self, user_data: int) -> int | None:
        """The oldest taken ticket with that ``user_data``."""
        found = np.flatnonzero(self._busy & (self._user_data == user_data))
        return int(found[np.argmin(self._order[found])]) if len(found) else None
