"""News of blocks for those who follow a directory: which names mean a block now, and which none any more.

While somebody follows a directory, threads that store blocks note their names, and the names of its rows are kept: a
block that goes has its name on the medium alone. The event loop looks at what was noted, in columns, and tells what is
true then: a name that was stored, if its row still has that block; one that was removed, if it means no block. So
whatever threads did in between, the last news of a name is right. Where nobody follows, nothing is noted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvfuse.native import blockforms as forms
from kvfuse.native._blocks import Core as NativeCore
from kvfuse.native._blocks import name_keys
from kvfuse.volume.api import NameColumns
from kvfuse.volume.blocks.block_tables import BlockTable, BlockTables
from kvfuse.volume.views.news import NameEvent, News

NOTED_MAX = 1 << 12
"""batches between two looks; of more, whoever follows begins anew"""
_ROWS_MIN = 1 << 10
_WIDTH_MIN = 64

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


class Names(NamedTuple):
    """Names of a batch."""

    text: Bytes
    """a row for each, filled up with zeros"""
    lengths: npt.NDArray[np.uint8]

    def some(self, which: Mask | npt.NDArray[np.intp]) -> Names:
        return Names(self.text[which], self.lengths[which])

    def columns(self) -> NameColumns:
        width = self.text.shape[1]
        offsets = np.arange(len(self.lengths), dtype=np.uint64) * np.uint64(width)
        return np.ascontiguousarray(self.text).reshape(-1), offsets, self.lengths.astype(np.uint32)

    def pack(self) -> bytes:
        """As `wire.pack_keys`."""
        chosen = np.arange(self.text.shape[1]) < self.lengths[:, None]
        return self.lengths.astype("<u2").tobytes() + self.text[chosen].tobytes()


def copy_names(columns: NameColumns, which: npt.NDArray[np.intp]) -> Names:
    """Some names of columns, which a client may change meanwhile."""
    text = np.frombuffer(columns[0], np.uint8)
    starts, lengths = columns[1][which].astype(np.int64), np.minimum(columns[2][which], forms.NAME_MAX)
    spots = np.arange(max(int(lengths.max(initial=0)), 1))
    found = text[np.minimum(starts[:, None] + spots, len(text) - 1)]
    found[spots >= lengths[:, None]] = 0
    return Names(found, lengths.astype(np.uint8))


class _RowNames:
    """The names of a table's rows, as far as they are known."""

    def __init__(self) -> None:
        self._names = Names(np.zeros((_ROWS_MIN, _WIDTH_MIN), np.uint8), np.zeros(_ROWS_MIN, np.uint8))
        self._sequences: Words = np.zeros(_ROWS_MIN, np.uint64)

    def put(self, rows: Numbers, sequences: Words, names: Names) -> Names:
        """Note the names of rows. Returns those that other blocks had that were in these rows."""
        self._grow(int(rows.max()) + 1, names.text.shape[1])
        former = rows[(self._sequences[rows] != 0) & (self._sequences[rows] != sequences)]
        gone = self._names.some(former)
        width = names.text.shape[1]
        self._names.text[rows, :width], self._names.text[rows, width:] = names.text, 0
        self._names.lengths[rows], self._sequences[rows] = names.lengths, sequences
        return gone

    def take(self, rows: Numbers, sequences: Words) -> Names:
        """The names of blocks that are gone, as far as they are known; they are forgotten."""
        inside = rows < len(self._sequences)
        rows, sequences = rows[inside], sequences[inside]
        rows = rows[self._sequences[rows] == sequences]
        names = self._names.some(rows)
        self._sequences[rows] = 0
        return names

    def _grow(self, rows: int, width: int) -> None:
        count, room = self._names.text.shape
        if rows <= count and width <= room:
            return
        count, room = max(count, 1 << (rows - 1).bit_length()), max(room, 1 << (width - 1).bit_length())
        former, sequences = self._names, self._sequences
        self._names = Names(np.zeros((count, room), np.uint8), np.zeros(count, np.uint8))
        self._names.text[: len(former.lengths), : former.text.shape[1]] = former.text
        self._names.lengths[: len(former.lengths)] = former.lengths
        self._sequences = np.zeros(count, np.uint64)
        self._sequences[: len(sequences)] = sequences


class _Noted(NamedTuple):
    table: BlockTable
    rows: Numbers | None
    """None: names of the directory were removed"""
    sequences: Words | None
    names: Names | None
    """None: the blocks of these rows are gone"""


