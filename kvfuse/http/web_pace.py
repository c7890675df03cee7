"""A deadline that moves on with the bytes of a transfer: who is slower than a lowest rate for long is cut off."""

from __future__ import annotations

import trio

STALL_SECONDS = 20.0
"""that a transfer may be behind the lowest rate"""
RATE_MIN = 64 << 10
"""bytes a second"""


class Pace:
    """One transfer, from now on."""

    def __init__(self, seconds: float = STALL_SECONDS, rate: float = RATE_MIN) -> None:
        self.deadline = trio.current_time() + seconds
        self._seconds = seconds
        self._rate = rate

    def moved(self, size: int) -> None:
        """So many more bytes have been moved. What was faster before allows nobody to be slower for longer."""
        self.deadline = min(self.deadline + size / self._rate, trio.current_time() + self._seconds)
