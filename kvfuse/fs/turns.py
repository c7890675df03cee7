"""Whose turn it is to read the next request of the kernel.

pyfuse3 has a few workers; one holds a lock and waits for the kernel, the others wait for the lock. trio's lock is fair:
it is handed to the one that waits longest. So every request changed workers, and the one that had just answered - and
could have read the next request at once - went to the end of the queue: two scheduling passes a request, which cost
more than most requests do. Here the lock goes to who asks first. A worker whose request did not make it wait keeps its
turn; the next one takes over when it does wait.

A request can go before it is read: its caller was killed, or it was the word that the caller of another one, answered
just now, had got a signal. A thread that then reads would wait in the kernel, event loop and all threads of Python with
it, until somebody asks for something. So the descriptor does not block, and is looked at again after each wait.

pyfuse3 looks up what it needs of trio in its own attribute ``trio``, so that asyncio can stand there
(`pyfuse3.asyncio.enable`). That is where `take_turns` puts this.
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

TURN_SECONDS = 0.0005
"""How long workers may answer one request after the other before the event loop's other tasks have theirs."""
SPIN_SECONDS = 100e-6
"""How long a worker looks for the next request before it sleeps: a caller with many small ones needs less than that
between them, and to sleep and be woken takes as long and more."""
REMEMBERED_SECONDS = 20 * SPIN_SECONDS
"""the longest wait that is remembered as such, so that one long wait does not outweigh many short ones"""
TRIAL_WAITS = 16
"""Each so manieth wait is awake although the last ones were long: sleeping makes short ones long, and hides them."""


class TurnLock:
    """``async with`` of `trio.Lock`, without fairness, and without a checkpoint where it is free. Of one event loop.

    While it is free and somebody waits, one of those is on its way to take it: it may find that another was faster.
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
    """Between the kernel's requests and the workers: open, or shut for a while, or for good. Of one event loop."""

    def __init__(self) -> None:
        self.is_shut = False
        self._is_over = False
        self._changed = trio.Event()

    def shut(self) -> None:
        """No request is read any more; those that were are answered. The others wait in the kernel."""
        self.is_shut = True

    def open(self) -> None:
        """Go on."""
        if not self._is_over:
            self.is_shut = False
            self._wake_waiters()

    def end(self) -> None:
        """Whoever waits, or comes, is told that there is nothing to wait for."""
        self.is_shut = self._is_over = True
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def wait_until_open(self) -> None:
        """Until it is open. trio.ClosedResourceError: it never will be."""
        while self.is_shut:
            if self._is_over:
                raise trio.ClosedResourceError("requests are for the next daemon")
            await self._changed.wait()


class Requests:
    """Waits for the kernel's requests: a short while awake where they come quickly, else asleep.

    It reports to ``wakefulness`` how long it waits. Nobody gets through while ``gate`` is shut.
    """

    def __init__(self, wakefulness: Wakefulness, gate: RequestGate | None = None) -> None:
        self._wakefulness = wakefulness
        self._gate = gate or RequestGate()
        self._poll = select.poll()
        self._descriptor = -1
        self._turn_began = 0.0
        self._usual = 0.0
        """what waits took lately, in seconds"""
        self._slept = 0
        """waits since the last one awake"""
        self._is_watched = False

    async def wait_for_request(self, descriptor: int) -> None:
        """`trio.lowlevel.wait_readable`, but the other tasks may not get a turn where a request comes at once.

        From here on nobody waits in a read of ``descriptor``.
        """
        if descriptor != self._descriptor:
            os.set_blocking(descriptor, False)
            self._poll = select.poll()
            self._poll.register(descriptor, select.POLLIN)
            self._descriptor = descriptor
        while True:
            if self._gate.is_shut:
                await self._gate.wait_until_open()
            began = time.perf_counter()
            if self._poll.poll(0) or self._spin_for_request(began):
                self._wakefulness.note_wait(0.0)
                if time.perf_counter() - self._turn_began < TURN_SECONDS:
                    return
                await trio.lowlevel.checkpoint()
                self._turn_began = time.perf_counter()
            else:
                await self._sleep_until_request(descriptor)
                self._turn_began = time.perf_counter()
                self._learn_wait(self._turn_began - began)
            if self._poll.poll(0) and not self._gate.is_shut:  # it has not gone meanwhile
                return

    async def _sleep_until_request(self, descriptor: int) -> None:
        """Until there is a request."""
        if self._wakefulness.is_kept and not self._is_watched:
            self._is_watched = True
            trio.lowlevel.spawn_system_task(failing.vital_task, self._watch_for_idleness)
        await trio.lowlevel.wait_readable(descriptor)

    async def _watch_for_idleness(self) -> None:
        """While processors are kept awake: end that when no request came for a while. A timer of each wait costs more
        than most requests do.
        """
        while self._wakefulness.is_kept:
            before = self._turn_began
            await trio.sleep(LINGER_SECONDS)
            if self._turn_began == before:
                self._wakefulness.allow_sleep()
        self._is_watched = False

    def _spin_for_request(self, began: float) -> bool:
        """Look for a request for a while, if that pays. Each look lets threads run."""
        if self._usual > SPIN_SECONDS and self._slept < TRIAL_WAITS:
            self._slept += 1
            return False
        self._slept = 0
        while time.perf_counter() - began < SPIN_SECONDS:
            if self._poll.poll(0):
                self._usual = 0.0
                return True
        return False

    def _learn_wait(self, took: float) -> None:
        self._wakefulness.note_wait(took)
        self._usual += (min(took, REMEMBERED_SECONDS) - self._usual) / 4


SessionLoop = Callable[..., Awaitable[None]]
"""A worker of pyfuse3's: reads and answers requests until the mount is gone."""


def retry_reads(loop: SessionLoop) -> SessionLoop:
    """``loop``, begun again where the request went in the instant between the last look at it and the read.

    What the loop says then leaves its buffer behind: that must be rare.
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
                raise  # the mount is gone
            except Exception as error:
                failing.end_process(error)  # before the other workers give up what they do
                raise

    return wrapped


def take_turns(wakefulness: Wakefulness, gate: RequestGate | None = None) -> None:
    """Have pyfuse3's workers take turns as said above. To be called before each `pyfuse3.main`."""
    names = vars(pyfuse3)
    if names["trio"] is trio:
        names["_session_loop"] = retry_reads(names["_session_loop"])
    # New ones for each mount: its descriptor may have the number of the last one's.
    lowlevel = SimpleNamespace(**{**vars(trio.lowlevel), "wait_readable": Requests(wakefulness, gate).wait_for_request})
    names["trio"] = SimpleNamespace(**{**vars(trio), "Lock": TurnLock, "lowlevel": lowlevel})