class BlockNews:
    """Of one engine. Event loop only, but where a docstring says otherwise."""

    def __init__(self, native: NativeCore, tables: BlockTables, news: News) -> None:
        self._native = native
        self._tables = tables
        self._news = news
        self._names: dict[int, _RowNames] = {}
        """origin of a table -> the names of its rows"""
        self._noted: deque[_Noted] = deque()
        self._lost: set[int] = set()
        """directories of which something was not noted"""

    def is_followed(self, directory: int) -> bool:
        """Any thread."""
        return directory in self._news.watches

    # -- what threads note: only where a directory is followed -------------------------------------------

    def stored(self, table: BlockTable, columns: NameColumns, results: Numbers, sequences: Words) -> None:
        """Blocks were put, as far as results are rows. Any thread."""
        which = np.flatnonzero(results >= 0)
        if len(which) and self._has_place(table):
            self._noted.append(_Noted(table, results[which], sequences[which], copy_names(columns, which)))

    def removed(self, tables: Sequence[BlockTable], names: Sequence[bytes]) -> None:
        """These names of the directory of tables lost their blocks. Any thread."""
        if names and self._has_place(table := tables[0]):
            columns = forms.name_columns(names)
            self._noted.append(_Noted(table, None, None, copy_names(columns, np.arange(len(names)))))

    def gone(self, table: BlockTable, rows: Numbers, sequences: Words) -> None:
        """The blocks of these rows are gone. Any thread."""
        if len(rows) and self.is_followed(table.readers.directory) and self._has_place(table):
            self._noted.append(_Noted(table, rows, sequences, None))

    def _has_place(self, table: BlockTable) -> bool:
        if len(self._noted) < NOTED_MAX:
            return True
        self._lost.add(table.readers.directory)
        return False

    # -- what is told ------------------------------------------------------------------------------------

    def learn(self, table: BlockTable, rows: Numbers, sequences: Words, names: Sequence[bytes]) -> None:
        """Blocks that were there before somebody followed."""
        if len(rows) and not table.has_ended:
            found = copy_names(forms.name_columns(names), np.arange(len(names)))
            self._tell(table, NameEvent.REMOVED, self._names_of(table).put(rows, sequences, found), is_there=False)

    def tell(self) -> None:
        """Tell what was noted."""
        while self._lost:
            self._news.lose(self._lost.pop())
        for _ in range(len(self._noted)):
            table, rows, sequences, names = self._noted.popleft()
            table = self._tables.current(table)
            if not self.is_followed(table.readers.directory) or table.has_ended:
                continue
            if names is None:
                assert rows is not None
                assert sequences is not None
                self._tell(table, NameEvent.REMOVED, self._names_of(table).take(rows, sequences), is_there=False)
            elif rows is None or sequences is None:
                self._tell(table, NameEvent.REMOVED, names, is_there=False)
            else:
                self._tell_stored(table, rows, sequences, names)
        if self._names:
            self._forget()

    def _tell_stored(self, table: BlockTable, rows: Numbers, sequences: Words, names: Names) -> None:
        found, keys = table.rows[rows], np.zeros(len(rows), np.uint64)
        name_keys(table.memory, table.readers.directory, *names.columns(), keys)
        is_there = (found["version"] & np.uint64(1) == 1) & (found["sequence"] == sequences)
        if not (found["low"] == keys)[is_there].all():  # the client changed its keys while they were stored
            self._news.lose(table.readers.directory)
        is_there &= found["low"] == keys
        has_expired = is_there & (found["expires"] != 0) & (found["expires"] <= time.time())
        if has_expired.any():  # what removes blocks of other hosts is put, too
            self._tell(table, NameEvent.REMOVED, names.some(has_expired), is_there=False)
            is_there &= ~has_expired
        if is_there.any():
            names = names.some(is_there)
            gone = self._names_of(table).put(rows[is_there], sequences[is_there], names)
            self._tell(table, NameEvent.REMOVED, gone, is_there=False)
            self._tell(table, NameEvent.STORED, names, is_there=None)

    def _tell(self, table: BlockTable, event: NameEvent, names: Names, *, is_there: bool | None) -> None:
        """``is_there``: only of names of which this is so; None: of all."""
        if is_there is not None and len(names.lengths):
            names = names.some(self._have_blocks(table.readers.directory, names) == is_there)
        if len(names.lengths):
            self._news.tell_names(table.readers.directory, event, names)

    def _have_blocks(self, directory: int, names: Names) -> Mask:
        found = np.zeros(len(names.lengths), np.bool_)
        rows, sequences, now = np.empty(len(found), np.int64), np.empty(len(found), np.uint64), int(time.time())
        for table in self._tables.of(directory):
            self._native.find(table.number, directory, *names.columns(), False, now, rows, sequences)
            found |= rows >= 0
        return found

    def _names_of(self, table: BlockTable) -> _RowNames:
        return self._names.setdefault(table.origin, _RowNames())

    def _forget(self) -> None:
        """Drop names of tables that nobody follows."""
        followed = {
            table.origin
            for table in self._tables.all.values()
            if not table.has_ended and self.is_followed(table.readers.directory)
        }
        for origin in self._names.keys() - followed:
            del self._names[origin]
