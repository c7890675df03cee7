"""Queues entries that a ring's thread has taken and not yet served: a line for each priority."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvfuse.usrbio.daemon.columns import as_words
from kvfuse.usrbio.protocol.queues import Entries
from kvfuse.usrbio.protocol.wire import Priority

TURN_ENTRIES = 256
TURN_BYTES = 16 << 20
"""served before the next look for higher priorities"""
LOW_TURN = 8
"""One turn of so many serves the priority that has waited for longest."""
_PRIORITY_BITS = np.uint64(0xFF00)
"""the priority in the first word of an SQE"""
CLASSES = (Priority.HIGH, Priority.NORMAL, Priority.LOW)


class _WaitingEntries(NamedTuple):
    """Entries that were taken together."""

    rows: Entries
    taken_at: float


class Lines:
    """Waiting entries of one ring, a queue for each priority. The ring's thread owns it.

    ``serve``: gets entries and when they were taken; returns those for which there is no memory now.
    """

    def __init__(self, serve: Callable[[Entries, float], Entries]) -> None:
        self._serve_entries = serve
        self._waiting: dict[int, deque[_WaitingEntries]] = {kind: deque() for kind in CLASSES}
        self._all = tuple(self._waiting.values())
        self._turn = 0
        self._served_at = dict.fromkeys(reversed(CLASSES), 0)
        """priority -> the last turn that it had; the lowest first"""

    @property
    def is_empty(self) -> bool:
        high, normal, low = self._all
        return not (high or normal or low)

    def add(self, rows: Entries, taken_at: float) -> None:
        """Let entries wait for their turn."""
        if not len(rows):
            return
        if not np.count_nonzero(as_words(rows)[:, 0] & _PRIORITY_BITS):
            self._waiting[Priority.NORMAL].append(_WaitingEntries(rows, taken_at))
            return
        priorities = rows["priority"]
        for kind in CLASSES:  # an unknown priority is refused later
            chosen = rows[priorities == kind if kind else ~np.isin(priorities, CLASSES[::2])]
            if len(chosen):
                self._waiting[kind].append(_WaitingEntries(chosen, taken_at))

    def serve(self, entries_max: int) -> bool:
        """Serve up to ``entries_max`` entries of the highest waiting priority. False: none waits, or no memory."""
        kinds = [kind for kind in CLASSES if self._waiting[kind]]
        self._turn += 1
        if self._turn % LOW_TURN == 0:
            kinds = [kind for kind in sorted(self._served_at, key=self._served_at.__getitem__) if kind in kinds]
        for kind in kinds:
            for _ in range(len(self._waiting[kind])):
                if self._serve_first(self._waiting[kind], entries_max):
                    self._served_at[kind] = self._turn
                    return True
        return False

    def _serve_first(self, line: deque[_WaitingEntries], entries_max: int) -> bool:
        """Serve the first batch of a queue; entries that lack memory move to its end. False: all lack it."""
        rows, taken_at = line[0]
        count = min(len(rows), entries_max)
        if count > 1:
            total = 0
            for number, length in enumerate(rows["length"][:count].tolist()):
                total += length
                if total > TURN_BYTES and number:
                    count = number
                    break
        if count == len(rows):
            line.popleft()
        else:
            line[0] = _WaitingEntries(rows[count:], taken_at)
        waiting = self._serve_entries(rows[:count], taken_at)
        if len(waiting):
            line.append(_WaitingEntries(waiting, taken_at))
        return len(waiting) < count

    def remove(self, user_data: int) -> bool:
        """Remove the first waiting entry with this ``user_data``. False where there is none."""
        for line in self._waiting.values():
            for number, (rows, taken_at) in enumerate(line):
                found = np.flatnonzero(rows["user_data"] == user_data)
                if len(found):
                    line[number] = _WaitingEntries(np.delete(rows, found[0]), taken_at)
                    if not len(line[number].rows):
                        del line[number]
                    return True
        return False
