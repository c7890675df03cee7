"""Whether the event loop of a daemon runs; see `main`. Standard library only.

The holder asks (ASK) a second after each answer (ALIVE), and waits for one answer at a time. What counts is the time
since the question in which the holder itself ran: not that of a machine that slept, nor of a holder that was stopped
with its daemon (`docker pause`). A daemon under a debugger is waited for; one that was merely stopped is silent.
"""

from __future__ import annotations

import time

ASK_SECONDS = 1.0
SILENT_SECONDS, START_SECONDS = 10.0, 60.0
"""after which a daemon that does not answer is replaced; and before it is ready: to load a large volume takes its time,
and not all of that leaves the event loop"""
LOOK_SECONDS_MAX = 1.0
"""that count between two looks of the holder"""


class Pulse:
    """Of one daemon, from its turn on."""

    def __init__(self) -> None:
        self._looked = self._heard = time.monotonic()
        self._is_asked = False
        self.silent = 0.0
        """seconds since the question that is not answered"""
        self.answers = False
        """it knows the question, as its HELLO says"""
        self.cause = self.reason = ""
        """of its death, where that is known before"""

    def is_due(self) -> bool:
        """The daemon is to be asked now; to be called at each look."""
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
        """It has been silent for too long."""
        if self.silent <= (SILENT_SECONDS if is_ready else START_SECONDS):
            return False
        if is_traced(pid):
            self.silent = 0.0
        return self.silent > 0.0


def is_traced(pid: int) -> bool:
    """A debugger has the process."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return False
    return any(line.startswith(b"TracerPid:") and line.split()[1] != b"0" for line in lines)
