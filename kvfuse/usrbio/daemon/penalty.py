"""Counts penalties for malformed entries, and for rings of a bell without an entry.

Both cost the daemon about as much as a good entry. A ring may have ``FREE`` more bad entries than good ones; above that
the ring rests after each turn, longer each time, and its turns are short. Above ``BOUND`` the daemon disconnects it.
Occasional errors cost nothing: a good entry compensates a bad one. Misses, timeouts, a lack of room, or of permission
for a block, count as good entries.
"""

from __future__ import annotations

import errno

MALFORMED = frozenset({errno.EINVAL, errno.EBADF, errno.EFAULT, errno.EPERM, errno.EACCES})
"""errnos of entries that the ring's thread refuses for their contents"""
FREE = 256
BOUND = 10_000
FIRST_SECONDS = 0.001
LAST_SECONDS = 0.1
SHORT_TURN = 16
"""entries"""


class Penalty:
    """The penalty of one ring, for its thread only. ``seconds``: how long to rest now."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.excess = 0
        """bad entries less good ones, at least 0"""

    @property
    def is_broken(self) -> bool:
        return self.excess > BOUND

    def entries_max(self, usual: int) -> int:
        """How many entries a turn has."""
        return SHORT_TURN if self.seconds else usual

    def judge(self, count: int, bad: int) -> None:
        """Count a turn of ``count`` entries, ``bad`` ones among them."""
        self.excess = max(0, self.excess + 2 * bad - count)
        if self.excess <= FREE:
            self.seconds = 0.0
        elif bad:
            self.seconds = min(max(2 * self.seconds, FIRST_SECONDS), LAST_SECONDS)

    def forget(self, count: float) -> None:
        """Subtract ``count`` bad ones."""
        self.excess = max(0, self.excess - int(count))
        if self.excess <= FREE:
            self.seconds = 0.0

    def count_idle_ring(self) -> None:
        """Count a ring of the bell without an entry. It costs rests, but breaks no ring."""
        if self.excess < BOUND:
            self.judge(1, 1)
