"""Jobs that others give to a ring's thread, which does them between entries, and how they wake it."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import trio


class Jobs:
    """Of one ring, whose thread owns it and does them. Any thread. ``in_loop``: calls something in the event loop."""

    def __init__(self, in_loop: Callable[[Callable[[], object]], None]) -> None:
        self.here: deque[Callable[[], None]] = deque()
        """may wait for the kernel: called without the turn"""
        self.in_turn: deque[Callable[[], None]] = deque()
        """wait for nothing, and copy much: called with the turn"""
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """wakes the thread from within the daemon: of the bell the client has a descriptor, too, and may empty it"""
        self.is_reading = False
        """the thread may be in the middle of a copy; once it is seen to be not, it looks at maps anew"""
        self.stopped = False
        self._in_loop = in_loop
        self._lock = threading.Lock()

    def run_here(self, job: Callable[[], None]) -> bool:
        """Let the ring's thread call ``job``, which may wait, soon. False, and it will not, if the ring has ended."""
        return self._append(self.here, job)

    def _append(self, jobs: deque[Callable[[], None]], job: Callable[[], None]) -> bool:
        with self._lock:
            if self.stopped:
                return False
            jobs.append(job)
            os.eventfd_write(self.wake, 1)
            return True

    async def ask(self, job: Callable[[], bool]) -> bool:
        """The result of ``job``, called by the ring's thread in its turn; False if that has ended. Event loop only."""
        done = trio.Event()
        token = trio.lowlevel.current_trio_token()
        results: list[bool] = []

        def run() -> None:
            results.append(False)
            try:
                results[0] = job()
            finally:
                token.run_sync_soon(done.set)

        if not self._append(self.in_turn, run):
            return False
        await done.wait()
        return results[0]

    def tell_when_done(self, told: Callable[[], None]) -> bool:
        """As `ReadingThread.tell_when_done` says."""
        with self._lock:
            if not self.is_reading:
                return False
            self.here.append(partial(self._in_loop, told))
            os.eventfd_write(self.wake, 1)
            return True

    def nudge(self) -> None:
        """Have the thread look again at what waits."""
        with self._lock:
            if not self.stopped:
                os.eventfd_write(self.wake, 1)

    def stop(self) -> None:
        """Take no more, and wake the thread."""
        with self._lock:
            self.stopped = True
            os.eventfd_write(self.wake, 1)

    def end(self) -> None:
        """The thread ends: it reads nothing any more, and does what it was given."""
        with self._lock:
            self.stopped = True
            self.is_reading = False
        for jobs in (self.here, self.in_turn):  # the kernel has to hear of changes, whether or not anybody waits
            while jobs:
                jobs.popleft()()

    def close(self) -> None:
        """After the thread has ended."""
        os.close(self.wake)
