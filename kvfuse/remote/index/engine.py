"""Base of the engines of an index: checks, counters, closing, and the stored form of an entry.

A stored entry has 8 bytes of its sequence, big-endian, a zero byte, and the value. So entries of a lower sequence are
lower as bytes, whatever their values are, and `below` and `above` enclose all entries of one sequence: servers need
only compare bytes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import trio

from kvfuse.errors import EngineError
from kvfuse.remote.index.api import KEY_SIZE, SEQUENCE_MAX, VALUE_SIZE_MAX, BlockIndex, Entry, Replacement

SEQUENCE_SIZE = 8
STORED_SIZE_MAX = SEQUENCE_SIZE + 1 + VALUE_SIZE_MAX
SIDE_BY_SIDE_MAX = 8
"""requests of one call under way"""

_T = TypeVar("_T")
_I = TypeVar("_I")


class Row(NamedTuple):
    """An entry to be stored."""

    key: bytes
    sequence: int
    stored: bytes


class RowChange(NamedTuple):
    """A row that is to take the place of an entry of this sequence."""

    expected: int
    row: Row


def packed(entry: Entry) -> bytes:
    return below(entry.sequence) + b"\0" + entry.value


def unpacked(key: bytes, stored: bytes | None) -> Entry | None:
    """None for an absent entry, or one that is not ours."""
    if stored is None or len(stored) <= SEQUENCE_SIZE:
        return None
    return Entry(key, int.from_bytes(stored[:SEQUENCE_SIZE], "big"), stored[SEQUENCE_SIZE + 1 :])


def below(sequence: int) -> bytes:
    """Below all stored entries of this sequence, and not below those of lower ones."""
    return sequence.to_bytes(SEQUENCE_SIZE, "big")


def above(sequence: int) -> bytes:
    """Above all stored entries of this sequence, and not above those of higher ones."""
    return below(sequence) + b"\1"


class IndexEngine(BlockIndex):
    """An engine has ``_clear``; and ``_find``, ``_put``, ``_replace`` and ``_drop``, which get one key or more, all
    different."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        """in messages"""
        self._closed = False
        self._calls: set[trio.CancelScope] = set()
        self._idle = trio.Event()

    async def find(self, keys: Sequence[bytes]) -> list[Entry | None]:
        _check_keys(keys)
        self.counters.finds += 1
        found = await self._call(self._find, keys)
        self.counters.found += len(keys) - found.count(None)
        return [*map(unpacked, keys, found)]

    async def put(self, entries: Sequence[Entry]) -> list[Entry | None]:
        rows = _rows_of(entries)
        self.counters.puts += 1
        return [*map(unpacked, [row.key for row in rows], await self._call(self._put, rows))]

    async def replace(self, changes: Sequence[Replacement]) -> list[bool]:
        rows = _rows_of([change.entry for change in changes])
        for change in changes:
            _check_sequence(change.entry.key, change.expected)
        self.counters.replaces += 1
        wanted = [RowChange(change.expected, row) for change, row in zip(changes, rows, strict=True)]
        before = await self._call(self._replace, wanted)
        return [
            had is not None and (had[:SEQUENCE_SIZE] == below(change.expected) or had == change.row.stored)
            for change, had in zip(wanted, before, strict=True)
        ]

    async def drop(self, entries: Sequence[tuple[bytes, int]]) -> None:
        _check_keys([key for key, _ in entries])
        for key, sequence in entries:
            _check_sequence(key, sequence)
        self.counters.drops += 1
        await self._call(self._drop, entries)

    async def clear(self) -> None:
        async def clear(_: Sequence[None]) -> list[None]:
            await self._clear()
            return []

        await self._call(clear, [None])

    async def aclose(self) -> None:
        with trio.CancelScope(shield=True):
            if self._closed:
                return
            self._closed = True
            for scope in self._calls:
                scope.cancel()
            if self._calls:
                await self._idle.wait()
            await self._close()

    @abstractmethod
    async def _find(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Stored entries of these keys, in their order."""

    @abstractmethod
    async def _put(self, rows: Sequence[Row]) -> list[bytes | None]:
        """Store rows. Returns entries that were stored before, in the same order."""

    @abstractmethod
    async def _replace(self, changes: Sequence[RowChange]) -> list[bytes | None]:
        """Store rows where the expected entries are. Returns entries that were stored before, in the same order."""

    @abstractmethod
    async def _drop(self, entries: Sequence[tuple[bytes, int]]) -> list[bytes | None]:
        """Remove entries. The result is not used."""

    @abstractmethod
    async def _clear(self) -> None:
        """Remove all entries."""

    @abstractmethod
    async def _close(self) -> None:
        """End it; no call is under way."""

    async def _call(self, call: Callable[[Sequence[_I]], Awaitable[list[_T]]], items: Sequence[_I]) -> list[_T]:
        if not items:
            await trio.lowlevel.checkpoint()
            return []
        try:
            if not self._closed:
                with trio.CancelScope() as scope:
                    self._calls.add(scope)
                    try:
                        return await call(items)
                    finally:
                        self._calls.discard(scope)
                        if self._closed and not self._calls:
                            self._idle.set()
            raise EngineError(f"{self.name} is closed")
        except EngineError:
            self.counters.errors += 1
            raise


async def side_by_side(
    call: Callable[[Sequence[_I]], Awaitable[list[_T]]], items: Sequence[_I], batch_size: int
) -> list[_T]:
    """Call for each batch of items. Returns all results in the items' order. EngineError of the first that failed."""
    batches = [items[start : start + batch_size] for start in range(0, len(items), batch_size)]
    if len(batches) == 1:
        return await call(items)
    results: list[list[_T]] = [[] for _ in batches]
    failures: list[EngineError] = []
    queue = enumerate(batches)

    async def work() -> None:
        try:
            for index, batch in queue:
                results[index] = await call(batch)
        except EngineError as error:
            failures.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for _ in range(min(len(batches), SIDE_BY_SIDE_MAX)):
            nursery.start_soon(work)
    if failures:
        raise failures[0]
    return [*chain.from_iterable(results)]


def _rows_of(entries: Sequence[Entry]) -> list[Row]:
    """ValueError: a key, sequence or value is none."""
    _check_keys([entry.key for entry in entries])
    for key, sequence, value in entries:
        _check_sequence(key, sequence)
        if len(value) > VALUE_SIZE_MAX:
            raise ValueError(f"a value of {len(value)} bytes; at most {VALUE_SIZE_MAX}")
    return [Row(entry.key, entry.sequence, packed(entry)) for entry in entries]


def _check_keys(keys: Sequence[bytes]) -> None:
    if any(len(key) != KEY_SIZE for key in keys):
        raise ValueError(f"a key is not of {KEY_SIZE} bytes")
    if len({*keys}) != len(keys):
        raise ValueError("a key is there twice")


def _check_sequence(key: bytes, sequence: int) -> None:
    if not 0 <= sequence <= SEQUENCE_MAX:
        raise ValueError(f"sequence {sequence} of key {key.hex()}; from 0 to {SEQUENCE_MAX}")
