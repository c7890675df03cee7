"""System calls on segment files, which the file engine makes in its threads. Nothing here waits for trio."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.errors import EngineError, EngineFull, EngineReadOnly, MediumError
from kvfuse.native.filesums import fill_and_sum, sum_file
from kvfuse.native.rowreceiver import ENDED
from kvfuse.remote import libc
from kvfuse.remote.mapguard import GuardedMap
from kvfuse.remote.segments.file import direct

log = logging.getLogger(__name__)

IOV_MAX = os.sysconf("SC_IOV_MAX")
ZEROS = memoryview(bytes(1 << 20))
TURN_SECONDS = 5.0
"""for which the making of a segment waits for another process that makes one"""
TURN_PAUSE = 0.02


class SegmentFile:
    """The open file of a segment, closed once it is retired and no call uses it: never under a thread's hands.

    Uses are counted on the event loop's thread only (``with file:``).
    """

    def __init__(
        self, path: Path, segment: int, fd: int, *, is_direct: bool, start: int = 0, size: int | None = None
    ) -> None:
        """``start``, ``size``: the segment is that part of the file, in bytes, which then cannot be mapped."""
        self.path = path
        self.segment = segment
        self.fd = fd
        self.start = start
        self.size = os.fstat(fd).st_size if size is None else size
        self.is_direct = is_direct
        self.block_lock = threading.Lock()
        """held while a part of a block is changed (direct)"""
        self.is_writable = True
        self.past_cache: int | None = None
        """a descriptor to write by, where the page cache is not trusted: see `distrust_cache`"""
        self.retired = False
        self.closed = trio.Event()
        self._use_count = 0
        self._direct_reader: int | None = None
        """a descriptor with O_DIRECT; below 0: the file system has none"""
        self._mapping: mmap.mmap | None = None
        self._mapping_address = 0
        self._written: tuple[mmap.mmap | None, int] | None = None

    @classmethod
    def open(cls, path: Path, segment: int, *, is_direct: bool, read_only: bool) -> Self:
        """Where the file system has turned read-only, for reading: each write tries to open it for writing."""
        flags = os.O_CLOEXEC | (os.O_DIRECT if is_direct else 0)
        try:
            descriptor = os.open(path, flags | (os.O_RDONLY if read_only else os.O_RDWR))
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            descriptor = os.open(path, flags | os.O_RDONLY)
            read_only = True
        file = cls(path, segment, descriptor, is_direct=is_direct)
        file.is_writable = not read_only
        return file

    def open_for_writing(self) -> None:
        """In a thread. OSError."""
        if not self.is_writable:
            again = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if self.is_direct else 0))
            os.dup2(again, self.fd, inheritable=False)
            os.close(again)
            self.is_writable = True

    def __enter__(self) -> Self:
        self._use_count += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._use_count -= 1
        self._close_if_unused()

    def retire(self) -> None:
        """Close now, or when the last call that uses the file has ended."""
        self.retired = True
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self.retired and not self._use_count and not self.closed.is_set():
            self._mapping = self._written = None  # unmapped with the last view of it
            os.close(self.fd)
            if self.past_cache is not None:
                os.close(self.past_cache)
            if self._direct_reader is not None and self._direct_reader >= 0:
                os.close(self._direct_reader)
            self.closed.set()

    def direct_reader(self) -> int | None:
        """A descriptor to read past the page cache by, in whole blocks. None where the file system has none.

        In a thread that uses the file.
        """
        with self.block_lock:
            if self._direct_reader is None:
                try:
                    self._direct_reader = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
                except OSError:  # or no descriptor is left; the page cache does as well
                    self._direct_reader = -1
        return self._direct_reader if self._direct_reader >= 0 else None

    def distrust_cache(self) -> None:
        """Write past the page cache from now on, where the file system can; reads still find what it has.

        Pages that could not be written count as clean, and on ext4 as blocks that were written once: what goes to them
        later is not found on the disk, though a sync succeeded.
        """
        if not (self.is_direct or self.past_cache or (self.start | self.size) % direct.BLOCK_SIZE):
            with contextlib.suppress(OSError):
                self.past_cache = os.open(self.path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)

    def drop_cache(self) -> None:
        """Nothing in the page cache is needed any more."""
        self.drop_mapped_pages()
        with contextlib.suppress(OSError):
            os.posix_fadvise(self.fd, self.start, self.size, os.POSIX_FADV_DONTNEED)

    def resident(self, offset: int, length: int) -> memoryview | None:
        """A view of a range of which all pages are in the page cache. For the kernel alone: see `SegmentStore.view`.

        None also where the file has lost bytes of it: behind its end the last page reads as zeros.
        """
        if os.lseek(self.fd, 0, os.SEEK_END) < offset + length:
            return None
        if self._mapping is None:
            self._mapping = self._map(self.fd)
            if self._mapping is None:
                return None
            self._mapping_address = direct.address_of(self._mapping)
        head = offset % mmap.PAGESIZE
        if not libc.is_resident(self._mapping_address + offset - head, head + length):
            return None
        return memoryview(self._mapping)[offset : offset + length]

    def _map(self, fd: int) -> mmap.mmap | None:
        """The whole file, read-only. None where the system refuses, or the file is shorter by now."""
        try:
            return mmap.mmap(fd, self.size, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            return None

    def source(self) -> tuple[int, npt.NDArray[np.uint8], GuardedMap | None] | None:
        """A mapping of its own, with a descriptor that is closed when it is gone; None if there may be no more.

        On some file systems a file cannot be mapped at all.
        """
        try:
            fd = os.dup(self.fd)
        except OSError:
            return None
        memory = self._map(fd)
        if memory is None:
            os.close(fd)
            return None
        guard = GuardedMap(self.path, fd, direct.address_of(memory), self.size, memory)
        weakref.finalize(guard, os.close, fd)
        return fd, np.frombuffer(memory, np.uint8), guard

    def written_address(self) -> int:
        """Where the file is mapped to be written to by the kernel. 0 where the system refuses."""
        if self._written is None:
            try:
                memory = mmap.mmap(self.fd, self.size)
                self._written = memory, direct.address_of(memory)
            except (OSError, ValueError):
                self._written = None, 0
        return self._written[1]

    def drop_mapped_pages(self) -> None:
        """The mapped pages stop counting as this process's memory; views that are still held fault them in."""
        if self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED)


