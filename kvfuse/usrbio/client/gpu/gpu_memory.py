"""Memory of a device, registered with a client: what rings and block stores take in the place of an `Iov`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from kvfuse.errors import DeviceError
from kvfuse.usrbio.client.gpu.device import Mark, Stream
from kvfuse.usrbio.client.gpu.device_link import DeviceLink
from kvfuse.usrbio.client.gpu.host_staging import StagingPart
from kvfuse.usrbio.client.gpu.interfaces import DeviceBytes
from kvfuse.usrbio.client.gpu.ways import Way, choose_way
from kvfuse.usrbio.client.iov import Iov
from kvfuse.usrbio.client.session import Session
from kvfuse.usrbio.protocol.wire import Op, Request

ADAPTER_FAILURES = 3
"""of the daemon's adapter, one after the other, after which another way is taken for good"""


class GpuIov(AbstractContextManager["GpuIov"]):
    """Memory of a GPU. Made by `Client.iov_from_gpu`; it keeps the object whose memory it is.

    ``way``: how bytes get there, ``why_not``: the better ways, and why they are not taken. Rings and stores take it
    wherever they take an iov, and `range` of it as a buffer.
    """

    base = 0
    mirror = None
    writable = True

    def __init__(
        self, memory: DeviceBytes, link: DeviceLink, stream: Callable[[], int | None], forget: Callable[[GpuIov], None]
    ) -> None:
        """``stream``: the one that writes and reads the memory now; None: none that has to be waited for."""
        self.address = memory.address
        self.size = memory.size
        self.link = link
        self.failure: DeviceError | None = None
        """why the last copy that failed did"""
        self._owner: object = memory.owner
        self._stream = stream
        self._forget = forget
        self._is_closed = False
        self._choice = choose_way(link.capabilities)
        self._session: Session | None = None
        self.handle = 0
        """the daemon's number for it; 0: it knows staging memory, not this"""
        self._failures = 0
        """of the daemon's adapter, one after the other"""

    @property
    def way(self) -> Way:
        assert self._choice.way is not None
        return self._choice.way

    @property
    def why_not(self) -> dict[Way, str]:
        return self._choice.why_not

    def register(self, session: Session) -> None:
        """With the daemon of ``session``, where that and the device can do it; else another way is taken."""
        self.handle = 0
        self._choice = choose_way(self.link.capabilities._replace(lacks_adapter=session.lacks_adapter))
        if self.way is not Way.DMABUF:
            return
        try:
            descriptor, offset = self.link.device.export(self.address, self.size)
            try:
                reply, _ = session.request(Request.ADD_DMABUF, offset, self.size, descriptors=[descriptor])
            finally:
                os.close(descriptor)
        except (DeviceError, OSError) as error:
            self._choice = self.link.give_up(getattr(error, "strerror", None) or str(error))
            return
        self._session, self.handle, self._failures = session, reply.values[0], 0

    def note_adapter(self, *, failed: bool) -> None:
        """What the daemon's adapter was to bring came, or came by another way alone. If that goes on, that is taken."""
        self._failures = self._failures + 1 if failed else 0
        if self._failures >= ADAPTER_FAILURES and self.handle:
            self._choice = self.link.give_up(f"the daemon's adapter failed {self._failures} times; its log says why")
            self._drop()

    def takes(self, op: Op, flags: int) -> bool:
        """The daemon's adapter carries out such entries in this memory."""
        return self.handle != 0 and op in (Op.READ, Op.GET) and not flags

    def at(self, offset: int) -> int:
        """As of other iovs."""
        return offset

    def catch_up(self) -> DeviceError | None:
        """Wait until the stream that uses the memory has done all that it was given so far. Why that failed, if so."""
        try:
            if (before := self._stream()) is not None:
                self.link.into.follow(before)
                self.link.into.mark().wait()
        except DeviceError as error:
            return error
        return None

    def range(self, offset: int = 0, size: int | None = None) -> GpuRange:
        """A part of it, as a buffer for a `BlockStore`. ValueError: it reaches beyond."""
        size = self.size - offset if size is None else size
        self.check(offset, size)
        return GpuRange(self, offset, size)

    def check(self, offset: int, size: int) -> None:
        """ValueError unless the range is within."""
        if self._is_closed:
            raise ValueError("the memory of the GPU is not registered any more")
        if offset < 0 or size < 0 or offset + size > self.size:
            raise ValueError(f"{size} bytes at {offset} of {self.size} bytes of a GPU")

    def fill(self, offset: int, source: int, size: int, part: StagingPart | None = None) -> DeviceCopy:
        """Begin a copy from host memory at ``source``. ``part``: staging memory that comes back when it has ended."""
        return self._begin(self.link.into, lambda into: into.to_device(self.address + offset, source, size), part)

    def take(self, offset: int, target: int, size: int) -> DeviceCopy:
        """Begin a copy to host memory at ``target``."""
        return self._begin(self.link.out, lambda out: out.to_host(target, self.address + offset, size), None)

    def _begin(self, stream: Stream, copy: Callable[[Stream], Mark], part: StagingPart | None) -> DeviceCopy:
        try:
            if (before := self._stream()) is not None:
                stream.follow(before)
            return DeviceCopy(self, copy(stream), part)
        except DeviceError as error:
            return DeviceCopy(self, Failed(error), part)

    def close(self) -> None:
        """No call with it is under way. The object whose memory it is is let go of."""
        if not self._is_closed:
            self._is_closed = True
            self._forget(self)
            self._drop()
            self._owner = None

    def _drop(self) -> None:
        handle, self.handle = self.handle, 0
        if handle and self._session is not None:
            self._session.drop(Request.DROP_IOV, handle)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self.size


