"""The blocks of all tables of one cache: their places in an order, how many they are, and which go next."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvfuse.policy.blockrows import DEAD, HELD, LEAVING, NORMAL, UNTOLD, Mask, Numbers, Places, PolicyRows, Rows
from kvfuse.policy.candidates import CHUNK, DUE, ROW_OF, SEQUENCE, CandidateQueue, Scan, by_table, make_candidates

MICROSECONDS = 1_000_000
PRIORITY_SECONDS = 1
"""a block is due so much later for each step of its priority above `NORMAL`, and earlier below"""
UNTOLD_SECONDS = 60
"""after which nobody tells of a block any more: it is taken for one that was just put then"""

Sizes = Callable[[NDArray[np.uint32], NDArray[np.uint32]], Numbers]
"""bytes of blocks, all positive, from the columns of their slabs and lengths"""
Settle = Callable[[int, Places, Numbers], None]
"""gives rows of a table, which are in no list, a place at these times"""


def lengths_alone(slabs: NDArray[np.uint32], lengths: NDArray[np.uint32]) -> Numbers:
    return np.maximum(lengths, 1).astype(np.int64)


class BlockSet:
    """``lists``: the lists of each queue of the order. Moments are microseconds, and none is given twice."""

    def __init__(self, lists: tuple[tuple[int, ...], ...], sizes: Sizes) -> None:
        self.tables: dict[int, PolicyRows] = {}
        self.queues = [CandidateQueue() for _ in lists]
        self.counts = [0] * 256
        """blocks of each list; exact after a scan, and as good as what was told since"""
        self.size = 0
        """bytes of the blocks that `count` counts"""
        self._lists = lists
        self._sizes = sizes
        self._queue_of = {
            number: queue for queue, numbers in zip(self.queues, lists, strict=True) for number in numbers
        }
        self._moment = 0

    @property
    def count(self) -> int:
        """Blocks that the policy was told of."""
        return sum(self.counts[1:DEAD]) + self.counts[HELD]

    # -- tables ------------------------------------------------------------------------------------------

    def put_table(self, number: int, rows: Rows) -> None:
        self.tables[number] = PolicyRows(rows)

    def drop_table(self, number: int) -> None:
        del self.tables[number]
        for queue in self.queues:
            queue.drop_table(number)
        self.count_all()

    def chunks(self) -> Iterator[tuple[int, PolicyRows, int, slice]]:
        """All rows, some thousand at a time: (number of the table, table, first row, which rows)."""
        for number, table in self.tables.items():
            for start in range(0, len(table), CHUNK):
                yield number, table, start, slice(start, start + CHUNK)

    def count_all(self) -> None:
        """Count blocks and bytes as they are."""
        counts, size = np.zeros(256, dtype=np.int64), 0
        for _, table, _, which in self.chunks():
            lists = table.lists_of(which)
            counts += np.bincount(lists, minlength=256)
            told = (lists != UNTOLD) & ((lists < DEAD) | (lists == HELD))
            size += int(self.sizes(table, which)[told].sum())
        self.counts, self.size = counts.tolist(), size

    def add_bytes(self, size: int) -> None:
        """Of blocks that it is told of."""
        self.size += size

    def sizes(self, table: PolicyRows, which: Places | slice) -> Numbers:
        return self._sizes(table.slabs[which], table.lengths[which])

    # -- places ------------------------------------------------------------------------------------------

    def moments(self, now: float, count: int) -> int:
        """The moment of the first block of a chain; each after it has the one before: leaves go before roots."""
        self._moment = max(int(now * MICROSECONDS) + 1, self._moment) + count  # none is that of a put now, or 0
        return self._moment - 1

    def place(self, number: int, rows: Places, list_: int, dues: Numbers, *, never_sooner: bool = False) -> None:
        """Put blocks into a list. ``never_sooner``: those that are due later already stay there."""
        table = self.tables[number]
        priorities = table.priorities[rows]
        if (priorities != NORMAL).any():
            dues = np.maximum(dues + (priorities.astype(np.int64) - NORMAL) * (PRIORITY_SECONDS * MICROSECONDS), 0)
        before, lists = table.due[rows], table.list[rows]
        if never_sooner:
            dues = np.maximum(dues, before)
        if (lists != list_).any():
            self._recount(lists, list_)
            table.list[rows] = list_
        table.due[rows] = dues
        queue = self._queue_of[list_]
        if len(rows) and dues.min() <= queue.horizon:
            moved = (dues != before) | ((lists != list_) & (lists != UNTOLD))  # others are candidates already
            near = np.flatnonzero(moved & (dues <= queue.horizon))
            queue.push(make_candidates(number, dues[near], rows[near], table.sequences[rows[near]]))

    def place_one(self, number: int, row: int, list_: int, due: int, *, never_sooner: bool = False) -> None:
        """``place`` for one row."""
        table = self.tables[number]
        if (priority := table.priority_bytes[row]) != NORMAL:
            due = max(due + (priority - NORMAL) * (PRIORITY_SECONDS * MICROSECONDS), 0)
        before, list_before = table.due_words[row], table.list_bytes[row]
        if never_sooner:
            due = max(due, before)
        table.due_words[row] = due
        if list_before != list_:
            table.list_bytes[row] = list_
            self.counts[list_before] -= 1
            self.counts[list_] += 1
        queue = self._queue_of[list_]
        if due <= queue.horizon and (due != before or list_before not in (list_, UNTOLD)):
            sequences = table.sequences[row : row + 1]
            queue.push(make_candidates(number, np.array([due]), np.array([row]), sequences))

    def _recount(self, lists: NDArray[np.uint8], list_: int) -> None:
        """Blocks left these lists for one."""
        for number, count in enumerate(np.bincount(lists).tolist()):
            self.counts[number] -= count
        self.counts[list_] += len(lists)

    def tell(self, number: int, rows: Places, settle: Settle) -> None:
        """Give a place to blocks that nobody told of."""
        table = self.tables[number]
        self.size += int(self.sizes(table, rows).sum())
        settle(number, rows, table.due[rows])

    # -- candidates --------------------------------------------------------------------------------------

    def refill(self, share: float, skip: int, now: float, settle: Settle) -> None:
        """Look at all rows: the share of each queue that is due first become its candidates."""
        scan = Scan(self.tables, self._lists, share, skip)
        if self._settle(scan, now, settle):
            scan = Scan(self.tables, self._lists, share, skip)
        for place, queue in enumerate(self.queues):
            queue.fill(scan.candidates(place))
        told = [count for number, count in enumerate(scan.counts.tolist()) if number not in (UNTOLD, DEAD, LEAVING)]
        if sum(told) != self.count:
            self.count_all()
        self.counts = scan.counts.tolist()

    def _settle(self, scan: Scan, now: float, settle: Settle) -> bool:
        """Give a place to blocks that were held for long enough, and to those that nobody told of."""
        moment = int(now * MICROSECONDS)
        settled = False
        for number, parts in scan.restless.items():
            table, rows = self.tables[number], np.concatenate(parts)
            lists, dues = table.list[rows], table.due[rows]
            released = rows[(lists == HELD) & (dues <= moment)]
            untold = rows[(lists == UNTOLD) & (dues <= moment - UNTOLD_SECONDS * MICROSECONDS)]
            if len(released):
                settle(number, released, self.moments(now, len(released)) - np.arange(len(released)))
            if len(untold):
                self.tell(number, untold, settle)
            settled = settled or len(released) + len(untold) > 0
        return settled

    def check(self, queue: int, candidates: Numbers, skip: int) -> tuple[Mask, Numbers, NDArray[np.uint8]]:
        """Of candidates of a queue: whether each may go still, its bytes, and its uses."""
        count = candidates.shape[1]
        good, sizes, uses = np.empty(count, np.bool_), np.empty(count, np.int64), np.empty(count, np.uint8)
        for number, which in by_table(candidates):
            table, rows = self.tables[number], candidates[ROW_OF][which]
            lists = table.list[rows]
            fits = lists == self._lists[queue][0]
            for other in self._lists[queue][1:]:
                fits |= lists == other
            fits &= table.is_live(rows)
            fits &= table.sequences[rows] == candidates[SEQUENCE][which]
            fits &= table.due[rows] == candidates[DUE][which]
            if skip:
                fits &= (table.flags[rows] & np.uint32(skip)) == 0
            good[which], sizes[which], uses[which] = fits, self.sizes(table, rows), table.uses[rows]
        return good, sizes, uses

    def leave(self, candidates: Numbers, size: int, now: float) -> NDArray[np.float64]:
        """These go, with so many bytes; the seconds since their last use."""
        ages = np.empty(candidates.shape[1])
        for number, which in by_table(candidates):
            table, rows = self.tables[number], candidates[ROW_OF][which]
            lists = table.list[rows]
            table.list[rows] = LEAVING
            self._recount(lists, LEAVING)
            if not lists.all():  # what nobody told of is not in the size
                size -= int(self.sizes(table, rows)[lists == UNTOLD].sum())
            ages[which] = np.maximum(int(now) - table.used[rows].astype(np.int64), 0)
        self.size -= size
        return ages

    def find(self, number: int, rows: Places, skip: int) -> Numbers:
        """Of these rows the blocks that are not on their way out, and have none of these flags; as candidates."""
        table = self.tables[number]
        lists = table.lists_of(rows)
        rows = rows[(lists < DEAD) | (lists == HELD)]
        rows = rows[(table.flags[rows] & np.uint32(skip)) == 0]
        return make_candidates(number, table.due[rows], rows, table.sequences[rows])

    def hold(self, number: int, candidates: Numbers, until: int, used: int) -> None:
        """Those that are on their way out are there still, and candidates from a moment on."""
        table, rows = self.tables[number], candidates[ROW_OF]
        rows = rows[(table.lists_of(rows) == LEAVING) & (table.sequences[rows] == candidates[SEQUENCE])]
        table.due[rows], table.used[rows], table.list[rows] = until, used, HELD
        self.counts[LEAVING] -= len(rows)
        self.counts[HELD] += len(rows)
        self.size += int(self.sizes(table, rows).sum())

    def remove(self, number: int, rows: Places, sizes: Numbers) -> None:
        """Blocks are gone otherwise."""
        lists = self.tables[number].list[rows]
        is_told = (lists != UNTOLD) & ((lists < DEAD) | (lists == HELD))
        for list_, count in enumerate(np.bincount(lists[is_told]).tolist()):
            self.counts[list_] -= count
        self.size -= int(sizes[is_told].sum())
