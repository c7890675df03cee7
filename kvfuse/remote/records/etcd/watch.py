"""The changes of a store: one stream serves all its followings, with a watcher for each prefix that one of them has.

A member tells of records under these prefixes, and spends nothing on others. Each watcher resumes at the revision after
the last one that it has shown, so the stream outlives the members that send it. Nothing runs beside the readers of the
followings: one of those that wait reads for all, opens the stream, and looks after the member. A reader that is
cancelled loses nothing: another goes on, or the next wait does. One that stays away while others read finds what came
meanwhile.

**Silence.** A stream says nothing while nothing changes, and would say nothing either if its member were stopped or cut
off. So while somebody waits, a member that answers no other call either is asked something every ``PROBE_SECONDS``; one
that does not answer that is left. While no member can be reached the followings wait: whoever must know that asks the
store something. Where little changes, members are asked now and then up to which revision they have shown all, so that
watchers do not resume where the history was compacted since.

**Catching up.** A member that is asked for its progress answers a revision R, behind all changes up to there, once none
of the stream's watchers lags behind, nor begins later than R. The newest revision T is read (from a quorum), and
progress is asked for until R is at least T. An answer may be older than a watcher that was made meanwhile. Then R is at
most the revision at which that one was made. So T has to be greater, and also not before the begin of any watcher:
otherwise a put, of a record that no reader sees, makes it so.

**Members of before `PROGRESS_SINCE`** answer a request for progress before changes that they have not sent yet, or not
at all. They have a watcher for each prefix until somebody catches up. From then on one watcher of theirs shows the
changes of all records, and each catching up is the put of that record: what comes before it has come when it comes.
"""

from __future__ import annotations

import math
import random
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import NoReturn

import trio

from kvfuse.errors import EngineError, EngineTimeout
from kvfuse.native.messagefields import NoMessage
from kvfuse.remote.records.api import Change
from kvfuse.remote.records.backlog import BacklogFollowing
from kvfuse.remote.records.etcd import messages
from kvfuse.remote.records.etcd.calls import (
    CLOSE_SECONDS,
    KV_PUT,
    KV_RANGE,
    OK,
    PAUSE_SECONDS_MAX,
    PAUSE_SECONDS_MIN,
    WATCH,
    Endpoint,
    EtcdClient,
    Unanswered,
)
from kvfuse.remote.records.etcd.http2 import Http2Connection, Http2Error

PROBE_SECONDS = 1.0
PROGRESS_SECONDS = 60.0
"""after so long progress is asked for, if nobody caught up"""
LAG_SECONDS = 0.02
"""after so long a member that has not answered is asked again: a watcher that began in the past lags for up to 0.1 s"""
PROGRESS_SINCE: dict[tuple[int, ...], int] = {(3, 4): 31, (3, 5): 13}
"""(major, minor) -> the first patch level of it that answers a request for progress in order; all later ones do"""
PROGRESS_ID = -1
"""of an answer to that"""


@dataclass(eq=False)
class _Watcher:
    """Keys of a range, for all followings that have it."""

    prefix: bytes
    revision_next: int
    """the oldest that it has not shown"""
    followings: weakref.WeakSet[EtcdFollowing] = field(default_factory=weakref.WeakSet)
    id: int = 0
    """on the present stream"""
    made_at: int = 0
    """the member's revision when it made it there; 0: it has not said so"""


