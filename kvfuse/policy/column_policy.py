"""The policy of a cache whose blocks are rows in shared memory: the contract, and how its parts go together.

What a policy is told, and asks, are columns: arrays of one length. A *key* is an unsigned number of 64 bits, the first
half of the fingerprint in its row. A table has a *number*, and a block is found by the number of its table, its row,
and the sequence of its put. Times are seconds of one clock that never runs backwards: that by which puts write ``due``,
``used`` and ``stored`` into rows. Nothing here waits, reads a clock or does I/O; no call is safe beside another one.

The caller says what happens to blocks soon after it did, in the order in which it did::

    used (a chain is asked for) -> admits -> (puts) added -> used* -> victims -> (frees them)
                                                        |              '-> kept: they could not go -> offered again
                                                        '-> removed (freed for another reason, or replaced by a put)

Rows change meanwhile. Blocks of which it is told nothing go in the order of their puts, and count after a minute. An
answer of ``victims`` was right when it was made: whoever frees a row compares its sequence, under the lock of its
table, and leaves a row that has another one. A row is in one answer only, unless it was kept, or has another block.

Of blocks that are due at the same time those of lower priority go first: each step of a priority above or below
`blockrows.NORMAL` is worth `blockset.PRIORITY_SECONDS` of being used later or earlier (in ``lfu`` among those of equal
uses, in ``arc`` and ``s3fifo`` in each queue).

KeyError: no table has the number, or no policy the name. ValueError: rows are no rows, or columns differ in length.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvfuse.policy.admission import VictimAge
from kvfuse.policy.api import HOLD_SECONDS
from kvfuse.policy.blockrows import DEAD, UNTOLD, Keys, Mask, Numbers, Places, Rows
from kvfuse.policy.blockset import MICROSECONDS, BlockSet, Sizes, lengths_alone
from kvfuse.policy.candidates import ROW_OF, SEQUENCE, TABLE, by_table, make_candidates, no_candidates
from kvfuse.policy.chains import FOLLOWS, IS_ROOT, MOMENT_SHIFT, WAS_SEEN, WordNotes
from kvfuse.policy.ghost_orders import ArcColumns, S3FifoColumns
from kvfuse.policy.orders import ChainColumns, FifoColumns, LfuColumns, LruColumns, Order
from kvfuse.policy.pace import Pace
from kvfuse.policy.registry import ADMISSIONS, DEFAULT_ADMISSION, DEFAULT_POLICY
from kvfuse.policy.seen import DEFAULT_SIZE, SeenKeys
from kvfuse.policy.taking import Taking

ORDERS: dict[str, type[Order]] = {
    "lru": LruColumns,
    "lfu": LfuColumns,
    "fifo": FifoColumns,
    "arc": ArcColumns,
    "s3fifo": S3FifoColumns,
    "chain": ChainColumns,
}
NOTE_SECONDS = 60
"""a block gets the place of its request, if it is stored no later than this after it"""
EXPIRY_SECONDS = 60
"""all rows are looked at for expired ones that often at least"""


class Victims(NamedTuple):
    """Columns of blocks that go, in their order."""

    tables: Numbers
    rows: Places
    sequences: Keys
    sizes: Numbers
    """bytes"""
    ages: NDArray[np.float64]
    """seconds since the last use"""


class SlabColumns(NamedTuple):
    """Columns of slabs that have blocks."""

    slabs: Places
    sizes: Numbers
    """bytes of their blocks"""
    last_uses: NDArray[np.float64]
    """mean time of the last use of their blocks"""


class ColumnPolicy:
    """Which blocks of a cache go, and which it stores: see the module."""

    def __init__(
        self,
        eviction: str = DEFAULT_POLICY,
        admission: str = DEFAULT_ADMISSION,
        sizes: Sizes = lengths_alone,
        seen_size: int = DEFAULT_SIZE,
        follows_gaps: bool = True,
    ) -> None:
        """``sizes``: what blocks occupy. ``seen_size``, ``follows_gaps``: as of `registry.make_policy`."""
        pace = Pace(follows_gaps)
        self.victim_age = VictimAge()
        self._blocks = BlockSet(ORDERS[eviction].lists, sizes)
        self._order = ORDERS[eviction](self._blocks, pace)
        self._admission = ADMISSIONS[admission](self.victim_age, pace)
        needs_seen = self._order.needs_seen or self._admission.needs_seen
        self._notes = WordNotes(SeenKeys(seen_size) if needs_seen else None, pace)
        self._expiry = 0.0
        """nothing expires before"""

    # -- tables ------------------------------------------------------------------------------------------

    def add_table(self, number: int, rows: Rows, *, is_known: bool = False) -> None:
        """Rows of dtype `blockrows.ROW`, which may have blocks. They stay mapped until `drop_table`.

        ``is_known``: a policy of the same eviction gave the blocks their places. Else they go by their last use.
        """
        if number in self._blocks.tables:
            raise ValueError(f"there is a table {number} already")
        self._blocks.put_table(number, rows)
        self._adopt(number, is_known)
        self._rows_changed()

    def grow_table(self, number: int, rows: Rows) -> None:
        """The table has more rows: those that it had, and others after them."""
        if len(rows) < len(self._blocks.tables[number]):
            raise ValueError("a table only grows")
        self._blocks.put_table(number, rows)
        self._rows_changed()

    def drop_table(self, number: int) -> None:
        """The table is gone, with all its blocks."""
        self._blocks.drop_table(number)

    def _rows_changed(self) -> None:
        self._expiry = 0.0
        self._blocks.count_all()
        self._order.room_changed(sum(map(len, self._blocks.tables.values())))

    def _adopt(self, number: int, is_known: bool) -> None:
        table = self._blocks.tables[number]
        if is_known:
            self._order.begin()
        for _, other, start, which in self._blocks.chunks():
            if other is table:
                lists = table.lists_of(which)
                lost = (lists > DEAD) if is_known else (lists != DEAD)
                rows = start + np.flatnonzero(lost)
                table.list[rows], table.uses[rows] = UNTOLD, 0
                table.due[rows] = table.used[rows].astype(np.int64) * MICROSECONDS
                if len(rows):
                    self._blocks.tell(number, rows, self._order.settle)

    # -- what happens to blocks --------------------------------------------------------------------------

    def used(self, number: int, keys: Keys, rows: Places, now: float) -> None:
        """Somebody read a chain, or looked for it. ``keys``: all of it, root first. ``rows``: -1 where it is absent."""
        if len(keys) != len(rows):
            raise ValueError(f"{len(keys)} keys have {len(rows)} rows")
        if len(keys) == 1:
            return self._used_one(number, int(keys[0]), int(rows[0]), now)
        table, moment = self._blocks.tables[number], self._blocks.moments(now, len(keys))
        is_absent = rows < 0
        follows = self._notes.ask(keys, np.flatnonzero(is_absent), moment, now)
        depths = np.flatnonzero(~is_absent)
        there = rows[depths]
        lists = table.list[there]
        if (lists >= DEAD).any():
            stays = lists < DEAD
            depths, there, lists = depths[stays], there[stays], lists[stays]
        if len(there):
            if not lists.all():
                self._blocks.tell(number, there[lists == UNTOLD], self._order.settle)
            self._order.touch(number, there, moment - depths, follows)
            table.used[there] = int(now)
        return None

    def _used_one(self, number: int, key: int, row: int, now: float) -> None:
        blocks = self._blocks
        table, moment = blocks.tables[number], blocks.moments(now, 1)
        follows = self._notes.ask_one(key, row < 0, moment, now)
        if row < 0 or (list_ := table.list_bytes[row]) >= DEAD:
            return
        if list_ == UNTOLD:
            blocks.tell(number, np.array([row]), self._order.settle)
        self._order.touch_one(number, row, moment, follows)
        table.used_words[row] = int(now)

    def admits(self, keys: Keys, now: float, has_room: bool) -> Mask:
        """Which of these absent blocks are worth storing now, root first. ``has_room``: without a victim.

        Keys that nobody asked for count as asked for now: call `used` with the whole chain before.
        """
        words = self._notes.words(keys, self._blocks.moments(now, len(keys)), now)
        if has_room:
            return np.ones(len(keys), dtype=np.bool_)
        answers: Mask = self._admission.admits((words & IS_ROOT) != 0, (words & WAS_SEEN) != 0, (words & FOLLOWS) != 0)
        return answers

    def added(self, number: int, rows: Places, keys: Keys, sizes: Numbers, now: float) -> None:
        """Blocks were put, those of a chain root first. ``sizes``: in bytes."""
        if not len(rows) == len(keys) == len(sizes):
            raise ValueError(f"{len(rows)} rows have {len(keys)} keys and {len(sizes)} sizes")
        if len(rows) == 1:
            return self._added_one(number, int(rows[0]), int(keys[0]), int(sizes[0]), now)
        table, moment, words = self._blocks.tables[number], self._blocks.moments(now, len(rows)), self._notes.take(keys)
        lists = table.list[rows]
        if (lists >= DEAD).any():
            stays = lists < DEAD
            rows, keys, sizes, words, lists = rows[stays], keys[stays], sizes[stays], words[stays], lists[stays]
        if not len(rows):
            return None
        self._blocks.add_bytes(int(sizes.sum() if not lists.any() else sizes[lists == UNTOLD].sum()))
        asked, latest = words >> MOMENT_SHIFT, moment - np.arange(len(rows))
        moments = np.where((words != 0) & (asked > moment - NOTE_SECONDS * MICROSECONDS), asked, latest)
        self._order.insert(number, rows, keys, moments, (words & FOLLOWS) != 0)
        expires = table.expires[rows]
        if expires.any():
            self._expiry = min(self._expiry, float(expires[expires != 0].min()))
        return None

    def _added_one(self, number: int, row: int, key: int, size: int, now: float) -> None:
        table, moment, word = self._blocks.tables[number], self._blocks.moments(now, 1), self._notes.take_one(key)
        if (list_ := table.list_bytes[row]) >= DEAD:
            return
        self._blocks.add_bytes(size if list_ == UNTOLD else 0)
        if word and (asked := word >> MOMENT_SHIFT) > moment - NOTE_SECONDS * MICROSECONDS:
            moment = asked
        self._order.insert_one(number, row, key, moment, word & FOLLOWS != 0)
        if expires := table.expires_words[row]:
            self._expiry = min(self._expiry, expires)

    def removed(self, number: int, rows: Places, sizes: Numbers) -> None:
        """Blocks are gone otherwise than by an answer: told before other blocks are in their rows."""
        self._blocks.remove(number, rows, sizes)

    def kept(self, blocks: Victims, now: float) -> None:
        """These could not go: as just used, and not offered for `api.HOLD_SECONDS`. Gone ones are ignored."""
        candidates = make_candidates(0, blocks.sizes, blocks.rows, blocks.sequences.view(np.int64))
        candidates[TABLE] = blocks.tables
        until = int((now + HOLD_SECONDS) * MICROSECONDS)
        for number, which in by_table(candidates):
            self._blocks.hold(number, candidates[:, which], until, int(now))

    # -- which go ----------------------------------------------------------------------------------------

    def victims(self, size: int, now: float, skip: int = 0) -> Victims:
        """The blocks that go next: of ``size`` bytes together and no block more, or all that may go.

        ``skip``: blocks that have one of these flags stay. Where nothing may go, each call looks at all rows.
        """
        taking = Taking(self._blocks, self._order.settle, size, now, skip)
        self._order.pick(taking)
        ages = np.concatenate((np.empty(0), *taking.ages))
        self.victim_age.add_column(ages)
        return _blocks_of(taking.taken, taking.sizes, ages)

    def expired(self, now: float, skip: int = 0) -> Victims:
        """The blocks of which ``expires`` has passed, in no order. Those of ``skip`` are found a minute later."""
        if now < self._expiry:
            return _blocks_of([], [], np.empty(0))
        found: list[tuple[int, Places]] = []
        self._expiry = now + EXPIRY_SECONDS
        for number, table, start, which in self._blocks.chunks():
            expires = table.expires[which]
            fits = (expires != 0) & table.is_live(which)
            if fits.any():
                later = expires[fits & (expires > now)]
                self._expiry = min(self._expiry, float(later.min())) if len(later) else self._expiry
                found.append((number, start + np.flatnonzero(fits & (expires <= now))))
        return self._take(found, now, skip)

    def in_slabs(self, slabs: Iterable[int], now: float, skip: int = 0) -> Victims:
        """The blocks of these slabs, in no order: for emptying whole slabs."""
        wanted = np.fromiter(slabs, dtype=np.uint32)
        found = [
            (number, start + np.flatnonzero(np.isin(table.slabs[which], wanted)))
            for number, table, start, which in self._blocks.chunks()
        ]
        return self._take(found, now, skip)

    def _take(self, found: Iterable[tuple[int, Places]], now: float, skip: int) -> Victims:
        taken = [part for number, rows in found if (part := self._blocks.find(number, rows, skip)).size]
        sizes = [self._blocks.sizes(self._blocks.tables[int(part[TABLE, 0])], part[ROW_OF]) for part in taken]
        ages = [self._blocks.leave(part, int(size.sum()), now) for part, size in zip(taken, sizes, strict=True)]
        return _blocks_of(taken, sizes, np.concatenate((np.empty(0), *ages)))

    # -- figures -----------------------------------------------------------------------------------------

    def by_slab(self) -> SlabColumns:
        """What slabs have: looks at all rows. Numbers of slabs are below 2**24."""
        sizes: NDArray[np.float64] = np.zeros(0)
        counts = times = sizes
        for _, table, _, which in self._blocks.chunks():
            live = np.flatnonzero(table.is_live(which))
            slabs = table.slabs[which][live]
            length = max(len(sizes), int(slabs.max()) + 1 if len(slabs) else 0)
            sizes = _sum_up(sizes, slabs, self._blocks.sizes(table, which)[live], length)
            times = _sum_up(times, slabs, table.used[which][live], length)
            counts = _sum_up(counts, slabs, np.ones(len(live)), length)
        used = np.flatnonzero(counts)
        return SlabColumns(used, sizes[used].astype(np.int64), times[used] / counts[used])

    @property
    def size(self) -> int:
        """Bytes of the blocks that it was told of, and that did not go."""
        return self._blocks.size

    def __len__(self) -> int:
        """How many these are."""
        return self._blocks.count


def _blocks_of(parts: list[Numbers], sizes: list[Numbers], ages: NDArray[np.float64]) -> Victims:
    found = np.concatenate((no_candidates(), *parts), axis=1)
    all_sizes = np.concatenate((np.empty(0, dtype=np.int64), *sizes))
    return Victims(found[TABLE], found[ROW_OF], found[SEQUENCE].view(np.uint64), all_sizes, ages)


def _sum_up(
    sums: NDArray[np.float64], slabs: NDArray[np.uint32], values: NDArray[Any], length: int
) -> NDArray[np.float64]:
    """``sums`` by slab, now of ``length`` slabs, with these values."""
    found = np.bincount(slabs, values, minlength=length).astype(np.float64)
    found[: len(sums)] += sums
    return found
