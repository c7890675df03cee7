"""Executes GETs and READs into memory of devices, in the event loop.

A ring's thread finds blocks that are in shared memory (`find_block`), and the event loop has the adapter copy those of
one pass as one list. It reads other blocks, and files, into staging memory first. It holds an entry while the adapter
has it: the completion waits for the last write. So an adapter has less time than a client gives the daemon.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import trio

from kvfuse.access.namespace_handle import BlockDoor, NamespaceHandle
from kvfuse.usrbio.daemon.call import Call, Completion, Entry, RefusedEntry
from kvfuse.usrbio.daemon.device_iovs import DeviceIov
from kvfuse.usrbio.daemon.device_memory import STAGING_PART, DevicePiece, DeviceStaging
from kvfuse.usrbio.daemon.held_blocks import HeldBlock
from kvfuse.usrbio.protocol.wire import LENGTH_MAX
from kvfuse.volume.api import RingApi

LIST_SIZE = 64 << 20
"""bytes of one list of copies, about"""
LIST_MAX = 1024
"""copies in it"""
FILL_SECONDS = 5.0
"""time that an adapter may take for a list"""
LEAST_SECONDS = 0.5
"""the same, where an entry's deadline is nearer: clients wait for that a second longer"""


def check_range(entry: Entry, iov: DeviceIov) -> None:
    """Refused, unless the target of a GET or READ lies in the memory."""
    if entry.length > LENGTH_MAX or entry.flags:
        raise RefusedEntry(errno.EINVAL)
    if entry.length > iov.size or entry.iov_offset > iov.size - entry.length:
        raise RefusedEntry(errno.EFAULT)


def find_block(call: Call) -> Completion | None:
    """Note where the block of a GET is in shared memory, and hold it there. Ring's thread only.

    Returns an answer where nothing is to copy; else None, also where it noted nothing: the event loop has to look.
    """
    namespace, entry = call.namespace, call.entry
    assert namespace is not None
    call.piece = call.data = None
    if namespace.blocks is not None:
        return _find_row(call, namespace, namespace.blocks)
    binding = namespace.bindings.get(call.names[0])
    if binding is None or not binding.valid or not namespace.is_checked:
        return None
    content = binding.map
    version, size = content.version, content.size
    row = content.rows.get(0)
    answer = None
    if size > entry.length:
        answer = Completion(-errno.EMSGSIZE, size)
    elif not size:
        answer = Completion(0)
    elif size > 0 and row is not None and row.block is not None and row.source is not None:
        piece = DevicePiece(row.block.home.memory.bytes, row.start, size, entry.iov_offset)
        call.piece, call.data = piece, row.block  # the block keeps its bytes
    if content.version != version or not binding.valid:
        call.piece = call.data = None
        return None
    if call.piece is not None:
        call.data.note_use()
        if content.notes_reads:
            content.note_read()
    return answer


def _find_row(call: Call, namespace: NamespaceHandle, door: BlockDoor) -> Completion | None:
    """As `find_block`, of a block that is a row."""
    if not (namespace.is_checked and door.sees_all and door.is_current):
        return None
    held = door.store.hold(namespace.ino, call.names[0])
    if held is None or namespace.is_absent or namespace.is_cut_off:
        return None
    if held.size > call.entry.length:
        return Completion(-errno.EMSGSIZE, held.size)
    note_row(call, held)
    return None


def note_row(call: Call, held: HeldBlock) -> None:
    """Note that the bytes of a GET are those of a block that is held."""
    call.piece = DevicePiece(held.home.memory.bytes, held.offset, held.size, call.entry.iov_offset)
    call.data = held


@dataclass(eq=False, slots=True)
class _Filling:
    """One piece of a call. ``answer``: the call's, once the piece is copied; None: more pieces follow."""

    call: Call
    piece: DevicePiece
    answer: Completion | None
    done: Callable[[bool], object]
    """called at its end, with whether it was copied"""


@dataclass(eq=False, slots=True)
class _Queue:
    """Pieces that wait for one memory. ``list_ended``: set when the present list has ended."""

    waiting: deque[_Filling]
    list_ended: trio.Event = field(default_factory=trio.Event)


