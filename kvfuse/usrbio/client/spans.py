"""Spans of a ring's aux area: first fit, neighbours joined when they are freed. A ring has few at a time."""

from __future__ import annotations

from bisect import bisect_left

ALIGNMENT = 8


class Spans:
    """Gives out parts of ``size`` bytes that begin at ``start``."""

    def __init__(self, start: int, size: int) -> None:
        self._free = [(start, size)] if size else []
        """(offset, size), ordered, no two adjacent"""
        self._taken: dict[int, int] = {}

    def take(self, size: int) -> int | None:
        """The offset of ``size`` bytes, aligned to 8, or None while there is no such gap."""
        size = -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
        for index, (offset, gap) in enumerate(self._free):
            if gap >= size:
                self._free[index : index + 1] = [(offset + size, gap - size)] if gap > size else []
                self._taken[offset] = size
                return offset
        return None

    def give_back(self, offset: int) -> None:
        """What `take` answered."""
        size = self._taken.pop(offset)
        index = bisect_left(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + size:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            index -= 1
            offset, before = self._free.pop(index)
            size += before
        self._free.insert(index, (offset, size))
