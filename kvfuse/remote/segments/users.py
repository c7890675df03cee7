"""Calls that use something, counted on the event loop's thread, so that its end can wait for theirs."""

from __future__ import annotations

from typing import Self

import trio


class Users:
    """Counts those within ``with``; ``idle`` is set while there are none."""

    def __init__(self) -> None:
        self.idle = trio.Event()
        self.idle.set()
        self._count = 0

    def __enter__(self) -> Self:
        if self._count == 0:
            self.idle = trio.Event()
        self._count += 1
        return self

    def __exit__(self, *exc: object) -> None:
        self._count -= 1
        if self._count == 0:
            self.idle.set()


class UsedSegment(Users):
    """A segment as a store knows it, and the calls that use it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.removed = False
        self.gate: trio.Event | None = None
        """while it is set to one, new calls wait for that"""
        self.changed: set[int] | None = None
        """of a segment that is copied: numbers of its chunks that were written since they were"""
