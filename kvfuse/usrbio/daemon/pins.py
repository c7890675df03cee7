"""Counts blocks in shared memory that clients hold, each by a number that the client gives back.

A held block keeps all of its arena, as the arena serves no other kind before it is wholly free. So a user counts with
the memory of the arenas in which it holds something: beyond its part it gets copies, not views.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable

from kvfuse.usrbio.daemon.connection_keeping import ConnectionKeeping
from kvfuse.usrbio.daemon.held_blocks import HeldBlock, Home
from kvfuse.volume.tier.shared_tier import ARENAS_MAX

PART = 0.75
"""part that one user may hold of what others leave of the tier"""
NUMBER_MAX = (1 << 32) - 1
"""a completion has room for no larger one"""


class Pinned:
    """Arenas in which users hold blocks. ``capacity``: of the tier, in bytes. Any thread. A user None has no limit."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: dict[Hashable, Counter[Home]] = {}
        self._lock = threading.Lock()

    def take(self, user: Hashable, arena: Home, *, is_held: bool = False) -> bool:
        """Count a block that the user is about to hold. False: the user holds as much of the tier as it may.

        ``is_held``: it holds the block already.
        """
        with self._lock:
            held = self._held.get(user)
            is_new = held is None or arena not in held
            if user is not None and is_new and not is_held and not self._has_room(user, arena):
                return False
            if held is None:
                held = self._held[user] = Counter()
            held[arena] += 1
            return True

    def _has_room(self, user: Hashable, arena: Home) -> bool:
        """Whether one more arena fits into the part of what others leave: of memory, and of the tier's arenas."""
        own = {arena, *self._held.get(user, ())}
        others = {held for key, arenas in self._held.items() if key != user for held in arenas} - own
        size_max = PART * (self._capacity - sum(held.memory.resident for held in others))
        count_max = PART * (ARENAS_MAX - len(others))
        if len(own) == 1:
            return True
        return sum(held.memory.resident for held in own) <= size_max and len(own) <= count_max

    def give(self, user: Hashable, arena: Home) -> None:
        with self._lock:
            held = self._held[user]
            held[arena] -= 1
            if not held[arena]:
                del held[arena]
            if not held:
                del self._held[user]


class Pins:
    """Up to ``count_max`` blocks that one connection of a user holds, by pin. Any thread may call it."""

    def __init__(
        self, count_max: int, pinned: Pinned, user: Hashable = None, keeping: ConnectionKeeping | None = None,
        left: dict[int, HeldBlock] | None = None,
    ) -> None:  # fmt: skip
        """``keeping``: tells the next daemon. ``left``: what the connection held with the former daemon; `Pins` takes
        it out, as the maker of the dict may keep that for longer than the connection lives."""
        self._count_max = count_max
        self._pinned = pinned
        self._user = user
        self._blocks: dict[int, HeldBlock] = {}
        self._keeping = keeping
        self._last = 0 if keeping is None or keeping.page is None else keeping.page.last_pin
        self._lock = threading.Lock()
        self.arenas: set[int] = set()
        """arenas in which the client ever got a block"""
        while left:
            pin, block = left.popitem()
            self._pinned.take(user, block.home, is_held=True)
            self._blocks[pin] = block
            self.arenas.add(block.arena)

    def __len__(self) -> int:
        return len(self._blocks)

    def take(self, block: HeldBlock, note: Callable[[int], object] = lambda pin: None) -> int:
        """Hold a block; returns its pin. 0: not held, the connection has ``count_max``, or the user has its share.

        ``note``: called with the pin before the block has it.
        """
        with self._lock:
            if len(self._blocks) >= self._count_max or not self._pinned.take(self._user, block.home):
                return 0
            number = self._last % NUMBER_MAX + 1
            while number in self._blocks:  # a client may give more back than there are numbers
                number = number % NUMBER_MAX + 1
            note(number)
            self._last = number
            self._blocks[number] = block
            if self._keeping is not None and self._keeping.page is not None:
                self._keeping.page.add_pin(number, block)
            self.arenas.add(block.arena)
            return number

    def give(self, pin: int) -> None:
        """Release the block of a pin. A pin that is not held is ignored."""
        with self._lock:
            block = self._blocks.pop(pin, None)
            if block is not None:
                if self._keeping is not None and self._keeping.page is not None:
                    self._keeping.page.remove_pin(pin)
                self._pinned.give(self._user, block.home)

    def list_blocks(self) -> list[HeldBlock]:
        """List all held blocks."""
        with self._lock:
            return list(self._blocks.values())

    def clear(self) -> None:
        with self._lock:
            for block in self._blocks.values():
                self._pinned.give(self._user, block.home)
            self._blocks.clear()
