"""Journals a ring for the daemon after a kill of this one: its positions, and its entries in flight.

It is memory that the client does not see (a memfd which the holder keeps, see `connection_keeping.py`). A daemon trusts
nothing in the client's ring, and the client reuses the places of taken entries.

Each taken entry gets a *place* here, with a copy of it. The daemon's threads know it by the number of its place, which
stands in the field ``user_data`` meanwhile; the client's own number is in the copy. A completion frees the place.

A kill may happen between any two stores, and both positions change with one: `commit` writes them to the half of the
words that is not the present one, and then makes that half the present one. Earlier writes, for a completion or for
entries that are being taken, count from that store on. Each place says in one word what it has:

* taken, and the position in the submission queue: in flight if that queue's position is beyond it. A mark beside it,
  which stays until the place is free, says that answers of the entry are in the aux area (`mark_begun`), those of a
  DELETE before it removes a block;
* pinned, and a pin: in flight; a GET has the pin of the view that will answer it;
* done, and the position of the last completion that was posted with it: in flight until that was committed, then free.

So an entry is in flight or completed, and never both or neither. The next daemon serves those in flight again.

An entry that is alone in the queue, and gets its answer at once, gets no place: it stays in the submission queue until
one `commit` moves both positions.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvfuse.usrbio.protocol.queues import Entries
from kvfuse.usrbio.protocol.wire import CQE_STRUCT, PAGE, SQE

Places = npt.NDArray[np.int64]

_HALF = 0
"""word: where the present positions are, 8 or 10"""
_LONE = 1
"""word: the pin that an entry without a place has, below the low half of its position"""
_HALVES = (8, 10)
_TAKEN, _PINNED, _DONE = (number << 62 for number in (1, 2, 3))
_KIND = 3 << 62
_BEGUN = 1 << 61
_VALUE = _BEGUN - 1
_LOW = (1 << 32) - 1
_ROW_WORDS = SQE.itemsize // 8
_LENGTH, _USER_DATA = 4, 6
"""words of an SQE"""
NO_PLACE = (1 << 64) - 1
"""the number of no place"""


class KeptRingState(NamedTuple):
    """Contents of a ring's journal when a daemon takes over."""

    rows: Entries
    """entries in flight, the oldest first; their ``user_data`` are their places"""
    times: npt.NDArray[np.float64]
    """monotonic seconds when each was taken"""
    pins: list[int]
    """pins of views that would have answered entries in flight"""
    uncommitted: range
    """positions of completions that were written and not committed: they may have pins, too"""


