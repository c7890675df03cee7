"""The changes of a store: one stream serves all its watches, and outlives the members that send it.

The stream resumes at the revision after the last one that it has shown. Nothing runs beside the readers of the watches:
one of those that wait reads for all, opens the stream, and looks after the member. A reader that is cancelled loses
nothing: another goes on, or the next wait does. One that stays away while others read finds what came meanwhile.

A stream says nothing while nothing changes, and would say nothing either if its member were stopped or cut off.
So while somebody waits, a member that answers no other call either is asked something every ``PROBE_SECONDS``; one that
does not answer that is left.

While no member can be reached the watches wait: whoever must know that asks the store something.
"""

from __future__ import annotations

import math
import random
import weakref
from collections import deque
from collections.abc import AsyncIterator

import httpcore
import msgspec
import trio

from kvfuse.errors import EngineError
from kvfuse.remote.records.api import Change
from kvfuse.remote.records.etcd import messages
from kvfuse.remote.records.etcd.gateway import (
    CLOSE_SECONDS,
    OUT_OF_RANGE,
    PAUSE_SECONDS_MAX,
    PAUSE_SECONDS_MIN,
    TRANSPORT_ERRORS,
    UNAUTHENTICATED,
    UNAVAILABLE,
    UNSURE_CODES,
    Endpoint,
    EtcdClient,
    Unanswered,
)

PROBE_SECONDS = 1.0
BACKLOG_MAX = 1 << 16
"""changes that a watch holds for a reader who has not come for them"""
LINE_SIZE_MAX = 256 << 20
"""bytes of one message: far more than etcd puts into one"""


class _Stream:
    """One answer of a member, a message a line."""

    def __init__(self, endpoint: Endpoint, response: httpcore.Response) -> None:
        self.endpoint = endpoint
        self._response = response
        self._parts = response.aiter_stream()
        self._unread = bytearray()

    async def next_message(self) -> messages.WatchAnswer:
        """Unanswered when the stream ends or breaks."""
        while (end := self._unread.find(b"\n")) < 0:
            try:
                self._unread += await anext(self._parts)
            except (StopAsyncIteration, *TRANSPORT_ERRORS) as error:
                raise Unanswered(f"{self.endpoint.url}: the stream broke ({error!r})", sent=True) from error
            if len(self._unread) > LINE_SIZE_MAX:
                raise Unanswered(f"{self.endpoint.url}: a message of over {LINE_SIZE_MAX} bytes", sent=True)
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        try:
            return messages.WATCH.decode(line)
        except msgspec.DecodeError as error:
            raise Unanswered(f"{self.endpoint.url}: not a watch's message: {line[:80]!r}", sent=True) from error

    async def aclose(self) -> None:
        with trio.CancelScope() as scope:
            scope.cancel()  # ends the generators that httpcore reads with: trio warns of one that is merely dropped
            async for _ in self._parts:
                pass
        with trio.move_on_after(CLOSE_SECONDS, shield=True):
            await self._response.aclose()


