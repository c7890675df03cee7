"""The record store as the parts of a shared volume see it: reads share round trips, and fail at once while it is away.

* Reads that arrive while another read is in flight join into one call, which begins after it: its answer is at least as
  new as each question. The answer is also at least as new as every event about these records that this client knows
  when it returns: its own commits, and the watch. A watch event may overtake an answer, and arrives only once: a caller
  that took the older answer would keep it for good.
* After a read failed the store is *away* until it answers a probe: reads fail at once meanwhile, instead of each
  waiting for its deadline. Commits are sent all the same, as their callers need the outcome.
* The versions of this client's own commits are kept, so that a watch can tell them from those of other clients.
* What is read of names and inodes is followed, from before the question (`followed`).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from weakref import WeakSet

import trio

from kvfuse.errors import EngineError
from kvfuse.remote.records.api import Lease, Record, RecordStore, Versioned
from kvfuse.remote.records.decorators import RecordDecorator
from kvfuse.volume.store.followed import Followed
from kvfuse.volume.store.sealed import DamagedRecords, get_page

CALLS_MAX = 1
"""Calls of `get` under way at once; what comes meanwhile shares the next one."""
OWN_MAX = 4096
"""Commits that are known as our own: a watch may lag behind by so many."""
ASKS_MAX = 10
"""Calls of one question whose answers are all overtaken by news; each may take as long as the store's deadline.

