"""The ring of `hf3fs`: operations go to the daemon as there is room, and come back in the order of their submission."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from errno import EACCES, EAGAIN, EBADF, EINVAL, EIO, EPIPE
from itertools import repeat
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from kvfuse.errors import Disconnected
from kvfuse.usrbio.client import File, Op, Priority, Ring
from kvfuse.usrbio.hf3fs.mount_link import MountLink, SharedThing, with_link
from kvfuse.usrbio.hf3fs.slices import iovec
from kvfuse.usrbio.protocol.wire import ENTRIES_MAX, Layout

OFFSET_MAX = (1 << 63) - 1
CANCEL = (1 << 64) - 1
"""what the cancels themselves are numbered; their completions tell nothing"""


class RegisteredDescriptor(NamedTuple):
    """What `hf3fs.register_fd` knows of a descriptor."""

    file: SharedThing[File]
    readable: bool
    writable: bool


registered: dict[int, RegisteredDescriptor] = {}
"""by the number of the descriptor"""


class HeldOperation(NamedTuple):
    slice: iovec
    file: SharedThing[File]
    offset: int
    """in the file"""
    userdata: Any


class InFlight:
    """Operations from submission to return, numbered in that order. One that is done waits for all before it."""

    def __init__(self) -> None:
        self._open: deque[HeldOperation] = deque()
        self._results: dict[int, int] = {}
        """number -> result, of open ones that are done"""
        self.first = 0
        """number of the first open one"""
        self._ready_until = 0
        """all open ones before this number are done"""

    @property
    def end(self) -> int:
        """The number that the next one will get."""
        return self.first + len(self._open)

    @property
    def ready_count(self) -> int:
        """How many may return."""
        return self._ready_until - self.first

    @property
    def all_ready(self) -> bool:
        return self._ready_until == self.end

    @property
    def unfinished(self) -> Iterable[int]:
        """Numbers of open ones that are not done."""
        return (number for number in range(self._ready_until, self.end) if number not in self._results)

    def add(self, operations: Iterable[HeldOperation]) -> None:
        self._open.extend(operations)

    def complete(self, numbers: Iterable[int], results: Iterable[int]) -> None:
        self._results.update(zip(numbers, results, strict=False))
        self._advance()

    def take(self, count: int) -> list[iovec]:
        """The next ``count`` slices, which are ready, with their results."""
        slices = []
        for number in range(self.first, self.first + count):
            part, _, _, userdata = self._open.popleft()
            part.result = self._results.pop(number)
            part.userdata = userdata
            slices.append(part)
        self.first += count
        return slices

    def give_up(self, until: int) -> None:
        """Those before the number ``until`` never return."""
        while self.first < until:
            self._open.popleft()
            self._results.pop(self.first, None)
            self.first += 1
        self._ready_until = max(self._ready_until, self.first)
        self._advance()

    def _advance(self) -> None:
        while self._ready_until in self._results:
            self._ready_until += 1


class ioring:
    """Reads, or writes, of up to ``entries`` slices at a time. Made by `hf3fs.make_ioring`.

    One thread may wait while another one prepares and submits.
    """

    def __init__(self, mount_point: str, entries: int, for_read: bool, priority: Priority) -> None:
        self.entries = entries
        """how many operations may be prepared and not have come back"""
        self._mount_point = mount_point
        self._for_read = for_read
        self._priority = priority
        self._start_anew()
        with_link(mount_point, self._attach)
        _rings.add(self)

    def _start_anew(self) -> None:
        """Nothing is prepared or under way, and there is no connection."""
        self._turn = threading.Lock()
        """its holder waits"""
        self._lock = threading.Lock()
        """of all below; never held while waiting"""
        self._submitted = threading.Condition(self._lock)
        self._prepared: list[HeldOperation] = []
        self._ledger = InFlight()
        self._unsent: deque[HeldOperation] = deque()
        """the last ones of the ledger, for which the daemon's ring has no room yet"""
        self._given_up: set[int] = set()
        """numbers of those that the daemon has still, but that do not return"""
        self._late_until = 0
        """those before this number were not done when a wait for them ended"""
        self._link: MountLink | None = None
        self._ring: Ring | None = None

    def _attach(self, link: MountLink) -> None:
        op = Op.READ if self._for_read else Op.WRITE
        self._ring = link.request(lambda client: client.ring(_ring_size(self.entries), ops=[op]))
        self._link = link
        self._detach = weakref.finalize(self, link.drop, self._ring)

    @staticmethod
    def size_for_entries(entries: int) -> int:
        """Bytes of shared memory that a ring of so many entries takes."""
        return Layout.of(_ring_size(entries), 0).size

    def destroy(self) -> None:
        """The daemon takes the ring back, as it does when it is deleted."""
        with self._lock:
            self._lose()

    # -- preparing and submitting --------------------------------------------------------------------

    def prepare(self, iov: iovec, read: bool, fd: int, off: int, userdata: Any = None) -> ioring:
        """Add the operation that fills ``iov`` from the file at ``off``, or writes it there. It begins with `submit`.
        What a timed-out `wait` left behind is given up now.

        BlockingIOError: ``entries`` operations have not come back yet. PermissionError: the file is not open for this.
        OSError: EBADF, the descriptor is not registered; EINVAL, the ring is for the other direction, or what is
        given is not a slice with bytes in it and an offset.
        """
        known = registered.get(fd)
        if known is None:
            raise OSError(EBADF, f"descriptor {fd} is not registered")
        if not (known.readable if read else known.writable):
            raise PermissionError(EACCES, f"descriptor {fd} is not open for {'reading' if read else 'writing'}")
        if bool(read) is not self._for_read:
            raise OSError(EINVAL, f"the ring is for {'reads' if self._for_read else 'writes'} alone")
        if not isinstance(iov, iovec) or iov.memory is None or not len(iov) or not 0 <= off <= OFFSET_MAX:
            raise OSError(EINVAL, f"{iov!r} at {off}: a part of an iovec, not empty, and an offset were expected")
        with self._lock:
            if self._late_until:
                self._guarded(self._give_up_late)
            if len(self._prepared) + self._ledger.end - self._ledger.first >= self.entries:
                raise BlockingIOError(EAGAIN, f"all {self.entries} entries of the ring are in use")
            self._prepared.append(HeldOperation(iov, known.file, off, userdata))
        return self

    def submit(self) -> ioring:
        """Begin what was prepared. BrokenPipeError where no daemon answers: what was prepared is forgotten."""
        with self._lock:
            prepared, self._prepared = self._prepared, []
            if self._link is None or not self._link.alive:
                self._lose()
                with_link(self._mount_point, self._attach)
            self._ledger.add(prepared)
            self._unsent.extend(prepared)
            self._guarded(self._send)
            self._submitted.notify_all()
        return self

    def _give_up_late(self) -> None:
        """What a timed-out wait left behind is given up. Until the daemon has let go of it, nothing else is sent."""
        until, first_unsent = self._late_until, self._ledger.end - len(self._unsent)
        late = [number for number in self._ledger.unfinished if number < until]
        self._late_until = 0
        self._ledger.give_up(until)
        for number in late:
            if number >= first_unsent:
                self._unsent.popleft()
            else:
                self._given_up.add(number)
                with contextlib.suppress(BlockingIOError):  # no room: it ends by itself
                    self._attached.prep_cancel(number, user_data=CANCEL)
        if self._given_up:
            self._attached.submit()

    def _send(self) -> None:
        """To the daemon, as much as there is room for. Disconnected."""
        ring = self._attached
        room = 0 if self._given_up else ring.entries - ring.in_flight
        while room and self._unsent:
            number = self._ledger.end - len(self._unsent)
            run = self._next_run(room)
            room -= len(run)
            try:
                self._place(ring, number, run)
            except OSError as error:  # the daemon refuses the memory or the file
                self._ledger.complete(range(number, number + len(run)), repeat(-(error.errno or EIO)))
        ring.submit()

    def _next_run(self, count_max: int) -> list[HeldOperation]:
        """Takes what is next and concerns one memory and one file."""
        unsent, run = self._unsent, [self._unsent.popleft()]
        memory, file = run[0].slice.memory, run[0].file
        while unsent and len(run) < count_max and unsent[0].slice.memory is memory and unsent[0].file is file:
            run.append(unsent.popleft())
        return run

    def _place(self, ring: Ring, number: int, run: list[HeldOperation]) -> None:
        """Prepare a run; ``number``: of its first operation. OSError, Disconnected."""
        first, link = run[0], self._link
        assert first.slice.memory is not None, "prepare takes only parts of an iovec"
        assert link is not None, "submit attaches"
        iov, file = first.slice.memory.on(link), first.file.on(link)
        if len(run) == 1:
            place_one = ring.prep_read if self._for_read else ring.prep_write
            length, priority = len(first.slice), self._priority
            place_one(iov, first.slice.base_off, file, first.offset, length, user_data=number, priority=priority)
            return
        place = ring.prep_reads if self._for_read else ring.prep_writes
        place(
            iov,
            [operation.slice.base_off for operation in run],
            file,
            [operation.offset for operation in run],
            [len(operation.slice) for operation in run],
            np.arange(number, number + len(run), dtype=np.uint64),
            priority=self._priority,
        )

    # -- waiting -------------------------------------------------------------------------------------

    def wait(
        self, *, max_results: int = 0, min_results: int = 0, timeout: timedelta | float | None = None
    ) -> list[iovec]:
        """The next slices, in the order of submission, that are done: at least ``min_results``, and at most that or
        ``max_results``, whichever is more (both 0: all that are done). Only ``min_results`` makes it wait.

        ``timeout``: seconds, or a timedelta; what is done by then comes back, be it nothing. Without one it waits for
        what is under way, and never for more. After the daemon died, what was under way has the result -EPIPE.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        deadline = None if seconds is None else monotonic() + seconds
        if not self._turn.acquire(timeout=-1 if seconds is None else max(seconds, 0)):
            return []
        try:
            with self._lock:
                self._wait_for(min_results, deadline)
                limit = max(min_results, max_results)
                ready = self._ledger.ready_count
                return self._ledger.take(min(ready, limit) if limit else ready)
        finally:
            self._turn.release()

    def _wait_for(self, count: int, deadline: float | None) -> None:
        """Until ``count`` operations are ready, or the deadline. The lock is held, but not while waiting."""
        while True:
            self._guarded(self._reap)
            missing = count - self._ledger.ready_count
            remaining = None if deadline is None else deadline - monotonic()
            if missing <= 0:
                return
            if remaining is not None and remaining <= 0:
                self._late_until = self._ledger.end
                return
            if not self._ledger.all_ready:
                self._sleep(missing, remaining)
            elif remaining is not None:
                self._submitted.wait(remaining)
            else:
                return

    def _sleep(self, count: int, timeout: float | None) -> None:
        """Until the daemon completed ``count`` operations, all it has, or the timeout."""
        ring = self._attached
        self._lock.release()
        try:
            ring.wait(count, timeout, max_results=0)
        except Disconnected:
            pass  # the reaping that follows sees it, too
        finally:
            self._lock.acquire()

    def _reap(self) -> None:
        """Note what is done, send what there is room for now. Disconnected."""
        if self._ring is None:
            return
        done = self._ring.peek()
        numbers = done["user_data"]
        returning = (numbers >= self._ledger.first) & (numbers != CANCEL)
        self._given_up.difference_update(numbers[~returning].tolist())
        self._ledger.complete(numbers[returning].tolist(), done["result"][returning].tolist())
        if self._unsent:
            self._send()

    # -- the end of a connection ---------------------------------------------------------------------

    @property
    def _attached(self) -> Ring:
        assert self._ring is not None, "there is a ring while anything is under way"
        return self._ring

    def _guarded(self, action: Callable[[], None]) -> None:
        """``action``, where the daemon may be found to be gone."""
        try:
            action()
        except Disconnected:
            if self._link is not None:
                self._link.alive = False
            self._lose()

    def _lose(self) -> None:
        """The daemon's ring: what is under way ends as broken."""
        self._ledger.complete(list(self._ledger.unfinished), repeat(-EPIPE))
        self._unsent.clear()
        self._given_up.clear()
        if self._ring is not None:
            self._detach()
        self._link = self._ring = None


def _ring_size(entries: int) -> int:
    """Entries of the daemon's ring: a power of two, and room to cancel each. What does not fit is sent later."""
    return min(1 << (2 * entries - 1).bit_length(), ENTRIES_MAX)


_rings: weakref.WeakSet[ioring] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In the child of a fork: what was prepared and what is under way is the parent's."""
    for ring in list(_rings):
        ring._start_anew()


os.register_at_fork(after_in_child=_leave_to_parent)