@dataclass(eq=False)
class _Stream:
    """A call to a member that takes requests for watchers, and tells of changes."""

    endpoint: Endpoint
    connection: Http2Connection
    token: str
    has_progress: bool
    """the member answers requests for its progress in order"""
    whole: _Watcher | None
    """the one watcher of a member that does not, where somebody has to catch up"""
    watchers: dict[int, _Watcher] = field(default_factory=dict)
    """id -> watcher"""
    unmade: set[_Watcher] = field(default_factory=set)
    """those of which the member has not said that it made them"""
    last_id: int = 0
    begun_at: int = 0
    """catching up needs a revision beyond this one, see above"""
    _shown: int = 0

    @property
    def shown(self) -> int:
        """All changes up to this revision were shown."""
        return self.whole.revision_next - 1 if self.whole is not None else self._shown

    def watch(self, watcher: _Watcher, key: bytes) -> None:
        """Ask for it."""
        self.last_id = watcher.id = self.last_id + 1
        watcher.made_at = 0
        self.watchers[watcher.id] = watcher
        self.unmade.add(watcher)
        end, notify = messages.prefix_end(key), not self.has_progress
        message = messages.watch_create(watcher.id, key, end, watcher.revision_next, notify=notify)
        self.connection.write(message)

    def forget(self, watcher: _Watcher) -> None:
        self.drop(watcher)
        self.connection.write(messages.watch_cancel(watcher.id))

    def drop(self, watcher: _Watcher) -> None:
        del self.watchers[watcher.id]
        self.unmade.discard(watcher)

    def made(self, watcher: _Watcher, revision: int) -> None:
        watcher.made_at = revision
        self.unmade.discard(watcher)
        self.begun_at = max(self.begun_at, revision, watcher.revision_next - 1)

    def progressed(self, revision: int) -> None:
        self._shown = max(self._shown, revision)

    def note_progress(self) -> None:
        """It ends: the next one resumes behind all that it has shown."""
        for watcher in self.watchers.values():
            if 0 < watcher.made_at < self._shown:
                watcher.revision_next = max(watcher.revision_next, self._shown + 1)


