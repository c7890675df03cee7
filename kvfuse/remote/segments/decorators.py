"""Segment stores around segment stores: each adds one thing and keeps the contract of ``api.py``.

A decorator shares the counters of what it wraps: a call is counted once, by the engine that answers it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.errors import EngineError, EngineTimeout
from kvfuse.remote.faults import Fault, FaultPlan
from kvfuse.remote.mapguard import GuardedMap
from kvfuse.remote.segments.api import Buffer, SegmentInfo, SegmentStore, Transfer

_T = TypeVar("_T")


class SegmentDecorator(SegmentStore):
    """Passes everything on. Subclasses override ``around``, which every awaited call but ``aclose`` goes through."""

    def __init__(self, inner: SegmentStore) -> None:
        super().__init__(inner.limits)
        self.inner = inner
        self.counters = inner.counters

    async def around(self, call: Callable[[], Awaitable[_T]], *, writes: bool) -> _T:
        """Do ``call``, once at the most. ``writes`` says that it changes or syncs segments."""
        return await call()

    async def create(self, segment: int, size: int) -> None:
        await self.around(lambda: self.inner.create(segment, size), writes=True)

    async def remove(self, segment: int) -> None:
        await self.around(lambda: self.inner.remove(segment), writes=True)

    async def read(self, batch: Sequence[Transfer]) -> None:
        await self.around(lambda: self.inner.read(batch), writes=False)

    async def write(self, batch: Sequence[Transfer]) -> None:
        await self.around(lambda: self.inner.write(batch), writes=True)

    async def zero(self, segment: int, offset: int, length: int) -> None:
        await self.around(lambda: self.inner.zero(segment, offset, length), writes=True)

    async def sync(self) -> None:
        await self.around(self.inner.sync, writes=True)

    def view(self, segment: int, offset: int, length: int) -> memoryview | None:
        return self.inner.view(segment, offset, length)

    def source(self, segment: int) -> tuple[int, npt.NDArray[np.uint8], GuardedMap | None] | None:
        return self.inner.source(segment)

    def register(self, buffer: Buffer) -> object:
        return self.inner.register(buffer)

    def identity(self) -> bytes:
        return self.inner.identity()

    async def fence(self, identity: bytes) -> bool:
        return await self.around(lambda: self.inner.fence(identity), writes=False)

    async def renew(self) -> None:
        await self.around(self.inner.renew, writes=False)

    async def aclose(self) -> None:
        await self.inner.aclose()

    async def list(self) -> list[SegmentInfo]:
        return await self.around(self.inner.list, writes=False)


class Delayed(SegmentDecorator):
    """A store further away: each answer comes ``write_seconds`` or ``read_seconds`` later."""

    def __init__(self, inner: SegmentStore, *, write_seconds: float = 0.0, read_seconds: float = 0.0) -> None:
        super().__init__(inner)
        self.write_seconds = write_seconds
        self.read_seconds = read_seconds

    async def around(self, call: Callable[[], Awaitable[_T]], *, writes: bool) -> _T:
        result = await call()
        await trio.sleep(self.write_seconds if writes else self.read_seconds)
        return result


class Deadlined(SegmentDecorator):
    """EngineTimeout after ``seconds``, where the inner store's calls can be cancelled. The write is then unknown."""

    def __init__(self, inner: SegmentStore, seconds: float) -> None:
        super().__init__(inner)
        self.seconds = seconds

    async def around(self, call: Callable[[], Awaitable[_T]], *, writes: bool) -> _T:
        try:
            with trio.fail_after(self.seconds):
                return await call()
        except trio.TooSlowError:
            raise EngineTimeout(f"the segment store did not answer within {self.seconds} s") from None


class Faulty(SegmentDecorator):
    """Fails as a plan says. A torn write stores some of its transfers, and a prefix of one more."""

    def __init__(self, inner: SegmentStore, plan: FaultPlan) -> None:
        super().__init__(inner)
        self.plan = plan

    async def around(self, call: Callable[[], Awaitable[_T]], *, writes: bool) -> _T:
        return await self._fail(self.plan.draw(), call)

    async def write(self, batch: Sequence[Transfer]) -> None:
        fault = self.plan.draw()
        if fault is Fault.TORN:
            await self.inner.write(self._torn(batch))
            raise EngineError("injected: a part of the batch was written")
        await self._fail(fault, lambda: self.inner.write(batch))

    async def _fail(self, fault: Fault, call: Callable[[], Awaitable[_T]]) -> _T:
        if fault in (Fault.ERROR_BEFORE, Fault.TORN):
            raise EngineError("injected before the call")
        result = await call()
        await trio.sleep(self.plan.draw_delay())
        if fault is Fault.ERROR_AFTER:
            raise EngineError("injected after the call")
        return result

    def _torn(self, batch: Sequence[Transfer]) -> Sequence[Transfer]:
        choose = self.plan.random
        part = choose.sample(batch, choose.randint(0, len(batch)))
        if part:
            segment, offset, buffer = part.pop()
            view = memoryview(buffer).cast("B")
            part.append(Transfer(segment, offset, view[: choose.randrange(len(view) + 1)]))
        return part
