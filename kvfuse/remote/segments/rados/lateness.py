"""When a change is late, by what changes took before, and which objects have not answered since.

Late is `TIMES` times what a call took lately, not less than `LATE_MIN` (servers pause for a moment when they compact,
or lose a packet) and not more than `LATE_MAX`: nobody who stores waits longer for a stopped server before other objects
are tried. Where much is late the whole cluster is slow, and more work is no remedy: calls then wait for their deadline.
"""

from __future__ import annotations

import trio

TIMES = 4
LATE_MIN, LATE_MAX = 0.25, 0.6
"""seconds"""
GAIN = 1 / 8
"""weight of the last call in what calls take"""
FREE = 1024
SHARE = 0.1
"""Late changes beyond the first ones stay below this share of all changes."""


class Lateness:
    """What is known of the objects of one connection. Times are trio's."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._seconds = 0.0
        """that a call took, smoothed"""
        self.changes = 0
        self.late = 0
        self.since: dict[bytes, float] = {}
        """object that has not answered -> since when"""
        self._answering: set[bytes] = set()
        """objects that answered a change while others were silent"""

    def took(self, seconds: float) -> None:
        """A call of changes was answered, as a whole, after so many seconds."""
        self._seconds += GAIN * (seconds - self._seconds)

    @property
    def patience(self) -> float:
        """Seconds without any answer after which changes are late."""
        if self.late >= FREE + SHARE * self.changes:
            return self._deadline
        return min(max(TIMES * self._seconds, LATE_MIN), LATE_MAX, self._deadline)

    def silent(self, name: bytes, since: float) -> None:
        """An object has not answered since then."""
        self.since[name] = since
        self._answering.discard(name)

    def heard(self, name: bytes) -> None:
        """A silent object has answered."""
        del self.since[name]
        if not self.since:
            self._answering.clear()

    def changed(self, name: bytes) -> None:
        """A change of an object was answered."""
        self.changes += 1
        if self.since:
            self._answering.add(name)

    def answers(self, name: bytes) -> bool | None:
        """As `SegmentStore.answers`."""
        if not self.since:
            return True
        if name in self.since:
            return False
        return True if name in self._answering else None

    def is_lost(self, name: bytes) -> bool:
        """The object has been silent for longer than anybody waits for it."""
        since = self.since.get(name)
        return since is not None and trio.current_time() >= since + self._deadline

    def silence_of(self, name: bytes) -> str:
        """In words, for errors."""
        seconds = trio.current_time() - self.since.get(name, trio.current_time())
        return f": the object has not answered for {seconds:.1f} s; it is asked again when it answers a probe"