class EtcdFeed:
    """Changes of the keys that start with ``base``, for the followings of one store."""

    def __init__(self, client: EtcdClient, base: bytes) -> None:
        self.base = base
        self.closed = client.closed
        self.failure: EngineError | None = None
        """why all its followings have ended: a new one needs another feed"""
        self._client = client
        self._followings: weakref.WeakSet[EtcdFollowing] = weakref.WeakSet()
        self._watchers: dict[bytes, _Watcher] = {}
        """by prefix"""
        self._lengths: Counter[int] = Counter()
        """of prefixes"""
        self._waiting: dict[EtcdFollowing, trio.Event] = {}
        """those that somebody else reads for"""
        self._reading = trio.Lock()
        self._scope = trio.CancelScope()
        self._stream: _Stream | None = None
        self._to_send = trio.Event()
        self._taken = trio.lowlevel.ParkingLot()
        """who waits for any message, or the end of the stream, or another one"""
        self._heard_at = -math.inf
        self._progress_asked_at = -math.inf
        self._has_caught_up = False
        """somebody had to, once"""
        self._pause = PAUSE_SECONDS_MIN

    def follow(self) -> EtcdFollowing:
        following = EtcdFollowing(self)
        self._followings.add(following)
        return following

    @property
    def is_catching_up_dear(self) -> bool:
        """A member cannot tell of its progress, or may not, and nobody has made it show all changes so far."""
        return not self._has_caught_up and (self._stream is None or not self._stream.has_progress)

    @property
    def newest(self) -> int:
        """The newest revision that an answer has told the client of."""
        return self._client.revision

    def join(self, following: EtcdFollowing, prefix: bytes) -> None:
        """Show it the prefix, too."""
        watcher = self._watchers.get(prefix)
        if watcher is None:
            watcher = self._watchers[prefix] = _Watcher(prefix, self.newest + 1)
            self._lengths[len(prefix)] += 1
            if self._stream is not None and self._stream.whole is None:
                self._stream.watch(watcher, self.base + prefix)
                self._to_send.set()
        watcher.followings.add(following)

    def leave(self, following: EtcdFollowing, prefix: bytes) -> None:
        watcher = self._watchers.get(prefix)
        if watcher is not None:
            watcher.followings.discard(following)
            self._drop_unused(watcher)

    def _drop_unused(self, watcher: _Watcher) -> None:
        if watcher.followings or self._watchers.get(watcher.prefix) is not watcher:
            return
        del self._watchers[watcher.prefix]
        self._lengths[len(watcher.prefix)] -= 1
        self._lengths += Counter()  # without those that are 0
        if self._stream is not None and self._stream.watchers.get(watcher.id) is watcher:
            self._stream.forget(watcher)
            self._to_send.set()

    def wake(self, following: EtcdFollowing) -> None:
        if (woken := self._waiting.get(following)) is not None:
            woken.set()

    async def aclose(self) -> None:
        """End all followings, also under a reader that waits. Idempotent."""
        self.closed = True
        for following in self._followings:
            following.end()
        self._scope.cancel()
        for woken in self._waiting.values():
            woken.set()
        async with self._reading:
            self._end_stream()

    # -- readers -------------------------------------------------------------------------------------

    async def wait(self, following: EtcdFollowing) -> None:
        """Return when there may be something new for ``following``: read for all, unless somebody else does."""
        if self._reading.locked():
            await self._wait_for_reader(following)
            return
        self._reading.acquire_nowait()
        try:
            with trio.CancelScope() as self._scope:
                if not self.closed:
                    await self._read(following)
        finally:
            self._reading.release()
            self._hand_over()

    async def _wait_for_reader(self, following: EtcdFollowing) -> None:
        woken = self._waiting[following] = trio.Event()
        try:
            await woken.wait()
        finally:
            del self._waiting[following]
            if not self._reading.locked():
                self._hand_over()  # it was this one's turn to read, and it may have been cancelled

    def _hand_over(self) -> None:
        """Somebody who waits is to read on."""
        for woken in self._waiting.values():
            if not woken.is_set():
                woken.set()
                return

    def _fail(self, error: EngineError) -> None:
        self.failure = error
        for following in list(self._followings):
            following.fail(error)
        for woken in self._waiting.values():
            woken.set()

    # -- catching up ---------------------------------------------------------------------------------

    async def catch_up(self, following: EtcdFollowing) -> None:
        """Return when all that was committed before this call was offered. EngineError. Somebody has to read."""
        deadline = trio.current_time() + self._client.options.deadline
        try:
            with trio.fail_at(deadline):
                while self._stream is None or not await self._show_all(self._stream, following, deadline):
                    if self._stream is None:
                        await self._park(following)
        except trio.TooSlowError:
            raise EngineTimeout("etcd did not show all changes in time") from None

    async def _show_all(self, stream: _Stream, following: EtcdFollowing, deadline: float) -> bool:
        """False where the stream ended before."""
        if not stream.has_progress and stream.whole is None:
            self._has_caught_up = True
            self._end_stream()  # whoever reads opens another one
            return False
        if stream.whole is None:
            revision = await self._read_revision(deadline)
            while self._stream is stream and any(following in watcher.followings for watcher in stream.unmade):
                await self._park(following)
        if stream.whole is not None or revision <= stream.begun_at:
            revision = await self._put_mark(deadline)
        while self._stream is stream and stream.watchers and stream.shown < revision:
            self._ask_progress(stream)
            with trio.move_on_after(LAG_SECONDS):
                await self._park(following)
        following.check()
        return self._stream is stream

    async def _park(self, following: EtcdFollowing) -> None:
        following.check()
        await self._taken.park()
        following.check()

    async def _read_revision(self, deadline: float) -> int:
        message = messages.get(self.base, limit=1, keys_only=True)
        return (await self._client.call(KV_RANGE, message, messages.RangeAnswer.parse, deadline)).revision

    async def _put_mark(self, deadline: float) -> int:
        """Put a record that no reader sees. Returns the revision, which is a new one."""
        message = messages.put(self.base, b"")
        return (await self._client.call(KV_PUT, message, messages.EtcdAnswer.parse, deadline)).revision

    def _ask_progress(self, stream: _Stream) -> None:
        if stream.has_progress:
            stream.connection.write(messages.WATCH_PROGRESS)
            self._progress_asked_at = trio.current_time()
            self._to_send.set()

    # -- the stream ----------------------------------------------------------------------------------

    async def _read(self, following: EtcdFollowing) -> None:
        """Take in messages until there is something for ``following``, whatever becomes of members meanwhile."""
        while not following.has_news:
            try:
                if self._stream is None:
                    await self._open()
                elif self._stream.connection.messages:
                    self._take(self._stream, self._stream.connection.messages.popleft())
                else:
                    await self._listen(self._stream)
            except Unanswered:
                self._end_stream()
                if self.failure is None:
                    await trio.sleep(self._pause * random.uniform(0.5, 1.0))
                    self._pause = min(2 * self._pause, PAUSE_SECONDS_MAX)

    async def _listen(self, stream: _Stream) -> None:
        """Return when there are messages. Unanswered when the stream ends, or its member does not answer."""
        connection = stream.connection
        self._heard_at = trio.current_time()
        ended = Unanswered(f"{stream.endpoint.url} is silent", sent=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tend, stream, nursery.cancel_scope)
            try:
                while not connection.messages and connection.outcome is None:
                    await connection.read()
                    self._heard_at = trio.current_time()
                    self._to_send.set()  # it may have asked for an answer, or have room again
            except Http2Error as error:
                ended = Unanswered(f"{stream.endpoint.url}: the stream broke ({error})", sent=True)
            nursery.cancel_scope.cancel()
        if connection.messages:
            self._pause = PAUSE_SECONDS_MIN
            return
        if connection.outcome is not None:
            self._judge(stream, *connection.outcome)
        raise ended

    async def _tend(self, stream: _Stream, scope: trio.CancelScope) -> None:
        """Send what is to be sent, and ask a silent member now and then. Cancel ``scope`` when it does not answer."""
        while await self._send(stream):
            with trio.move_on_after(PROBE_SECONDS):
                await self._to_send.wait()
                continue
            now = trio.current_time()
            if now > self._progress_asked_at + PROGRESS_SECONDS:
                self._ask_progress(stream)
            if now < max(self._heard_at, stream.endpoint.answered_at) + PROBE_SECONDS / 2:
                continue
            try:
                alive = await self._client.probe(stream.endpoint, self.base)
            except EngineError:
                alive = False
            if not alive:
                break
        scope.cancel()

    async def _send(self, stream: _Stream) -> bool:
        """False: the stream is of no use. Not cancelled in the middle."""
        self._to_send = trio.Event()
        if stream.connection.wants_to_send:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_SECONDS) as scope:
                try:
                    await stream.connection.flush()
                except Http2Error:
                    return False
            return not scope.cancelled_caught
        return True

    async def _open(self) -> None:
        """Have a stream, and ask for all watchers."""
        endpoint = self._client.choose()
        try:
            has_progress = _has_progress(await self._client.version(endpoint))
            connection, token = await self._client.stream(endpoint, WATCH)
        except EngineError as error:
            self._fail(error)
            raise Unanswered(str(error), sent=False) from error
        begins = [watcher.revision_next for watcher in self._watchers.values()]
        is_whole = self._has_caught_up and not has_progress
        whole = _Watcher(b"", min(begins, default=self.newest + 1)) if is_whole else None
        self._stream = stream = _Stream(endpoint, connection, token, has_progress, whole)
        for watcher in [whole] if whole else self._watchers.values():
            stream.watch(watcher, self.base + watcher.prefix)
        self._progress_asked_at = trio.current_time()
        self._taken.unpark_all()

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.connection.close()
            if stream.whole is None:
                stream.note_progress()
            else:
                for watcher in self._watchers.values():
                    watcher.revision_next = max(watcher.revision_next, stream.whole.revision_next)
        self._taken.unpark_all()

    # -- messages ------------------------------------------------------------------------------------

    def _take(self, stream: _Stream, message: bytes) -> None:
        """Show what a message tells. Unanswered: the stream ends here."""
        try:
            answer = messages.WatchAnswer.parse(message)
        except NoMessage as error:
            raise Unanswered(f"{stream.endpoint.url}: not a watch's message: {error}", sent=True) from error
        self._client.revision = max(self._client.revision, answer.revision)
        watcher = stream.watchers.get(answer.watch_id)
        if answer.canceled:
            self._take_cancellation(stream, watcher, answer)
        elif answer.watch_id == PROGRESS_ID:
            stream.progressed(answer.revision)
        elif watcher is not None:
            if answer.created:
                stream.made(watcher, answer.revision)
            elif not answer.events:  # it says that there was nothing until here
                watcher.revision_next = max(watcher.revision_next, answer.revision + 1)
            for event in answer.events:
                self._show(stream, watcher, event)
        self._taken.unpark_all()

    def _show(self, stream: _Stream, watcher: _Watcher, event: messages.Event) -> None:
        key, value, revision = event.kv
        change = Change(key[len(self.base) :], None if event.is_delete else value, revision)
        for wanted in [watcher] if stream.whole is None else self._wanted(change):
            for following in list(wanted.followings):
                following.show(wanted.prefix, change)
            self._drop_unused(wanted)
        watcher.revision_next = max(watcher.revision_next, revision + 1)

    def _wanted(self, change: Change) -> list[_Watcher]:
        """The watchers that a change of any key is for."""
        if not change.key:
            return []
        found = [self._watchers.get(change.key[:length]) for length in self._lengths if length <= len(change.key)]
        return [watcher for watcher in found if watcher is not None and change.version >= watcher.revision_next]

    def _take_cancellation(self, stream: _Stream, watcher: _Watcher | None, answer: messages.WatchAnswer) -> None:
        """A watcher that ends says why in words. Unanswered: another member may make it."""
        if watcher is None and not answer.created:
            return  # as it was asked to
        reason = answer.cancel_reason
        if answer.compact_revision and watcher is not None:
            reason = f"the changes since revision {watcher.revision_next} are no longer kept: read the state anew"
        elif not reason or "leader" in reason or "token" in reason:
            raise Unanswered(f"{stream.endpoint.url}: the watch ended: {reason}", sent=True)
        else:
            reason = f"etcd ended a watch of {self.base!r}: {reason}"
        if watcher is None or watcher is stream.whole:
            self._fail(EngineError(reason))
            raise Unanswered(reason, sent=True)
        stream.drop(watcher)
        for following in list(watcher.followings):
            following.fail(EngineError(reason))
        self._drop_unused(watcher)

    def _judge(self, stream: _Stream, code: int, text: str) -> NoReturn:
        """The end of the stream: of all followings, where another member would say the same. Unanswered."""
        error = self._client.refusal(stream.endpoint, code, text, stream.token)
        if code == OK or isinstance(error, Unanswered):
            raise Unanswered(f"{stream.endpoint.url}: the stream ended ({text})", sent=True)
        self._fail(error)
        raise Unanswered(str(error), sent=True) from error


