"""The references of rings: memcpy, and the same bytes through system calls on tmpfs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfuse.errors import KvfuseError
from kvfuse_bench.timing import Batch

Bytes = npt.NDArray[np.uint8]


def _rolling(piece_count: int, depth: int, do: Callable[[int], Any]) -> Batch:
    """Batches of ``depth`` calls ``do(index)`` that walk over all pieces and begin again."""
    count = piece_count // depth

    def batch(number: int) -> None:
        first = number % count * depth
        for index in range(first, first + depth):
            do(index)

    return batch


def memcpy(source: Bytes, target: Bytes, size: int, depth: int) -> Batch:
    """``depth`` copies of ``size`` bytes by one thread, from other places to other places each time."""
    sources, targets = source.reshape(-1, size), target.reshape(-1, size)
    return _rolling(len(sources), depth, lambda index: np.copyto(targets[index], sources[index]))


@contextlib.contextmanager
def memory_file(folder: Path, content: Bytes) -> Iterator[int]:
    """A descriptor of a file with ``content`` in ``folder``, which is on tmpfs."""
    path = folder / "reference"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        write_whole(descriptor, content)
        yield descriptor
    finally:
        os.close(descriptor)
        path.unlink()


def write_whole(descriptor: int, content: Bytes) -> None:
    """All of it, from the start of the file."""
    written = 0
    while written < len(content):
        written += os.pwrite(descriptor, content.data[written:], written)


def file_reads(descriptor: int, target: Bytes, size: int, depth: int) -> Batch:
    """``depth`` calls of pread."""
    return _file_calls(os.preadv, descriptor, target, size, depth)


def file_writes(descriptor: int, source: Bytes, size: int, depth: int) -> Batch:
    """``depth`` calls of pwrite over bytes that are there."""
    return _file_calls(os.pwritev, descriptor, source, size, depth)


def _file_calls(
    call: Callable[[int, list[memoryview], int], int], descriptor: int, memory: Bytes, size: int, depth: int
) -> Batch:
    view = memory.data

    def do(index: int) -> None:
        start = index * size
        if call(descriptor, [view[start : start + size]], start) != size:
            raise KvfuseError("tmpfs moved only a part of the bytes")

    return _rolling(len(memory) // size, depth, do)
