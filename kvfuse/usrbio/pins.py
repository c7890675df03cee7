"""Blocks of the shared-memory tier that a client holds, each by a number that it gives back."""

from __future__ import annotations

import threading

from kvfuse.volume.tier import TierBlock

NUMBER_MAX = (1 << 32) - 1
"""what a completion has room for"""


class Pins:
    """Up to ``count_max`` of one connection. Any thread."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._blocks: dict[int, TierBlock] = {}
        self._last = 0
        self._lock = threading.Lock()
        self.arenas: set[int] = set()
        """in which the client was ever given a block"""

    def __len__(self) -> int:
        return len(self._blocks)

    def take(self, block: TierBlock) -> int:
        """Hold a block: the pin. 0, and it is not held, where that are too many."""
        with self._lock:
            if len(self._blocks) >= self._count_max:
                return 0
            number = self._last % NUMBER_MAX + 1
            while number in self._blocks:  # a client may give more back than there are numbers
                number = number % NUMBER_MAX + 1
            self._last = number
            self._blocks[number] = block
            self.arenas.add(block.arena)
            return number

    def give(self, pin: int) -> None:
        """Let go of it. One that is not held is passed over."""
        with self._lock:
            self._blocks.pop(pin, None)

    def clear(self) -> None:
        with self._lock:
            self._blocks.clear()
