"""A watch that outlives the members it hears from: it resumes at the revision after the last one it has shown.

Nothing runs beside the reader: its own wait opens the stream, reads it, and looks after the member, so a
reader that is cancelled or stays away loses nothing - the next wait goes on where the last one ended.

A stream says nothing while nothing changes, and would say nothing either if its member were stopped or cut off.
So while the reader waits, the member is asked something every ``PROBE_SECONDS``; one that does not answer is left.

While no member can be reached the watch waits: whoever must know that asks the store something.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import AsyncIterator

import httpx
import msgspec
import trio

from kvfuse.errors import EngineError
from kvfuse.remote.records import etcd_wire as wire
from kvfuse.remote.records.api import Change
from kvfuse.remote.records.etcd_client import (
    CLOSE_SECONDS,
    OUT_OF_RANGE,
    PAUSE_SECONDS_MAX,
    PAUSE_SECONDS_MIN,
    UNAUTHENTICATED,
    UNAVAILABLE,
    UNSURE_CODES,
    Endpoint,
    EtcdClient,
    Unanswered,
)

PROBE_SECONDS = 1.0
LINE_SIZE_MAX = 256 << 20
"""bytes of one message: far more than etcd puts into one"""


class _Stream:
    """One answer of a member, a message a line."""

    def __init__(self, endpoint: Endpoint, response: httpx.Response) -> None:
        self.endpoint = endpoint
        self._response = response
        self._parts = response.aiter_raw()
        self._unread = bytearray()

    async def next_message(self) -> wire.WatchAnswer:
        """Unanswered when the stream ends or breaks."""
        while (end := self._unread.find(b"\n")) < 0:
            try:
                self._unread += await anext(self._parts)
            except (StopAsyncIteration, httpx.TransportError) as error:
                raise Unanswered(f"{self.endpoint.url}: the stream broke ({error!r})", sent=True) from error
            if len(self._unread) > LINE_SIZE_MAX:
                raise Unanswered(f"{self.endpoint.url}: a message of over {LINE_SIZE_MAX} bytes", sent=True)
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        try:
            return wire.WATCH.decode(line)
        except msgspec.DecodeError as error:
            raise Unanswered(f"{self.endpoint.url}: not a watch's message: {line[:80]!r}", sent=True) from error

    async def aclose(self) -> None:
        with trio.CancelScope() as scope:
            scope.cancel()  # ends the generators that httpx reads with: trio warns of one that is merely dropped
            async for _ in self._parts:
                pass
        with trio.move_on_after(CLOSE_SECONDS, shield=True):
            await self._response.aclose()


class EtcdWatch(AsyncIterator[Change]):
    """Changes of the keys that start with ``base + prefix``, shown without ``base``. For one reader at a time."""

    def __init__(self, client: EtcdClient, base: bytes, prefix: bytes) -> None:
        self._client = client
        self._base = base
        self._start = base + prefix
        self._revision_next = client.revision + 1
        self._changes: deque[Change] = deque()
        self._stream: _Stream | None = None
        self._failure: EngineError | None = None
        self._pause = PAUSE_SECONDS_MIN
        self._closed = client.closed
        self._scope = trio.CancelScope()
        self._reading = trio.Lock()

    async def __anext__(self) -> Change:
        while not self._changes:
            if self._closed:
                raise StopAsyncIteration
            if self._failure is not None:
                raise self._failure
            await self._receive()
        return self._changes.popleft()

    async def aclose(self) -> None:
        """End it, also under a reader that waits. Idempotent."""
        self._closed = True
        self._scope.cancel()
        async with self._reading:
            await self._leave()

    async def _receive(self) -> None:
        """Take in one message, or pause after a failed attempt to get one."""
        async with self._reading:
            if self._closed:
                return
            with trio.CancelScope() as self._scope:
                await self._receive_one()

    async def _receive_one(self) -> None:
        try:
            message = await self._next_message()
        except Unanswered:
            await self._leave()
            await trio.sleep(self._pause * random.uniform(0.5, 1.0))
            self._pause = min(2 * self._pause, PAUSE_SECONDS_MAX)
            return
        except BaseException:  # cancelled, in the middle of a message: the stream cannot be read on
            await self._leave()
            raise
        self._pause = PAUSE_SECONDS_MIN
        if not self._take(message):
            await self._leave()

    async def _leave(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.aclose()

    async def _next_message(self) -> wire.WatchAnswer:
        if self._stream is None:
            self._stream = await self._open()
        stream = self._stream
        message: wire.WatchAnswer | None = None
        broken = Unanswered(f"{stream.endpoint.url} is silent", sent=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._guard, stream.endpoint, nursery.cancel_scope)
            try:
                message = await stream.next_message()
            except Unanswered as error:
                broken = error
            nursery.cancel_scope.cancel()
        if message is None:
            raise broken
        return message

    async def _guard(self, endpoint: Endpoint, scope: trio.CancelScope) -> None:
        """Ask the member now and then; cancel ``scope`` when it does not answer, or refuses."""
        while True:
            await trio.sleep(PROBE_SECONDS)
            try:
                alive = await self._client.probe(endpoint, self._start)
            except EngineError:
                alive = False
            if not alive:
                scope.cancel()

    async def _open(self) -> _Stream:
        endpoint = self._client.choose()
        create = wire.WatchCreate(self._start, wire.prefix_end(self._start), self._revision_next, progress_notify=True)
        try:
            return _Stream(endpoint, await self._client.stream(endpoint, "watch", wire.WatchCall(create)))
        except EngineError as error:
            self._failure = error
            raise Unanswered(str(error), sent=False) from error

    def _take(self, message: wire.WatchAnswer) -> bool:
        """Keep what a message shows. False: the stream ends here."""
        result = message.result
        if result is None:
            self._judge(message.error or wire.StreamError("an empty message", UNAVAILABLE))
            return False
        self._client.revision = max(self._client.revision, result.header.revision)
        if result.canceled:
            self._judge(_cancel_error(result))
            return False
        for event in result.events:
            value = None if event.type == "DELETE" else event.kv.value
            self._changes.append(Change(event.kv.key[len(self._base) :], value, event.kv.mod_revision))
        if result.events:
            self._revision_next = result.events[-1].kv.mod_revision + 1
        elif not result.created:  # it says that there was nothing until here
            self._revision_next = max(self._revision_next, result.header.revision + 1)
        return True

    def _judge(self, error: wire.StreamError) -> None:
        """End the watch where another member would say the same."""
        if error.grpc_code == OUT_OF_RANGE:
            text = f"the changes since revision {self._revision_next} are no longer kept: read the state anew"
            self._failure = EngineError(text)
        elif error.grpc_code not in UNSURE_CODES | {UNAUTHENTICATED}:
            self._failure = EngineError(f"etcd ended the watch of {self._start!r}: {error.message}")


def _cancel_error(result: wire.WatchResult) -> wire.StreamError:
    """A watch that was cancelled says why in words."""
    if result.compact_revision:
        return wire.StreamError("compacted", OUT_OF_RANGE)
    passing = not result.cancel_reason or "leader" in result.cancel_reason or "token" in result.cancel_reason
    return wire.StreamError(result.cancel_reason, UNAVAILABLE if passing else 0)
