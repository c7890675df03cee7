"""When a holder tries again what failed, and when it gives up; see `main`. Standard library only."""

from __future__ import annotations

import time

PAUSES = (0.0, 0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""seconds before a start, by how many daemons in a row have failed"""
FAILURES_MAX = 8
"""daemons in a row that fail by themselves: then the mount is given up"""
KILL_WEIGHT = 0.1
"""of one that was killed before it was ready, by somebody who kills at random"""
SERVED_WEIGHT, SERVED_MAX, FORGIVEN_SECONDS = 0.25, 5.0, 2.0
"""of one that failed after it was ready. The mount is never given up for those, as it is served in between: the pause
before the next one grows to a second. One failure is forgiven for each 2 s that a daemon lived"""
ENDS_MAX = 3
"""daemons that may fail while they end the mount: each next one goes on to store what is left"""
PROVEN_SECONDS = 10.0
"""a process that stood by so long did not fail for what it found"""
STANDBY_SECONDS_MAX = 60.0
"""between tries of one that stands by: nobody waits for it"""


class Failures:
    """Of daemons in a row."""

    def __init__(self) -> None:
        self._count = 0.0
        self._ends = 0

    def count_death_at_end(self) -> None:
        """It was told to end the mount."""
        self._ends += 1

    @property
    def may_end_anew(self) -> bool:
        """The next daemon may be told so."""
        return self._ends <= ENDS_MAX

    def count_death(self, lived: float, *, was_killed: bool, was_ready: bool) -> None:
        """After ``lived`` seconds of its turn."""
        if was_ready and was_killed:
            self._count = 0
        elif was_ready:
            self._count = min(max(0.0, self._count - lived / FORGIVEN_SECONDS) + SERVED_WEIGHT, SERVED_MAX)
        else:
            self._count += KILL_WEIGHT if was_killed else 1

    def reset_count(self) -> None:
        """The next daemon is another version."""
        self._count = 0

    @property
    def are_too_many(self) -> bool:
        return self._count > FAILURES_MAX

    @property
    def pause(self) -> float:
        """Seconds."""
        return PAUSES[min(int(self._count), len(PAUSES) - 1)]


class Backoff:
    """Of processes that stand by: they are tried later after each one that fails, without an end."""

    def __init__(self) -> None:
        self._pause = 0.0
        self._due = 0.0

    def count_death(self, lived: float) -> None:
        """After ``lived`` seconds."""
        self._pause = 0.0 if lived > PROVEN_SECONDS else min(STANDBY_SECONDS_MAX, 2 * self._pause + 0.5)
        self._due = time.monotonic() + self._pause

    @property
    def is_due(self) -> bool:
        """The next one may be tried."""
        return time.monotonic() >= self._due