class GpuRange(NamedTuple):
    """A buffer: ``size`` bytes of a `GpuIov`."""

    iov: GpuIov
    offset: int
    size: int


class DeviceCopy(NamedTuple):
    """A copy that has begun."""

    iov: GpuIov
    mark: Mark
    part: StagingPart | None

    def finish(self) -> DeviceError | None:
        """Wait for its end. Why it failed, if it did."""
        try:
            self.mark.wait()
        except DeviceError as error:
            self.iov.failure = error
            return error
        finally:
            if self.part is not None:
                self.part.release()
        return None


class Failed:
    """The mark of a copy that did not begin."""

    def __init__(self, error: DeviceError) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error


class StagedEntry:
    """An entry of a ring whose bytes are memory of a device: the daemon works on a part of staging memory."""

    def __init__(self, iov: GpuIov, offset: int, length: int) -> None:
        """BlockingIOError while there is no room; ValueError, OSError, Disconnected."""
        iov.check(offset, length)
        self.part = iov.link.staging.take(length)
        self._iov = iov
        self._offset = offset
        self._length = length
        self._failure: DeviceError | None = None

    def bring(self) -> DeviceCopy:
        """Begin to copy what the entry writes, before it is submitted."""
        return self._iov.take(self._offset, self.part.address, self._length)

    def fail(self, error: DeviceError) -> None:
        """The copy of `bring` failed: so does the entry."""
        self._failure = error

    def end(self, op: Op, result: int, viewed: bool) -> DeviceCopy | None:
        """The entry completed: the daemon uses the part no more. A copy that is to be waited for."""
        if self._failure is not None:
            return DeviceCopy(self._iov, Failed(self._failure), self.part)
        if op in (Op.READ, Op.GET) and result > 0 and not viewed:
            return self._iov.fill(self._offset, self.part.address, min(result, self._length), self.part)
        self.part.release()
        return None


class StagedEntries(NamedTuple):
    """Entries of a ring, of which some have memory of devices: what the daemon works on."""

    iovs: list[Iov | GpuIov | None]
    offsets: list[int]
    entries: list[StagedEntry | None]
    """None: for those of other memory, whose iov and offset are as they were"""

    @property
    def handles(self) -> list[int]:
        return [iov.handle if iov is not None else 0 for iov in self.iovs]


def is_staged(op: Op, iov: Iov | GpuIov | None, flags: int = 0) -> bool:
    """An entry with this iov needs staging memory."""
    return isinstance(iov, GpuIov) and not iov.takes(op, flags)


@contextmanager
def staging(
    op: Op, iovs: Sequence[Iov | GpuIov | None], offsets: Iterable[int], lengths: Iterable[int], *, flags: int = 0
) -> Iterator[StagedEntries]:
    """Take parts of staging memory for entries: all or none. The body places them; if it fails they are given back.

    Errors as of `StagedEntry`.
    """
    staged = StagedEntries([], [], [])
    try:
        for iov, offset, length in zip(iovs, offsets, lengths, strict=True):
            entry = None
            if isinstance(iov, GpuIov) and not iov.takes(op, flags):
                entry = StagedEntry(iov, offset, length)
            staged.entries.append(entry)
            staged.iovs.append(entry.part.iov if entry is not None else iov)
            staged.offsets.append(entry.part.offset if entry is not None else offset)
        yield staged
    except BaseException:
        for entry in staged.entries:
            if entry is not None:
                entry.part.release()
        raise
