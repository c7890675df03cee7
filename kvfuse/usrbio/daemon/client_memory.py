"""Maps the registered memory of clients, which rings read and write.

The daemon must not die of what an owner does with its memory meanwhile: decision 031 in docs/internals has a table.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvfuse.checksum import granule_checksums
from kvfuse.usrbio.daemon.charges import Charge
from kvfuse.usrbio.daemon.page_owners import count_faults

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]

_SEAL_FUTURE_WRITE = 0x10
PAGE = mmap.PAGESIZE
HELD_SIZE = 4 << 30
"""Bytes of the largest memory into which small copies keep the interpreter lock."""
SLOW_SECONDS = 0.01
"""No small copy takes as long, unless its memory was punched out meanwhile: that takes about 0.2 s for each GiB."""
SMALL = 64 << 10
"""Bytes of the largest copy that keeps the interpreter lock: to release it costs more."""
TINY = 1024
"""bytes that numpy copies with the lock"""
LOOK_BYTES = 1 << 20
"""Bytes that are copied before the daemon looks for absent pages again"""
LARGE = 256 << 10
"""Bytes of a copy whose pages are mapped at once, the first time: one by one that takes longer than the copy"""
ZEROS = memoryview(bytes(1 << 20))
_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_MADV_POPULATE_WRITE = 23
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_process_vm_writev = ctypes.CDLL(None, use_errno=True).process_vm_writev


class _Span(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def seal_memory(descriptor: int) -> None:
    """Seal shared memory against shrinking, where the kernel allows it.

    Waits for the inode's lock, which a client may hold as long as it likes: call it in a thread of the user's own.
    """
    writable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    if writable and not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        with contextlib.suppress(PermissionError):  # files in /dev/shm refuse seals
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)


class MappedIov:
    """A client's memory.

    The daemon copies memory that is sealed against shrinking through a mapping. Any other may vanish during a copy,
    which would kill the daemon (SIGBUS): there the kernel copies, and returns EFAULT.

    A copy into absent pages creates them: the user has a limit for these (`Charge`).
    """

    def __init__(self, descriptor: int, size: int, charge: Charge) -> None:
        """Takes the descriptor over, unless it fails. OSError for what is no shared memory, or has fewer bytes.

        Waits for no lock of the inode: `seal_memory` was called before.
        """
        self.size = size
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)  # EINVAL: not in memory
        self.writable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        self.writable &= not seals & (fcntl.F_SEAL_WRITE | _SEAL_FUTURE_WRITE)
        if os.fstat(descriptor).st_size < size:
            raise OSError(errno.EFAULT, f"the memory has fewer than {size} bytes")
        self._is_small = os.fstat(descriptor).st_size <= HELD_SIZE and bool(seals & fcntl.F_SEAL_GROW)
        self.is_sealed = bool(seals & fcntl.F_SEAL_SHRINK) and not _may_refuse_pages()
        access = mmap.PROT_READ | (mmap.PROT_WRITE if self.writable else 0)
        self._mapping = mmap.mmap(descriptor, size, prot=access)
        self.bytes: Bytes = np.frombuffer(self._mapping, np.uint8)
        self.address: int = self.bytes.ctypes.data
        self.view = memoryview(self._mapping)
        self.rows: Bytes = self.bytes[: size - size % 4096].reshape(-1, 4096)
        """the whole pages"""
        self.descriptor = self._reopen(descriptor)
        self._charge = charge
        self._mapped = bytearray(-(-size // LOOK_BYTES))
        """which pieces of LOOK_BYTES were mapped at once"""
        self._known_bytes = 0
        """so many more may be copied before the next look; 0 or less: pages are absent"""

    def _reopen(self, descriptor: int) -> int:
        """A descriptor of our own instead of one that shares its position and flags with the client's."""
        mode = os.O_RDWR if self.writable else os.O_RDONLY
        try:
            own = os.open(f"/proc/self/fd/{descriptor}", mode | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:  # the memory of somebody else, and the daemon is not root; or the client has a lease on it
            return descriptor
        os.close(descriptor)
        return own

    @property
    def holds_lock(self) -> bool:
        """Small copies from and to it keep the interpreter lock, as long as none of its user was slow."""
        return self._is_small and not self._charge.is_slow

    def note_copy(self, seconds: float) -> None:
        """Note how long a small copy took, for which all others waited."""
        if seconds > SLOW_SECONDS:
            status = os.fstat(self.descriptor)
            if status.st_blocks * 512 < status.st_size:  # else the machine had no processor for this thread
                self._charge.mark_slow()

    def read(self, offset: int, target: Bytes) -> None:
        """Copy ``len(target)`` bytes from ``offset`` out of it. OSError EFAULT, if the memory went away."""
        if self.is_sealed and (self.holds_lock or len(target) > TINY) and self.is_present(len(target)):
            np.copyto(target, self.bytes[offset : offset + len(target)])
        elif os.preadv(self.descriptor, [target.data], offset) != len(target):  # brings no page into being
            raise OSError(errno.EFAULT, "the memory was truncated")

    def read_checked(self, offset: int, target: Bytes) -> bytes:
        """`read`; returns the checksums of the copy's granules."""
        self.read(offset, target)
        return granule_checksums(target.data)

    def write(self, offset: int, data: memoryview) -> None:
        """Copy ``data`` to ``offset``. OSError EFAULT, if the memory went away; see `charging`."""
        if self.is_present(len(data)):
            self.map_pages(offset, len(data))
            self._put(offset, data)
            return
        for position in range(0, len(data), LOOK_BYTES):
            part = data[position : position + LOOK_BYTES]
            with self.charging(offset + position, len(part)):
                self._put(offset + position, part)

    def map_pages(self, offset: int, length: int) -> None:
        """Map the pages of a range, which are all present (`is_present`), before it is copied to."""
        if length < LARGE or not self.is_sealed:
            return
        first, last = offset // LOOK_BYTES, (offset + length - 1) // LOOK_BYTES
        if self._mapped.find(0, first, last + 1) >= 0:
            start = first * LOOK_BYTES
            end = min((last + 1) * LOOK_BYTES, len(self.bytes))
            _madvise(self.address + start, end - start, _MADV_POPULATE_WRITE)  # refused, they are mapped one by one
            self._mapped[first : last + 1] = b"\1" * (last + 1 - first)

    def _put(self, offset: int, data: memoryview) -> None:
        if self.is_sealed and len(data) > TINY:
            np.copyto(self.bytes[offset : offset + len(data)], np.frombuffer(data, np.uint8))
        elif self.is_sealed and self.holds_lock:
            self.view[offset : offset + len(data)] = data
        else:
            self.put_guarded(offset, data)

    def put_guarded(self, offset: int, data: memoryview) -> None:
        """Have the kernel copy through the mapping: for truncated memory it returns EFAULT, and sends no signal.

        The copy releases the interpreter lock. pwrite(2) would wait for the inode's lock, which a client holds as long
        as its own write there takes.
        """
        source = _Span(np.frombuffer(data, np.uint8).ctypes.data, len(data))
        target = _Span(self.bytes.ctypes.data + offset, len(data))
        count = _process_vm_writev(os.getpid(), ctypes.byref(source), 1, ctypes.byref(target), 1, 0)
        if count != len(data):
            number = ctypes.get_errno() if count < 0 else errno.EFAULT
            raise OSError(number, f"the memory was truncated: {os.strerror(number)}")

    def is_present(self, length: int) -> bool:
        """Whether no page is absent, before ``length`` bytes are copied. As of some copies ago."""
        self._known_bytes -= length
        if self._known_bytes < 0:
            status = os.fstat(self.descriptor)
            self._known_bytes = LOOK_BYTES if status.st_blocks * 512 >= status.st_size else 0
            if self._charge.is_watched:
                self._known_bytes = 0
            return self._known_bytes > 0
        return True

    @contextmanager
    def charging(self, offset: int, length: int) -> Iterator[None]:
        """Charge the user for absent pages of a range that the body copies into. OSError EDQUOT, ENOMEM.

        While the kernel charges more than was counted, also for those that the client punched out meanwhile.
        """
        holes = sum(int(np.count_nonzero(holes)) for _, holes in self._find_holes(offset, length))
        if holes:
            self._charge.take(self.descriptor, holes * PAGE)
        if not self._charge.is_watched:
            yield
            return
        before = count_faults()
        yield
        if (more := count_faults() - before - holes) > 0:
            start = offset - offset % PAGE
            own = self._charge.count_own(self.bytes.ctypes.data + start, offset + length - start) - holes
            if own > 0:
                self._charge.take(self.descriptor, min(more, own) * PAGE)

    def charge_many(self, offsets: Numbers, lengths: Numbers) -> bool:
        """Charge the user for absent pages of many ranges, as `charging`. False: the caller copies them one by one."""
        first, last = int(offsets.min()), int((offsets + lengths).max())
        if self._charge.is_watched or last - first > 4 * int(lengths.sum()):
            return False
        before = np.cumsum(np.concatenate([[False], *(holes for _, holes in self._find_holes(first, last - first))]))
        starts, ends = offsets // PAGE - first // PAGE, -(-(offsets + lengths) // PAGE) - first // PAGE
        if count := int((before[ends] - before[starts]).sum()):
            self._charge.take(self.descriptor, count * PAGE)
        return True

    def clear(self, offset: int, length: int) -> None:
        """Write zeros to a range; absent pages stay absent. OSError EFAULT, if the memory went away."""
        if self.is_present(length):
            self._put_zeros(offset, offset + length)
            return
        if not self.is_sealed and os.fstat(self.descriptor).st_size < offset + length:
            raise OSError(errno.EFAULT, "the memory was truncated")
        for position, holes in self._find_holes(offset, length):
            edges = np.flatnonzero(np.diff(np.concatenate(([True], holes, [True])))) * PAGE + position
            for start, end in edges.reshape(-1, 2).tolist():
                with self.charging(start, end - start):
                    self._put_zeros(max(start, offset), min(end, offset + length))

    def _put_zeros(self, start: int, end: int) -> None:
        for position in range(start, end, len(ZEROS)):
            self._put(position, ZEROS[: end - position])

    def _find_holes(self, offset: int, length: int) -> Iterator[tuple[int, npt.NDArray[np.bool_]]]:
        """Pieces of a range: (start of its first page, for each page: whether it is neither present nor swapped
        out)."""
        last = offset + length
        for start in range(offset - offset % PAGE, last, LOOK_BYTES):
            there = np.zeros(-(-min(LOOK_BYTES, last - start) // PAGE), np.uint8)
            _mincore(self.bytes.ctypes.data + start, len(there) * PAGE, there.ctypes.data)
            holes = there & 1 == 0
            page = 0
            while holes[page:].any():  # or swapped out, for all that mincore(2) says
                page += int(holes[page:].argmax())
                page = self._find_data(start + page * PAGE, start) // PAGE
                if page >= len(holes):
                    break
                holes[page] = False
            yield start, holes

    def _find_data(self, position: int, start: int) -> int:
        """Bytes from ``start`` to the first present page at or after ``position``; the size of the memory if none."""
        try:
            return os.lseek(self.descriptor, position, os.SEEK_DATA) - start
        except OSError:  # ENXIO: there is none
            return self.size

    def close(self) -> None:
        """Unmap the memory at once, although an exception may still refer to it. Nobody uses it any more."""
        del self.bytes, self.rows
        os.close(self.descriptor)
        del self.descriptor
        with contextlib.suppress(BufferError):  # else the last view of it frees it
            self.view.release()
            self._mapping.close()

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def map_memory(descriptor: int, size: int, charge: Charge) -> MappedIov:
    """Map memory, in a thread: the last one to close memory frees it, 0.2 s for each GiB."""
    try:
        return MappedIov(descriptor, size, charge)
    except BaseException:
        os.close(descriptor)
        raise


def _may_refuse_pages() -> bool:
    """The kernel counts what it has promised, and may refuse to fill a hole: through a mapping that is SIGBUS."""
    with open("/proc/sys/vm/overcommit_memory") as file:
        return file.read().strip() == "2"