class RingJournal:
    """The journal of one ring, for whoever has the lock of its `Completions`. ``entries``: those of its queues."""

    def __init__(self, descriptor: int, entries: int) -> None:
        self._mapping = mmap.mmap(descriptor, size_of(entries))
        memory, rows_end = memoryview(self._mapping), PAGE + entries * SQE.itemsize
        self._words = memory[:PAGE].cast("Q")
        self._row_bytes = memory[PAGE:rows_end]
        self._row_words = self._row_bytes.cast("Q")
        tables = np.frombuffer(self._mapping, np.uint64, offset=PAGE).reshape(-1)
        self._rows = tables[: entries * _ROW_WORDS].reshape(-1, _ROW_WORDS)
        self._user_data = self._rows[:, _USER_DATA]
        self._states = tables[entries * _ROW_WORDS :][:entries]
        self._times = tables[entries * (_ROW_WORDS + 1) :][:entries].view(np.float64)
        self._state_words = memory[rows_end : rows_end + 8 * entries].cast("Q")
        self._time_words = memory[rows_end + 8 * entries : rows_end + 16 * entries].cast("d")
        self._busy = bytearray(entries)
        """1 for each place that is not free"""
        self._are_busy = np.frombuffer(self._busy, np.uint8)
        self._places = np.arange(entries, dtype=np.uint64)
        self._next = 0
        """place to look at first for a free one"""

    @classmethod
    def create(cls, entries: int) -> tuple[RingJournal, int]:
        """(journal, descriptor) of a new ring. OSError."""
        descriptor = os.memfd_create("kvfuse-journal", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size_of(entries))
            journal = cls(descriptor, entries)
        except BaseException:
            os.close(descriptor)
            raise
        journal.commit(0, 0)
        return journal, descriptor

    # -- positions -----------------------------------------------------------------------------------

    def commit(self, taken: int, given: int) -> None:
        """Set both positions in one step: entries taken, completions given."""
        words = self._words
        half = _HALVES[words[_HALF] == _HALVES[0]]
        words[half], words[half + 1] = taken, given
        words[_HALF] = half

    def read_positions(self) -> tuple[int, int]:
        """(taken, given) as of the last `commit`."""
        half = self._words[_HALF]
        return self._words[half], self._words[half + 1]

    # -- places --------------------------------------------------------------------------------------

    def enter_entries(self, packed: bytearray, taken_at: float, taken: int) -> None:
        """Give entries places, from the position ``taken`` on. In ``packed`` they have their places' numbers then."""
        count = len(packed) // SQE.itemsize
        first = self._next if self._next + count <= len(self._busy) else 0
        if self._busy.find(1, first, first + count) >= 0:
            self._enter_apart(packed, taken_at, taken)
            return
        end = self._next = first + count
        self._row_bytes[first * SQE.itemsize : end * SQE.itemsize] = packed
        self._time_words[first] = taken_at
        self._state_words[first] = _TAKEN | taken
        if count > 1:
            self._times[first:end] = taken_at
            self._states[first:end] = self._places[first:end] + ((_TAKEN | taken) - first)
        self._busy[first:end] = b"\1" * count
        np.frombuffer(packed, np.uint64)[_USER_DATA::_ROW_WORDS] = self._places[first:end]

    def _enter_apart(self, packed: bytearray, taken_at: float, taken: int) -> None:
        """Give entries places that are not one behind the other, as `enter_entries`."""
        rows = np.frombuffer(packed, np.uint64).reshape(-1, _ROW_WORDS)
        places = np.flatnonzero(self._are_busy == 0)[: len(rows)]
        self._rows[places] = rows
        self._times[places] = taken_at
        self._states[places] = np.arange(len(rows), dtype=np.uint64) + (_TAKEN | taken)
        self._are_busy[places] = 1
        self._next = int(places[-1]) + 1
        rows[:, _USER_DATA] = places

    def get_user_data(self, place: int) -> int:
        """The client's number of the entry at a place."""
        return self._row_words[place * _ROW_WORDS + _USER_DATA]

    def user_data_of(self, places: Places) -> npt.NDArray[np.uint64]:
        """`get_user_data` of many."""
        return self._user_data[places]

    def describe(self, places: Places) -> tuple[npt.NDArray[np.uint64], Places, npt.NDArray[np.float64]]:
        """(first words, lengths, when they were taken) of entries in flight."""
        rows = self._rows[places]
        return rows[:, 0], rows[:, _LENGTH].view(np.int64), self._times[places]

    def describe_one(self, place: int, result: int) -> tuple[int, int, int, int, float]:
        """(operation, handle, length, ``result``, when it was taken) of an entry in flight."""
        head, length = (self._row_words[place * _ROW_WORDS + word] for word in (0, _LENGTH))
        return head & 0xFF, head >> 32, length, result, self._time_words[place]

    def pack(self, place: int, answer: Sequence[int]) -> bytes:
        """Pack the completion of the entry at a place: ``answer`` is `wire.CQE` without its first field."""
        return CQE_STRUCT.pack(self._row_words[place * _ROW_WORDS + _USER_DATA], *answer)

    def find(self, user_data: int, before: int) -> int:
        """The place of the oldest entry in flight with that number of the client's; `NO_PLACE` where there is none.

        ``before``: a place; finds only what was taken before that one.
        """
        found = np.flatnonzero((self._user_data == user_data) & (self._are_busy == 1))
        older = [(self._state_words[place] & ~_BEGUN, place) for place in found.tolist()]
        return min([row for row in older if row[0] < self._state_words[before] & ~_BEGUN], default=(0, NO_PLACE))[1]

    def mark_begun(self, place: int) -> None:
        """Note that the aux area has answers of the entry at a place from now on, as far as it got."""
        self._state_words[place] |= _BEGUN

    def has_begun(self, place: int) -> bool:
        """Whether this daemon, or a former one, has called `mark_begun`."""
        return self._state_words[place] & (_KIND | _BEGUN) == _TAKEN | _BEGUN

    def set_pin(self, place: int, pin: int) -> None:
        """Note the pin of the entry at a place, until it is done."""
        self._state_words[place] = _PINNED | pin

    def set_lone_pin(self, taken: int, pin: int) -> None:
        """Note the pin of the entry at the position ``taken``, which has no place."""
        self._words[_LONE] = (taken & _LOW) << 32 | pin

    def finish_one(self, place: int, taken: int, given: int) -> None:
        """`finish` of one."""
        self._state_words[place] = self._state_words[place] & _BEGUN | _DONE | given - 1
        self.commit(taken, given)
        self._busy[place] = 0

    def finish(self, places: Places | list[int], taken: int, given: int) -> None:
        """Commit the written completions of these, with the positions."""
        self._states[places] = self._states[places] & np.uint64(_BEGUN) | np.uint64(_DONE | given - 1)
        self.commit(taken, given)
        self._are_busy[places] = 0

    def forget(self, place: int) -> None:
        """End the entry at a place, which has no completion."""
        self._state_words[place] = 0
        self._busy[place] = 0

    # -- the next daemon -----------------------------------------------------------------------------

    def read_state(self) -> KeptRingState:
        """Read what is in flight. Call `restart` once the pins are given back."""
        taken, given = self.read_positions()
        kinds, values = self._states & np.uint64(_KIND), self._states & np.uint64(_VALUE)
        is_pinned, is_done = kinds == _PINNED, (kinds == _DONE) & (values >= given)
        places = np.flatnonzero((kinds == _TAKEN) & (values < taken) | is_pinned | is_done)
        order = np.where(kinds[places] == _TAKEN, values[places], 0)
        places = places[np.argsort(order, kind="stable")]
        rows = self._rows[places]
        rows[:, _USER_DATA] = places
        pins = values[is_pinned].tolist()
        lone = self._words[_LONE]
        if lone >> 32 == taken & _LOW:
            pins.append(lone & _LOW)
        end = int(values[is_done].max()) + 1 if is_done.any() else given
        return KeptRingState(
            rows.view(SQE).reshape(-1), self._times[places], [pin for pin in pins if pin], range(given, end)
        )

    def restart(self, rows: Entries) -> None:
        """Begin with these entries in flight, which `read_state` returned. A kill meanwhile changes nothing of them."""
        places = rows["user_data"].astype(np.intp)
        self._words[_LONE] = 0
        begun = self._states[places] & np.uint64(_BEGUN)
        self._states[places] = np.arange(len(places), dtype=np.uint64) + _TAKEN + begun
        self._are_busy[:] = 0
        self._are_busy[places] = 1
        self._states[self._are_busy == 0] = 0


def size_of(entries: int) -> int:
    """Bytes of a journal."""
    return PAGE + entries * (SQE.itemsize + 16)
