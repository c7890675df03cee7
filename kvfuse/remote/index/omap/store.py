"""The index in Ceph: keys of the omaps of some objects, in the pool and namespace of the segments.

* An entry is a key of one of ``shards`` objects, by a checksum of the key. An absent object has no entries.
* A find reads each object that has some of its keys, side by side. A put or drop reads first, then changes the keys of
  each object in one operation, on condition that none has changed since. If another host was faster, nothing of that
  object was changed, and its keys are read again. Of hosts that race for an object one always gets on.
* A call has the deadline of the segments' engine. `dispatcher.py` says how late objects are treated.
* An erasure-coded pool has no omaps.
"""

from __future__ import annotations

import errno
import random
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self, TypeVar

import trio

from kvfuse.errors import EngineError, EngineTimeout
from kvfuse.remote.index.engine import IndexEngine, Row, RowChange, below
from kvfuse.remote.segments.api import SegmentCounters
from kvfuse.remote.segments.rados.dispatcher import Dispatcher
from kvfuse.remote.segments.rados.librados import OmapChange, OmapValues, PoolPlace, RadosPool
from kvfuse.remote.segments.rados.objects import ObjectRequest, RemoveRequest

_I = TypeVar("_I")

KEYS_MAX = 512
"""of one operation"""
PAUSE_SECONDS = 0.01
"""at most, before keys are read again that another host changed"""
ABSENT = b""
"""stands for no value: a stored entry is never empty"""


class NoOmap(EngineError):
    """The pool has no omaps."""


class ReadKeys(ObjectRequest):
    verb = "reading keys of"
    is_read = True

    def __init__(self, name: bytes, keys: Sequence[bytes]) -> None:
        super().__init__(name)
        self.keys = keys
        self.found: Mapping[bytes, bytes] = {}
        self._values = OmapValues()

    def start(self, pool: RadosPool, tag: int) -> int:
        return pool.start_omap_read(self.name, self.keys, self._values, tag)

    def ended(self, code: int) -> None:
        super().ended(code)
        self.found = self._values.take()

    @property
    def failure(self) -> int:
        return 0 if self.code == -errno.ENOENT else super().failure


class ChangeKeys(ObjectRequest):
    """All of them or none."""

    verb = "changing keys of"

    def __init__(self, name: bytes, changes: Sequence[OmapChange]) -> None:
        super().__init__(name)
        self.changes = changes

    def start(self, pool: RadosPool, tag: int) -> int:
        return pool.start_omap_change(self.name, self.changes, tag)

    @property
    def is_refused(self) -> bool:
        """One of the keys had another value."""
        return self.code == -errno.ECANCELED

    @property
    def failure(self) -> int:
        return 0 if self.is_refused else super().failure


class OmapIndex(IndexEngine):
    """Made by ``open``. ``prefix``: of its objects' names."""

    def __init__(self, place: PoolPlace, prefix: str, shards: int) -> None:
        super().__init__(f"the index {prefix} ({place})")
        self.operations = SegmentCounters()
        self._dispatcher = Dispatcher(place, self.operations)
        self._names = [f"{prefix}.{shard:03x}".encode() for shard in range(shards)]

    @classmethod
    async def open(cls, place: PoolPlace, prefix: str, shards: int) -> Self:
        """Connect. EngineError says what is missing: library, monitors, key, pool, omaps (NoOmap); EngineTimeout."""
        index = cls(place, prefix, shards)
        await index._dispatcher.connect()
        request = ChangeKeys(index._names[0], [OmapChange(bytes(1), ABSENT, ABSENT)])
        try:
            await index._dispatcher.perform([request])
        except BaseException as error:
            if request.code in (-errno.EPERM, -errno.EACCES):
                return index  # of a user who may only read
            await index.aclose()
            if request.code == -errno.EOPNOTSUPP:
                raise NoOmap(f"{place}: the pool has no omaps: see index.engine") from error
            raise
        return index

    async def _find(self, keys: Sequence[bytes]) -> list[bytes | None]:
        found = await self._read(keys, self._deadline())
        return [found.get(key) for key in keys]

    async def _put(self, rows: Sequence[Row]) -> list[bytes | None]:
        new = {row.key: row for row in rows}

        def after(key: bytes, before: bytes) -> bytes | None:
            row = new[key]
            return row.stored if before[:8] <= below(row.sequence) else None

        return await self._change([*new], after)

    async def _replace(self, changes: Sequence[RowChange]) -> list[bytes | None]:
        new = {change.row.key: change for change in changes}

        def after(key: bytes, before: bytes) -> bytes | None:
            change = new[key]
            return change.row.stored if before[:8] == below(change.expected) else None

        return await self._change([*new], after)

    async def _drop(self, entries: Sequence[tuple[bytes, int]]) -> list[bytes | None]:
        sequences = dict(entries)

        def after(key: bytes, before: bytes) -> bytes | None:
            return ABSENT if before[:8] == below(sequences[key]) else None

        return await self._change([*sequences], after)

    async def _clear(self) -> None:
        for name in self._names:
            await self._dispatcher.perform([RemoveRequest(name)])

    async def _close(self) -> None:
        await self._dispatcher.aclose()

    async def _read(self, keys: Sequence[bytes], deadline: float) -> dict[bytes, bytes]:
        requests = [ReadKeys(name, some) for name, some in self._by_object(keys, lambda key: key)]
        await self._dispatcher.perform(requests, deadline)
        return {key: stored for request in requests for key, stored in request.found.items()}

    async def _change(self, keys: Sequence[bytes], after: Callable[[bytes, bytes], bytes | None]) -> list[bytes | None]:
        """Returns what keys had. ``after``: of a key and its value (or `ABSENT`) the new value; None: no change."""
        deadline = self._deadline()
        had: dict[bytes, bytes | None] = {}
        left = keys
        while True:
            found = await self._read(left, deadline)
            had |= {key: found.get(key) for key in left}
            changes = [
                OmapChange(key, before, new)
                for key in left
                if (new := after(key, before := found.get(key, ABSENT))) is not None
            ]
            requests = [ChangeKeys(name, some) for name, some in self._by_object(changes, lambda change: change.key)]
            await self._dispatcher.perform(requests, deadline)
            left = [change.key for request in requests if request.is_refused for change in request.changes]
            if not left:
                return [had[key] for key in keys]
            if trio.current_time() > deadline:
                raise EngineTimeout(f"{self.name}: other hosts changed {len(left)} keys again and again")
            await trio.sleep(random.uniform(0, PAUSE_SECONDS))

    def _deadline(self) -> float:
        return trio.current_time() + self._dispatcher.options.deadline

    def _by_object(self, items: Sequence[_I], key: Callable[[_I], bytes]) -> Iterator[tuple[bytes, Sequence[_I]]]:
        """(object's name, items) of each operation."""
        shards: dict[int, list[_I]] = defaultdict(list)
        for item in items:
            shards[zlib.crc32(key(item)) % len(self._names)].append(item)
        for shard, some in shards.items():
            for start in range(0, len(some), KEYS_MAX):
                yield self._names[shard], some[start : start + KEYS_MAX]
