"""Numbers that are never given twice: inodes, and generations of slots. Taken from the record store in ranges."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import trio

from kvfuse.errors import EngineError, EngineTimeout
from kvfuse.remote.records.api import RecordStore
from kvfuse.volume.store import schema
from kvfuse.volume.store.transaction import Transaction

ATTEMPTS_MAX = 20
"""Times that others may be faster before a range is given up."""

REACH_SECONDS = 10.0
"""How long a caller waits for numbers that are not below those of a namespace that was cleared."""

Transact = Callable[[Transaction], Awaitable[bool]]
"""as `Journal.transact`"""


class NumberRange:
    """Of a volume that nobody else has open.

    A range is announced (`take`) by commits that are half a range ahead of what was given: a number that a slot
    header shows was announced before, so none is given again after a crash. The first range is announced before the
    first number is given. Where the store refuses that commit (`withhold`), those are given which the daemon before
    this one announced and did not give; then none, until a commit brings more.
    """

    def __init__(self, key: bytes, start: int, word: memoryview | None = None) -> None:
        """``word``: 64 bits that outlive the daemon: the number after the last one that was given; 0: nobody knows."""
        self.key = key
        self._next = start
        self._end = start
        self._refusal: EngineError | None = None
        self._word = word if word is not None else memoryview(bytearray(8)).cast("q")
        self._left = range(self._word[0] or start, start)
        """announced by the daemon before this one, and not given"""

    @property
    def upcoming(self) -> int:
        """Larger than all numbers that were given."""
        return self._next

    def next(self) -> int:
        """EngineError, as the store refused it, while nothing is announced."""
        if self._refusal is not None and self._next >= self._end:
            raise type(self._refusal)(f"no number is left for {self.key[1:].decode()}: {self._refusal}")
        value = self._next
        self._next += 1
        self._word[0] = self._next
        return value

    def next_range(self, count: int) -> int:
        """The first of so many that follow each other. Not of a shared volume."""
        first = self.next()
        self._next += count - 1
        self._word[0] = self._next
        return first

    def pass_over(self, number: int) -> None:
        """A daemon before this one gave this number, whether it was announced or not."""
        self._next = max(self._next, number + 1)

    def withhold(self, error: EngineError) -> None:
        """The store refused the first range, of which nothing was given: `take` says it again."""
        if self._refusal is None and self._next == self._left.stop:  # else numbers behind those were seen
            self._next = min(self._left.start, self._next)
        self._end, self._refusal = max(self._next, self._left.stop), error

    @property
    def is_withheld(self) -> bool:
        """The first range is not announced."""
        return self._refusal is not None

    def announced(self) -> None:
        """All that `take` has said is in the store."""
        self._refusal = None

    async def reach(self, bound: int) -> None:
        """Return when the next number is not below ``bound``, which some other client may have given already."""

    def take(self) -> dict[bytes, bytes]:
        """The record that announces a new range, when half of the announced numbers were given."""
        if self._next + schema.COUNTER_RANGE // 2 <= self._end:
            return {}
        self._end = self._next + schema.COUNTER_RANGE
        return {self.key: schema.encode_u64(self._end)}


class SharedNumberRange(NumberRange):
    """Of a shared volume: a range is this client's when a commit of its own has moved the counter over it.

    One range is in use and one in reserve, so nobody waits for the next one while the record store answers.
    """

    def __init__(self, key: bytes) -> None:
        super().__init__(key, 0)
        self._reserve: range | None = None
        self._floor = 0
        """numbers below are given only as long as there are no others"""
        self._arrived = trio.Event()
        """set, and made anew, with each range"""
        self.wanted: Callable[[], object] = lambda: None
        """called when the reserve is in use: see `fill`"""

    def next(self) -> int:
        """EngineError when both ranges were given and the record store did not answer since."""
        if self._next == self._end or (self._next < self._floor and self._has_fresh):
            if self._reserve is None:
                raise EngineError(f"no number is left for {self.key[1:].decode()}: the record store does not answer")
            self._next, self._end = self._reserve.start, self._reserve.stop
            self._reserve = None
            self.wanted()
        return super().next()

    def take(self) -> dict[bytes, bytes]:
        """Nothing: commits of its own announce the ranges."""
        return {}

    @property
    def _has_fresh(self) -> bool:
        return self._reserve is not None and self._reserve.start >= self._floor

    def leave(self, bound: int) -> bool:
        """Give numbers of ``bound`` and above as soon as there are some. False: such were given already."""
        self._floor = max(self._floor, bound)
        if not self._has_fresh:
            self.wanted()
        return self._next < bound

    async def reach(self, bound: int) -> None:
        """As of a volume that nobody else has; the caller gave `leave` the bound. EngineTimeout."""
        with trio.move_on_after(REACH_SECONDS):
            while self._next < bound and not self._has_fresh:
                await self._arrived.wait()
            return
        raise EngineTimeout(f"no number is left for {self.key[1:].decode()}: the record store does not answer")

    async def fill(self, records: RecordStore, transact: Transact) -> None:
        """Have a reserve. Numbers may be given at each await; a commit of unknown outcome may bring its range later."""
        for _ in range(ATTEMPTS_MAX):
            if self._has_fresh:
                return
            (row,) = await records.get([self.key])
            if row is None:
                raise EngineError(f"the counter {self.key!r} is gone: 'kvfuse fsck --repair' counts anew")
            start = schema.decode_u64(row.value)
            end = start + schema.COUNTER_RANGE
            if await transact(
                Transaction(
                    {self.key: row.version},
                    {self.key: schema.encode_u64(end)},
                    applied=partial(self._put_by, range(start, end)),
                )
            ):
                return
        raise EngineError(f"the counter {self.key!r} moved {ATTEMPTS_MAX} times while a range of it was taken")

    def _put_by(self, taken: range, version: int) -> None:
        self.add(taken)

    def add(self, taken: range) -> None:
        """A commit has moved the counter over a range: it is this client's."""
        if self._reserve is None or taken.start > self._reserve.start:
            self._reserve = taken
        self._arrived.set()
        self._arrived = trio.Event()
