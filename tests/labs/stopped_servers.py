"""Servers of segments in memory that stand still: what is written there does not happen until they go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import trio
from volume_lab import MIB, MemorySegments

from kvfuse.errors import EngineTimeout
from kvfuse.remote.segments import api
from kvfuse.remote.segments.api import Transfer

PATIENCE = 0.25
"""seconds, after which a write is late"""
DEADLINE = 5.0


@dataclass
class Servers:
    """Of all segments in memory of a test, each part of which is on a server of its own."""

    part_size: int = MIB
    is_stopped: Callable[[int, int], bool] = lambda segment, part: False
    """of (segment, part)"""
    late: list[tuple[int, int, bytes]] = field(default_factory=list)
    """writes that may still happen, in order"""
    waits: int = 0
    """calls that were kept waiting for a stopped server"""

    def __post_init__(self) -> None:
        self._silent: set[tuple[int, int]] = set()
        self._answering: set[tuple[int, int]] = set()
        self._writers: list[MemorySegments] = []
        """of `late`"""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Into all stores that are opened from now on."""
        made, plain, servers = MemorySegments.__init__, MemorySegments.write, self

        def init(store: MemorySegments, *arguments: object) -> None:
            made(store, *arguments)  # type: ignore[arg-type]
            store.limits = replace(store.limits, part_size=self.part_size)
            store.servers = StoppedServers(store, self)

        async def write(store: MemorySegments, batch: Sequence[Transfer]) -> None:
            late = servers._late(batch)
            await plain(store, [one for index, one in enumerate(batch) if index not in late])
            if late:
                servers._keep(store, [batch[index] for index in sorted(late)])
                await servers._wait(DEADLINE)
                servers._learn([(one.segment, one.offset, len(one.buffer)) for one in map(batch.__getitem__, late)])
                raise EngineTimeout(f"injected: a server stands still, no answer within {DEADLINE} s")

        monkeypatch.setattr(MemorySegments, "__init__", init)
        monkeypatch.setattr(MemorySegments, "write", write)

    def answer(self) -> None:
        """All servers answer from now on; what is late stays on its way."""
        self.is_stopped = lambda segment, part: False
        self._silent.clear()
        self._answering.clear()

    def go_on(self) -> None:
        """All servers answer, and do what they were asked, in that order; but for clients that were cut off."""
        self.answer()
        for store, (segment, offset, data) in zip(self._writers, self.late, strict=True):
            if store.identity() not in store.disk.fenced:
                store._range(segment, offset, len(data))[:] = data
        self.late.clear()
        self._writers.clear()

    def _parts(self, segment: int, offset: int, buffer: object) -> set[tuple[int, int]]:
        end = offset + len(buffer)  # type: ignore[arg-type]
        return {(segment, part) for part in range(offset // self.part_size, -(-end // self.part_size))}

    def _late(self, batch: Sequence[Transfer]) -> set[int]:
        return {
            index
            for index, one in enumerate(batch)
            if any(self.is_stopped(*part) for part in self._parts(one.segment, one.offset, one.buffer))
        }

    def _keep(self, store: MemorySegments, batch: Sequence[Transfer]) -> None:
        self._writers += [store] * len(batch)
        self.late += [(segment, offset, bytes(buffer)) for segment, offset, buffer in batch]

    async def _wait(self, seconds: float) -> None:
        self.waits += 1
        await trio.sleep(seconds)

    def _learn(self, places: Sequence[tuple[int, int, int]]) -> None:
        for segment, offset, length in places:
            for part in self._parts(segment, offset, range(length)):
                (self._silent if self.is_stopped(*part) else self._answering).add(part)


class StoppedServers(api.Servers):
    """`api.Servers` of one store."""

    def __init__(self, store: MemorySegments, servers: Servers) -> None:
        super().__init__(store)
        self._servers = servers

    async def write_some(self, batch: Sequence[Transfer]) -> set[int]:
        servers, late = self._servers, self._servers._late(batch)
        await self.store.write([one for index, one in enumerate(batch) if index not in late])
        silent = servers._silent
        new = [batch[index] for index in sorted(late) if not silent.issuperset(servers._parts(*batch[index]))]
        if new:
            assert isinstance(self.store, MemorySegments)
            servers._keep(self.store, new)
            await servers._wait(PATIENCE)
        servers._learn([(one.segment, one.offset, len(one.buffer)) for one in batch])
        return late

    async def probe(self, places: Sequence[tuple[int, int, int]]) -> None:
        await self._servers._wait(PATIENCE)
        self._servers._learn(places)

    def answers(self, segment: int, offset: int, length: int) -> bool | None:
        servers, parts = self._servers, self._servers._parts(segment, offset, range(length))
        if not servers._silent or not parts:
            return True
        return False if parts & servers._silent else True if parts <= servers._answering else None
