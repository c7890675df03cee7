"""Orders on columns of rows that remember what they evicted: ARC and S3-FIFO (`ghosts` says why).

They count blocks where those count bytes: the blocks of a cache are of about one size.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kvfuse.policy import rounds
from kvfuse.policy.blockrows import FIRST, SECOND, UNTOLD, Keys, Mask, Numbers, Places
from kvfuse.policy.blockset import BlockSet
from kvfuse.policy.candidates import EVERYTHING, ROW_OF, by_table
from kvfuse.policy.ghosts import FREQUENCY_MAX, SMALL_SHARE
from kvfuse.policy.orders import Order
from kvfuse.policy.pace import Pace
from kvfuse.policy.seen import NEVER, SeenKeys
from kvfuse.policy.taking import Spare, Taking

_GHOSTS_MIN = 4096
_STEP_MIN = 64
SPARED_MAX = 1 << 16
"""blocks that stay, after which a choice goes by whole queues"""


class GhostKeys:
    """Keys of evicted blocks: a table in which the time is the number of keys that were added.

    How many there are is reckoned: those forgotten last are taken to be as dense as all are.
    """

    def __init__(self, count_max: int) -> None:
        self._seen = SeenKeys(16 * max(count_max, _GHOSTS_MIN))
        self._added = 0
        self._reach = 0.0
        """of the last so many added keys those are ghosts that were not taken"""
        self.count = 0.0

    def add(self, keys: Keys) -> None:
        for start in range(0, len(keys), _GHOSTS_MIN):  # of few keys hardly two have one row
            part = keys[start : start + _GHOSTS_MIN]
            self._seen.ask_column(part, self._added)
            self._added += len(part)
        self._reach += len(keys)
        self.count += len(keys)

    def take(self, keys: Keys) -> Mask:
        """Forget the keys; which of them were there."""
        if not self.count:
            return np.zeros(len(keys), dtype=np.bool_)
        gaps = self._seen.forget_column(keys, self._added)
        found: Mask = (gaps != NEVER) & (gaps <= self._reach)
        self.count = max(0.0, self.count - int(found.sum()))
        return found

    def trim(self, count: float) -> None:
        """Forget the oldest beyond so many."""
        if self.count > count:
            self._reach *= max(count, 0.0) / self.count
            self.count = max(count, 0.0)


class GhostOrder(Order):
    """Two queues: of the blocks that are new, and of those that came again."""

    lists = ((UNTOLD, FIRST), (SECOND,))

    def _place(self, number: int, rows: Places, moments: Numbers, again: Mask) -> None:
        if not again.all():
            self.blocks.place(number, rows[~again], FIRST, moments[~again])
        if again.any():
            self.blocks.place(number, rows[again], SECOND, moments[again])

    def keys_of(self, candidates: Numbers) -> Keys:
        """Of candidates that were taken, and are not gone yet."""
        keys = np.empty(candidates.shape[1], dtype=np.uint64)
        for number, which in by_table(candidates):
            keys[which] = self.blocks.tables[number].keys[candidates[ROW_OF][which]]
        return keys


class ArcColumns(GhostOrder):
    """By the time of the last use, in two lists: of blocks used once, and of those used again."""

    def __init__(self, blocks: BlockSet, pace: Pace) -> None:
        super().__init__(blocks, pace)
        self.room_changed(0)
        self._target = 0.0

    def room_changed(self, rows: int) -> None:
        self._once_ghosts, self._again_ghosts = GhostKeys(rows), GhostKeys(rows)

    def insert(self, number: int, rows: Places, keys: Keys, moments: Numbers, follows: Mask) -> None:
        once, again = self._once_ghosts.count, self._again_ghosts.count
        was_once = self._once_ghosts.take(keys)
        was_again = self._again_ghosts.take(keys) & ~was_once
        for is_once in was_once[was_once | was_again].tolist():
            if is_once:
                self._target = min(self._target + max(1.0, again / max(once, 1.0)), self.blocks.count)
                once -= 1
            else:
                self._target = max(self._target - max(1.0, once / max(again, 1.0)), 0.0)
                again -= 1
        self._place(number, rows, moments, was_once | was_again)

    def insert_one(self, number: int, row: int, key: int, moment: int, follows: bool) -> None:
        if self._once_ghosts.count or self._again_ghosts.count:
            columns = np.array([row]), np.array([key], dtype=np.uint64), np.array([moment]), np.array([follows])
            self.insert(number, *columns)
        else:
            self.blocks.place_one(number, row, FIRST, moment)

    def touch(self, number: int, rows: Places, moments: Numbers, follows: bool) -> None:
        self.blocks.place(number, rows, SECOND, moments)

    def touch_one(self, number: int, row: int, moment: int, follows: bool) -> None:
        self.blocks.place_one(number, row, SECOND, moment)

    def settle(self, number: int, rows: Places, moments: Numbers) -> None:
        is_new = self.blocks.tables[number].list[rows] == UNTOLD
        self._place(number, rows, moments, ~is_new)

    def pick(self, taking: Taking) -> None:
        over = self.blocks.counts[FIRST] - self._target
        if over > 0:
            self._take(taking, 0, math.ceil(over))
        for queue in (1, 0, 1):  # a scan may have found blocks that were held, or that nobody told of
            if taking.left > 0 and (queue == 0 or self.blocks.counts[SECOND] > 0):
                self._take(taking, queue, EVERYTHING)
        capacity = self.blocks.count + 1  # with the one that went last
        self._once_ghosts.trim(capacity - self.blocks.counts[FIRST])
        self._again_ghosts.trim(capacity - self._once_ghosts.count)

    def _take(self, taking: Taking, queue: int, count: int) -> None:
        before = len(taking.taken)
        taking.take(queue, count)
        (self._again_ghosts if queue else self._once_ghosts).add(self.keys_of(taking.taken_since(before)))


class Promoted(Spare):
    """Blocks of S3-FIFO's small queue that were used more than once go into the main one."""

    def __init__(self, order: S3FifoColumns) -> None:
        self.order = order

    def stay(self, uses: NDArray[np.uint8]) -> Mask:
        return uses > 1

    def put(self, number: int, rows: Places) -> None:
        self.order.put_main(number, rows, 0)


