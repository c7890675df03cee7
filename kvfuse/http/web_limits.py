"""Bounds what one user, and all users together, have of the HTTP door: requests in flight, and bytes in memory.

A user that has some takes no more than it leaves to others, so no user can take the last of it. Pure; event loop only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from kvfuse.http.web_message import WebError

RETRY_SECONDS = 1


class SharedUnits:
    """A resource of ``total`` units, of which one user has ``user_max`` at most. ``what``: in messages."""

    def __init__(self, total: int, user_max: int, what: str) -> None:
        self.total = total
        self.user_max = user_max
        self.what = what
        self.used = 0
        self.refused = 0
        self._users: Counter[Hashable] = Counter()

    def take(self, user: Hashable, amount: int = 1) -> None:
        """WebError 429: the user has too many. 503: all together have."""
        mine = self._users[user]
        if mine + amount > self.user_max:
            self.refused += 1
            raise self._refusal(429, f"{self.what}: a user may have {self.user_max} at once")
        left = self.total - self.used - amount
        if left < 0 or (mine and mine + amount > max(left, self.total // 16)):
            self.refused += 1
            raise self._refusal(503, f"{self.what}: all that the daemon has are in use")
        self._users[user] += amount
        self.used += amount

    def give(self, user: Hashable, amount: int = 1) -> None:
        """Give back what `take` gave."""
        self.used -= amount
        self._users[user] -= amount
        if not self._users[user]:
            del self._users[user]

    @contextmanager
    def taking(self, user: Hashable, amount: int = 1) -> Iterator[None]:
        self.take(user, amount)
        try:
            yield
        finally:
            self.give(user, amount)

    def _refusal(self, status: int, message: str) -> WebError:
        return WebError(status, message, "ask again in a moment", {"Retry-After": str(RETRY_SECONDS)})