class ThreadTarget:
    """A segment's file for threads that write to it; see `api.Target`."""

    def __init__(self, file: SegmentFile, unsynced: set[SegmentFile], address: int) -> None:
        self.descriptor = file.fd
        self.start = file.start
        self.address = address
        self._file = file
        self._unsynced = unsynced

    def wrote(self) -> None:
        self._unsynced.add(self._file)

    def error(self, error: OSError, offset: int) -> Exception:
        """EFAULT is the memory's, not the file's."""
        return error if error.errno == errno.EFAULT else engine_error(error, self._file.path, offset)


class Run:
    """Neighbouring transfers of one file, done by one system call. ``advance`` leaves the rest."""

    __slots__ = ("bounces", "file", "length", "offset", "transfer_count", "views")

    def __init__(self, file: SegmentFile, offset: int, view: memoryview) -> None:
        self.file = file
        self.offset = offset
        self.views = [view]
        self.length = view.nbytes
        self.transfer_count = 1
        self.bounces = file.is_direct and not direct.is_aligned(offset, view)

    def takes(self, file: SegmentFile, offset: int, view: memoryview) -> bool:
        """Go on with these bytes, if they continue this run; False if not."""
        if (
            offset != self.offset + self.length
            or file is not self.file
            or len(self.views) >= IOV_MAX
            or (file.is_direct and not self.bounces and not direct.is_aligned(offset, view))
        ):
            return False
        self.views.append(view)
        self.length += view.nbytes
        self.transfer_count += 1
        return True

    def advance(self, byte_count: int) -> None:
        """The first ``byte_count`` bytes are done."""
        self.offset += byte_count
        self.length -= byte_count
        done = 0
        while done < len(self.views) and byte_count >= self.views[done].nbytes:
            byte_count -= self.views[done].nbytes
            done += 1
        del self.views[:done]
        if byte_count:
            self.views[0] = self.views[0][byte_count:]


def read_resident(run: Run) -> bool:
    """Read as much as needs no waiting. False where this file system never answers without waiting."""
    try:
        run.advance(os.preadv(run.file.fd, run.views, run.offset, os.RWF_NOWAIT))
    except BlockingIOError:
        pass
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise engine_error(error, run.file.path, run.offset) from error
        return False
    return True


def read_runs(runs: Sequence[Run]) -> None:
    for run in runs:
        with translated(run.file.path, run.offset):
            if run.bounces:
                direct.read(run.file.fd, run.views, run.offset)
                continue
            while run.length:
                byte_count = os.preadv(run.file.fd, run.views, run.offset)
                if byte_count == 0:
                    raise EOFError
                run.advance(byte_count)


def warm(file: SegmentFile, offset: int, length: int) -> bytes:
    """Checksums of the granules of a range of the file, which is in the page cache afterwards."""
    with translated(file.path, offset):
        return _sums_of(*sum_file(file.fd, offset, length))


