"""Decides when a holder retries a failed start, and when it gives up; see `main`. Standard library only."""

from __future__ import annotations

import time

PAUSES = (0.0, 0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""seconds before a start, by the number of daemons in a row that have failed"""
FAILURES_MAX = 8
"""daemons in a row that fail by themselves before the holder gives the mount up"""
KILL_WEIGHT = 0.1
"""weight of a daemon that others killed before it was ready: kills may be random"""
SERVED_WEIGHT, SERVED_MAX, FORGIVEN_SECONDS = 0.25, 5.0, 2.0
"""weight of a daemon that failed after it was ready. The holder never gives the mount up for those, as they serve in
between: the pause before the next one grows to a second. Each 2 s of a daemon's life cancel one failure"""
ENDS_MAX = 3
"""daemons that may fail while they end the mount: each next one stores what is left"""
PROVEN_SECONDS = 10.0
"""a standby that lived so long did not fail for its environment"""
STANDBY_SECONDS_MAX = 60.0
"""between retries of a standby: no caller waits for it"""


class Failures:
    """Weighs failures of daemons in a row."""

    def __init__(self) -> None:
        self._count = 0.0
        self._ends = 0

    def count_death_at_end(self) -> None:
        """Count a daemon that died while it ended the mount."""
        self._ends += 1

    @property
    def may_end_anew(self) -> bool:
        """Another daemon may try to end the mount."""
        return self._ends <= ENDS_MAX

    def count_death(self, lived: float, *, was_killed: bool, was_ready: bool) -> None:
        """Count a daemon that died ``lived`` seconds after its START."""
        if was_ready and was_killed:
            self._count = 0
        elif was_ready:
            self._count = min(max(0.0, self._count - lived / FORGIVEN_SECONDS) + SERVED_WEIGHT, SERVED_MAX)
        else:
            self._count += KILL_WEIGHT if was_killed else 1

    def reset_count(self) -> None:
        """Reset the count: the next daemon is of another version."""
        self._count = 0

    @property
    def are_too_many(self) -> bool:
        return self._count > FAILURES_MAX

    @property
    def pause_seconds(self) -> float:
        """The pause before the next start."""
        return PAUSES[min(int(self._count), len(PAUSES) - 1)]


class Backoff:
    """Delays retries of a standby, longer after each failure, without a limit of tries."""

    def __init__(self) -> None:
        self._pause = 0.0
        self._due = 0.0

    def count_death(self, lived: float) -> None:
        """Count a standby that died after ``lived`` seconds."""
        self._pause = 0.0 if lived > PROVEN_SECONDS else min(STANDBY_SECONDS_MAX, 2 * self._pause + 0.5)
        self._due = time.monotonic() + self._pause

    @property
    def is_due(self) -> bool:
        """The next standby may be started."""
        return time.monotonic() >= self._due
