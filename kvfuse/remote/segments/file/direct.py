"""Transfers of any offset, length and buffer on a file that is open with O_DIRECT.

The kernel takes only whole blocks from and to aligned memory. Everything else goes through an aligned
bounce buffer; a partly written block is read, changed and written back under its file's lock, because a
neighbour may change the rest of the same block at the same time.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

BLOCK_SIZE = 4096
BOUNCE_SIZE = 1 << 20
SPARE_MAX = 4
"""bounce buffers that are kept for the next transfers"""


def address_of(view: memoryview | mmap.mmap) -> int:
    """Where a buffer, writable or not, lies in memory."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def is_aligned(offset: int, view: memoryview) -> bool:
    """The kernel can transfer this without a bounce buffer."""
    return (offset | view.nbytes | address_of(view)) % BLOCK_SIZE == 0


def read_fully(fd: int, view: memoryview, offset: int) -> None:
    """Fill ``view``. EOFError when the file ends before."""
    done = 0
    while done < view.nbytes:
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise EOFError
        done += count


def write_fully(fd: int, view: memoryview, offset: int) -> None:
    """Write all of ``view``."""
    done = 0
    while done < view.nbytes:
        done += os.pwritev(fd, [view[done:]], offset + done)


@contextmanager
def bounce_buffer() -> Iterator[memoryview]:
    """Aligned memory for one transfer. A few are kept: the first touch of new memory costs more than a copy."""
    try:
        memory = _spare.pop()
    except IndexError:
        memory = mmap.mmap(-1, BOUNCE_SIZE)
    try:
        with memoryview(memory) as bounce:
            yield bounce
    finally:
        _spare.append(memory)


_spare: deque[mmap.mmap] = deque(maxlen=SPARE_MAX)


def read(fd: int, views: Sequence[memoryview], offset: int) -> None:
    """Fill views that follow each other through a bounce buffer."""
    left, end = deque(views), offset + sum([view.nbytes for view in views])
    with bounce_buffer() as bounce:
        for start, stop, block_start, block_stop in chunks(offset, end):
            with bounce[: block_stop - block_start] as blocks:
                read_fully(fd, blocks, block_start)
                position = start - block_start
                for part in first_of(left, stop - start):
                    part[:] = blocks[position : position + len(part)]
                    position += len(part)


def write(
    fd: int, views: Sequence[memoryview], offset: int, block_lock: threading.Lock, reader: int | None = None
) -> None:
    """Write views that follow each other through a bounce buffer, leaving the rest of its first and last block.

    ``reader``: a descriptor that knows what those blocks have, where ``fd`` may not.
    """
    reader = fd if reader is None else reader
    left, end = deque(views), offset + sum([view.nbytes for view in views])
    with bounce_buffer() as bounce, block_lock:
        for start, stop, block_start, block_stop in chunks(offset, end):
            with bounce[: block_stop - block_start] as blocks:
                if start != block_start:
                    with blocks[:BLOCK_SIZE] as first:
                        read_fully(reader, first, block_start)
                if stop != block_stop:
                    with blocks[-BLOCK_SIZE:] as last:
                        read_fully(reader, last, block_stop - BLOCK_SIZE)
                position = start - block_start
                for part in first_of(left, stop - start):
                    blocks[position : position + len(part)] = part
                    position += len(part)
                write_fully(fd, blocks, block_start)


def first_of(left: deque[memoryview], length: int) -> Iterator[memoryview]:
    """The first ``length`` bytes of ``left``, which has the rest afterwards."""
    while length:
        view = left.popleft()
        if len(view) > length:
            left.appendleft(view[length:])
            view = view[:length]
        length -= len(view)
        yield view


def chunks(offset: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(start, stop) of the pieces whose blocks, (block_start, block_stop), fit a bounce buffer."""
    start = offset
    while start < end:
        block_start = start - start % BLOCK_SIZE
        stop = min(end, block_start + BOUNCE_SIZE)
        yield start, stop, block_start, -(-stop // BLOCK_SIZE) * BLOCK_SIZE
        start = stop
