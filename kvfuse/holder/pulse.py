"""Detects a daemon whose event loop does not run; see `main`. Standard library only.

The holder asks (ASK) a second after each answer (ALIVE), and waits for one answer at a time. Only time since the
question in which the holder itself ran counts: not that of a suspended machine, nor of a holder that was stopped with
its daemon (`docker pause`). The holder waits for a daemon under a debugger; one that was merely stopped is silent.
"""

from __future__ import annotations

import time

ASK_SECONDS = 1.0
SILENT_SECONDS, START_SECONDS = 10.0, 60.0
"""timeouts of an answer; the second one before the daemon is ready: a large volume takes time to load, in parts within
the event loop"""
LOOK_SECONDS_MAX = 1.0
"""between two looks of the holder that count, at most"""


class Pulse:
    """Questions and answers of one daemon."""

    def __init__(self) -> None:
        self._looked = self._heard = time.monotonic()
        self._is_asked = False
        self.silent = 0.0
        """seconds since the unanswered question"""
        self.answers = False
        """the daemon answers ASK, as its HELLO says"""
        self.cause = self.reason = ""
        """cause and reason of the daemon's death, where they are known before"""

    def is_due(self) -> bool:
        """Whether to ask the daemon now. Called at each look, as it counts the silent time."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, LOOK_SECONDS_MAX), now
        if self._is_asked:
            self.silent += passed
            return False
        return now - self._heard >= ASK_SECONDS

    def note_question(self) -> None:
        self._is_asked, self.silent = True, 0.0

    def note_answer(self) -> None:
        self._is_asked, self.silent, self._heard = False, 0.0, time.monotonic()

    def is_lost(self, pid: int, *, is_ready: bool) -> bool:
        """Whether the daemon has been silent for too long."""
        if self.silent <= (SILENT_SECONDS if is_ready else START_SECONDS):
            return False
        if is_traced(pid):
            self.silent = 0.0
        return self.silent > 0.0


def is_traced(pid: int) -> bool:
    """Whether a debugger is attached to the process."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return False
    return any(line.startswith(b"TracerPid:") and line.split()[1] != b"0" for line in lines)
