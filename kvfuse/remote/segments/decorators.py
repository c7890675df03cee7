"""Segment stores around segment stores keep the contract of ``api.py``.

A decorator shares the counters of what it wraps: a call is counted once, by the engine that answers it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.remote.mapguard import GuardedMap
from kvfuse.remote.segments.api import Fetch, SegmentInfo, SegmentStore, Transfer


class SegmentDecorator(SegmentStore):
    """Passes everything on to the store that it owns; subclasses override what they add to."""

    def __init__(self, inner: SegmentStore) -> None:
        super().__init__(inner.limits)
        self.inner = inner
        self.counters = inner.counters
        self.servers = inner.servers
        self.devices = inner.devices

    async def create(self, segment: int, size: int) -> None:
        await self.inner.create(segment, size)

    async def remove(self, segment: int) -> None:
        await self.inner.remove(segment)

    async def discard(self) -> None:
        await self.inner.discard()

    async def read(self, batch: Sequence[Transfer]) -> None:
        await self.inner.read(batch)

    async def write(self, batch: Sequence[Transfer]) -> None:
        await self.inner.write(batch)

    async def sync(self) -> None:
        await self.inner.sync()

    def distrust_cache(self) -> None:
        self.inner.distrust_cache()

    def recheck(self) -> None:
        self.inner.recheck()

    def drop_cache(self) -> None:
        self.inner.drop_cache()

    def view(self, segment: int, offset: int, length: int) -> memoryview | None:
        return self.inner.view(segment, offset, length)

    async def warm(self, segment: int, offset: int, length: int, threads: trio.CapacityLimiter) -> bytes:
        return await self.inner.warm(segment, offset, length, threads)

    async def fetch(self, batch: Sequence[Fetch], threads: trio.CapacityLimiter) -> Sequence[bytes]:
        return await self.inner.fetch(batch, threads)

    def source(self, segment: int) -> tuple[int, npt.NDArray[np.uint8], GuardedMap | None] | None:
        return self.inner.source(segment)

    def identity(self) -> bytes:
        return self.inner.identity()

    async def fence(self, identity: bytes) -> bool:
        return await self.inner.fence(identity)

    async def renew(self) -> None:
        await self.inner.renew()

    async def aclose(self) -> None:
        await self.inner.aclose()

    async def list(self) -> list[SegmentInfo]:
        return await self.inner.list()
