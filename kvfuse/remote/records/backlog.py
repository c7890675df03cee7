"""A following that keeps changes until the reader comes."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, deque

import trio

from kvfuse.errors import EngineError
from kvfuse.remote.records.api import Change, Following

BACKLOG_MAX = 1 << 16
"""changes that are kept for a reader who has not come for them"""


class BacklogFollowing(Following):
    """Subclasses say how a reader waits, and which changes are kept, in the order of their commits."""

    def __init__(self) -> None:
        self.since: dict[bytes, int] = {}
        """prefix -> oldest version that is shown"""
        self._lengths: Counter[int] = Counter()
        """of prefixes"""
        self._backlog: deque[Change | trio.Event] = deque()
        """an event is set when the reader has all before it"""
        self._failure: EngineError | None = None
        self._has_ended = False
        self._is_awaited = False
        """the reader waits for more"""

    @property
    def has_news(self) -> bool:
        """There is something to show, or the end."""
        return bool(self._backlog or self._failure) or self._has_ended

    def add(self, prefix: bytes) -> None:
        if prefix not in self.since:
            self.since[prefix] = self.newest() + 1
            self._lengths[len(prefix)] += 1

    def remove(self, prefix: bytes) -> None:
        if self.since.pop(prefix, None) is not None:
            self._lengths[len(prefix)] -= 1
            self._lengths += Counter()  # without those that are 0

    def shows(self, change: Change, length_end: int) -> bool:
        """It is under a prefix that is shorter than that, and not too old."""
        key, version = change.key, change.version
        return any(n < length_end and version >= self.since.get(key[:n], version + 1) for n in self._lengths)

    @abstractmethod
    async def wait(self) -> None:
        """Return when there may be news."""

    @abstractmethod
    def wake(self) -> None:
        """There is news for whoever waits."""

    def keep(self, change: Change) -> None:
        """For the reader. With too many that he has not come for this fails."""
        if self._failure is None and len(self._backlog) >= BACKLOG_MAX:
            self.fail(EngineError(f"the watch fell {BACKLOG_MAX} changes behind: read the state anew"))
        elif self._failure is None:
            self._backlog.append(change)
            self.wake()

    def fail(self, error: EngineError) -> None:
        """Changes are missing from here on."""
        self._failure = error
        backlog, self._backlog = self._backlog, deque()
        for mark in backlog:
            if isinstance(mark, trio.Event):
                mark.set()
        self.wake()

    def end(self) -> None:
        """The store is closed. The reader gets what it has not had yet, then the end."""
        self._has_ended = True
        self.wake()

    async def await_reader(self) -> None:
        """Return when the reader has come back after everything that was offered before. EngineError: it has ended."""
        self.check()
        if self._backlog or not self._is_awaited:
            passed = trio.Event()
            self._backlog.append(passed)
            await passed.wait()
            self.check()

    def check(self) -> None:
        """EngineError: it has ended."""
        if self._failure is not None or self._has_ended:
            raise self._failure or EngineError("the store is closed")

    async def __anext__(self) -> Change:
        while True:
            while self._backlog:
                change = self._backlog.popleft()
                if isinstance(change, Change):
                    return change
                change.set()
            if self._failure is not None:
                raise self._failure
            if self._has_ended:
                raise StopAsyncIteration
            self._is_awaited = True
            try:
                await self.wait()
            finally:
                self._is_awaited = False
