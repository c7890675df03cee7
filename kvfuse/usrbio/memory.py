"""What all clients draw from together: the daemon's memory for calls that are under way, its descriptors, its rings.

A user that holds some of a `Pool` may take no more of it than is left to others afterwards. So one alone may have half,
the second one half of the rest, and however many take what they can, there is something left for the next. One that
holds nothing may take all that is left: one entry may be so large. An entry for which there is too little waits.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable


class Pool:
    """``size`` bytes, or things. Any thread. Users are whatever is equal for one user; None: one without a limit."""

    def __init__(self, size: int) -> None:
        self.free = size
        self._held: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    def take(self, size: int, user: Hashable = None) -> bool:
        """False where there is less left, or this user has had its part."""
        with self._lock:
            held = self._held[user] if user is not None else 0
            if size > self.free or (held and held + size > self.free - size):
                return False
            self.free -= size
            if user is not None:
                self._held[user] = held + size
            return True

    def give(self, size: int, user: Hashable = None) -> None:
        with self._lock:
            self.free += size
            if user is not None:
                self._held[user] -= size
                if not self._held[user]:
                    del self._held[user]


class Share:
    """What one connection of a user has taken of a pool. Any thread."""

    def __init__(self, pool: Pool, user: Hashable = None) -> None:
        self._pool = pool
        self._user = user
        self._held = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        """False where there is less left in the pool, or its user has had its part."""
        if not self._pool.take(size, self._user):
            return False
        with self._lock:
            self._held += size
        return True

    def give(self, size: int) -> None:
        """Give back what was taken."""
        with self._lock:
            self._held -= size
        self._pool.give(size, self._user)

    def close(self) -> None:
        """When nothing is under way any more: whatever is left goes back."""
        self.give(self._held)
