"""Memory of a device, registered with a client: what rings and block stores take in the place of an `Iov`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, cast

from kvfuse.errors import DeviceError
from kvfuse.usrbio.client.gpu.device import Mark, Stream
from kvfuse.usrbio.client.gpu.interfaces import DeviceMemory
from kvfuse.usrbio.client.gpu.link import Link
from kvfuse.usrbio.client.gpu.staging import Part
from kvfuse.usrbio.client.gpu.ways import Way
from kvfuse.usrbio.client.iov import Iov
from kvfuse.usrbio.protocol.wire import Op


class GpuIov(AbstractContextManager["GpuIov"]):
    """Memory of a GPU. Made by `Client.iov_from_gpu`; it keeps the object whose memory it is.

    ``way``: how bytes get there, ``why_not``: the better ways, and why they are not taken. Rings and stores take it
    wherever they take an iov, and `range` of it as a buffer.
    """

    handle = 0
    """the daemon knows staging memory, not this"""
    base = 0
    mirror = None
    writable = True

    def __init__(
        self, memory: DeviceMemory, link: Link, stream: Callable[[], int | None], forget: Callable[[GpuIov], None]
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

    @property
    def way(self) -> Way:
        assert self.link.choice.way is not None
        return self.link.choice.way

    @property
    def why_not(self) -> dict[Way, str]:
        return self.link.choice.why_not

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

    def fill(self, offset: int, source: int, size: int, part: Part | None = None) -> Landing:
        """Begin a copy from host memory at ``source``. ``part``: staging memory that comes back when it has ended."""
        return self._begin(self.link.into, lambda into: into.to_device(self.address + offset, source, size), part)

    def take(self, offset: int, target: int, size: int) -> Landing:
        """Begin a copy to host memory at ``target``."""
        return self._begin(self.link.out, lambda out: out.to_host(target, self.address + offset, size), None)

    def _begin(self, stream: Stream, copy: Callable[[Stream], Mark], part: Part | None) -> Landing:
        try:
            if (before := self._stream()) is not None:
                stream.follow(before)
            return Landing(self, copy(stream), part)
        except DeviceError as error:
            return Landing(self, _Failed(error), part)

    def close(self) -> None:
        """No call with it is under way. The object whose memory it is is let go of."""
        if not self._is_closed:
            self._is_closed = True
            self._forget(self)
            self._owner = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self.size


class GpuRange(NamedTuple):
    """A buffer: ``size`` bytes of a `GpuIov`."""

    iov: GpuIov
    offset: int
    size: int


class Landing(NamedTuple):
    """A copy that has begun."""

    iov: GpuIov
    mark: Mark
    part: Part | None

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


class _Failed:
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

    def bring(self) -> Landing:
        """Begin to copy what the entry writes, before it is submitted."""
        return self._iov.take(self._offset, self.part.address, self._length)

    def fail(self, error: DeviceError) -> None:
        """The copy of `bring` failed: so does the entry."""
        self._failure = error

    def end(self, op: Op, result: int, viewed: bool) -> Landing | None:
        """The entry completed: the daemon uses the part no more. A copy that is to be waited for."""
        if self._failure is not None:
            return Landing(self._iov, _Failed(self._failure), self.part)
        if op in (Op.READ, Op.GET) and result > 0 and not viewed:
            return self._iov.fill(self._offset, self.part.address, min(result, self._length), self.part)
        self.part.release()
        return None


class Staged(NamedTuple):
    """Entries of a ring, of which some have memory of devices: what the daemon works on."""

    iovs: list[Iov | None]
    offsets: list[int]
    entries: list[StagedEntry | None]
    """None: for those of other memory, whose iov and offset are as they were"""

    @property
    def handles(self) -> list[int]:
        return [iov.handle if iov is not None else 0 for iov in self.iovs]


@contextmanager
def staging(iovs: Sequence[Iov | GpuIov | None], offsets: Iterable[int], lengths: Iterable[int]) -> Iterator[Staged]:
    """Take parts of staging memory for entries: all or none. The body places them; if it fails they are given back.

    Errors as of `StagedEntry`.
    """
    staged = Staged([], [], [])
    try:
        for iov, offset, length in zip(iovs, offsets, lengths, strict=True):
            entry = StagedEntry(iov, offset, length) if isinstance(iov, GpuIov) else None
            staged.entries.append(entry)
            staged.iovs.append(entry.part.iov if entry is not None else cast("Iov | None", iov))
            staged.offsets.append(entry.part.offset if entry is not None else offset)
        yield staged
    except BaseException:
        for entry in staged.entries:
            if entry is not None:
                entry.part.release()
        raise
