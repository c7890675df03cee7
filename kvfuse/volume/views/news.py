"""News of the blocks of a cache, for those who follow them: which names mean a block now, and which none any more.

Event loop only. A watch that is not read for long loses rows; who follows then begins anew, as nothing else would tell
what was lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt
import trio


class NameEvent(Enum):
    """What happened to a name, or to all."""

    STORED = auto()
    REMOVED = auto()
    CLEARED = auto()
    """none of the names means a block any more"""


Row = tuple[NameEvent, bytes]
"""(what happened, name)"""
PART_MAX = 128
"""names that are packed together"""


class PackedNames(NamedTuple):
    """What happened to some names."""

    event: NameEvent
    name_count: int
    packed: bytes
    """lengths (u16), then the names"""


class NameBatch(Protocol):
    """Names that are packed without looking at each of them."""

    @property
    def lengths(self) -> npt.NDArray[Any]: ...
    def some(self, which: Any) -> NameBatch: ...
    def pack(self) -> bytes: ...


class Watch:
    """Rows of one directory since somebody took them."""

    ROWS_MAX = 1 << 13
    PACKED_MAX = 1 << 16
    """names of `PackedNames`"""

    def __init__(self, namespace: int) -> None:
        self.namespace = namespace
        self.lost = trio.Event()
        """set when rows were lost"""
        self._rows: list[Row | PackedNames] = []
        self._packed = 0
        self._has_rows = trio.Event()

    def tell(self, row: Row | PackedNames) -> None:
        self._packed += row.name_count if isinstance(row, PackedNames) else 0
        if len(self._rows) < self.ROWS_MAX and self._packed <= self.PACKED_MAX:
            self._rows.append(row)
            self._has_rows.set()
        else:
            self.lost.set()

    def take(self) -> list[Row | PackedNames]:
        """The rows since the last call, oldest first."""
        self._packed = 0
        rows, self._rows, self._has_rows = self._rows, [], trio.Event()
        return rows

    async def wait(self) -> None:
        """Wait until there are rows."""
        await self._has_rows.wait()


class News:
    """All watches of a volume. ``watches``: by directory, of those that somebody follows."""

    def __init__(self) -> None:
        self.watches: dict[int, set[Watch]] = {}
        self.on_watch: Callable[[int], None] = lambda directory: None
        """hears of each watch before it begins"""

    @contextmanager
    def watching(self, directory: int, namespace: int) -> Iterator[Watch]:
        """A watch of a directory in a namespace, which gets rows while the body runs."""
        watch = Watch(namespace)
        self.on_watch(directory)
        self.watches.setdefault(directory, set()).add(watch)
        try:
            yield watch
        finally:
            self.watches[directory].discard(watch)
            if not self.watches[directory]:
                del self.watches[directory]

    def tell(self, directory: int, change: NameEvent, name: bytes) -> None:
        for watch in self.watches.get(directory, ()):
            watch.tell((change, name))

    def tell_names(self, directory: int, change: NameEvent, names: NameBatch) -> None:
        """As `tell`, of many names."""
        for start in range(0, len(names.lengths), PART_MAX):
            part = names.some(slice(start, start + PART_MAX))
            row = PackedNames(change, len(part.lengths), part.pack())
            for watch in self.watches.get(directory, ()):
                watch.tell(row)

    def lose(self, directory: int) -> None:
        """Something happened in a directory that nobody can tell."""
        for watch in self.watches.get(directory, ()):
            watch.lost.set()

    def clear(self, namespace: int) -> None:
        """A namespace was cleared."""
        for watch in self._all():
            if watch.namespace == namespace:
                watch.tell((NameEvent.CLEARED, b""))

    def lose_all(self) -> None:
        """Nothing is told any more."""
        for watch in self._all():
            watch.lost.set()

    def _all(self) -> Iterator[Watch]:
        return itertools.chain.from_iterable(self.watches.values())
