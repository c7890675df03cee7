"""A cache without bytes whose blocks are rows, for policies of columns: it does with rows what a block store does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvfuse.policy.blockrows import NORMAL, ROW
from kvfuse.policy.column_policy import ColumnPolicy

TABLE = 1
_ROWS_MIN = 1024


class ColumnCache:
    """Up to ``row_max`` blocks of one byte, in a table that grows up to then."""

    def __init__(self, policy: ColumnPolicy, row_max: int) -> None:
        self.policy = policy
        self.places: dict[int, int] = {}
        """key -> row"""
        self._memory = np.zeros(row_max, dtype=ROW)
        self.rows = self._memory[:_ROWS_MIN]
        self._free = list(range(len(self.rows)))
        self._sequence = 0
        policy.add_table(TABLE, self.rows)

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, key: object) -> bool:
        return key in self.places

    def used(self, keys: Sequence[int], now: float) -> None:
        rows = [self.places.get(key, -1) for key in keys]
        self.policy.used(TABLE, _column(keys), np.array(rows, dtype=np.intp), now)

    def admits(self, keys: Sequence[int], now: float, has_room: bool) -> list[bool]:
        answers: list[bool] = self.policy.admits(_column(keys), now, has_room).tolist()
        return answers

    def victims(self, size: int, now: float) -> list[int]:
        """The keys of blocks that are gone."""
        rows = self.policy.victims(size, now).rows
        keys: list[int] = self.rows["fingerprint"][rows, 0].tolist()
        self.rows["version"][rows] += np.uint64(1)
        self._free.extend(self.places.pop(key) for key in keys)
        return keys

    def put(self, keys: Sequence[int], now: float, priority: int = NORMAL) -> None:
        """Store blocks that are not there."""
        if not keys:
            return
        while len(self._free) < len(keys):
            self._grow()
        rows = np.array([self._free.pop() for _ in keys], dtype=np.intp)
        self.places.update(zip(keys, rows.tolist(), strict=True))
        self._publish(rows, _column(keys), now, priority)
        self.policy.added(TABLE, rows, _column(keys), np.ones(len(rows), dtype=np.int64), now)

    def _publish(self, rows: NDArray[np.intp], keys: NDArray[np.uint64], now: float, priority: int) -> None:
        new = np.zeros(len(rows), dtype=ROW)
        new["version"], new["fingerprint"][:, 0] = self.rows["version"][rows] + np.uint64(1), keys
        new["length"], new["priority"] = 1, priority
        new["sequence"] = np.arange(self._sequence + 1, self._sequence + 1 + len(rows))
        new["due"], new["used"], new["stored"] = int(now * 1_000_000), int(now), int(now)
        self._sequence += len(rows)
        self.rows[rows] = new

    def _grow(self) -> None:
        before = len(self.rows)
        self.rows = self._memory[: 2 * before]
        if len(self.rows) == before:
            raise ValueError(f"a cache of {before} rows is full")
        self._free.extend(range(before, len(self.rows)))
        self.policy.grow_table(TABLE, self.rows)


def _column(keys: Sequence[int]) -> NDArray[np.uint64]:
    return np.array(keys, dtype=np.uint64)
