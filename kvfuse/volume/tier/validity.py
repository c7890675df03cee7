"""Up to when tables of blocks that clients map hold: while this daemon lives, and has its lease."""

from __future__ import annotations

import threading
import time

from kvfuse.kept.alive import ALIVE_SECONDS, Alive


class Validity:
    """Of one mount. Any thread."""

    def __init__(self) -> None:
        self.alive: Alive | None = None
        """where the daemon after this one finds how long tables hold"""
        self.until = 0
        """up to when they hold, in nanoseconds of CLOCK_MONOTONIC; 0: no limit"""
        self._lease_until = 0
        """of a shared volume: when the lease ends"""
        self._lock = threading.Lock()

    def hold(self, seconds: float) -> None:
        """Of a shared volume: what tables say holds for so long from now on, and no longer."""
        with self._lock:
            self._lease_until = max(1, time.monotonic_ns() + int(seconds * 1e9)) if seconds > 0 else 1
        self.live_on()

    def live_on(self) -> None:
        """Where a daemon may come after this one: tables hold for `ALIVE_SECONDS` from now on, and no longer."""
        with self._lock:
            self.until = self._lease_until
            if self.alive is not None:
                until = time.monotonic_ns() + int(ALIVE_SECONDS * 1e9)
                self.until = min(until, self._lease_until or until)
                self.alive.note_expiry(self.until)
