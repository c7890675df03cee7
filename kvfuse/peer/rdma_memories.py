"""Memory of GPUs that this host's RDMA device fills: it reads the daemon's memory, and writes what it read there.

The memory is a dma-buf, so there is no library of the GPU here. Its queue pair is connected to itself: one side reads
arenas and staging memory, the other one writes. All of it is in a protection domain that no queue pair of another host
is in, so nobody else can use its keys. The device is opened with the first memory that a client registers.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import stat
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from errno import EACCES, EINVAL
from importlib.util import find_spec
from time import monotonic

import numpy as np
import numpy.typing as npt
import trio

from kvfuse import failing
from kvfuse.errors import InvalidArgument, Unsupported
from kvfuse.peer.peer_wire import WireError
from kvfuse.peer.queue_pair import READ, QueuePair, Reads, join
from kvfuse.peer.registrations import Registrations
from kvfuse.peer.verbs import (
    MemoryPart,
    NoDevice,
    RdmaDevice,
    Registration,
    VerbsError,
    active_devices,
    open_device,
    pyverbs,
)

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Piece = tuple[Bytes, int, int, int]
"""the memory, where the bytes begin in it, how many, and where they go in the device's memory"""
DMABUF_MAGIC = 0x444D4142
"""the type of dma-bufs in statfs(2)"""
REGISTERED_MAX = 1 << 40
"""bytes of the daemon's own memory: all arenas that it may have"""
LOOK_SECONDS = 5.0
REFUSED_SECONDS = 60.0
"""for which a device is not opened again that could not be used"""
_fstatfs = ctypes.CDLL(None, use_errno=True).fstatfs


def missing(*, load: bool = False) -> str:
    """What of RDMA is not on this host, "" where it may be there; a line. Nothing is opened.

    ``load``: import pyverbs, instead of looking whether it is there.
    """
    try:
        if load:
            pyverbs()
        elif find_spec("pyverbs") is None:
            return "RDMA needs pyverbs for this Python (Debian's package is python3-pyverbs)"
        active_devices()
    except NoDevice as error:
        return str(error)
    return ""


def problem(open_device: Callable[[], RdmaDevice] = open_device) -> str:
    """Why this process can register no memory of GPUs, "" where it can: a device is opened to find out."""
    if reason := missing(load=True):
        return reason
    try:
        with open_device() as device:
            return device.lacks_dmabuf()
    except NoDevice as error:
        return str(error)


class RdmaMemories:
    """`usrbio.daemon.device_memory.DeviceMemories`, by RDMA."""

    def __init__(
        self,
        open_device: Callable[[], RdmaDevice] = open_device,
        make_pair: Callable[[RdmaDevice], QueuePair] = QueuePair,
    ) -> None:
        self._open_device = open_device
        self._make_pair = make_pair
        self._opened: Loop | None = None
        self._opening = trio.Lock()
        self._nursery: trio.Nursery | None = None
        self._lacks, self._lacks_until = "", 0.0
        """what `lacks` says until then: to look takes adapters a moment, and clients ask whenever they connect"""

    @property
    def lacks(self) -> str:
        if monotonic() >= self._lacks_until:
            self._note(missing(), LOOK_SECONDS)
        return self._lacks

    def _note(self, lacks: str, seconds: float) -> None:
        self._lacks, self._lacks_until = lacks, monotonic() + seconds

    def check(self, descriptor: int) -> None:
        kind = (ctypes.c_long * 32)()
        if _fstatfs(descriptor, kind) or kind[0] != DMABUF_MAGIC:
            raise OSError(EINVAL, "the descriptor is not one of a dma-buf")
        check_writable(descriptor)

    async def add(self, descriptor: int, offset: int, size: int) -> RdmaMemory:
        loop = await self._open()
        if offset + size > (there := size_of(descriptor)):
            raise InvalidArgument(f"{size} bytes at {offset} of memory of {there} bytes")
        try:
            return RdmaMemory(loop, loop.device.register_dmabuf(descriptor, offset, size, remote=True))
        except VerbsError as error:
            raise Unsupported(str(error)) from error

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                try:
                    yield
                finally:
                    self._nursery = None
                    nursery.cancel_scope.cancel()
        finally:
            opened, self._opened = self._opened, None
            if opened is not None:
                opened.device.close()

    async def _open(self) -> Loop:
        """Unsupported."""
        async with self._opening:
            if self._opened is not None:
                return self._opened
            if reason := await trio.to_thread.run_sync(lambda: missing(load=True)):
                raise Unsupported(reason)
            if self._nursery is None:
                raise Unsupported("the daemon ends")
            try:
                self._opened = await Loop.open(self._open_device, self._make_pair, self._nursery)
            except (NoDevice, VerbsError) as error:
                self._note(str(error), REFUSED_SECONDS)
                raise Unsupported(str(error)) from error
            log.info("memory of GPUs is filled by %s", self._opened.device.info)
            return self._opened


