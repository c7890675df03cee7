"""Shares what the daemon has among clients: memory for calls in flight, descriptors, rings.

A user that holds some of a `SharedPool` may take no more of it than is left to others afterwards. So one alone may have
half, the second one half of the rest, and however many take what they can, something is left for the next. One that
holds nothing may take all that is left: one entry may be so large. An entry for which there is too little waits.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable

CALLS_MAX = 1024
"""calls in flight of all users, by their weight"""
USER_CALLS_MAX = 128
"""calls of one user: all of them may continue in one pass of the event loop"""


class SharedPool:
    """``size`` bytes, or things. Any thread. Any equal values mean one user; None: a user without a limit."""

    def __init__(self, size: int) -> None:
        self.free = size
        self._held: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    def count_held(self, user: Hashable) -> int:
        """How much a user holds now."""
        return self._held[user]

    def take(self, size: int, user: Hashable = None) -> bool:
        """Take some. False: less is left, or the user has its share."""
        with self._lock:
            held = self._held[user] if user is not None else 0
            if size > self.free or (held and held + size > self.free - size):
                return False
            self.free -= size
            if user is not None:
                self._held[user] = held + size
            return True

    def force(self, size: int) -> None:
        """Count what somebody has already, even where no room is left."""
        with self._lock:
            self.free -= size

    def give(self, size: int, user: Hashable = None) -> None:
        with self._lock:
            self.free += size
            if user is not None:
                self._held[user] -= size
                if not self._held[user]:
                    del self._held[user]


class UnderWay:
    """Limits calls that wait in the event loop, as for the store or a commit, by weight: about, tasks. Any thread.

    One commit may wake all of them at once. Then everybody else waits until all have continued. So a user has few of
    them; more wait in their rings, which `give` wakes as calls end. A user None has no limit, and does not count.
    """

    def __init__(self, size: int = CALLS_MAX, user_max: int = USER_CALLS_MAX) -> None:
        self._pool = SharedPool(size)
        self._user_max = user_max
        self._held: Counter[Hashable] = Counter()
        self._waiting: dict[Hashable, dict[Callable[[], object], None]] = {}
        """user -> callables that wake waiting rings, the first one first"""
        self._lock = threading.Lock()

    def take(self, weight: int, user: Hashable, wake: Callable[[], object] | None = None) -> bool:
        """Take weight. False: the user has too many; ``wake`` runs once when it has fewer. The last one may be
        heavy."""
        if user is None:
            return True
        with self._lock:
            held = self._held[user]
            if held >= self._user_max or not self._pool.take(weight, user):
                if wake is not None:
                    self._waiting.setdefault(user, {})[wake] = None
                return False
            self._held[user] = held + weight
            return True

    def give(self, weight: int, user: Hashable) -> None:
        if user is None or not weight:
            return
        with self._lock:
            self._pool.give(weight, user)
            self._held[user] -= weight
            held = self._held[user]
            if not held:
                del self._held[user]
            wakes: list[Callable[[], object]] = []
            if user in self._waiting and held <= self._user_max - self._user_max // 4:
                waiting = self._waiting[user]
                wakes = [next(iter(waiting))] if held else list(waiting)
                for wake in wakes:
                    del waiting[wake]
                if not waiting:
                    del self._waiting[user]
        for wake in wakes:
            wake()

    def forget(self, user: Hashable, wake: Callable[[], object]) -> None:
        """Drop ``wake``: its ring does not wait any more."""
        with self._lock:
            waiting = self._waiting.get(user, {})
            waiting.pop(wake, None)
            if not waiting:
                self._waiting.pop(user, None)


class Share:
    """The part of a pool that one connection of a user has taken, and its calls in flight. Any thread."""

    def __init__(self, pool: SharedPool, user: Hashable = None, under_way: UnderWay | None = None) -> None:
        self._pool = pool
        self._user = user
        self._under_way = under_way or UnderWay()
        self._held = 0
        self._weight = 0
        self._lock = threading.Lock()

    @property
    def user_size(self) -> int:
        """Bytes that all connections of the user have of the pool; 0 for a user without a limit."""
        return self._pool.count_held(self._user)

    def take(self, size: int, weight: int = 0, wake: Callable[[], object] | None = None) -> bool:
        """Take bytes and weight. False: the pool has fewer, or its user has its part; see `UnderWay.take`."""
        if weight and not self._under_way.take(weight, self._user, wake):
            return False
        if not self._pool.take(size, self._user):
            self._under_way.give(weight, self._user)
            return False
        with self._lock:
            self._held += size
            self._weight += weight
        return True

    def give(self, size: int, weight: int = 0) -> None:
        """Give back what was taken."""
        with self._lock:
            self._held -= size
            self._weight -= weight
        self._pool.give(size, self._user)
        if weight:
            self._under_way.give(weight, self._user)

    def forget(self, wake: Callable[[], object]) -> None:
        """Drop ``wake``: its ring does not wait any more."""
        self._under_way.forget(self._user, wake)

    def close(self) -> None:
        """Give back all that is left, once no call is in flight."""
        self.give(self._held, self._weight)
