"""A pace for threads that together do no more than so many bytes a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

AHEAD_SECONDS = 0.1
"""of bytes that may come at once"""


class RatePace:
    """``rate``: bytes a second; 0: any number."""

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._lock = threading.Lock()
        self._paid_until = clock()

    def take(self, size: int) -> float:
        """Seconds that the caller, who has just moved ``size`` bytes, has to wait before it moves more."""
        if not self._rate:
            return 0.0
        with self._lock:
            now = self._clock()
            self._paid_until = max(self._paid_until, now - AHEAD_SECONDS) + size / self._rate
            return max(0.0, self._paid_until - now)
