"""The grace: how long a freed slot rests before it is reused, because reads and writes in flight may still reach it.

It is measured by this host's monotonic clock, which is compared with no other clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from kvfuse.slab.allocator import Slot

Give = Callable[[list[Slot]], object]
"""a function that takes over slots"""


class Grace:
    """Hands slots on after ``seconds``. ``run`` has to be running."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._waiting: deque[tuple[float, Give, list[Slot]]] = deque()
        self._work = trio.Event()
        self._is_over = False
        self.passed = trio.Event()
        """set, and replaced by a new one, each time that slots were handed on"""

    def later(self, give: Give) -> Give:
        """A function that calls ``give`` ``seconds`` later; ``give`` itself if there is no grace."""
        if not self.seconds:
            return give

        def wait(slots: list[Slot]) -> None:
            if slots:
                self._waiting.append((trio.current_time() + self.seconds, give, slots))
                self._work.set()

        return wait

    @property
    def is_empty(self) -> bool:
        """No slot waits to be handed on."""
        return self._is_over or not self._waiting

    async def run(self) -> None:
        """Hand on slots whose time is over, until cancelled; afterwards none are."""
        try:
            while True:
                while self._waiting:
                    time, give, slots = self._waiting[0]
                    await trio.sleep_until(time)
                    self._waiting.popleft()
                    give(slots)
                    self.passed.set()
                    self.passed = trio.Event()
                self._work = trio.Event()
                await self._work.wait()
        finally:
            self._is_over = True
            self.passed.set()
