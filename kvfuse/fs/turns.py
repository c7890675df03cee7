"""Schedules pyfuse3's workers: decides which one reads the kernel's next request, so that few task switches are needed.

pyfuse3 has a few workers; one holds a lock and waits for the kernel, the others wait for the lock. trio's lock is fair:
it passes to the worker that waits longest. So every request changed workers, and the one that had just answered - and
could have read the next request at once - queued last: two scheduling passes a request, which cost more than most
requests do. Here the first worker that asks gets the lock. A worker whose request did not make it wait keeps its turn;
the next one takes over when it does wait.

A request may disappear before it is read: its caller was killed, or it was the INTERRUPT of a request that was just
answered. A thread that then reads would block in the kernel, with the event loop and all Python threads, until the next
request. So the descriptor is non-blocking, and polled again after each wait.

pyfuse3 finds trio by its own attribute ``trio``, which `pyfuse3.asyncio.enable` replaces, too. `take_turns` sets that
attribute.
"""

from __future__ import annotations

import errno
import functools
import os
import select
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pyfuse3
import trio

from kvfuse import failing
from kvfuse.fs.wakefulness import LINGER_SECONDS, Wakefulness
from kvfuse.native import fusewire

TURN_SECONDS = 0.0005
"""longest time that workers answer requests in a row before the event loop's other tasks run"""
BLOCKED_SECONDS = 100e-6
"""time for which a worker blocks the thread until the next request, before it waits as a task: a caller with many small
ones needs less than that between them, and the event loop's wait takes several times the processor time"""
REMEMBERED_SECONDS = 20 * BLOCKED_SECONDS
"""longer waits count as this one, so that one long wait does not outweigh many short ones"""
TRIAL_WAITS = 16
"""after so many waits as a task one wait blocks the thread, as tasks make short waits long, and hide them"""


class TurnLock:
    """``async with`` of `trio.Lock`, without fairness, and without a checkpoint if the lock is free. One event loop.

    While the lock is free and tasks wait, one of them is scheduled to take it; another task may be faster.
    """

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: list[trio.lowlevel.Task] = []
        self._is_one_coming = False

    async def __aenter__(self) -> None:
        while self._is_held:
            task = trio.lowlevel.current_task()
            self._waiting.append(task)
            await trio.lowlevel.wait_task_rescheduled(functools.partial(self._leave_queue, task))
            self._is_one_coming = False
        self._is_held = True

    async def __aexit__(self, *_: object) -> None:
        self._is_held = False
        if self._waiting and not self._is_one_coming:
            self._is_one_coming = True
            trio.lowlevel.reschedule(self._waiting.pop())  # the last one: its memory is warm

    def _leave_queue(self, task: trio.lowlevel.Task, _: object) -> trio.lowlevel.Abort:
        self._waiting.remove(task)
        return trio.lowlevel.Abort.SUCCEEDED


class RequestGate:
    """Stops the reading of requests for a while, or for good. One event loop."""

    def __init__(self) -> None:
        self.is_shut = False
        self._is_over = False
        self._changed = trio.Event()

    def shut(self) -> None:
        """Stop reading. Workers answer what they have read; later requests wait in the kernel."""
        self.is_shut = True
        fusewire.hold_readers()

    def open(self) -> None:
        """Read on, unless the gate has ended."""
        if not self._is_over:
            self.is_shut = False
            fusewire.let_readers_go_on()
            self._wake_waiters()

    def end(self) -> None:
        """Shut for good: present and later waiters get ClosedResourceError."""
        self.is_shut = self._is_over = True
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def wait_until_open(self) -> None:
        """Wait until the gate is open. trio.ClosedResourceError: it is shut for good."""
        while self.is_shut:
            if self._is_over:
                raise trio.ClosedResourceError("requests are for the next daemon")
            await self._changed.wait()


