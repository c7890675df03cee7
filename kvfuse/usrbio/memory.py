"""How much of the daemon's memory calls that are under way may take: copies of what is written, keys, tasks.

All clients draw from one `Pool`. An entry for which there is nothing left waits in its ring; so a client that asks for
more than the machine has makes others wait, but no more.
"""

from __future__ import annotations

import threading


class Pool:
    """``size`` bytes. Any thread."""

    def __init__(self, size: int) -> None:
        self.free = size
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        """False where there is less left."""
        with self._lock:
            if size > self.free:
                return False
            self.free -= size
            return True

    def give(self, size: int) -> None:
        with self._lock:
            self.free += size


class Share:
    """What one connection has taken of a pool. Any thread."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._held = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        """False where there is less left in the pool."""
        if not self._pool.take(size):
            return False
        with self._lock:
            self._held += size
        return True

    def give(self, size: int) -> None:
        """Give back what was taken."""
        with self._lock:
            self._held -= size
        self._pool.give(size)

    def close(self) -> None:
        """When nothing is under way any more: whatever is left goes back."""
        self.give(self._held)
