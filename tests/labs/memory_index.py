"""An index in memory, for tests of many hosts in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from kvfuse.errors import EngineError
from kvfuse.remote.index.engine import IndexEngine, Row, RowChange, below


@dataclass
class Entries:
    """What all hosts' objects of one index share."""

    stored: dict[bytes, bytes] = field(default_factory=dict)
    is_down: bool = False
    """every call fails"""

    def lose(self) -> None:
        """All entries, as an index may."""
        self.stored.clear()


class MemoryIndex(IndexEngine):
    """One host's."""

    def __init__(self, entries: Entries) -> None:
        super().__init__("the index in memory")
        self._entries = entries

    async def _find(self, keys: Sequence[bytes]) -> list[bytes | None]:
        await self._wait()
        return [*map(self._entries.stored.get, keys)]

    async def _put(self, rows: Sequence[Row]) -> list[bytes | None]:
        had: list[bytes | None] = []
        for row in rows:
            await self._wait()
            before = self._entries.stored.get(row.key)
            had.append(before)
            if before is None or before[:8] <= below(row.sequence):
                self._entries.stored[row.key] = row.stored
        return had

    async def _replace(self, changes: Sequence[RowChange]) -> list[bytes | None]:
        had: list[bytes | None] = []
        for expected, row in changes:
            await self._wait()
            before = self._entries.stored.get(row.key)
            had.append(before)
            if before is not None and before[:8] == below(expected):
                self._entries.stored[row.key] = row.stored
        return had

    async def _drop(self, entries: Sequence[tuple[bytes, int]]) -> list[bytes | None]:
        for key, sequence in entries:
            await self._wait()
            if self._entries.stored.get(key, b"")[:8] == below(sequence):
                del self._entries.stored[key]
        return []

    async def _clear(self) -> None:
        await self._wait()
        self._entries.stored.clear()

    async def _close(self) -> None:
        await trio.lowlevel.checkpoint()

    async def _wait(self) -> None:
        """Other hosts have their turn between any two keys."""
        await trio.lowlevel.checkpoint()
        if self._entries.is_down:
            raise EngineError("injected: the index is down")
