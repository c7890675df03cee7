"""Memory that ring operations read and write: registered with the daemon, mapped by both sides.

Plain memory of this process cannot be mapped by another one. It is wrapped all the same: a hidden piece of shared
memory stands in for it, and the ring copies out of it when a read completes, into it when a write is submitted.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from mmap import PAGESIZE, PROT_READ, PROT_WRITE, mmap
from multiprocessing.shared_memory import SharedMemory
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from kvfuse.usrbio.client.session import Bytes, Session
from kvfuse.usrbio.protocol.wire import Request

native: Any
try:
    from kvfuse.native import _blocks as native
except ImportError:  # it was built without a compiler
    native = None

T = TypeVar("T", covariant=True)
Addresses = npt.NDArray[np.uint64]
Sizes = npt.NDArray[np.int64]
MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None)
F_SEAL_FUTURE_WRITE = 0x10
"""no mapping made from here on may be writable; not in the fcntl module of Python 3.11"""


class SharedPart(NamedTuple):
    """Bytes of this process that are bytes of a descriptor's memory. Owns the descriptor."""

    descriptor: int
    offset: int
    """of the first byte, in the descriptor's memory"""


class TakesGpuMemory(Protocol[T]):
    """A client."""

    def iov_from_gpu(self, memory: object, **options: Any) -> T: ...


class Iov(AbstractContextManager["Iov"]):
    """Registered memory; ``array`` is it, as bytes. Made by `Client.iov` and `Client.wrap`.

    ``in_place``: the daemon reads and writes ``array`` itself; otherwise it works on ``mirror``, and rings copy.
    """

    def __init__(self, array: Bytes, part: SharedPart, mirror: Bytes | None, forget: Callable[[Iov], None]) -> None:
        self.array = array
        self.mirror = mirror
        self.base = part.offset
        """where ``array`` (or its mirror) begins in the registered memory"""
        self.size = len(array)
        self.address = address_of(array)
        self.handle = 0
        """the daemon's number for it; 0 while it is not registered"""
        self.writable = False
        """reads and gets may fill it"""
        self._descriptor = part.descriptor
        self._forget = forget
        self._session: Session | None = None

    @staticmethod
    def from_gpu(client: TakesGpuMemory[T], memory: object, **options: Any) -> T:
        """Memory of a GPU, as a kind of iov: see `Client.iov_from_gpu`."""
        return client.iov_from_gpu(memory, **options)

    @property
    def buffer(self) -> memoryview:
        return self.array.data

    @property
    def in_place(self) -> bool:
        return self.mirror is None

    def populate(self) -> None:
        """Have all pages be there: then they are charged to this process, and not to the daemon, which limits that.

        What cannot be had, as in a full tmpfs or before Linux 5.14, is left to the daemon.
        """
        if self.array.flags.writeable:
            address = self.address if self.mirror is None else address_of(self.mirror)
            start = address // PAGESIZE * PAGESIZE
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + self.size - start), MADV_POPULATE_WRITE)

    def register(self, session: Session) -> None:
        """With the daemon of ``session``, instead of any before. OSError where it does not take such memory."""
        self.handle = 0
        reply, _ = session.request(Request.ADD_IOV, self.base + self.size, descriptors=[self._descriptor])
        self._session, self.handle = session, reply.values[0]
        self.writable = bool(reply.values[1]) and self.array.flags.writeable

    def at(self, offset: int) -> int:
        """Where a byte of the array is in the registered memory. ValueError before its start."""
        if offset < 0:
            raise ValueError(f"the offset {offset} in an iov")
        return self.base + offset

    def to_mirror(self, offset: int, size: int) -> None:
        """Let the daemon see these bytes as they are now."""
        assert self.mirror is not None
        self.mirror[offset : offset + size] = self.array[offset : offset + size]

    def from_mirror(self, offset: int, size: int) -> None:
        """Take over what the daemon made of these bytes."""
        assert self.mirror is not None
        self.array[offset : offset + size] = self.mirror[offset : offset + size]

    def close(self) -> None:
        """Returns when the daemon touches the memory no more; ``array`` is empty then. Views of it live on."""
        if self._descriptor < 0:
            return
        self._forget(self)
        self.array = np.empty(0, np.uint8)
        os.close(self._descriptor)
        self._descriptor = -1
        handle, self.handle = self.handle, 0
        if handle and self._session is not None:
            self._session.drop(Request.DROP_IOV, handle)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self.size


