"""Waits for the bells of sleeping rings, in one thread.

A thread that wakes needs the interpreter before it can do anything, even wait for its turn. So a client that rings
the bells of 256 rings at once would have 256 threads compete with the event loop for it. Therefore few
rings of a user wait for their bells themselves (`Interpreter.may_sleep_alone`): the bell watcher waits for all others,
and queues them for their turns. Their threads wake when they have the turn.
"""

from __future__ import annotations

import os
import select
import threading
from typing import Self

from kvfuse.usrbio.daemon.interpreter import Interpreter, Seat

THREAD_NAME = "kvfuse-bells"


class BellWatcher:
    """Runs the thread, as a context manager. All rings must be removed before its end."""

    def __init__(self, interpreter: Interpreter) -> None:
        self.interpreter = interpreter
        self._poll = select.epoll()
        self._seats: dict[int, Seat] = {}
        """descriptor -> seat of a sleeping ring"""
        self._end = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def add(self, descriptor: int) -> None:
        """Add a ring, to be woken when ``descriptor`` is readable."""
        self._poll.register(descriptor, 0)

    def remove(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)

    def watch(self, descriptor: int, seat: Seat) -> None:
        """Queue the seat for a turn, once, when its descriptor is readable. Any thread."""
        self._seats[descriptor] = seat
        self._poll.modify(descriptor, select.EPOLLIN | select.EPOLLONESHOT)

    def _run(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._end:
                    return
                self.interpreter.queue_seat(self._seats.pop(descriptor))

    def __enter__(self) -> Self:
        self._poll.register(self._end, select.EPOLLIN)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.eventfd_write(self._end, 1)
        self._thread.join()
        self._poll.close()
        os.close(self._end)
