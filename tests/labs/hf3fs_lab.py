"""What tests of the 3FS calls share: memory, registered files, rings, and a daemon that stands still."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from mounting import PATIENCE_S, KvfuseMount
from posix_calls import opened

from kvfuse.usrbio import hf3fs

KIB, MIB = 1 << 10, 1 << 20
PATIENT = timedelta(seconds=PATIENCE_S)


@contextmanager
def shared(size: int) -> Iterator[SharedMemory]:
    """Shared memory whose name is gone, and whose mapping goes at the end."""
    memory = SharedMemory(create=True, size=size)
    try:
        yield memory
    finally:
        memory.close()


def iovec_of(mount: KvfuseMount, size: int) -> hf3fs.iovec:
    """Memory that only the rings still know."""
    with shared(size) as memory:
        iov = hf3fs.make_iovec(memory, str(mount.point))
        memory.unlink()
    return iov


@contextmanager
def registered(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[int]:
    with opened(path, flags) as fd:
        hf3fs.register_fd(fd)
        try:
            yield fd
        finally:
            hf3fs.deregister_fd(fd)


def rings(mount: KvfuseMount, entries: int = 8) -> tuple[hf3fs.ioring, hf3fs.ioring]:
    """(for reads, for writes)"""
    point = str(mount.point)
    return hf3fs.make_ioring(point, entries), hf3fs.make_ioring(point, entries, for_read=False)


def run(ring: hf3fs.ioring, count: int) -> list[int]:
    """Submit, and the results of ``count`` operations."""
    return [done.result for done in ring.submit().wait(min_results=count, timeout=PATIENT)]
