"""Waits for the bells of rings that sleep, in one thread.

A thread that wakes needs the interpreter before it can do anything, even to wait for its turn. So a client that rings
the bells of 256 rings at once would have 256 threads want the interpreter at once, beside the event loop. Therefore few
rings of a user wait for their bells themselves (`Interpreter.may_sleep_alone`): the doorman waits for all others, and
lines them up for their turns. Their threads wake when they have the turn.
"""

from __future__ import annotations

import os
import select
import threading
from typing import Self

from kvfuse.usrbio.daemon.interpreter import Interpreter, Seat

THREAD_NAME = "kvfuse-doorman"


class Doorman:
    """A context manager: it has a thread meanwhile. No ring may be left at the end."""

    def __init__(self, interpreter: Interpreter) -> None:
        self.interpreter = interpreter
        self._poll = select.epoll()
        self._seats: dict[int, Seat] = {}
        """of the rings that sleep, by their descriptors"""
        self._end = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def add(self, descriptor: int) -> None:
        """A ring that may sleep: it wakes when ``descriptor`` is readable."""
        self._poll.register(descriptor, 0)

    def remove(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)

    def watch(self, descriptor: int, seat: Seat) -> None:
        """Line the seat up, once, as soon as its descriptor is readable. Any thread."""
        self._seats[descriptor] = seat
        self._poll.modify(descriptor, select.EPOLLIN | select.EPOLLONESHOT)

    def _run(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._end:
                    return
                self.interpreter.line_up(self._seats.pop(descriptor))

    def __enter__(self) -> Self:
        self._poll.register(self._end, select.EPOLLIN)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.eventfd_write(self._end, 1)
        self._thread.join()
        self._poll.close()
        os.close(self._end)
