"""How long a transfer may wait for its client: who is slower than a lowest rate for long is cut off."""

from __future__ import annotations

from types import TracebackType

import trio

STALL_SECONDS = 20.0
"""that a transfer may be behind the lowest rate"""
RATE_MIN = 64 << 10
"""bytes a second"""


class TooSlow(Exception):
    """A client that is too slow is cut off."""


class ClientPace:
    """One transfer. Only the time for which it waits for the client counts: that of `waiting` contexts."""

    def __init__(self, seconds: float = STALL_SECONDS, rate: float = RATE_MIN) -> None:
        self._seconds = self._left = seconds
        self._rate = rate
        self._began = 0.0
        self._scope = trio.CancelScope()

    def __enter__(self) -> ClientPace:
        self._began = trio.current_time()
        self._scope = trio.CancelScope(deadline=self._began + self._left)
        self._scope.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """TooSlow."""
        self._left -= trio.current_time() - self._began
        is_handled = self._scope.__exit__(kind, error, trace)
        if self._scope.cancelled_caught:
            raise TooSlow
        return is_handled

    def moved(self, size: int) -> None:
        """So many more bytes have been moved. What was faster before allows nobody to be slower for longer."""
        self._left = min(self._left + size / self._rate, self._seconds)