class EtcdFollowing(BacklogFollowing):
    """Changes of the keys that start with the feed's ``base`` and one of the prefixes, without that base."""

    def __init__(self, feed: EtcdFeed) -> None:
        super().__init__()
        self._feed = feed
        self._has_ended = feed.closed

    @property
    def is_catching_up_dear(self) -> bool:
        return self._feed.is_catching_up_dear

    def newest(self) -> int:
        return self._feed.newest

    def add(self, prefix: bytes) -> None:
        super().add(prefix)
        if self._failure is None:
            self._feed.join(self, prefix)

    def remove(self, prefix: bytes) -> None:
        super().remove(prefix)
        self._feed.leave(self, prefix)

    async def wait(self) -> None:
        await self._feed.wait(self)

    def wake(self) -> None:
        self._feed.wake(self)

    def show(self, prefix: bytes, change: Change) -> None:
        """A change that the watcher of this prefix shows. Where another prefix includes this one, its watcher does."""
        if change.version >= self.since.get(prefix, math.inf) and not self.shows(change, len(prefix)):
            self.keep(change)

    def fail(self, error: EngineError) -> None:
        for prefix in self.since:
            self._feed.leave(self, prefix)
        super().fail(error)

    async def catch_up(self) -> None:
        self.check()
        await self._feed.catch_up(self)
        await self.await_reader()


def _has_progress(version: tuple[int, ...]) -> bool:
    """A member of this version answers a request for progress in order."""
    patch_min = PROGRESS_SINCE.get(version[:2])
    return version > max(PROGRESS_SINCE) if patch_min is None else version[2:3] >= (patch_min,)
