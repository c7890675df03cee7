"""The aux area of a ring: keys on their way to the daemon, and its answers for many of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from errno import EAGAIN

import numpy as np
import numpy.typing as npt

from kvfuse.keys import KEY_SIZE_MAX
from kvfuse.usrbio.client.session import Bytes
from kvfuse.usrbio.client.tickets import Numbers
from kvfuse.usrbio.protocol.wire import key_sizes

KEY_CELL = 256
"""bytes that each ticket has for its key; behind the cells are spans for many keys and results"""
ALIGNMENT = 8
Found = npt.NDArray[np.bool_]
Answers = npt.NDArray[np.uint8]


class Spans:
    """Gives out parts of ``size`` bytes that begin at ``start``: first fit, and few at a time."""

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
        """``offset``: as `take` returned it."""
        size = self._taken.pop(offset)
        index = bisect_left(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + size:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            index -= 1
            offset, before = self._free.pop(index)
            size += before
        self._free.insert(index, (offset, size))


class KeyArea:
    """Of one attached ring, which owns it. ``cells_size``: bytes of it that are cells."""

    def __init__(self, area: Bytes, cells_size: int) -> None:
        self._area = area
        self._bytes = area.data
        self._cells = area[:cells_size].reshape(-1, KEY_CELL)
        self.spans = Spans(cells_size, len(area) - cells_size)
        """whoever takes one gives it back here"""

    def check(self, keys: Sequence[bytes]) -> npt.NDArray[np.uint32]:
        """The sizes of keys that are given one to an entry. ValueError for a wrong one, and on a ring without keys."""
        if not len(self._cells):
            raise ValueError("the ring was made for file operations only")
        return key_sizes(keys)

    def check_one(self, key: bytes) -> None:
        """`check` of one, at less expense."""
        if not len(self._cells) or not 1 <= len(key) <= KEY_SIZE_MAX:
            self.check([key])

    def put(self, ticket: int, key: bytes) -> int:
        """Where the key of an entry is from here on."""
        offset = ticket * KEY_CELL
        self._bytes[offset : offset + len(key)] = key
        return offset

    def put_many(self, tickets: Numbers, keys: Sequence[bytes]) -> Numbers:
        """`put` for each."""
        self._cells[tickets] = np.array(keys, f"S{KEY_CELL}").view(np.uint8).reshape(len(keys), KEY_CELL)
        return tickets * KEY_CELL

    def take_span(self, packed: bytes, count: int) -> int:
        """Where the packed keys of one entry are; behind them are ``count`` bytes for its answers. BlockingIOError."""
        span = self.spans.take(len(packed) + count)
        if span is None:
            raise BlockingIOError(EAGAIN, f"{count} keys of {len(packed)} bytes find no room in the ring's aux area")
        answers = span + len(packed)
        self._bytes[span:answers] = packed
        self._area[answers : answers + count] = 0
        return span

    def read_answers(self, offset: int, answers: Answers) -> None:
        """What the daemon answered, one byte for each key, at ``offset``."""
        answers[:] = self._area[offset : offset + len(answers)]
