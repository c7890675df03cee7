"""What a client registered with the daemon: memory, files, namespaces. Checked here, trusted nowhere else.

Objects are made by the event loop and then read by ring threads, which keep their own references: a thing that
was dropped stays usable until the last operation that found it has ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfuse import errors
from kvfuse.usrbio.wire import Access
from kvfuse.volume.blocks import Binding
from kvfuse.volume.maps import ContentMap

Bytes = npt.NDArray[np.uint8]

_SEAL_FUTURE_WRITE = 0x10
BINDINGS_MAX = 100_000
"""keys that a connection remembers, of all its namespaces"""


@dataclass(eq=False)
class OpenFile:
    """A registered file. ``handle``: the volume's, open as long as the file is registered."""

    handle: Any
    ino: int
    readable: bool
    writable: bool
    map: ContentMap
    use_count: int = 0
    """operations on the event loop that need the handle"""
    dropped: bool = False


@dataclass(eq=False)
class Remembered:
    """How many keys the namespaces of a connection remember together. Event loop only."""

    count: int = 0
    namespaces: set[Namespace] = field(default_factory=set)

    def make_room(self) -> None:
        """For one more: where there are too many, all are forgotten, and asked for anew."""
        if self.count >= BINDINGS_MAX:
            for namespace in self.namespaces:
                namespace.bindings = {}
            self.namespaces.clear()
            self.count = 0


@dataclass(eq=False)
class Namespace:
    """A registered directory, whose files are blocks."""

    ino: int
    mode: int
    """permission bits of new blocks"""
    gid: int
    """group of new blocks"""
    read_only: bool = False
    """the peer has it through a mount that is bound read-only"""
    may_list: bool = False
    """the peer may, as far as known, find out every name; else it must not see blocks that it did not name"""
    bindings: dict[bytes, Binding] = field(default_factory=dict)
    """file name -> what it meant, which this peer may read; to be asked whether it is still valid"""
    remembered: Remembered = field(default_factory=Remembered)
    """of all namespaces of the connection"""

    def remember(self, name: bytes, binding: Binding) -> None:
        self.remembered.make_room()
        self.remembered.namespaces.add(self)
        self.remembered.count += name not in self.bindings
        self.bindings[name] = binding


class Iov:
    """A client's memory.

    Memory that is sealed against shrinking is copied from and to through a mapping. Any other may vanish while
    we copy, which would kill the daemon (SIGBUS): there the kernel copies, and says EFAULT.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        """Takes the descriptor over, unless it fails. OSError for what is no shared memory, or has fewer bytes."""
        self.size = size
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)  # EINVAL: not in memory
        self.writable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        if not seals & fcntl.F_SEAL_SHRINK and self.writable:
            with contextlib.suppress(PermissionError):  # as of files in /dev/shm
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
                seals |= fcntl.F_SEAL_SHRINK
        self.writable &= not seals & (fcntl.F_SEAL_WRITE | _SEAL_FUTURE_WRITE)
        if os.fstat(descriptor).st_size < size:
            raise OSError(errno.EFAULT, f"the memory has fewer than {size} bytes")
        self.is_sealed = bool(seals & fcntl.F_SEAL_SHRINK)
        access = mmap.PROT_READ | (mmap.PROT_WRITE if self.writable else 0)
        self._mapping = mmap.mmap(descriptor, size, prot=access)
        self.bytes: Bytes = np.frombuffer(self._mapping, np.uint8)
        self.view = memoryview(self._mapping)
        self.rows: Bytes = self.bytes[: size - size % 4096].reshape(-1, 4096)
        """the whole pages"""
        self.descriptor = descriptor

    def read(self, offset: int, target: Bytes) -> None:
        """Copy ``len(target)`` bytes from ``offset`` out of it. OSError EFAULT, if the memory went away."""
        if self.is_sealed:
            np.copyto(target, self.bytes[offset : offset + len(target)])
        elif os.preadv(self.descriptor, [target.data], offset) != len(target):
            raise OSError(errno.EFAULT, "the memory was truncated")

    def write(self, offset: int, data: memoryview) -> None:
        """Copy ``data`` to ``offset``. OSError EFAULT, if the memory went away."""
        if self.is_sealed:
            self.view[offset : offset + len(data)] = data
        elif os.fstat(self.descriptor).st_size < offset + len(data):  # a write would bring truncated memory back
            raise OSError(errno.EFAULT, "the memory was truncated")
        else:
            os.pwrite(self.descriptor, data, offset)

    def close(self) -> None:
        """Give the memory back at once, although a failure somewhere may still know of it. Nobody uses it any more."""
        del self.bytes, self.rows
        os.close(self.descriptor)
        del self.descriptor
        with contextlib.suppress(BufferError):  # else it goes with the last view of it
            self.view.release()
            self._mapping.close()

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def check_memory(descriptor: int) -> None:
    """OSError EINVAL for anything but shared memory."""
    fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)


def check_file(descriptor: int, device: int, access: Access) -> int:
    """The inode of a descriptor of a regular file of the mount, open as ``access`` says. May wait for the kernel.

    KvfuseError: BadHandle, PermissionDenied, InvalidArgument.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    status = os.fstat(descriptor)
    if status.st_dev != device or flags & os.O_PATH:
        raise errors.BadHandle("the descriptor is not one of an open file of this mount")
    if not stat.S_ISREG(status.st_mode):
        raise errors.InvalidArgument("the descriptor is not one of a regular file")
    mode = flags & os.O_ACCMODE
    if (access & Access.READ and mode == os.O_WRONLY) or (access & Access.WRITE and mode == os.O_RDONLY):
        raise errors.PermissionDenied(f"the descriptor is not open for {access.name}")
    return status.st_ino


def check_directory(descriptor: int, device: int) -> tuple[int, bool]:
    """(inode, bound read-only) of a descriptor of a directory of the mount. May wait for the kernel.

    KvfuseError: BadHandle, NotADirectory.
    """
    status = os.fstat(descriptor)
    if status.st_dev != device:
        raise errors.BadHandle("the descriptor is not one of this mount")
    if not stat.S_ISDIR(status.st_mode):
        raise errors.NotADirectory("the descriptor is not one of a directory")
    return status.st_ino, bool(os.fstatvfs(descriptor).f_flag & os.ST_RDONLY)