@dataclass(eq=False)
class DeviceCalls:
    """The device calls of one connection. Event loop only. ``ended``: called when a call of `start` has ended."""

    volume: RingApi
    nursery: trio.Nursery
    staging: DeviceStaging
    ended: Callable[[Call], None]
    _queues: dict[DeviceIov, _Queue] = field(default_factory=dict)
    """queues of memory that a task fills"""

    def start(self, call: Call) -> None:
        """Answer a GET whose block was found. `Calls.cancel` finds it until then."""
        namespace, piece, began = call.namespace, call.piece, time.perf_counter()
        assert namespace is not None
        assert piece is not None

        def done(is_filled: bool) -> None:
            if is_filled:
                namespace.measures.read_bytes += piece.size
                namespace.measures.seconds["get"].add(time.perf_counter() - began)
            self.ended(call)

        self._put(_Filling(call, piece, Completion(piece.size), done))

    async def answer_found(self, call: Call) -> bool:
        """Answer a GET whose block was found after the event loop prepared it. False: it was not."""
        if call.piece is None:
            return False
        if await self._fill(call, call.piece, Completion(call.piece.size)) and call.namespace is not None:
            call.namespace.measures.read_bytes += call.piece.size
        return True

    async def read(self, call: Call, handle: Any, offset: int, length: int) -> None:
        """Answer a call with bytes of a file, by way of staging memory."""

        async def read_part(done: int, target: memoryview) -> int:
            return await self.volume.files.read_into(handle, offset + done, target)

        await self._answer_by_staging(call, length, read_part)

    async def answer_bytes(self, call: Call, data: bytearray) -> None:
        """Answer a GET with these bytes, by way of staging memory."""

        async def copy_part(done: int, target: memoryview) -> int:
            target[:] = memoryview(data)[done : done + len(target)]
            return len(target)

        await self._answer_by_staging(call, len(data), copy_part)

    async def _answer_by_staging(
        self, call: Call, length: int, read_part: Callable[[int, memoryview], Awaitable[int]]
    ) -> None:
        """``read_part``: fill memory with bytes from an offset; fewer than fit: that is their end."""
        done, is_end = 0, False
        while done < length and not is_end:
            async with self.staging.take_part() as (memory, start):
                size = min(length - done, STAGING_PART)
                count = await read_part(done, memory[start : start + size].data)
                piece = DevicePiece(memory, start, count, call.entry.iov_offset + done)
                if count and not await self._fill(call, piece, None):
                    return
            done += count
            is_end = count < size
        call.ring.completions.complete(call, done)

    async def _fill(self, call: Call, piece: DevicePiece, answer: Completion | None) -> bool:
        """Have one piece copied. False: the call is completed with an error, if it was not before.

        It returns when the adapter has ended the piece, also when cancelled.
        """
        outcomes: list[bool] = []
        ended = trio.Event()

        def done(is_filled: bool) -> None:
            outcomes.append(is_filled)
            ended.set()

        self._put(_Filling(call, piece, answer, done))
        with trio.CancelScope(shield=True):
            await ended.wait()
        return outcomes[0]

    async def wait_for_lists(self) -> None:
        """Return when the present lists have ended: later ones have no calls of rings that have stopped."""
        for queue in list(self._queues.values()):
            await queue.list_ended.wait()

    # -- lists ---------------------------------------------------------------------------------------

    def _put(self, filling: _Filling) -> None:
        iov = filling.call.device
        assert iov is not None
        if (queue := self._queues.get(iov)) is not None:
            queue.waiting.append(filling)
            return
        self._queues[iov] = _Queue(deque([filling]))
        iov.idle = trio.Event()
        self.nursery.start_soon(self._serve, iov)

    async def _serve(self, iov: DeviceIov) -> None:
        """Fill memory until nothing is left to be filled."""
        queue = self._queues[iov]
        try:
            await trio.lowlevel.checkpoint()  # pieces of this pass of the event loop make one list
            while queue.waiting:
                await _fill_list(iov, _take_list(queue.waiting))
                queue.list_ended.set()
                queue.list_ended = trio.Event()
        finally:
            del self._queues[iov]
            while queue.waiting:
                queue.waiting.popleft().done(False)
            queue.list_ended.set()
            iov.idle.set()


async def _fill_list(iov: DeviceIov, fillings: list[_Filling]) -> None:
    is_filled = False
    try:
        if fillings:
            is_filled = await iov.memory.fill([one.piece for one in fillings], _seconds_for(fillings))
    finally:
        for one in fillings:
            one.call.ring.completions.release_call(one.call, one.answer if is_filled else Completion(-errno.EIO))
            one.done(is_filled)


def _take_list(queue: deque[_Filling]) -> list[_Filling]:
    """Hold the calls of the next list. Those that were completed meanwhile are left out."""
    taken: list[_Filling] = []
    size = 0
    while queue and size < LIST_SIZE and len(taken) < LIST_MAX:
        one = queue.popleft()
        if one.call.ring.completions.hold_call(one.call):
            taken.append(one)
            size += one.piece.size
        else:
            one.done(False)
    return taken


def _seconds_for(fillings: list[_Filling]) -> float:
    left = min(one.call.deadline for one in fillings) - time.monotonic()
    return min(FILL_SECONDS, max(LEAST_SECONDS, left))
