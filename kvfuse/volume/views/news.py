"""News of the blocks of a cache, for those who follow them: which names mean a block now, and which none any more.

Event loop only. A watch that is not read for long loses rows; who follows then begins anew, as nothing else would tell
what was lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto

import trio


class NameEvent(Enum):
    """What happened to a name, or to all."""

    STORED = auto()
    REMOVED = auto()
    CLEARED = auto()
    """none of the names means a block any more"""


Row = tuple[NameEvent, bytes]
"""(what happened, name)"""


class Watch:
    """Rows of one directory since somebody took them."""

    ROWS_MAX = 1 << 13

    def __init__(self, namespace: int) -> None:
        self.namespace = namespace
        self.lost = trio.Event()
        """set when rows were lost"""
        self._rows: list[Row] = []
        self._has_rows = trio.Event()

    def tell(self, row: Row) -> None:
        if len(self._rows) < self.ROWS_MAX:
            self._rows.append(row)
            self._has_rows.set()
        else:
            self.lost.set()

    def take(self) -> list[Row]:
        """The rows since the last call, oldest first."""
        rows, self._rows, self._has_rows = self._rows, [], trio.Event()
        return rows

    async def wait(self) -> None:
        """Wait until there are rows."""
        await self._has_rows.wait()


class News:
    """All watches of a volume. ``watches``: by directory, of those that somebody follows."""

    def __init__(self) -> None:
        self.watches: dict[int, set[Watch]] = {}

    @contextmanager
    def watching(self, directory: int, namespace: int) -> Iterator[Watch]:
        """A watch of a directory in a namespace, which gets rows while the body runs."""
        watch = Watch(namespace)
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
