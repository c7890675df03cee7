"""Measurements of a folder on any file system: one function for each figure, with POSIX calls alone.

Nothing here chooses sizes or compares; ``suite`` does.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kvfuse.errors import KvfuseError
from kvfuse.usrbio.client import BlockStore
from kvfuse_bench.cache import read_whole, write_and_rename
from kvfuse_bench.mountpoint import mount_of
from kvfuse_bench.ringwork import connect_when_open

MIB = 1 << 20
PUTS_MAX, PUTS_SIZE = 64, 16 * MIB
_PAGE = os.sysconf("SC_PAGE_SIZE")
_OTHER_FILES = 200
_RESIDENT_SHARE_MAX = 0.01


def _rate(count: int, function: Callable[[], None]) -> float:
    """How often a second, where ``function`` does a thing ``count`` times."""
    start = time.perf_counter()
    function()
    return count / (time.perf_counter() - start)


def block_paths(folder: Path, count: int, first: int = 0) -> list[str]:
    """Names of ``count`` blocks as engines choose them: a hash's length of hexadecimal."""
    return [f"{folder}/{index:032x}" for index in range(first, first + count)]


def store_blocks(folder: Path, count: int, size: int, first: int = 0) -> float:
    """Blocks a second: a temporary name created, written whole, closed, renamed."""
    paths, data = block_paths(folder, count, first), os.urandom(size)

    def store() -> None:
        for path in paths:
            write_and_rename(path + ".part", path, data)

    return _rate(count, store)


