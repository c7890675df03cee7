"""Executes calls of rings in the event loop: everything that a ring's thread cannot do by itself.

A `Call` runs as a task of its connection. The event loop has a content map show the bytes of a read or a block, and the
ring's thread copies them; else the event loop reads them into memory of the daemon, and the thread copies them from
there. So the daemon answers a call that timed out, or was cancelled, at once, and never writes to its memory later.

The ring's thread may wait for the kernel: it has the kernel drop what a change made stale, then completes the change.
"""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import trio

from kvfuse import errors
from kvfuse.access.client_process import ClientProcess
from kvfuse.access.namespace_access import NamespaceAccess
from kvfuse.errnos import errno_of
from kvfuse.serving import NUMBERS, SERVED
from kvfuse.usrbio.daemon.block_calls import BlockCalls
from kvfuse.usrbio.daemon.call import Call, Done, ServedRing
from kvfuse.usrbio.daemon.call_memory import Share
from kvfuse.usrbio.daemon.client_memory import MappedIov
from kvfuse.usrbio.daemon.deadlines import Deadlines
from kvfuse.usrbio.daemon.device_calls import DeviceCalls
from kvfuse.usrbio.daemon.device_iovs import DeviceIov
from kvfuse.usrbio.daemon.device_memory import DeviceStaging
from kvfuse.usrbio.daemon.file_calls import FileCalls
from kvfuse.usrbio.daemon.indexes import Indexes
from kvfuse.usrbio.daemon.operations import OPERATIONS
from kvfuse.usrbio.daemon.registered_things import OpenFile
from kvfuse.usrbio.daemon.write_batches import WriteBatch, WriteBatches
from kvfuse.usrbio.protocol.wire import Op
from kvfuse.volume.api import RingApi
from kvfuse.volume.views.kernel_cache import KernelCache

log = logging.getLogger(__name__)

KINDS = {int(op): f"ring {op.name.lower()}" for op in Op}
"""operation -> kind of request, as log lines have it"""


