"""What of a volume does not work at present, since when, and what to do: for status, doctor and metrics.

A volume goes on where its engines fail: what is new is kept in memory and stored later. So nobody would see it.
Each part that stores something says here when it failed, and when it worked again. Event loop only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvfuse import errors

COMMIT, WRITE, SYNC = "commit", "write", "sync"
REASONS = {
    COMMIT: "the record store refuses commits: what is new is in memory alone",
    WRITE: "the segments refuse writes: what is new is in memory alone",
    SYNC: "a sync failed: what it was to vouch for is being written again to other slots",
}
"""reason -> what it means. Labels of a metric, too"""


@dataclass
class Trouble:
    """One reason, from the first failure until it worked again."""

    since: float
    """seconds since the epoch"""
    error: Exception
    """the last one"""
    failures: int = 0


class Health:
    """Of one volume; ``troubles`` is empty where all is well."""

    def __init__(self) -> None:
        self.troubles: dict[str, Trouble] = {}

    def failed(self, reason: str, error: Exception) -> None:
        trouble = self.troubles.setdefault(reason, Trouble(time.time(), error))
        trouble.error = error
        trouble.failures += 1

    def worked(self, *reasons: str) -> None:
        for reason in reasons:
            self.troubles.pop(reason, None)

    @contextmanager
    def trying(self, reason: str) -> Iterator[None]:
        """What the body does worked, or failed with an EngineError."""
        try:
            yield
        except errors.EngineError as error:
            self.failed(reason, error)
            raise
        self.worked(reason)

    def rows(self) -> list[dict[str, Any]]:
        """For everybody who may use the mount: without paths."""
        return [
            {
                "reason": reason,
                "what": REASONS[reason],
                "why": _why(trouble.error),
                "since": round(trouble.since, 3),
                "failures": trouble.failures,
                "remedy": _remedy(trouble.error),
            }
            for reason, trouble in self.troubles.items()
        ]


def _why(error: Exception) -> str:
    if isinstance(error, errors.EngineFull):
        return "no space left"
    if isinstance(error, errors.EngineReadOnly):
        return "read-only file system"
    return "no answer in time" if isinstance(error, errors.EngineTimeout) else "input/output error"


def _remedy(error: Exception) -> str:
    if isinstance(error, errors.EngineFull):
        return "make room on the disk below the volume"
    if isinstance(error, errors.EngineReadOnly):
        return "dmesg says what turned the file system below read-only: check it, and mount it again"
    if isinstance(error, errors.EngineTimeout):
        return "see whether the servers below the volume answer"
    return "the log has the error; see dmesg and the disk below the volume"
