"""Record stores around record stores: each adds one thing and keeps the contract of ``api.py``.

A decorator shares the counters of what it wraps: a call is counted once, by the engine that answers it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import trio

from kvfuse.remote.records.api import Following, Lease, Record, RecordStore, Usage, Versioned


class RecordDecorator(RecordStore):
    """Passes everything on to the store that it owns; subclasses override what they add to."""

    def __init__(self, inner: RecordStore) -> None:
        super().__init__(inner.limits)
        self.inner = inner
        self.counters = inner.counters

    @property
    def usage(self) -> Usage | None:
        return self.inner.usage

    async def bound(self, size: int) -> int:
        return await self.inner.bound(size)

    async def get(self, keys: Sequence[bytes]) -> list[Versioned | None]:
        return await self.inner.get(keys)

    async def scan(self, prefix: bytes, after: bytes = b"", limit: int = 1000) -> list[Record]:
        return await self.inner.scan(prefix, after, limit)

    async def seek(self, prefixes: Sequence[bytes]) -> list[Record | None]:
        return await self.inner.seek(prefixes)

    async def commit(
        self,
        puts: Mapping[bytes, bytes],
        deletes: Collection[bytes] = (),
        expect: Mapping[bytes, int] | None = None,
        *,
        durable: bool = False,
        lease: Lease | None = None,
    ) -> int:
        return await self.inner.commit(puts, deletes, expect, durable=durable, lease=lease)

    def follow(self) -> Following:
        return self.inner.follow()

    async def lease(self, ttl: float) -> Lease:
        return await self.inner.lease(ttl)

    async def resume_lease(self, identity: bytes) -> Lease | None:
        return await self.inner.resume_lease(identity)

    def distrust_cache(self) -> None:
        self.inner.distrust_cache()

    async def aclose(self) -> None:
        await self.inner.aclose()


class Delayed(RecordDecorator):
    """A store further away: each commit takes ``seconds`` longer.

    The delay follows the call, so that commits stay in the order in which they were called.
    """

    def __init__(self, inner: RecordStore, seconds: float) -> None:
        super().__init__(inner)
        self.seconds = seconds

    async def commit(
        self,
        puts: Mapping[bytes, bytes],
        deletes: Collection[bytes] = (),
        expect: Mapping[bytes, int] | None = None,
        *,
        durable: bool = False,
        lease: Lease | None = None,
    ) -> int:
        version = await self.inner.commit(puts, deletes, expect, durable=durable, lease=lease)
        await trio.sleep(self.seconds)
        return version