class EtcdFeed:
    """All changes of the keys that start with ``base``, for the watches of one store."""

    def __init__(self, client: EtcdClient, base: bytes) -> None:
        self.base = base
        self.closed = client.closed
        self.failure: EngineError | None = None
        """why all its watches have ended: a new one needs another feed"""
        self._client = client
        self._revision_next = 0
        self._watches: weakref.WeakSet[EtcdWatch] = weakref.WeakSet()
        self._waiting: dict[EtcdWatch, trio.Event] = {}
        """those that somebody else reads for"""
        self._reading = trio.Lock()
        self._scope = trio.CancelScope()
        self._stream: _Stream | None = None
        self._heard_at = -math.inf
        self._pause = PAUSE_SECONDS_MIN

    def watch(self, prefix: bytes) -> EtcdWatch:
        """Changes from the newest revision on that an answer has told the client of."""
        revision = self._client.revision + 1
        if not self._watches:
            self._revision_next = revision  # what came before is for nobody, and may not be kept any more
        watch = EtcdWatch(self, self.base + prefix, revision)
        self._watches.add(watch)
        return watch

    async def aclose(self) -> None:
        """End all watches, also under a reader that waits. Idempotent."""
        self.closed = True
        self._scope.cancel()
        for woken in self._waiting.values():
            woken.set()
        async with self._reading:
            await self._leave()

    # -- readers -------------------------------------------------------------------------------------

    async def wait(self, watch: EtcdWatch) -> None:
        """Return when there may be something new for ``watch``: read for all, unless somebody else does."""
        if self._reading.locked():
            await self._wait_for_reader(watch)
            return
        self._reading.acquire_nowait()
        try:
            with trio.CancelScope() as self._scope:
                if not self.closed:
                    await self._read(watch)
        finally:
            self._reading.release()
            self._hand_over()

    async def _wait_for_reader(self, watch: EtcdWatch) -> None:
        woken = self._waiting[watch] = trio.Event()
        try:
            await woken.wait()
        finally:
            del self._waiting[watch]
            if not self._reading.locked():
                self._hand_over()  # it was this one's turn to read, and it may have been cancelled

    def _hand_over(self) -> None:
        """Somebody who waits is to read on."""
        for woken in self._waiting.values():
            if not woken.is_set():
                woken.set()
                return

    def _show(self, change: Change) -> None:
        for watch in self._watches:
            if watch.offer(change) and (woken := self._waiting.get(watch)) is not None:
                woken.set()

    def _fail(self, error: EngineError) -> None:
        self.failure = error
        for woken in self._waiting.values():
            woken.set()

    # -- the stream ----------------------------------------------------------------------------------

    async def _read(self, watch: EtcdWatch) -> None:
        """Take in messages until there is something for ``watch``, whatever becomes of members meanwhile."""
        while not watch.has_news:
            try:
                if self._stream is None:
                    self._stream = await self._open()
                await self._listen(self._stream, watch)
            except Unanswered:
                await self._leave()
                if self.failure is None:
                    await trio.sleep(self._pause * random.uniform(0.5, 1.0))
                    self._pause = min(2 * self._pause, PAUSE_SECONDS_MAX)
            except BaseException:  # cancelled, in the middle of a message: the stream cannot be read on
                await self._leave()
                raise

    async def _listen(self, stream: _Stream, watch: EtcdWatch) -> None:
        """Unanswered when the stream ends, or its member does not answer."""
        ended: Unanswered | None = Unanswered(f"{stream.endpoint.url} is silent", sent=True)
        self._heard_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._guard, stream.endpoint, nursery.cancel_scope)
            try:
                while not watch.has_news:
                    self._take(await stream.next_message())
                    self._heard_at = trio.current_time()
                    self._pause = PAUSE_SECONDS_MIN
                ended = None
            except Unanswered as error:
                ended = error
            nursery.cancel_scope.cancel()
        if ended is not None:
            raise ended

    async def _guard(self, endpoint: Endpoint, scope: trio.CancelScope) -> None:
        """Ask a silent member now and then; cancel ``scope`` when it does not answer, or refuses."""
        while True:
            await trio.sleep(PROBE_SECONDS)
            if trio.current_time() < max(self._heard_at, endpoint.answered_at) + PROBE_SECONDS / 2:
                continue
            try:
                alive = await self._client.probe(endpoint, self.base)
            except EngineError:
                alive = False
            if not alive:
                scope.cancel()

    async def _open(self) -> _Stream:
        endpoint = self._client.choose()
        end = messages.prefix_end(self.base)
        create = messages.WatchCreate(self.base, end, self._revision_next, progress_notify=True)
        try:
            return _Stream(endpoint, await self._client.stream(endpoint, "watch", messages.WatchCall(create)))
        except EngineError as error:
            self._fail(error)
            raise Unanswered(str(error), sent=False) from error

    async def _leave(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.aclose()

    # -- messages ------------------------------------------------------------------------------------

    def _take(self, message: messages.WatchAnswer) -> None:
        """Show what a message tells. Unanswered: the stream ends here."""
        result = message.result
        if result is None:
            raise self._judged(message.error or messages.StreamError("an empty message", UNAVAILABLE))
        self._client.revision = max(self._client.revision, result.header.revision)
        if result.canceled:
            raise self._judged(_cancel_error(result))
        for event in result.events:
            value = None if event.type == "DELETE" else event.kv.value
            self._show(Change(event.kv.key, value, event.kv.mod_revision))
        if result.events:
            self._revision_next = result.events[-1].kv.mod_revision + 1
        elif not result.created:  # it says that there was nothing until here
            self._revision_next = max(self._revision_next, result.header.revision + 1)

    def _judged(self, error: messages.StreamError) -> Unanswered:
        """The end of the stream; of all watches, where another member would say the same."""
        if error.grpc_code == OUT_OF_RANGE:
            text = f"the changes since revision {self._revision_next} are no longer kept: read the state anew"
            self._fail(EngineError(text))
        elif error.grpc_code not in UNSURE_CODES | {UNAUTHENTICATED}:
            self._fail(EngineError(f"etcd ended the watch of {self.base!r}: {error.message}"))
        return Unanswered(error.message, sent=True)


class EtcdWatch(AsyncIterator[Change]):
    """Changes of the keys that start with ``start``, without the feed's ``base``. For one reader at a time."""

    def __init__(self, feed: EtcdFeed, start: bytes, version_min: int) -> None:
        self._feed = feed
        self._start = start
        self._version_min = version_min
        self._changes: deque[Change] = deque()
        self._failure: EngineError | None = None

    @property
    def has_news(self) -> bool:
        """There is a change to show, or the end."""
        return bool(self._changes or self._failure or self._feed.failure) or self._feed.closed

    def offer(self, change: Change) -> bool:
        """Keep a change of any key, if it is one to show."""
        if not change.key.startswith(self._start) or change.version < self._version_min or self._failure is not None:
            return False
        if len(self._changes) >= BACKLOG_MAX:
            self._changes.clear()
            self._failure = EngineError(f"the watch fell {BACKLOG_MAX} changes behind: read the state anew")
        else:
            self._changes.append(change._replace(key=change.key[len(self._feed.base) :]))
        return True

    async def __anext__(self) -> Change:
        while not self._changes:
            if self._feed.closed:
                raise StopAsyncIteration
            if failure := self._failure or self._feed.failure:
                raise failure
            await self._feed.wait(self)
        return self._changes.popleft()


def _cancel_error(result: messages.WatchResult) -> messages.StreamError:
    """A watch that was cancelled says why in words."""
    if result.compact_revision:
        return messages.StreamError("compacted", OUT_OF_RANGE)
    passing = not result.cancel_reason or "leader" in result.cancel_reason or "token" in result.cancel_reason
    return messages.StreamError(result.cancel_reason, UNAVAILABLE if passing else 0)