It takes an answer that is slower than the watch, just when another host changes what it is about.
"""
PROBE_SECONDS = (0.05, 1.0)
"""Pause between probes of a store that is away: of the first, and at most."""
PROBE_KEY = b"ninode"

log = logging.getLogger(__name__)


class _News:
    """The watch events since a call of `get` began."""

    __slots__ = ("__weakref__", "_heard", "is_lost")

    def __init__(self) -> None:
        self._heard: dict[bytes, tuple[int, bool]] = {}
        """key -> the newest version, and whether that is a record or its removal"""
        self.is_lost = False
        """something may have changed for which no event will arrive"""

    def heard(self, key: bytes, version: int, is_present: bool) -> None:
        if version > self._heard.get(key, (0, False))[0]:  # events of commits before ours may arrive late
            self._heard[key] = version, is_present

    def overtook(self, keys: Sequence[bytes], rows: Sequence[Versioned | None]) -> bool:
        """Some of these rows may be stale. An absent row has no version: then a key that was put may be gone since."""
        if self.is_lost:
            return True
        for key in self._heard.keys() & keys:
            row = rows[keys.index(key)]
            version, is_present = self._heard[key]
            if is_present if row is None else row.version < version:
                return True
        return False


class _Question:
    """A `get` that waits for its turn, or for its answer."""

    __slots__ = ("changed", "error", "is_asked", "keys", "news", "rows")

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.keys = keys
        self.news: _News | None = None
        """since the call began that answers it"""
        self.rows: list[Versioned | None] | None = None
        self.error: EngineError | None = None
        self.is_asked = False
        """in a call that is under way"""
        self.changed = trio.Event()
        """it was answered, or is to be asked again"""

    def answer(self, rows: list[Versioned | None], damaged: Mapping[bytes, int]) -> None:
        """``damaged``: versions of records that are damaged; of this question, or of others in the same call."""
        self.rows = rows
        own = {key: damaged[key] for key in self.keys if key in damaged}
        if own:
            self.error = DamagedRecords(own, rows=rows)

    @property
    def is_answered(self) -> bool:
        return self.rows is not None or self.error is not None


class SharedRecords(RecordDecorator):
    """Joins the reads of one membership's parts, which own it. `run` probes a store that is away."""

    def __init__(self, inner: RecordStore) -> None:
        super().__init__(inner)
        self.followed = Followed(inner)
        self._calls = trio.Semaphore(CALLS_MAX)
        self._questions: list[_Question] = []
        self._caller_count = 0
        """of `get`"""
        self._own: dict[int, None] = {}
        """versions of commits of ours, the oldest first"""
        self._committing: set[trio.Event] = set()
        self._news = WeakSet[_News]()
        """of calls whose answers are not all told yet"""
        self._reason: EngineError | None = None
        """why the store did not answer a read, nor a probe since; None: it does"""
        self._went_away = trio.Event()

    # -- reading -------------------------------------------------------------------------------------

    @property
    def is_asked(self) -> bool:
        """Somebody waits for an answer."""
        return self._caller_count > 0

    def _check(self) -> None:
        if self._reason is not None:
            raise EngineError(f"the record store is not reachable: {self._reason}")

    def _failed(self, error: EngineError) -> None:
        if self._reason is None:
            log.warning("the record store is away, cached names and blocks are still served: %s", error)
        self._reason = error
        self._went_away.set()

    async def get(self, keys: Sequence[bytes]) -> list[Versioned | None]:
        """As the inner store's, and never older than what this client has committed or the watch has brought by now."""
        self._caller_count += 1
        pinned = self.followed.pin(keys)
        try:
            for _ in range(ASKS_MAX):
                try:
                    rows, news = await self._answer(keys)
                except DamagedRecords as error:
                    if self.followed.pin_found(keys, error.rows, pinned):
                        continue
                    raise
                if not self.followed.pin_found(keys, rows, pinned) and not news.overtook(keys, rows):
                    return rows
        finally:
            self._caller_count -= 1
            self.followed.unpin(pinned)
        raise EngineError(f"{keys[0]!r} or another of {len(keys)} records changed before each of {ASKS_MAX} answers")

    async def _answer(self, keys: Sequence[bytes]) -> tuple[list[Versioned | None], _News]:
        """Wait for calls under way, and then for one of its own, which others share."""
        self._check()
        question = _Question(keys)
        self._questions.append(question)
        try:
            while not question.is_answered:
                if question.is_asked:
                    await question.changed.wait()
                else:
                    async with self._calls:
                        if not question.is_asked and not question.is_answered:
                            await self._ask()
        finally:
            if question in self._questions:
                self._questions.remove(question)
        if question.error is not None:
            raise question.error
        assert question.rows is not None
        assert question.news is not None
        return question.rows, question.news

    async def _ask(self) -> None:
        """Answer all questions there are. A caller that is cancelled leaves the others' to one of them."""
        asked, self._questions = self._questions, []
        news = _News()
        self._news.add(news)
        for question in asked:
            question.is_asked, question.news = True, news
        try:
            keys = list(dict.fromkeys(key for question in asked for key in question.keys))
            rows, damaged = await get_page(self.inner, keys)
        except EngineError as error:
            self._news.discard(news)  # there is nothing to compare, and the error is kept, and this frame by it
            self._failed(error)
            for question in asked:
                question.error = error
        except BaseException:
            for question in asked:
                question.is_asked = False
            self._questions = asked + self._questions
            raise
        else:
            found = dict(zip(keys, rows, strict=True))
            for question in asked:
                question.answer([found[key] for key in question.keys], damaged)
        finally:
            for question in asked:
                question.changed.set()
                question.changed = trio.Event()

    async def scan(self, prefix: bytes, after: bytes = b"", limit: int = 1000) -> list[Record]:
        self._check()
        pinned = self.followed.pin([prefix])
        try:
            return await self.inner.scan(prefix, after, limit)
        except DamagedRecords:
            raise
        except EngineError as error:
            self._failed(error)
            raise
        finally:
            self.followed.unpin(pinned)

    async def run(self) -> None:
        """Ask a store that is away until it answers; for ever."""
        while True:
            await self._went_away.wait()
            pause, pause_max = PROBE_SECONDS
            while self._reason is not None:
                try:
                    await get_page(self.inner, [PROBE_KEY])
                except EngineError as error:
                    self._reason = error
                    await trio.sleep(pause * random.uniform(0.5, 1.0))
                    pause = min(2 * pause, pause_max)
                else:
                    log.info("the record store is back")
                    self._reason = None
            self._went_away = trio.Event()

    # -- events of records, beside the reads ----------------------------------------------------------

    def heard(self, keys: Iterable[bytes], version: int, *, is_present: bool) -> None:
        """A commit put or deleted these records. Times of directories change often, and who takes them compares."""
        for news in self._news:
            for key in keys:
                if key[:1] != b"t":
                    news.heard(key, version, is_present)

    def lost_track(self) -> None:
        """Events may have been lost: answers in flight count for nothing."""
        for news in self._news:
            news.is_lost = True

    # -- commits -------------------------------------------------------------------------------------

    async def commit(
        self,
        puts: Mapping[bytes, bytes],
        deletes: Collection[bytes] = (),
        expect: Mapping[bytes, int] | None = None,
        *,
        durable: bool = False,
        lease: Lease | None = None,
    ) -> int:
        returned = trio.Event()
        self._committing.add(returned)
        try:
            version = await self.inner.commit(puts, deletes, expect, durable=durable, lease=lease)
            if version:
                self._own[version] = None
                self.heard(puts, version, is_present=True)
                self.heard(deletes, version, is_present=False)
                if len(self._own) > OWN_MAX:
                    del self._own[next(iter(self._own))]
            return version
        finally:
            self._committing.discard(returned)
            returned.set()

    def made(self, version: int) -> bool:
        """This client made the commit of ``version``, lately, and knows its outcome."""
        return version in self._own

    async def is_own(self, version: int) -> bool:
        """This client made the commit of ``version``. Waits for commits that are under way, which may be the one.

        One whose outcome was not told counts as somebody else's.
        """
        if version not in self._own:
            for returned in list(self._committing):
                await returned.wait()
        return version in self._own