def fetch(file: SegmentFile, offset: int, length: int, target: memoryview) -> bytes:
    """Fill ``target``, which has room for whole blocks, with a range of the file; the checksums of its granules.

    Not through the page cache, where the file system has another way.
    """
    with translated(file.path, offset):
        direct_fd = file.direct_reader() if direct.is_aligned(offset, target) else None
        if direct_fd is not None:
            sums, error = fill_and_sum(direct_fd, target, offset, length)
            if error != errno.EINVAL:  # it takes other blocks
                return _sums_of(sums, error)
        return _sums_of(*fill_and_sum(file.fd, target, offset, length))


def _sums_of(sums: bytes, error: int) -> bytes:
    """OSError or EOFError where there are none."""
    if error == ENDED:
        raise EOFError
    if error:
        raise OSError(error, os.strerror(error))
    return sums


def write_runs(runs: Sequence[Run]) -> None:
    for run in runs:
        with translated(run.file.path, run.offset):
            run.file.open_for_writing()
            if run.file.past_cache is not None:
                direct.write(run.file.past_cache, run.views, run.offset, run.file.block_lock, run.file.fd)
                continue
            if run.bounces:
                direct.write(run.file.fd, run.views, run.offset, run.file.block_lock)
                continue
            while run.length:
                run.advance(os.pwritev(run.file.fd, run.views, run.offset))


def create(path: Path, segment: int, size: int, *, is_direct: bool) -> SegmentFile:
    """Make a preallocated file appear at ``path``, whole and durable, or not at all. One that is there already is it.

    Another host that makes the same file at the same time gets the same one: a name is linked once. They take turns
    where the file system has locks: else all hosts of a new volume would reserve the same segment at once.
    """
    temporary = path.with_suffix(f".{secrets.token_hex(8)}.new")
    with translated(path), _turn_in(path.parent):
        with contextlib.suppress(FileNotFoundError):
            return SegmentFile.open(path, segment, is_direct=is_direct, read_only=False)
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # says that somebody is at it
            _preallocate(fd, size)
            os.fsync(fd)
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
            os.close(fd)
        sync_directory(path.parent)
        return SegmentFile.open(path, segment, is_direct=is_direct, read_only=False)


@contextlib.contextmanager
def _turn_in(folder: Path) -> Iterator[None]:
    """Have the lock of a folder in the body. Not where it has none, or another process keeps it for too long."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + TURN_SECONDS
        with contextlib.suppress(OSError):
            while not _has_locked(fd) and time.monotonic() < deadline:
                time.sleep(TURN_PAUSE)  # in a thread of the engine: a wait for a lock of a file has no deadline
        yield
    finally:
        os.close(fd)


def _has_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_unfinished(temporary: Path) -> None:
    """Remove what a creation left that did not end; not what another process is about to make.

    Where the disk refuses that, it is left to whoever opens the folder next.
    """
    try:
        fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temporary.unlink(missing_ok=True)
    except BlockingIOError:
        pass
    except OSError as error:
        log.warning("%s, which nobody uses, cannot be removed: %s", temporary, error.strerror)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    with translated(path):
        path.unlink(missing_ok=True)
        sync_directory(path.parent)


def sync(files: Sequence[SegmentFile]) -> None:
    for file in files:
        with translated(file.path):
            try:
                os.fdatasync(file.fd)
            except OSError:
                file.distrust_cache()
                raise


def write_zeros(fd: int, offset: int, length: int) -> None:
    """Have zeros in a range of a file or device: by the device itself, where it can."""
    try:
        libc.fallocate(fd, libc.FALLOC_FL_ZERO_RANGE | libc.FALLOC_FL_KEEP_SIZE, offset, length)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        _write_zeros(fd, offset, length)


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def translated(path: Path, offset: int = 0) -> Iterator[None]:
    """Errors of the operating system as the project's."""
    try:
        yield
    except EOFError:
        raise MediumError(f"{path} at {offset}: the file is shorter than its segment") from None
    except OSError as error:
        raise engine_error(error, path, offset) from error


_KINDS = {
    errno.ENOSPC: EngineFull,
    errno.EDQUOT: EngineFull,
    errno.EIO: MediumError,
    errno.ENODATA: MediumError,
    errno.EROFS: EngineReadOnly,
}


def engine_error(error: OSError, path: Path, offset: int) -> EngineError:
    kind = _KINDS.get(error.errno or 0, EngineError)
    return kind(f"{path} at {offset}: {os.strerror(error.errno or 0)}")


def _preallocate(fd: int, size: int) -> None:
    try:
        libc.fallocate(fd, 0, 0, size)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        _write_zeros(fd, 0, size)


def _write_zeros(fd: int, offset: int, length: int) -> None:
    written = 0
    while written < length:
        written += os.pwrite(fd, ZEROS[: length - written], offset + written)
