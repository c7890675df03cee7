"""Long work of the event loop in slices, between which others have their turns."""

from __future__ import annotations

import time

import trio

SLICE_SECONDS = 0.003


class Pace:
    """For one piece of work: `rest` after each step of it."""

    def __init__(self) -> None:
        self._end = time.perf_counter() + SLICE_SECONDS

    async def rest(self) -> None:
        """Let others go on, if the slice is used up. Only then it is an await at which memory may change."""
        if time.perf_counter() > self._end:
            await trio.lowlevel.checkpoint()
            self._end = time.perf_counter() + SLICE_SECONDS