def new_memory(size: int, *, read_only: bool = False) -> tuple[Bytes, SharedPart]:
    """Zeroed shared memory of a size that nobody can change, so that the daemon may copy without looking back.

    ``read_only``: for everybody else.
    """
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    descriptor = os.memfd_create("kvfuse-iov", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        array = np.frombuffer(mmap(descriptor, size), np.uint8)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals | (F_SEAL_FUTURE_WRITE if read_only else 0))
        return array, SharedPart(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise


def map_descriptor(descriptor: int) -> tuple[Bytes, SharedPart]:
    """All the memory of a memfd or /dev/shm file; writable if the descriptor is open for that."""
    writable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    protection = PROT_READ | PROT_WRITE if writable else PROT_READ
    array = np.frombuffer(mmap(descriptor, os.fstat(descriptor).st_size, prot=protection), np.uint8)
    return array, SharedPart(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0), 0)


def bytes_of(buffer: object) -> Bytes:
    """The memory of a contiguous buffer as bytes, not copied. TypeError or ValueError for anything else."""
    if type(buffer) is np.ndarray and buffer.dtype == np.uint8 and buffer.ndim == 1 and buffer.flags.c_contiguous:
        return buffer
    if isinstance(buffer, SharedMemory):
        return np.frombuffer(cast(memoryview, buffer.buf), np.uint8)
    if hasattr(buffer, "data_ptr"):
        return _tensor_bytes(buffer)
    view = memoryview(cast(Any, buffer))
    if not view.c_contiguous:
        raise ValueError("the buffer is not contiguous")
    return np.frombuffer(view.cast("B") if view.nbytes else b"", np.uint8)


def _tensor_bytes(tensor: Any) -> Bytes:
    """A PyTorch tensor has no buffer protocol, and numpy does not know all of its types."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("a tensor must be contiguous and in the processor's memory")
    memory = (ctypes.c_uint8 * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    memory.owner = tensor
    return np.frombuffer(memory, np.uint8)


def spans_of(buffers: Sequence[object], *, writes: bool) -> tuple[Addresses, Sizes] | None:
    """(addresses, sizes) of buffers; None: not all are plain ones of this process, or, with ``writes``, writable."""
    if native is None:
        return None
    some = buffers if isinstance(buffers, list) else list(buffers)
    addresses, sizes = np.empty(len(some), np.uint64), np.empty(len(some), np.int64)
    return (addresses, sizes) if native.buffer_spans(some, writes, addresses, sizes) == len(some) else None


def address_of(array: Bytes) -> int:
    """Of the first byte."""
    return cast(int, array.__array_interface__["data"][0])


def shared_part(array: Bytes) -> SharedPart | None:
    """Which shared memory the array lies in, if this process has a descriptor of it that is open for as much."""
    found = _mapping_at(address_of(array), len(array))
    if found is None:
        return None
    file, offset = found
    wanted = os.O_RDWR if array.flags.writeable else os.O_RDONLY
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
            if (status.st_dev, status.st_ino) != file or offset + len(array) > status.st_size:
                continue
            if fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE in (wanted, os.O_RDWR):
                return SharedPart(fcntl.fcntl(int(name), fcntl.F_DUPFD_CLOEXEC, 0), offset)
        except OSError:
            continue  # another thread closed it
    return None


def _mapping_at(address: int, size: int) -> tuple[tuple[int, int], int] | None:
    """((device, inode), offset in it) of the shared mapping that holds all ``size`` bytes at ``address``."""
    with open("/proc/self/maps", newline="\n", errors="surrogateescape") as rows:
        for row in rows:
            span, flags, offset, device, inode = row.split(maxsplit=5)[:5]
            start, end = (int(bound, 16) for bound in span.split("-"))
            if start <= address < end:
                major, minor = (int(number, 16) for number in device.split(":"))
                is_shared = "s" in flags and address + size <= end
                return (
                    ((os.makedev(major, minor), int(inode)), int(offset, 16) + address - start) if is_shared else None
                )
    return None