def put_blocks(folder: Path, count: int, size: int, first: int = 0) -> float:
    """Blocks a second: put over a ring from registered memory, up to `PUTS_SIZE` bytes at once."""
    names = [Path(path).name for path in block_paths(folder, count, first)]
    with connect_when_open(mount_of(folder)) as client, BlockStore(client, folder) as store:
        batch = max(1, min(PUTS_MAX, PUTS_SIZE // size))
        memory = client.iov(batch * size).array.reshape(batch, size)
        memory[:] = np.frombuffer(os.urandom(size), np.uint8)

        def put() -> None:
            for start in range(0, count, batch):
                some = names[start : start + batch]
                if not store.put_many(some, list(memory[: len(some)])).all():
                    raise KvfuseError(f"{folder} does not store all blocks")

        return _rate(count, put)


def remove_blocks(folder: Path) -> None:
    """All files of a folder, which stays; committed when this returns. Some may be evicted meanwhile."""
    for entry in list(os.scandir(folder)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(entry.path)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def store_blocks_paced(folder: Path, count: int, size: int, rate: float) -> float:
    """As ``store_blocks``, but no faster than ``rate`` blocks a second."""
    paths, data = block_paths(folder, count), os.urandom(size)
    start = time.perf_counter()

    def store() -> None:
        for index, path in enumerate(paths):
            ahead = start + index / rate - time.perf_counter()
            # short waits are not worth a sleep: the clock of sleep is coarser than a block takes
            if ahead > 0.005:
                time.sleep(ahead)
            write_and_rename(path + ".part", path, data)

    return _rate(count, store)


def store_blocks_together(folder: Path, count: int, size: int, writer_count: int) -> float:
    """As ``store_blocks``, by ``writer_count`` threads that share the blocks, each in a folder of its own.

    In one folder the kernel lets one thread at a time create or rename.
    """
    data = os.urandom(size)
    folders = [folder / f"{writer:02x}" for writer in range(writer_count)]
    for writer_folder in folders:
        writer_folder.mkdir()

    def store_some(some: Sequence[str]) -> None:
        for path in some:
            write_and_rename(path + ".part", path, data)

    def store() -> None:
        with ThreadPoolExecutor(writer_count) as pool:
            list(pool.map(store_some, [block_paths(part, count // writer_count) for part in folders]))

    return _rate(count, store)


@contextlib.contextmanager
def open_files(folder: Path, count: int) -> Iterator[None]:
    """``count`` new files are open for writing meanwhile, with a byte each that was never stored."""
    files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max[1], files_max[1]))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, files_max)
        for path in block_paths(folder, min(count, files_max[1] - _OTHER_FILES)):
            stack.enter_context(open(path, "xb", buffering=0)).write(b"x")
        yield


def ask_absent_names(folder: Path, count: int) -> float:
    """Names a second: each asked for once, none there."""
    paths = [f"{folder}/absent-{index:032x}" for index in range(count)]

    def ask() -> None:
        for path in paths:
            try:
                os.stat(path)
            except FileNotFoundError:
                continue
            raise KvfuseError(f"{path} is there: this folder is not the bench's own")

    return _rate(count, ask)


def read_blocks(folder: Path, count: int, size: int) -> float:
    """Blocks a second: opened, read whole, closed. They were stored by ``store_blocks``."""
    paths, buffer = block_paths(folder, count), memoryview(bytearray(size))

    def read() -> None:
        for path in paths:
            found = read_whole(path, buffer)
            if found != size:
                raise KvfuseError(f"{path} has {found} bytes, not {size}")

    return _rate(count, read)


def make_small_files(folder: Path, count: int, size: int, progress: Callable[[int], None]) -> float:
    """Files a second: created, written, closed; a thousand to a folder."""
    data = os.urandom(size)
    start = time.perf_counter()
    for first in range(0, count, 1000):
        shard = folder / f"{first:08d}"
        shard.mkdir()
        for path in block_paths(shard, min(1000, count - first)):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            os.write(descriptor, data)
            os.close(descriptor)
        progress(min(first + 1000, count))
    return count / (time.perf_counter() - start)


def write_stream(path: Path, size: int) -> float:
    """GB/s of a new file written in calls of 1 MiB and closed."""
    data = os.urandom(MIB)
    start = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for _ in range(size // MIB):
            if os.write(descriptor, data) != MIB:
                raise KvfuseError(f"{path} took only a part of a write")
    finally:
        os.close(descriptor)
    return size / (time.perf_counter() - start) / 1e9


def read_stream(path: Path) -> float:
    """GB/s of a whole file read in calls of 1 MiB into one buffer."""
    buffer = memoryview(bytearray(MIB))
    size = 0
    start = time.perf_counter()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while part := os.readv(descriptor, [buffer]):
            size += part
    finally:
        os.close(descriptor)
    return size / (time.perf_counter() - start) / 1e9


def disk_rates(folder: Path, size: int) -> tuple[float, float]:
    """GB/s of ``size`` bytes written and synced to the disk of ``folder``, and of reading them again from there."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        path = Path(file.name)
        start = time.perf_counter()
        write_stream(path, size)
        os.fsync(file.fileno())
        written = size / (time.perf_counter() - start) / 1e9
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return written, read_stream(path)


def drop_cached(path: Path) -> None:
    """Make the kernel forget this file's pages - of this mount alone, not those of what lies below it.

    KvfuseError where it keeps them: what follows would not be a cold read.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # pages not yet written stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    share = cached_share(path)
    if share > _RESIDENT_SHARE_MAX:
        raise KvfuseError(f"{share:.0%} of {path} stay in the page cache: it cannot be read cold")


def cached_share(path: Path) -> float:
    """How much of a file is in the page cache of its mount, 0 to 1."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        page_count = -(-len(mapping) // _PAGE)
        states = np.zeros(page_count, np.uint8)
        content = np.frombuffer(mapping, np.uint8)
        arguments = (
            ctypes.c_void_p(content.ctypes.data),
            ctypes.c_size_t(len(mapping)),
            states.ctypes.data_as(ctypes.c_void_p),
        )
        del content  # the mapping cannot be closed while it is looked at
        if libc.mincore(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
        return float((states & 1).mean())


def copy_memory(size: int) -> float:
    """GB/s of memcpy in pieces of 1 MiB into one buffer, the least that a read must cost."""
    source, target = np.ones(max(size, 64 * MIB), np.uint8).reshape(-1, MIB), np.empty(MIB, np.uint8)
    start = time.perf_counter()
    for piece in source:
        np.copyto(target, piece)
    return source.nbytes / (time.perf_counter() - start) / 1e9
