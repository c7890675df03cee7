"""What the event loop does for a ring: everything that a ring thread cannot do by itself.

A `Call` runs as a task of its connection. A read or a block whose bytes can be shown in a content map goes back to the
ring thread, which copies them; else they are read here, into memory of our own, and copied when they are
there - so a call that ran out of time, or was cancelled, is answered at once, and never written to later.

What was changed here is dropped from the kernel's cache by the ring thread, which may wait for the kernel, before the
completion is posted.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio

from kvfuse import errors
from kvfuse.errnos import errno_of
from kvfuse.usrbio.daemon.block_calls import BlockCalls
from kvfuse.usrbio.daemon.call import PIECE, Call, Done
from kvfuse.usrbio.daemon.call_memory import Share
from kvfuse.usrbio.daemon.client_memory import Iov
from kvfuse.usrbio.daemon.deadlines import Deadlines
from kvfuse.usrbio.daemon.peer import Peer
from kvfuse.usrbio.daemon.registry import OpenFile
from kvfuse.usrbio.daemon.ring_thread import RingThread
from kvfuse.usrbio.protocol.wire import Op
from kvfuse.volume.api import KernelCache, RingApi
from kvfuse.volume.views.content_map import ContentMap

log = logging.getLogger(__name__)

PUTS_SECONDS = 1e-3
"""how long puts that need no wait keep the event loop"""


@dataclass(eq=False, slots=True)
class _Row:
    """A call that is under way, and what cancels it; None: it has not begun, and does not once it has ended."""

    ring: RingThread
    call: Call
    scope: trio.CancelScope | None = None

    def cancel(self) -> None:
        if self.scope is not None:
            self.scope.cancel()


@dataclass(eq=False, slots=True)
class _Runner:
    """A task that does puts one after the other. ``busy``: it is at one, and waits whenever another task runs."""

    busy: bool = False
    weight: int = 0
    """of its user's calls under way; the first runner has none"""


