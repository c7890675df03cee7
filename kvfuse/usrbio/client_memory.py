"""Memory of clients that rings read and write: registered by its owner, mapped here.

The daemon must not die of what an owner does with its memory meanwhile; ARCHITECTURE.md has a table of mapped memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_SEAL_FUTURE_WRITE = 0x10


def seal_memory(descriptor: int) -> None:
    """Have shared memory keep its size, where that can be had.

    It waits for the inode's lock, which a client may hold as long as it likes: in a thread of the user's own.
    """
    writable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    if writable and not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        with contextlib.suppress(PermissionError):  # as of files in /dev/shm
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)


class Iov:
    """A client's memory.

    Memory that is sealed against shrinking is copied from and to through a mapping. Any other may vanish while
    we copy, which would kill the daemon (SIGBUS): there the kernel copies, and says EFAULT.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        """Takes the descriptor over, unless it fails. OSError for what is no shared memory, or has fewer bytes.

        Waits for no lock of the inode: `seal_memory` was called before.
        """
        self.size = size
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)  # EINVAL: not in memory
        self.writable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
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