@dataclass
class Calls:
    """The calls of one connection. ``nursery``: their tasks run in it, and end with it."""

    volume: RingApi
    kernel: KernelCache
    peer: ClientProcess
    nursery: trio.Nursery
    share: Share
    queued: Callable[[ServedRing], Iterable[Call]] = lambda ring: ()
    """calls of a ring that are queued for `start`"""
    staging: DeviceStaging = field(default_factory=DeviceStaging)
    _under_way: dict[tuple[ServedRing, int], list[Call]] = field(default_factory=dict)
    """(ring, user_data) -> calls in flight, oldest first"""
    _done: dict[ServedRing, deque[Done]] = field(default_factory=dict)
    """calls for which the kernel must drop cached data before they are completed"""

    def __post_init__(self) -> None:
        devices = self.devices = DeviceCalls(self.volume, self.nursery, self.staging, self._end_call)
        files = self.files = FileCalls(self.volume, self._finish, self._drop_content, devices.read)
        self.batches = WriteBatches(
            files, self.nursery, self.share, lambda ino: self._drop(self.kernel.drop_content, ino)
        )
        self.admission = NamespaceAccess(self.volume, self.peer)
        self.indexes = Indexes(self.volume, self.admission)
        self.blocks = BlockCalls(self.volume, self.admission, self._finish, files.read_here, devices)
        self._deadlines: Deadlines[Call] = Deadlines(self.nursery, _expire)
        self._handlers = {op: one.in_loop(self) for op, one in OPERATIONS.items() if one.in_loop is not None}

    def start(self, calls: list[Call]) -> None:
        """Start a task for each call of a ring; writes of one file share one: cheaper.

        From here on `cancel` finds these calls.
        """
        ring = calls[0].ring
        if ring.completions.stopped:  # `cancel_ring` ran before: nobody would end them
            for call in calls:
                self.share.give(call.size, call.weight)
            return
        writes: dict[OpenFile, list[Call]] = {}
        for call in calls:
            self._under_way.setdefault((ring, call.entry.user_data), []).append(call)
            if call.deadline < float("inf"):
                self._deadlines.add(call, call.deadline)
            if call.entry.op == Op.WRITE and call.file is not None:
                writes.setdefault(call.file, []).append(call)
            elif call.piece is not None:
                self.devices.start(call)
            else:
                self.nursery.start_soon(self._run, call)
        for file, of_file in writes.items():
            self.nursery.start_soon(self._run_writes, file, of_file)

    async def _run_writes(self, file: OpenFile, calls: list[Call]) -> None:
        """Execute small writes of one file: together, as far as possible; the others one by one."""
        SERVED.set((KINDS[Op.WRITE], next(NUMBERS)))
        written = [False] * len(calls)
        if len(calls) > 1 and not file.measures.limiters:
            try:
                written = await self.files.write_together(calls)
            except Exception as error:
                _answer(error, *calls)
        others = []
        for call, is_done in zip(calls, written, strict=True):  # before any wait, in which this may be cancelled
            if is_done:
                self._finish(Done(call, call.entry.length, content=file.ino))
                self._end_call(call)
            else:
                others.append(call)
        for call in others:
            await self._run(call)

    def cancel(self, cancels: list[Call]) -> None:
        """Cancel the call that each of ``cancels`` names."""
        for call in cancels:
            self._cancel(call)
            self.share.give(call.size)

    def _cancel(self, call: Call) -> None:
        completions = call.ring.completions
        found = self._under_way.get((call.ring, call.entry.offset))
        if not found and self.batches.cancel(call):
            return
        if not found or found[0].ended:
            completions.complete(call, -errno.ENOENT)
            return
        found[0].cancel()
        completions.give_up(found[0], errno.ECANCELED, partial(completions.complete, call, 0))

    async def end_writes(self, ring: ServedRing, iov: MappedIov | DeviceIov) -> None:
        """Cancel a ring's calls that use the iov; return when none of them can write into it, but for an adapter."""
        await ring.jobs.ask_thread(lambda: True)  # all that the thread served before is a call now
        if isinstance(iov, MappedIov):
            self.batches.cancel_batches(ring, iov)
        for call in self._list_calls(ring):
            if iov in (call.iov, call.device):
                call.cancel()
                ring.completions.give_up(call, errno.ECANCELED)
        for call in self.queued(ring):
            if call.iov is iov and isinstance(call, WriteBatch):
                call.cancel()
            elif iov in (call.iov, call.device):
                ring.completions.give_up(call, errno.ECANCELED)
        await ring.jobs.ask_thread(lambda: True)  # and does none of those any more

    def cancel_ring(self, ring: ServedRing) -> None:
        """Cancel what is in flight for a ring that has stopped."""
        self.batches.cancel_batches(ring)
        for call in self._list_calls(ring):
            call.cancel()

    def close(self) -> None:
        """Drop all references to calls, and so to clients' memory. No ring is left."""
        self._under_way.clear()
        self._deadlines.clear()
        self._done.clear()

    def _list_calls(self, ring: ServedRing) -> list[Call]:
        return [call for (other, _), calls in self._under_way.items() if other is ring for call in calls]

    async def _run(self, call: Call) -> None:
        completions = call.ring.completions
        SERVED.set((KINDS[call.entry.op], next(NUMBERS)))
        try:
            with trio.CancelScope() as scope:
                call.scope = scope
                if not (call.ended or completions.stopped):
                    await self._do_call(call)
        finally:
            self._end_call(call)
        if scope.cancelled_caught:
            completions.give_up(call, errno.ECANCELED)

    def _end_call(self, call: Call) -> None:
        self._deadlines.remove(call)
        key = (call.ring, call.entry.user_data)
        calls = self._under_way.get(key, [])
        if call in calls:
            calls.remove(call)  # mostly the first one, where a client uses a number for many
        if not calls:
            self._under_way.pop(key, None)
        call.data = None
        self.share.give(call.size, call.weight)

    async def _do_call(self, call: Call) -> None:
        try:
            await self._handlers[call.entry.op](call)
        except Exception as error:
            _answer(error, call)

    # -- the kernel ----------------------------------------------------------------------------------

    def _finish(self, done: Done) -> None:
        """Complete a call once the kernel has dropped what is stale; many at once where they follow each other fast."""
        if (seal := self.volume.seal) is not None:
            seal()
        ring = done.call.ring
        queue = self._done.setdefault(ring, deque())
        queue.append(done)
        if len(queue) > 1:
            return  # the job that takes the one before takes this, too
        self._run_off_loop(ring, partial(self._complete_done, ring, queue))

    def _complete_done(self, ring: ServedRing, queue: deque[Done]) -> None:
        """Have the kernel drop what queued calls changed, then complete them. May block: not in the event loop."""
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
        """Drop data of the kernel; what it refuses to drop expires. The change is done, and its call completes
        anyway."""
        try:
            drop(*arguments)
        except errors.KvfuseError as error:
            log.warning("%s", error)

    def _drop_content(self, ring: ServedRing, ino: int) -> None:
        self._run_off_loop(ring, partial(self._drop, self.kernel.drop_content, ino))

    def _run_off_loop(self, ring: ServedRing, job: Callable[[], None]) -> None:
        """Call ``job``, which may wait for the kernel, in the ring's thread; in any other one if that has ended."""
        if not ring.jobs.run_here(job):
            self.nursery.start_soon(_run_in_thread, job)


def _expire(call: Call) -> None:
    """Answer at the deadline, also where the task cannot be cancelled at once."""
    _count_failures(TimeoutError(), call)
    call.ring.completions.give_up(call, errno.ETIMEDOUT)
    call.cancel()


def _answer(error: Exception, *calls: Call) -> None:
    """End the calls with the errno of what was raised."""
    number = error.errno if isinstance(error, OSError) else errno_of(error)
    if number is None:
        log.error("%s failed", Op(calls[0].entry.op).name, exc_info=error)
    _count_failures(error, *calls)
    for call in calls:
        call.ring.completions.complete(call, -(number or errno.EIO))


def _count_failures(error: Exception, *calls: Call) -> None:
    for call in calls:
        of = call.namespace if call.namespace is not None else call.file
        if of is not None and not call.ended:
            of.measures.failed(error, is_read=call.entry.op in (Op.READ, Op.GET))


async def _run_in_thread(job: Callable[[], None]) -> None:
    with trio.CancelScope(shield=True):
        await trio.to_thread.run_sync(job)
