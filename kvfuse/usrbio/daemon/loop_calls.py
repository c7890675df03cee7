"""Executes calls of rings in the event loop: everything that a ring's thread cannot do by itself.

A `Call` runs as a task of its connection. The event loop has a content map show the bytes of a read or a block, and the
ring's thread copies them; else the event loop reads them into memory of the daemon, and the thread copies them from
there. So the daemon answers a call that timed out, or was cancelled, at once, and never writes to its memory later.

The ring's thread may wait for the kernel: it has the kernel drop what a change made stale, then completes the change.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import trio

from kvfuse import errors
from kvfuse.errnos import errno_of
from kvfuse.usrbio.daemon.block_calls import BlockCalls
from kvfuse.usrbio.daemon.call import Call, Done, ServedRing
from kvfuse.usrbio.daemon.call_memory import Share
from kvfuse.usrbio.daemon.client_memory import MappedIov
from kvfuse.usrbio.daemon.client_process import ClientProcess
from kvfuse.usrbio.daemon.deadlines import Deadlines
from kvfuse.usrbio.daemon.device_calls import DeviceCalls
from kvfuse.usrbio.daemon.device_iovs import DeviceIov
from kvfuse.usrbio.daemon.device_memory import DeviceStaging
from kvfuse.usrbio.daemon.file_calls import FileCalls
from kvfuse.usrbio.daemon.indexes import Indexes
from kvfuse.usrbio.daemon.namespace_access import NamespaceAccess
from kvfuse.usrbio.daemon.operations import OPERATIONS
from kvfuse.usrbio.daemon.put_batches import PutBatch, PutBatches, complete
from kvfuse.usrbio.daemon.registered_things import OpenFile
from kvfuse.usrbio.daemon.write_batches import WriteBatch, WriteBatches
from kvfuse.usrbio.protocol.wire import Op
from kvfuse.volume.api import RingApi
from kvfuse.volume.views.kernel_cache import KernelCache

log = logging.getLogger(__name__)

PUTS_SECONDS = 1e-3
"""how long puts that need no wait keep the event loop"""
PUTS_TOGETHER = 32
"""done in one go, which takes about as long"""
BESIDE_READERS = 0.25
"""part of that where callers of other namespaces read"""


@dataclass(eq=False, slots=True)
class _Runner:
    """A task that does puts one after the other. ``busy``: it is at one, and waits whenever another task runs."""

    busy: bool = False
    weight: int = 0
    """part of its user's calls in flight; the first runner has none"""


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
    _puts: deque[Call] = field(default_factory=deque)
    """not yet begun"""
    _runner: _Runner | None = None
    """the task that does them"""
    _done: dict[ServedRing, deque[Done]] = field(default_factory=dict)
    """calls for which the kernel must drop cached data before they are completed"""
    _kept: dict[ServedRing, deque[Done]] | None = None
    """those of ``_done`` that no ring's thread has yet, while puts are done one after the other without a wait"""

    def __post_init__(self) -> None:
        devices = self.devices = DeviceCalls(self.volume, self.nursery, self.staging, self._end_call)
        files = self.files = FileCalls(self.volume, self._finish, self._drop_content, devices.read)
        self.batches = WriteBatches(
            files, self.nursery, self.share, lambda ino: self._drop(self.kernel.drop_content, ino)
        )
        self.admission = NamespaceAccess(self.volume, self.peer)
        self.indexes = Indexes(self.volume, self.admission)
        blocks = self.blocks = BlockCalls(self.volume, self.admission, self._finish, files.read_here, devices)
        self.puts = PutBatches(blocks, self.share, self.nursery, self.start, self._complete_puts)
        self._deadlines: Deadlines[Call] = Deadlines(self.nursery, _expire)
        self._handlers = {op: one.in_loop(self) for op, one in OPERATIONS.items() if one.in_loop is not None}

    def start(self, calls: list[Call]) -> None:
        """Start a task for each call of a ring; writes of one file, and puts that need no wait, share one: cheaper.

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
            elif call.entry.op != Op.PUT or self.volume.blocks.waits(_directory_of(call)):
                self.nursery.start_soon(self._run, call)
            else:
                self._puts.append(call)
        self._start_runner()
        for file, of_file in writes.items():
            self.nursery.start_soon(self._run_writes, file, of_file)

    async def _run_writes(self, file: OpenFile, calls: list[Call]) -> None:
        """Execute small writes of one file: together, as far as possible; the others one by one."""
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

    def _start_runner(self) -> None:
        """Start a task for puts that were not begun, unless one runs that does not wait itself."""
        if not self._puts or (self._runner is not None and not self._runner.busy):
            return
        if self._runner is None or self.share.take(0, 1):
            self._runner = _Runner(weight=int(self._runner is not None))
            self.nursery.start_soon(self._run_puts, self._runner)

    async def _run_puts(self, runner: _Runner) -> None:
        """Do puts one after the other in one cancel scope: to enter one takes a good part of what a put takes.

        It completes those together that needed no wait: to wake a thread for each takes as long again. Where one has to
        wait, another task does the rest; after a turn of puts other tasks run.
        """
        while self._puts and self._runner is runner:
            if self._kept is None:  # else a task that waits has left some, which `_post_at_wait` has not posted yet
                self._kept = {}
            self.nursery.start_soon(self._post_at_wait)
            turn_end = time.perf_counter() + PUTS_SECONDS
            namespace = self._puts[0].namespace
            assert namespace is not None
            of = namespace.measures
            if len(of.readers) > (of in of.readers) and of.is_beside_readers():
                turn_end -= PUTS_SECONDS * (1 - BESIDE_READERS)
            with trio.CancelScope() as scope:
                while self._puts and self._runner is runner and not scope.cancel_called:
                    if self._put_together() and time.perf_counter() > turn_end:
                        break
                    if not self._puts:
                        break
                    call = self._puts.popleft()
                    call.scope = scope
                    runner.busy = True
                    try:
                        if not (call.ended or call.ring.completions.stopped):
                            await self._do_call(call)
                    finally:
                        runner.busy = False
                        self._end_call(call)
                    if time.perf_counter() > turn_end:
                        break
            if scope.cancelled_caught:
                call.ring.completions.give_up(call, errno.ECANCELED)
            if self._runner is runner:
                await self._post_kept()
                if self._puts:
                    await trio.lowlevel.checkpoint()
        if self._runner is runner:
            self._runner = None
        self.share.give(0, runner.weight)
        self._start_runner()

    def _put_together(self) -> bool:
        """Do the first puts, if they are of one namespace and need no wait. False: the next one must be done alone."""
        ready: list[Call] = []
        while self._puts and len(ready) < PUTS_TOGETHER and not self._puts[0].is_alone:
            if ready and self._puts[0].namespace is not ready[0].namespace:
                break
            ready.append(self._puts.popleft())
        try:
            done = self.blocks.put_together(ready) if ready else []
        except Exception:  # `_do_call` does each alone, also those stored by now: again, with the same bytes
            log.exception("puts together failed")
            done = [False] * len(ready)
        for call, is_done in zip(reversed(ready), reversed(done), strict=True):
            if is_done:
                self._end_call(call)
            else:
                call.is_alone = True
                self._puts.appendleft(call)
        return True in done

    async def _post_at_wait(self) -> None:
        """Post the kept calls, and start a task for the other puts, once the task that does puts waits."""
        await self._post_kept()
        self._start_runner()

    async def _post_kept(self) -> None:
        kept, self._kept = self._kept, None
        for ring, queue in (kept or {}).items():
            self._run_off_loop(ring, partial(self._complete_done, ring, queue))

    def cancel(self, cancels: list[Call]) -> None:
        """Cancel the call that each of ``cancels`` names."""
        for call in cancels:
            self._cancel(call)
            self.share.give(call.size)

    def _cancel(self, call: Call) -> None:
        completions = call.ring.completions
        found = self._under_way.get((call.ring, call.entry.offset))
        if not found and (self.batches.cancel(call) or self.puts.cancel(call)):
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
        self._puts.clear()
        self._done.clear()

    def _list_calls(self, ring: ServedRing) -> list[Call]:
        return [call for (other, _), calls in self._under_way.items() if other is ring for call in calls]

    async def _run(self, call: Call) -> None:
        completions = call.ring.completions
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
        if self._kept is not None:
            self._kept[ring] = queue
        else:
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

    def _complete_puts(self, batch: PutBatch, numbers: list[int]) -> None:
        """Have the kernel drop negative entries for the names of these puts, then complete them."""

        def tell() -> None:
            directory = _directory_of(batch)
            for number in numbers:
                self._drop(self.kernel.drop_name, directory, batch.names[number], 0)
            self._drop(self.kernel.drop_attributes, directory)
            complete(batch, numbers)

        self._run_off_loop(batch.ring, tell)

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


def _directory_of(call: Call) -> int:
    assert call.namespace is not None
    return call.namespace.ino


async def _run_in_thread(job: Callable[[], None]) -> None:
    with trio.CancelScope(shield=True):
        await trio.to_thread.run_sync(job)
