"""Queues jobs for a ring's thread, which does them between entries."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import trio


class Jobs:
    """The jobs of one ring, whose thread owns and does them. Any thread. ``in_loop``: calls in the event loop."""

    def __init__(self, in_loop: Callable[[Callable[[], object]], None]) -> None:
        self.here: deque[Callable[[], None]] = deque()
        """may wait for the kernel: called without the turn"""
        self.in_turn: deque[Callable[[], None]] = deque()
        """never wait, but may copy much: called with the turn"""
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """wakes the thread from within the daemon: the client could empty the bell, as it has a descriptor of it"""
        self.is_reading = False
        """the thread may be copying; after it was False, the thread reads maps again"""
        self.stopped = False
        self._in_loop = in_loop
        self._lock = threading.Lock()

    def run_here(self, job: Callable[[], None]) -> bool:
        """Let the ring's thread call ``job``, which may wait, soon. False, and it will not, if the ring has ended."""
        return self._append(self.here, job)

    def run_in_turn(self, job: Callable[[], None]) -> bool:
        """Let the ring's thread call a job that never waits, as `run_here`: the thread keeps its turn."""
        return self._append(self.in_turn, job)

    def _append(self, jobs: deque[Callable[[], None]], job: Callable[[], None]) -> bool:
        with self._lock:
            if self.stopped:
                return False
            jobs.append(job)
            os.eventfd_write(self.wake, 1)
            return True

    async def ask_thread(self, job: Callable[[], bool]) -> bool:
        """Have the ring's thread call ``job`` in its turn: the result; False if that has ended. Event loop only."""
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
        """Call ``told`` in the event loop when the present copy ends; see `ReadingThread.tell_when_done`."""
        with self._lock:
            if not self.is_reading:
                return False
            self.here.append(partial(self._in_loop, told))
            os.eventfd_write(self.wake, 1)
            return True

    def nudge(self) -> None:
        """Have the thread check its waiting entries again."""
        with self._lock:
            if not self.stopped:
                os.eventfd_write(self.wake, 1)

    def stop(self) -> None:
        """Accept no more jobs, and wake the thread."""
        with self._lock:
            self.stopped = True
            os.eventfd_write(self.wake, 1)

    def end(self) -> None:
        """Do the jobs that are left, at the end of the thread."""
        with self._lock:
            self.stopped = True
            self.is_reading = False
        for jobs in (self.here, self.in_turn):  # some invalidate the kernel's cache
            while jobs:
                jobs.popleft()()

    def close(self) -> None:
        """Close the descriptor. The thread has ended."""
        os.close(self.wake)