@dataclass
class Calls:
    """The calls of one connection. ``nursery``: their tasks run in it, and end with it."""

    volume: RingApi[Any]
    kernel: KernelCache
    peer: Peer
    nursery: trio.Nursery
    share: Share
    queued: Callable[[RingThread], Iterable[Call]] = lambda ring: ()
    """calls of a ring that `start` will be told of later"""
    _under_way: dict[tuple[RingThread, int], list[_Row]] = field(default_factory=dict)
    """by ring and user_data, oldest first"""
    _puts: deque[_Row] = field(default_factory=deque)
    """not yet begun"""
    _runner: _Runner | None = None
    """who takes of them"""
    _done: dict[RingThread, deque[Done]] = field(default_factory=dict)
    """of which the kernel has to hear before they are completed"""
    _kept: dict[RingThread, deque[Done]] | None = None
    """those of ``_done`` that no thread was told of yet, while puts are done one after the other without a wait"""

    def __post_init__(self) -> None:
        blocks = BlockCalls(self.volume, self.peer, self._finish, self._read_here)
        self.caller = blocks.caller
        self._deadlines: Deadlines[_Row] = Deadlines(self.nursery, _expire)
        self._handlers: dict[int, Callable[[RingThread, Call], Awaitable[None]]] = {
            Op.READ: self._read,
            Op.WRITE: self._write,
            Op.FSYNC: self._fsync,
            Op.GET: blocks.get,
            Op.PUT: blocks.put,
            Op.EXISTS: blocks.exists,
            Op.DELETE: blocks.delete,
            Op.PREFETCH: blocks.prefetch,
        }

    def start(self, ring: RingThread, calls: list[Call]) -> None:
        """A task for each call; writes of one file, and puts that are not waited for, share one: it is much cheaper.

        From here on a call can be cancelled: whoever asks later finds it.
        """
        if ring.completions.stopped:  # `end` has been here: nobody would end them
            for call in calls:
                self.share.give(call.size, call.weight)
            return
        writes: dict[OpenFile, list[_Row]] = {}
        for call in calls:
            row = _Row(ring, call)
            self._under_way.setdefault((ring, call.entry.user_data), []).append(row)
            if call.deadline < float("inf"):
                self._deadlines.add(row, call.deadline)
            if call.entry.op == Op.WRITE and call.file is not None:
                writes.setdefault(call.file, []).append(row)
            elif call.entry.op != Op.PUT or self.volume.blocks.waits(_directory(call)):
                self.nursery.start_soon(self._run, row)
            else:
                self._puts.append(row)
        self._see_to_puts()
        for file, rows in writes.items():
            self.nursery.start_soon(self._run_writes, file, rows)

    async def _run_writes(self, file: OpenFile, rows: list[_Row]) -> None:
        """Small writes of one file: together, as far as they can be; the others one by one."""
        written = [False] * len(rows)
        if len(rows) > 1:
            try:
                async with self._using(rows[0].call):
                    writes = [(row.call.entry.offset, row.call.data) for row in rows]
                    written = await self.volume.write_in_slots(file.handle, writes)
            except Exception as error:
                _answer(error, rows[0].ring, *[row.call for row in rows])
        others = []
        for row, done in zip(rows, written, strict=True):  # before any wait, in which this may be cancelled
            if done:
                self._finish(row.ring, Done(row.call, row.call.entry.length, content=file.ino))
                self._ended(row)
            else:
                others.append(row)
        for row in others:
            await self._run(row)

    def _see_to_puts(self) -> None:
        """Have a task for puts that were not begun: not one that waits itself."""
        if not self._puts or (self._runner is not None and not self._runner.busy):
            return
        if self._runner is None or self.share.take(0, 1):
            self._runner = _Runner(weight=int(self._runner is not None))
            self.nursery.start_soon(self._run_puts, self._runner)

    async def _run_puts(self, runner: _Runner) -> None:
        """One after the other, in a scope that they share: to enter one takes a good part of what a put takes.

        Rings hear of those together that were done without a wait: to wake a thread for each takes as long again.
        Where one has to wait, another task goes on with the rest; after a turn of them others have theirs.
        """
        while self._puts and self._runner is runner:
            if self._kept is None:  # else a task that waits has left some, which `_at_a_wait` has not told yet
                self._kept = {}
            self.nursery.start_soon(self._at_a_wait)
            turn_end = time.perf_counter() + PUTS_SECONDS
            with trio.CancelScope() as scope:
                while self._puts and self._runner is runner and not scope.cancel_called:
                    row = self._puts.popleft()
                    row.scope = scope
                    runner.busy = True
                    try:
                        if not (row.call.ended or row.ring.completions.stopped):
                            await self._do(row.ring, row.call)
                    finally:
                        runner.busy = False
                        self._ended(row)
                    if time.perf_counter() > turn_end:
                        break
            if scope.cancelled_caught:
                row.ring.completions.give_up(row.call, errno.ECANCELED)
            if self._runner is runner:
                await self._tell_kept()
                if self._puts:
                    await trio.lowlevel.checkpoint()
        if self._runner is runner:
            self._runner = None
        self.share.give(0, runner.weight)
        self._see_to_puts()

    async def _at_a_wait(self) -> None:
        """The task that does puts lets others have their turn."""
        await self._tell_kept()
        self._see_to_puts()

    async def _tell_kept(self) -> None:
        kept, self._kept = self._kept, None
        for ring, queue in (kept or {}).items():
            self._off_loop(ring, partial(self._tell_kernel, ring, queue))

    def cancel(self, ring: RingThread, cancels: list[Call]) -> None:
        """What each of these wants to be cancelled."""
        for call in cancels:
            self._cancel(ring, call)
            self.share.give(call.size)

    def _cancel(self, ring: RingThread, call: Call) -> None:
        found = self._under_way.get((ring, call.entry.offset))
        if not found or found[0].call.ended:
            ring.completions.complete(call, -errno.ENOENT)
            return
        found[0].cancel()
        ring.completions.give_up(found[0].call, errno.ECANCELED, lambda: ring.completions.complete(call, 0))

    async def settled(self, ring: RingThread, iov: Iov) -> None:
        """Return when nothing that is under way for a ring can write into the iov any more."""
        await ring.jobs.ask(lambda: True)  # what the thread served before is a call of ours now
        for row in self._of(ring):
            if row.call.iov is iov:
                row.cancel()
                ring.completions.give_up(row.call, errno.ECANCELED)
        for call in self.queued(ring):
            if call.iov is iov:
                ring.completions.give_up(call, errno.ECANCELED)
        await ring.jobs.ask(lambda: True)  # and it is not at one of those any more

    def end(self, ring: RingThread) -> None:
        """Cancel what is under way for a ring that has stopped."""
        for row in self._of(ring):
            row.cancel()

    def close(self) -> None:
        """When no ring is left: keep nothing that keeps a client's memory."""
        self._under_way.clear()
        self._deadlines.clear()
        self._puts.clear()
        self._done.clear()

    def _of(self, ring: RingThread) -> list[_Row]:
        return [row for (other, _), rows in self._under_way.items() if other is ring for row in rows]

    async def release(self, file: OpenFile) -> None:
        """The file is not registered any more: the volume's handle goes with the last call that needs it."""
        file.dropped = True
        if not file.use_count:
            await self.volume.release(file.handle)

    @asynccontextmanager
    async def _using(self, call: Call) -> AsyncIterator[OpenFile]:
        """The file of a call, open meanwhile. BadHandle."""
        file = call.file
        assert file is not None
        if file.dropped:
            raise errors.BadHandle("the file is no longer registered")
        file.use_count += 1
        try:
            yield file
        finally:
            file.use_count -= 1
            if file.dropped and not file.use_count:
                with trio.CancelScope(shield=True):
                    await self.volume.release(file.handle)

    async def _run(self, row: _Row) -> None:
        ring, call = row.ring, row.call
        try:
            with trio.CancelScope() as scope:
                row.scope = scope
                if not (call.ended or ring.completions.stopped):
                    await self._do(ring, call)
        finally:
            self._ended(row)
        if scope.cancelled_caught:
            ring.completions.give_up(call, errno.ECANCELED)

    def _ended(self, row: _Row) -> None:
        self._deadlines.remove(row)
        key = (row.ring, row.call.entry.user_data)
        rows = self._under_way.get(key, [])
        if row in rows:
            rows.remove(row)  # the first one, mostly, where a client uses a number for many
        if not rows:
            self._under_way.pop(key, None)
        row.call.data = None
        self.share.give(row.call.size, row.call.weight)

    async def _do(self, ring: RingThread, call: Call) -> None:
        try:
            await self._handlers[call.entry.op](ring, call)
        except Exception as error:
            _answer(error, ring, call)

    # -- files ---------------------------------------------------------------------------------------

    async def _read(self, ring: RingThread, call: Call) -> None:
        entry = call.entry
        async with self._using(call) as file:
            if not await self._show(ring, call, file.handle, file.map, entry.offset, entry.length):
                await self._read_here(ring, call, file.handle, entry.offset, entry.length)

    async def _show(
        self, ring: RingThread, call: Call, handle: Any, content: ContentMap, offset: int, length: int
    ) -> bool:
        """Let the ring thread do it, once the map shows the range; False: it does not, or did not help."""
        end = min(offset + length, content.size)
        if end > offset:
            await self.volume.show(handle, offset // content.chunk_size, (end - 1) // content.chunk_size)
        return await ring.jobs.ask(lambda: ring.server.read_again(call))

    async def _read_here(self, ring: RingThread, call: Call, handle: Any, offset: int, length: int) -> None:
        iov, iov_offset = call.iov, call.entry.iov_offset
        assert iov is not None
        done, is_end = 0, False
        while done < length and not is_end:
            buffer = memoryview(bytearray(min(length - done, PIECE)))
            count = await self.volume.read_into(handle, offset + done, buffer)
            put = partial(iov.write, iov_offset + done, buffer[:count])
            if not await _copy_in_ring_thread(ring, call, put):
                return
            done += count
            is_end = count < len(buffer)
        ring.completions.complete(call, done)

    async def _write(self, ring: RingThread, call: Call) -> None:
        written = 0
        data = call.data
        async with self._using(call) as file:
            try:
                while written < len(data):
                    written += await self.volume.write(file.handle, call.entry.offset + written, data[written:])
            except errors.KvfuseError:
                if not written:
                    raise
            except trio.Cancelled:  # some of it may be done
                self._off_loop(ring, lambda: self.kernel.drop_content(file.ino))
                raise
        self._finish(ring, Done(call, written, content=file.ino))

    async def _fsync(self, ring: RingThread, call: Call) -> None:
        async with self._using(call) as file:
            await self.volume.fsync(file.handle)
        ring.completions.complete(call, 0)

    def _finish(self, ring: RingThread, done: Done) -> None:
        """Complete a call after the kernel has dropped what is no longer true; many at once where they come fast."""
        queue = self._done.setdefault(ring, deque())
        queue.append(done)
        if len(queue) > 1:
            return  # whoever is to take the one before takes this, too
        if self._kept is not None:
            self._kept[ring] = queue
        else:
            self._off_loop(ring, partial(self._tell_kernel, ring, queue))

    def _tell_kernel(self, ring: RingThread, queue: deque[Done]) -> None:
        """Not in the event loop: it may wait for the kernel."""
        rows = []
        while queue:
            rows.append(queue[0])
            for name, ino in rows[-1].names:
                self._drop(self.kernel.drop_name, rows[-1].directory, name, ino)
            queue.popleft()
        for directory in {row.directory for row in rows if row.names}:
            self._drop(self.kernel.drop_attributes, directory)
        for ino in {row.content for row in rows if row.content}:
            self._drop(self.kernel.drop_content, ino)
        for row in rows:
            if row.found is not None:
                ring.completions.answer_keys(row.call, row.found)
        ring.completions.complete_many([(row.call, row.result) for row in rows if row.found is None])

    def _drop(self, drop: Callable[..., None], *arguments: object) -> None:
        """What the kernel refuses to drop ends by its timeout: the change itself is done, and told so."""
        try:
            drop(*arguments)
        except errors.KvfuseError as error:
            log.warning("%s", error)

    def _off_loop(self, ring: RingThread, job: Callable[[], None]) -> None:
        """Call ``job``, which may wait for the kernel, in the ring's thread; in any other one if that has ended."""
        if not ring.jobs.run_here(job):
            self.nursery.start_soon(_in_any_thread, job)


def _expire(row: _Row) -> None:
    """Answer at the deadline, also where what is under way cannot be cancelled at once."""
    row.ring.completions.give_up(row.call, errno.ETIMEDOUT)
    row.cancel()


def _answer(error: Exception, ring: RingThread, *calls: Call) -> None:
    """End the calls with the errno of what was raised."""
    number = error.errno if isinstance(error, OSError) else errno_of(error)
    if number is None:
        log.error("%s failed", Op(calls[0].entry.op).name, exc_info=error)
    for call in calls:
        ring.completions.complete(call, -(number or errno.EIO))


async def _copy_in_ring_thread(ring: RingThread, call: Call, put: Callable[[], None]) -> bool:
    """Write to a client's memory, which may have to wait for the client. False: the call has ended."""

    def attempt() -> bool:
        with ring.turns.copying(ring.seat):
            put()
        return False

    has_ended = await ring.jobs.ask(lambda: ring.completions.attempt(call, attempt))
    return not (has_ended or ring.completions.stopped)


def _directory(call: Call) -> int:
    assert call.namespace is not None
    return call.namespace.ino


async def _in_any_thread(job: Callable[[], None]) -> None:
    with trio.CancelScope(shield=True):
        await trio.to_thread.run_sync(job)
