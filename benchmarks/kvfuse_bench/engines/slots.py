"""Patterns of engines that use rings of 3FS's kind, or one large file of slots."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import cycle
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from threading import Lock

import numpy as np

from kvfuse.errors import KvfuseError
from kvfuse.sizes import MIB, format_size
from kvfuse.usrbio import hf3fs
from kvfuse_bench.engines.files import HEADER, block_names, whole
from kvfuse_bench.engines.measuring import Memory, Meter

BATCH_PAGES = 96
"""pages of one call of SGLang's storage"""
GROUP_ENTRIES = 8
JOBS = 16
KVBM_THREADS = 4
Move = Callable[[range], int]
"""Moves some pages; answers how many bytes"""


# -- SGLang's hf3fs backend: one file a rank -------------------------------------------------------------


def require_shared_memory(page_size: int) -> None:
    """KvfuseError unless there is room for what all jobs have of it: a container's 64 MiB are not enough."""
    needed = 2 * JOBS * GROUP_ENTRIES * page_size
    found = os.statvfs("/dev/shm")
    if (free := found.f_bavail * found.f_frsize) < needed:
        raise KvfuseError(f"it needs {format_size(needed)} in /dev/shm, which has {format_size(free)}")


def sglang_hf3fs_files(folder: Path, meter: Meter, memory: Memory) -> None:
    """As its stand-in for a disk does: sixteen descriptors on one file, each page one pwrite or preadv."""
    with _rank_file(folder, memory.size) as path, ExitStack() as stack:
        jobs = [_FileJob(stack, path, memory) for _ in range(JOBS)]
        _in_groups(meter, memory, [job.write for job in jobs], [job.read for job in jobs])


def sglang_hf3fs_rings(folder: Path, meter: Meter, memory: Memory) -> None:
    """Through rings: for each of sixteen jobs a ring and shared memory of eight pages in either direction."""
    with _rank_file(folder, memory.size) as path, ExitStack() as stack:
        jobs = [_RingJob(stack, path, memory) for _ in range(JOBS)]
        _in_groups(meter, memory, [job.write for job in jobs], [job.read for job in jobs])


@contextmanager
def _rank_file(folder: Path, size: int) -> Iterator[Path]:
    path = folder / "hicache.0.bin"
    with path.open("wb") as file:
        os.ftruncate(file.fileno(), size)
    yield path


def _in_groups(meter: Meter, memory: Memory, writes: list[Move], reads: list[Move]) -> None:
    """Batches of pages one after the other; in each, groups by the jobs in turn."""
    batches = [range(first, min(first + BATCH_PAGES, memory.count)) for first in range(0, memory.count, BATCH_PAGES)]
    with ThreadPoolExecutor(JOBS) as pool:
        for name, moves in (("write", writes), ("read", reads)):
            turns = cycle(moves)
            with meter.phase(name) as phase:
                for batch in batches:
                    groups = [batch[start : start + GROUP_ENTRIES] for start in range(0, len(batch), GROUP_ENTRIES)]
                    phase.spread(pool, [partial(next(turns), group) for group in groups], GROUP_ENTRIES)


class _FileJob:
    """One of the jobs, through system calls."""

    def __init__(self, stack: ExitStack, path: Path, memory: Memory) -> None:
        self._memory = memory
        self._lock = Lock()
        self._descriptor = os.open(path, os.O_RDWR)
        stack.callback(os.close, self._descriptor)

    def write(self, pages: range) -> int:
        memory = self._memory
        with self._lock:
            moved = [os.pwrite(self._descriptor, memory.stored(page), page * memory.block_size) for page in pages]
        return whole(sum(moved), len(pages) * memory.block_size)

    def read(self, pages: range) -> int:
        memory = self._memory
        with self._lock:
            moved = [os.preadv(self._descriptor, [memory.loaded(page)], page * memory.block_size) for page in pages]
        return whole(sum(moved), len(pages) * memory.block_size)


class _RingJob:
    """One of the jobs, through rings; pages are copied from and to its shared memory, as there."""

    def __init__(self, stack: ExitStack, path: Path, memory: Memory) -> None:
        self._memory = memory
        self._lock = Lock()
        self._descriptor = os.open(path, os.O_RDWR)
        stack.callback(os.close, self._descriptor)
        hf3fs.register_fd(self._descriptor)
        stack.callback(hf3fs.deregister_fd, self._descriptor)
        mount = str(path.parent)
        self._reading = _RingAndMemory(stack, mount, GROUP_ENTRIES, memory.block_size, for_read=True)
        self._writing = _RingAndMemory(stack, mount, GROUP_ENTRIES, memory.block_size, for_read=False)

    def write(self, pages: range) -> int:
        with self._lock:
            for place, page in zip(self._writing.places, pages, strict=False):
                place.data[:] = self._memory.stored(page)
            return self._move(self._writing, pages, for_read=False)

    def read(self, pages: range) -> int:
        with self._lock:
            size = self._move(self._reading, pages, for_read=True)
            for place, page in zip(self._reading.places, pages, strict=False):
                np.copyto(np.frombuffer(self._memory.loaded(page), np.uint8), place)
            return size

    def _move(self, side: _RingAndMemory, pages: range, *, for_read: bool) -> int:
        size = self._memory.block_size
        for place, page in zip(side.places, pages, strict=False):
            side.ring.prepare(place, for_read, self._descriptor, page * size)
        return side.finish(len(pages), size)