class Round(Promoted):
    """Blocks of the main queue get another round for each use."""

    def stay(self, uses: NDArray[np.uint8]) -> Mask:
        return uses > 0

    def put(self, number: int, rows: Places) -> None:
        self.order.put_main(number, rows, self.order.blocks.tables[number].uses[rows] - 1)


class S3FifoColumns(GhostOrder):
    """By the time of the storing, in two queues: a small one of new blocks, and the main one."""

    def __init__(self, blocks: BlockSet, pace: Pace) -> None:
        super().__init__(blocks, pace)
        self.room_changed(0)
        self._promotion, self._round = Promoted(self), Round(self)
        self._now = 0.0

    def room_changed(self, rows: int) -> None:
        self._ghosts = GhostKeys(rows)

    def insert(self, number: int, rows: Places, keys: Keys, moments: Numbers, follows: Mask) -> None:
        self._place(number, rows, moments, self._ghosts.take(keys))

    def insert_one(self, number: int, row: int, key: int, moment: int, follows: bool) -> None:
        is_main = bool(self._ghosts.count) and bool(self._ghosts.take(np.array([key], dtype=np.uint64))[0])
        self.blocks.place_one(number, row, SECOND if is_main else FIRST, moment)

    def touch(self, number: int, rows: Places, moments: Numbers, follows: bool) -> None:
        uses = self.blocks.tables[number].uses
        uses[rows] = np.minimum(uses[rows], FREQUENCY_MAX - 1) + 1

    def touch_one(self, number: int, row: int, moment: int, follows: bool) -> None:
        uses = self.blocks.tables[number].uses_bytes
        uses[row] = min(uses[row] + 1, FREQUENCY_MAX)

    def settle(self, number: int, rows: Places, moments: Numbers) -> None:
        table = self.blocks.tables[number]
        is_new = table.list[rows] == UNTOLD
        table.uses[rows[~is_new]] = 1
        self._place(number, rows, moments, ~is_new)

    def put_main(self, number: int, rows: Places, uses: NDArray[np.uint8] | int) -> None:
        """At the end of the main queue."""
        self.blocks.tables[number].uses[rows] = uses
        last = self.blocks.moments(self._now, len(rows))
        self.blocks.place(number, rows, SECOND, np.arange(last - len(rows) + 1, last + 1))

    def pick(self, taking: Taking) -> None:
        self._now = taking.now
        while taking.left > 0:
            if taking.spared >= SPARED_MAX:
                taking.spared = 0
                self._go_round(taking)
                continue
            seen = self._pick_small(taking) or self._pick_main(taking) or self._take_small(taking, EVERYTHING)
            if not seen and not self._pick_main(taking):  # what a scan found at last
                break
        self._ghosts.trim(self.blocks.count + 1)

    def _go_round(self, taking: Taking) -> None:
        """Take what goes by the next whole rounds of the queue that is too long: see `rounds`."""
        blocks, before = self.blocks, len(taking.taken)
        small, main = blocks.counts[FIRST], blocks.counts[SECOND]
        if (over := self._over()) > 0:
            rounds.go_round(blocks, taking, FIRST, 1, over, taking.left, rounds.Spared(SECOND, np.zeros_like))
            self._ghosts.add(self.keys_of(taking.taken_since(before)))
            return
        mean = blocks.size // max(1, blocks.count)
        size = min(taking.left, max(_STEP_MIN, main - int(small / SMALL_SHARE - small)) * max(mean, 1))
        left = taking.left - size
        rounds.lose_uses(blocks, taking, SECOND, size)
        if taking.left > left:
            spared = rounds.Spared(SECOND, lambda uses: uses - np.uint8(1))
            rounds.go_round(blocks, taking, SECOND, 0, EVERYTHING, taking.left - left, spared)

    def _over(self) -> int:
        """Blocks that the small queue has too many."""
        small, main = self.blocks.counts[FIRST], self.blocks.counts[SECOND]
        return math.ceil(small - SMALL_SHARE * (small + main)) if main and small else EVERYTHING if small else 0

    def _pick_small(self, taking: Taking) -> int:
        over = self._over()
        return self._take_small(taking, min(over, SPARED_MAX)) if over > 0 else 0

    def _pick_main(self, taking: Taking) -> int:
        step = max(_STEP_MIN, self.blocks.count // 100)
        return taking.take(1, step, self._round) if self.blocks.counts[SECOND] > 0 else 0

    def _take_small(self, taking: Taking, count: int) -> int:
        before = len(taking.taken)
        seen = taking.take(0, count, self._promotion)
        self._ghosts.add(self.keys_of(taking.taken_since(before)))
        return seen
