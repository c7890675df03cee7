"""Record stores around record stores: each adds one thing and keeps the contract of ``api.py``.

A decorator shares the counters of what it wraps: a call is counted once, by the engine that answers it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeVar

import trio

from kvfuse.errors import EngineError, EngineTimeout
from kvfuse.remote.faults import Fault, FaultPlan
from kvfuse.remote.records.api import Change, Lease, Record, RecordStore, Usage, Versioned

_T = TypeVar("_T")


class RecordDecorator(RecordStore):
    """Passes everything on. Subclasses override ``around``, which every awaited call but ``aclose`` goes through."""

    def __init__(self, inner: RecordStore) -> None:
        super().__init__(inner.limits)
        self.inner = inner
        self.counters = inner.counters

    @property
    def usage(self) -> Usage | None:
        return self.inner.usage

    def bound(self, size: int) -> int:
        return self.inner.bound(size)

    async def around(self, call: Callable[[], Awaitable[_T]], *, commits: bool) -> _T:
        """Do ``call``, once at the most. ``commits`` says that it changes records."""
        return await call()

    async def get(self, keys: Sequence[bytes]) -> list[Versioned | None]:
        return await self.around(lambda: self.inner.get(keys), commits=False)

    async def scan(self, prefix: bytes, after: bytes = b"", limit: int = 1000) -> list[Record]:
        return await self.around(lambda: self.inner.scan(prefix, after, limit), commits=False)

    async def commit(
        self,
        puts: Mapping[bytes, bytes],
        deletes: Collection[bytes] = (),
        expect: Mapping[bytes, int] | None = None,
        *,
        durable: bool = False,
        lease: Lease | None = None,
    ) -> int:
        return await self.around(
            lambda: self.inner.commit(puts, deletes, expect, durable=durable, lease=lease), commits=True
        )

    def watch(self, prefix: bytes) -> AsyncIterator[Change]:
        return self.inner.watch(prefix)

    async def lease(self, ttl: float) -> Lease:
        return await self.around(lambda: self.inner.lease(ttl), commits=False)

    async def aclose(self) -> None:
        await self.inner.aclose()


class Delayed(RecordDecorator):
    """A store further away: each answer comes ``commit_seconds`` or ``read_seconds`` later.

    The delay follows the call, so that commits stay in the order in which they were called.
    """

    def __init__(self, inner: RecordStore, *, commit_seconds: float = 0.0, read_seconds: float = 0.0) -> None:
        super().__init__(inner)
        self.commit_seconds = commit_seconds
        self.read_seconds = read_seconds

    async def around(self, call: Callable[[], Awaitable[_T]], *, commits: bool) -> _T:
        result = await call()
        await trio.sleep(self.commit_seconds if commits else self.read_seconds)
        return result


class Deadlined(RecordDecorator):
    """EngineTimeout after ``seconds``, where the inner store's calls can be cancelled. The commit is then unknown."""

    def __init__(self, inner: RecordStore, seconds: float) -> None:
        super().__init__(inner)
        self.seconds = seconds

    async def around(self, call: Callable[[], Awaitable[_T]], *, commits: bool) -> _T:
        try:
            with trio.fail_after(self.seconds):
                return await call()
        except trio.TooSlowError:
            raise EngineTimeout(f"the record store did not answer within {self.seconds} s") from None


class Faulty(RecordDecorator):
    """Fails as a plan says. A commit stays all or nothing: it cannot be torn."""

    def __init__(self, inner: RecordStore, plan: FaultPlan) -> None:
        super().__init__(inner)
        self.plan = plan

    async def around(self, call: Callable[[], Awaitable[_T]], *, commits: bool) -> _T:
        fault = self.plan.draw()
        if fault in (Fault.ERROR_BEFORE, Fault.TORN):
            raise EngineError("injected before the call")
        result = await call()
        await trio.sleep(self.plan.draw_delay())
        if fault is Fault.ERROR_AFTER:
            raise EngineError("injected after the call")
        return result
