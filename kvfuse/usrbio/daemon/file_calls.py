"""Executes calls for registered files, in the event loop."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import trio

from kvfuse import errors
from kvfuse.usrbio.daemon.call import PIECE, Call, Done, ServedRing
from kvfuse.usrbio.daemon.client_memory import MappedIov
from kvfuse.usrbio.daemon.once_buffers import ONCE_PIECE, OnceBuffers
from kvfuse.usrbio.daemon.registered_things import OpenFile
from kvfuse.volume.api import RingApi


@dataclass
class FileCalls:
    """The file calls of one connection. An error that one raises becomes its result.

    ``finish``: completes a call that changed something. ``drop_content``: has the kernel drop the bytes of an inode.
    ``read_to_device``: as `read_here`, for calls that have a device.
    """

    volume: RingApi
    finish: Callable[[Done], None]
    drop_content: Callable[[ServedRing, int], None]
    read_to_device: Callable[[Call, Any, int, int], Awaitable[None]]
    buffers: OnceBuffers = field(default_factory=OnceBuffers)

    async def read(self, call: Call) -> None:
        """Have the ring's thread read once the content map shows the range; otherwise read here."""
        offset, length = call.entry.offset, call.entry.length
        async with self.using(call.file) as file:
            end = min(offset + length, file.map.size)
            if file.measures.limiters:
                await file.measures.throttle(max(0, end - offset))
            if end > offset:
                chunk_size = file.map.chunk_size
                if not file.goes_past_cache(length):
                    await self.volume.files.verify_ahead(file.handle, offset, end)
                elif call.device is None and await self._read_once(call, file.handle, offset, end - offset):
                    return
                await self.volume.files.show(file.handle, offset // chunk_size, (end - 1) // chunk_size)
            if not await call.try_again():
                await self.read_here(call, file.handle, offset, length)

    async def _read_once(self, call: Call, handle: Any, offset: int, length: int) -> bool:
        """Read past the page cache. False: another way has to, for all of it."""
        iov, iov_offset, done = call.iov, call.entry.iov_offset, 0
        assert iov is not None
        while done < length:
            async with self.buffers.lend() as buffer:
                part = min(length - done, ONCE_PIECE)
                data = await self.volume.files.read_once(handle, offset + done, part, buffer)
                if data is None:
                    return False
                if await call.attempt(partial(_copy, iov, iov_offset + done, data)):
                    return True
                done += len(data)
        call.ring.completions.complete(call, done)
        return True

    async def read_here(self, call: Call, handle: Any, offset: int, length: int) -> None:
        """Read into memory of the daemon, from which the ring's thread copies."""
        if call.device is not None:
            await self.read_to_device(call, handle, offset, length)
            return
        iov, iov_offset = call.iov, call.entry.iov_offset
        assert iov is not None
        done, is_end = 0, False
        while done < length and not is_end:
            buffer = memoryview(bytearray(min(length - done, PIECE)))
            count = await self.volume.files.read_into(handle, offset + done, buffer)
            if await call.attempt(partial(_copy, iov, iov_offset + done, buffer[:count])):
                return
            done += count
            is_end = count < len(buffer)
        call.ring.completions.complete(call, done)

    async def write(self, call: Call) -> None:
        written = 0
        data = call.data
        async with self.using(call.file) as file:
            if file.measures.limiters:
                await file.measures.throttle(len(data))
            try:
                while written < len(data):
                    written += await self.volume.files.write(file.handle, call.entry.offset + written, data[written:])
            except errors.KvfuseError:
                if not written:
                    raise
            except trio.Cancelled:  # some of it may be done
                self.drop_content(call.ring, file.ino)
                raise
        self.finish(Done(call, written, content=file.ino))

    async def write_together(self, calls: Sequence[Call]) -> list[bool]:
        """Do small writes of one file together where possible. For each call: whether it was done."""
        offsets = np.array([call.entry.offset for call in calls])
        lengths = np.array([len(call.data) for call in calls])
        async with self.using(calls[0].file) as file:
            done = await self.volume.files.write_in_slots(file.handle, offsets, lengths, [call.data for call in calls])
        chosen = set(done.tolist())
        return [number in chosen for number in range(len(calls))]

    async def fsync(self, call: Call) -> None:
        async with self.using(call.file) as file:
            if file.is_cut:  # a daemon was killed before it had stored all that was written to the file
                if call.ring.completions.complete(call, -errno.EIO):  # the client knows it from here on
                    file.is_cut = False
                    file.when_told()
                return
            await self.volume.files.fsync(file.handle)
        call.ring.completions.complete(call, 0)

    async def release(self, file: OpenFile) -> None:
        """Release the volume's handle of a dropped file, now or with the last call that uses it."""
        file.dropped = True
        if not file.use_count:
            await self.volume.files.release(file.handle)

    @asynccontextmanager
    async def using(self, file: OpenFile | None) -> AsyncIterator[OpenFile]:
        """The file of a call, kept open meanwhile. BadHandle: it was dropped."""
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
                    await self.volume.files.release(file.handle)


def _copy(iov: MappedIov, offset: int, data: memoryview, call: Call) -> None:
    """Write to a client's memory, which may have to wait for the client."""
    with call.ring.turns.copying(call.ring.seat):
        iov.write(offset, data)