class Requests:
    """Waits for the kernel's requests: in the thread where they follow quickly, else as a task.

    It reports each wait to ``wakefulness``, and waits while ``gate`` is shut.
    """

    def __init__(self, wakefulness: Wakefulness, gate: RequestGate | None = None) -> None:
        self._wakefulness = wakefulness
        self._gate = gate or RequestGate()
        self._poll = select.poll()
        self._connection = self._source = -1
        """what the kernel's requests come by, and what is readable once there is one"""
        self._turn_began = 0.0
        self._usual = 0.0
        """moving average of waits, in seconds"""
        self._slept = 0
        """waits since the last one in the thread"""
        self._is_watched = False

    async def wait_for_request(self, descriptor: int) -> None:
        """As `trio.lowlevel.wait_readable`, but other tasks may not run where a request is pending at once.

        Makes ``descriptor`` non-blocking.
        """
        if descriptor != self._connection:
            os.set_blocking(descriptor, False)
            self._connection = descriptor
        while True:
            source = fusewire.source(descriptor)
            if source != self._source:
                self._poll = select.poll()
                self._poll.register(source, select.POLLIN)
                self._source = source
            if self._is_shut:
                await self._gate.wait_until_open()
                continue
            began = time.perf_counter()
            if self._poll.poll(0) or self._block_for_request(source):
                self._wakefulness.note_wait(0.0)
                if time.perf_counter() - self._turn_began < TURN_SECONDS:
                    return
                await trio.lowlevel.checkpoint()
                self._turn_began = time.perf_counter()
            else:
                await self._sleep_until_request(source)
                self._turn_began = time.perf_counter()
                self._learn_wait(self._turn_began - began)
            if self._poll.poll(0) and not self._is_shut:  # the request is still pending
                return

    @property
    def _is_shut(self) -> bool:
        """Requests stay in the kernel; those that readers have read do not."""
        return self._gate.is_shut and self._source == self._connection

    def notify_closing(self, descriptor: int) -> None:
        """As `trio.lowlevel.notify_closing`, for whoever waits for a request."""
        trio.lowlevel.notify_closing(descriptor)
        if descriptor == self._connection and self._source not in (-1, descriptor):
            trio.lowlevel.notify_closing(self._source)

    async def _sleep_until_request(self, descriptor: int) -> None:
        """Sleep until a request is pending."""
        if self._wakefulness.is_kept and not self._is_watched:
            self._is_watched = True
            trio.lowlevel.spawn_system_task(failing.vital_task, self._watch_for_idleness)
        await trio.lowlevel.wait_readable(descriptor)

    async def _watch_for_idleness(self) -> None:
        """Let processors sleep again after a while without a request. A timer for each wait would cost more than most
        requests do.
        """
        while self._wakefulness.is_kept:
            before = self._turn_began
            await trio.sleep(LINGER_SECONDS)
            if self._turn_began == before:
                self._wakefulness.allow_sleep()
        self._is_watched = False

    def _block_for_request(self, source: int) -> bool:
        """Block the thread until a request is there, for a while, if waits were short lately."""
        if self._usual > BLOCKED_SECONDS and self._slept < TRIAL_WAITS:
            self._slept += 1
            return False
        self._slept = 0
        is_there = fusewire.await_request(source, BLOCKED_SECONDS)
        if is_there:
            self._usual = 0.0
        return is_there

    def _learn_wait(self, took: float) -> None:
        self._wakefulness.note_wait(took)
        self._usual += (min(took, REMEMBERED_SECONDS) - self._usual) / 4


SessionLoop = Callable[..., Awaitable[None]]
"""a worker of pyfuse3: reads and answers requests until the connection ends"""


def retry_reads(loop: SessionLoop) -> SessionLoop:
    """Wrap ``loop``: restart it where the request disappears between the last poll and the read.

    The loop's error then leaks its buffer: that is rare.
    """

    @functools.wraps(loop)
    async def wrapped(*arguments: object) -> None:
        while True:
            try:
                return await loop(*arguments)
            except BlockingIOError as error:
                if error.errno != errno.EAGAIN or "fuse_session_receive_buf" not in str(error):
                    raise  # an operation's
            except OSError:
                raise  # the connection has ended
            except Exception as error:
                failing.end_process(error)  # before the nursery cancels the other workers
                raise

    return wrapped


def take_turns(wakefulness: Wakefulness, gate: RequestGate | None = None) -> None:
    """Have pyfuse3's workers take turns as the module's head says. Call it before each `pyfuse3.main`."""
    names = vars(pyfuse3)
    if names["trio"] is trio:
        names["_session_loop"] = retry_reads(names["_session_loop"])
    # New objects for each mount: its descriptor may reuse the number of the last mount's.
    requests = Requests(wakefulness, gate)
    changed = {"wait_readable": requests.wait_for_request, "notify_closing": requests.notify_closing}
    lowlevel = SimpleNamespace(**{**vars(trio.lowlevel), **changed})
    names["trio"] = SimpleNamespace(**{**vars(trio), "Lock": TurnLock, "lowlevel": lowlevel})