class _RingAndMemory:
    """A ring with as much shared memory as its entries."""

    def __init__(self, stack: ExitStack, mount: str, entries: int, size: int, *, for_read: bool) -> None:
        mount = hf3fs.extract_mount_point(mount) or mount
        shared = SharedMemory(create=True, size=entries * size)
        iov = hf3fs.make_iovec(shared, mount)
        shared.unlink()
        shared.close()
        self.places = [iov[start : start + size] for start in range(0, entries * size, size)]
        self.ring = hf3fs.make_ioring(mount, entries, for_read)
        stack.callback(self.ring.destroy)

    def finish(self, count: int, size: int) -> int:
        """Submit, wait for all, and the bytes that they moved."""
        done = self.ring.submit().wait(min_results=count)
        return whole(sum(part.result for part in done), count * size)


# -- LMCache's hf3fs connector: a file a chunk -------------------------------------------------------------


def lmcache_hf3fs(folder: Path, meter: Meter, memory: Memory) -> None:
    """Header and data through a ring into a temporary file, renamed while open; read in the same way."""
    paths = block_names(folder, memory.count)
    size = HEADER.size + memory.block_size
    with ExitStack() as stack:
        writing = _ChunkRing(stack, folder, size, for_read=False)
        reading = _ChunkRing(stack, folder, size, for_read=True)

        def store(index: int) -> int:
            writing.data[: HEADER.size] = HEADER.pack(memory.block_size, 1, 2, 3, 4, 5, 6)
            writing.data[HEADER.size : size] = memory.stored(index)
            with _registered(f"{paths[index]}.tmp", os.O_RDWR | os.O_CREAT | os.O_TRUNC) as descriptor:
                writing.move(descriptor)
                os.rename(f"{paths[index]}.tmp", paths[index])
            return memory.block_size

        def load(index: int) -> int:
            with _registered(paths[index], os.O_RDONLY) as descriptor:
                reading.move(descriptor)
            (found, *_) = HEADER.unpack(reading.data[: HEADER.size])
            memory.loaded(index)[:] = reading.data[HEADER.size : size]
            return whole(found, memory.block_size)

        for name, call in (("write", store), ("read", load)):
            with meter.phase(name) as phase:
                for index in range(memory.count):
                    phase.run(partial(call, index))


class _ChunkRing:
    """Moves one chunk, in pieces of up to 1 MiB."""

    def __init__(self, stack: ExitStack, folder: Path, size: int, *, for_read: bool) -> None:
        self._for_read = for_read
        mount = hf3fs.extract_mount_point(folder) or str(folder)
        shared = SharedMemory(create=True, size=size)
        iov = hf3fs.make_iovec(shared, mount)
        shared.unlink()
        shared.close()
        self.data: memoryview = iov.data
        self._parts = [(iov[start : min(start + MIB, size)], start) for start in range(0, size, MIB)]
        self._size = size
        self._ring = hf3fs.make_ioring(mount, len(self._parts), for_read)
        stack.callback(self._ring.destroy)

    def move(self, descriptor: int) -> None:
        for part, offset in self._parts:
            self._ring.prepare(part, self._for_read, descriptor, offset)
        done = self._ring.submit().wait(min_results=len(self._parts))
        whole(sum(part.result for part in done), self._size)


@contextmanager
def _registered(path: str, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o644)
    try:
        hf3fs.register_fd(descriptor)
        yield descriptor
        hf3fs.deregister_fd(descriptor)
    finally:
        os.close(descriptor)


# -- KVBM's disk tier -----------------------------------------------------------------------------------


def kvbm_disk(folder: Path, meter: Meter, memory: Memory) -> None:
    """A temporary file, unlinked while open, allocated whole, O_DIRECT set late; slots at random by four threads."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file, ThreadPoolExecutor(KVBM_THREADS) as pool:
        descriptor, size = file.fileno(), memory.block_size
        os.posix_fallocate(descriptor, 0, memory.size)
        with suppress(OSError):  # refused, as KVBM finds it on tmpfs of older kernels: it goes on without
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
        slots = np.random.default_rng(0).permutation(memory.count).tolist()

        def store(index: int) -> int:
            return whole(os.pwrite(descriptor, memory.stored(index), slots[index] * size), size)

        def load(index: int) -> int:
            return whole(os.preadv(descriptor, [memory.loaded(index)], slots[index] * size), size)

        for name, call in (("write", store), ("read", load)):
            with meter.phase(name) as phase:
                phase.spread(pool, [partial(call, index) for index in range(memory.count)])