class Loop:
    """An open device that reads this host's own memory. ``sources``: registrations of it."""

    def __init__(self, device: RdmaDevice, make_pair: Callable[[RdmaDevice], QueuePair]) -> None:
        self.device = device
        self.make_pair = make_pair
        self.sources = Registrations(device, REGISTERED_MAX, remote=True)
        self.scratch: Bytes = np.zeros(4096, np.uint8)
        """what `RdmaMemory` reads back, and nobody looks at"""

    @classmethod
    async def open(
        cls, open_device: Callable[[], RdmaDevice], make_pair: Callable[[RdmaDevice], QueuePair], nursery: trio.Nursery
    ) -> Loop:
        """NoDevice; VerbsError where no memory at all can be registered."""
        device = open_device()
        try:
            if reason := device.lacks_dmabuf():
                raise NoDevice(reason)
            loop = cls(device, make_pair)
            await loop.parts(loop.scratch, 0, 1)
        except BaseException:
            device.close()
            raise
        nursery.start_soon(failing.vital_task, loop.sources.run)
        return loop

    async def parts(self, memory: Bytes, start: int, size: int) -> list[MemoryPart]:
        """Of the daemon's own memory; registered, if it was not. VerbsError."""
        found = self.sources.parts(memory, start, size)
        if found is None:
            await self.sources.cover(memory, start, size)
            found = self.sources.parts(memory, start, size)
        if found is None:
            raise VerbsError("more memory is registered than may be")
        return found


class RdmaMemory:
    """`usrbio.daemon.device_memory.DeviceMemory`: a registered dma-buf, and the queue pair by which it is filled.

    The pair is made when it is needed, and anew after a failure, which destroyed it.
    """

    def __init__(self, loop: Loop, registration: Registration) -> None:
        self.registration = registration
        self.pair: QueuePair | None = None
        self._loop = loop
        self._connecting = trio.Lock()
        self._has_failed = False
        """at the last list: it is logged once"""

    async def fill(self, pieces: Sequence[Piece], seconds: float) -> bool:
        status = f"it took longer than {seconds:g} s"
        with trio.move_on_after(seconds):
            try:
                rows = await self._rows(pieces)
                pair = await self._connected()
                status = (await pair.read(rows)).status or (await pair.read(await self._read_back(rows))).status
            except (VerbsError, WireError, ValueError) as error:  # ValueError: it was closed meanwhile
                status = str(error)
        if status and self.registration.is_open and not self._has_failed:
            log.warning("%d pieces did not come to memory of a GPU: %s", len(pieces), status)
        self._has_failed = bool(status)
        return not status

    async def aclose(self) -> None:
        pair, self.pair = self.pair, None
        if pair is not None:
            pair.close()
        await self.registration.aclose()

    async def _rows(self, pieces: Sequence[Piece]) -> Reads:
        """READs, cut where registered pieces of either side end. VerbsError, ValueError."""
        rows: list[tuple[int, int, int, int, int]] = []
        for memory, start, size, offset in pieces:
            sources = await self._loop.parts(memory, start, size)
            targets = self.registration.parts(self.registration.address + offset, size)
            rows += join(
                [(part.address, part.size, part.rkey) for part in sources],
                [(part.address, part.size, part.lkey) for part in targets],
            )
        return np.array(rows, READ)

    async def _read_back(self, rows: Reads) -> Reads:
        """A READ of the last byte that was written: it pushes what adapter and bridges still hold to the memory.

        So whoever hears that the bytes have come finds them there, whichever way it looks.
        """
        (scratch,) = await self._loop.parts(self._loop.scratch, 0, 1)
        last = int(rows[-1]["local"]) + int(rows[-1]["length"]) - 1
        (part,) = self.registration.parts(last, 1)
        return np.array([(last, scratch.address, 1, part.rkey, scratch.lkey)], READ)

    async def _connected(self) -> QueuePair:
        async with self._connecting:
            if not self.registration.is_open:
                raise ValueError("the memory was let go of")
            pair = self.pair
            if pair is None or pair.ended:
                if pair is not None:
                    pair.close()
                self.pair = None  # else it would be closed again, if none can be made
                self.pair = pair = self._loop.make_pair(self._loop.device)
                await pair.connect(pair.place)
            return pair  # closed by now, if the memory was let go of meanwhile


def check_writable(descriptor: int) -> None:
    """OSError unless whoever passed the descriptor may write by it."""
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise OSError(EACCES, "the descriptor is not open for reading and writing")


def size_of(descriptor: int) -> int:
    """Of a dma-buf, which says it at the end of a seek, or of a file in memory."""
    status = os.fstat(descriptor)
    return status.st_size if stat.S_ISREG(status.st_mode) and status.st_size else os.lseek(descriptor, 0, os.SEEK_END)
