"""Transfers of any offset, length and buffer on a file that is open with O_DIRECT.

The kernel takes only whole blocks from and to aligned memory. Everything else goes through an aligned
bounce buffer; a partly written block is read, changed and written back under its file's lock, because a
neighbour may change the rest of the same block at the same time.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator

import numpy as np

BLOCK_SIZE = 4096
BOUNCE_SIZE = 1 << 20


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


def read(fd: int, view: memoryview, offset: int) -> None:
    """Fill ``view`` through a bounce buffer."""
    with mmap.mmap(-1, BOUNCE_SIZE) as memory, memoryview(memory) as bounce:
        for start, stop, block_start, block_stop in _chunks(offset, offset + view.nbytes):
            with bounce[: block_stop - block_start] as blocks:
                read_fully(fd, blocks, block_start)
                view[start - offset : stop - offset] = blocks[start - block_start : stop - block_start]


def write(fd: int, view: memoryview, offset: int, block_lock: threading.Lock) -> None:
    """Write ``view`` through a bounce buffer, leaving the rest of its first and last block as it was."""
    with mmap.mmap(-1, BOUNCE_SIZE) as memory, memoryview(memory) as bounce, block_lock:
        for start, stop, block_start, block_stop in _chunks(offset, offset + view.nbytes):
            with bounce[: block_stop - block_start] as blocks:
                if start != block_start:
                    with blocks[:BLOCK_SIZE] as first:
                        read_fully(fd, first, block_start)
                if stop != block_stop:
                    with blocks[-BLOCK_SIZE:] as last:
                        read_fully(fd, last, block_stop - BLOCK_SIZE)
                blocks[start - block_start : stop - block_start] = view[start - offset : stop - offset]
                write_fully(fd, blocks, block_start)


def _chunks(offset: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(start, stop) of the pieces whose blocks, (block_start, block_stop), fit a bounce buffer."""
    start = offset
    while start < end:
        block_start = start - start % BLOCK_SIZE
        stop = min(end, block_start + BOUNCE_SIZE)
        yield start, stop, block_start, -(-stop // BLOCK_SIZE) * BLOCK_SIZE
        start = stop
