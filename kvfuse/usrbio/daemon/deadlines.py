"""Expires calls in flight at their deadlines: one timer for all, as a task for each would cost more than most calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

import trio

T = TypeVar("T")


class Deadlines(Generic[T]):
    """Calls ``expire`` with each item that is not removed before its deadline. Event loop only.

    The timer is a task of ``nursery``, from the first deadline on; it ends with the nursery.
    """

    def __init__(self, nursery: trio.Nursery, expire: Callable[[T], None]) -> None:
        self._nursery = nursery
        self._expire = expire
        self._due: dict[T, float] = {}
        """deadlines in the event loop's time, which is the monotonic clock with an offset"""
        self._offset = trio.current_time() - time.monotonic()
        self._alarm = float("inf")
        """next run of the timer; its item may have been removed by then"""
        self._sleep: trio.CancelScope | None = None

    def add(self, item: T, deadline: float) -> None:
        """Add an item. ``deadline``: monotonic seconds."""
        due = self._due[item] = deadline + self._offset
        if due >= self._alarm:
            return
        self._alarm = due
        if self._sleep is None:
            self._sleep = trio.CancelScope()
            self._nursery.start_soon(self._run)
        self._sleep.deadline = due

    def remove(self, item: T) -> None:
        """Remove an item, if it has a deadline."""
        self._due.pop(item, None)

    def clear(self) -> None:
        self._due.clear()

    async def _run(self) -> None:
        while self._sleep is not None:
            with self._sleep:
                await trio.sleep_forever()
            now = trio.current_time()
            for item in [item for item, due in self._due.items() if due <= now]:
                del self._due[item]
                self._expire(item)
            self._alarm = min(self._due.values(), default=float("inf"))
            self._sleep = trio.CancelScope(deadline=self._alarm)
