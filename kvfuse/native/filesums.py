"""Checksums of the granules of a file's range, without the interpreter; in Python without a compiler."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from kvfuse.checksum import GRANULE_SIZE, granule_checksums
from kvfuse.native.rowreceiver import ENDED, IS_NATIVE, native


def sum_file(descriptor: int, offset: int, length: int) -> tuple[bytes, int]:
    """(as `granule_checksums` of these bytes, 0); with an errno, or `ENDED` of a shorter file, they are of no use.

    ``length`` bytes at ``offset`` are read through the page cache, which has them afterwards; the kernel is asked for
    all of them before the first is read. The interpreter lock is not held meanwhile.
    """
    if not IS_NATIVE:
        return python_sum_file(descriptor, offset, length)
    found: tuple[bytes, int] = native.sum_file(descriptor, offset, length)
    return found


def python_sum_file(descriptor: int, offset: int, length: int) -> tuple[bytes, int]:
    """As `sum_file`."""
    with suppress(OSError):  # the read says it, too
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_WILLNEED)
    sums, piece = [], memoryview(bytearray(min(GRANULE_SIZE, length)))
    for start in range(0, length, GRANULE_SIZE):
        part = piece[: length - start]
        done = 0
        while done < len(part):
            try:
                count = os.preadv(descriptor, [part[done:]], offset + start + done)
            except OSError as error:
                return b"", error.errno or errno.EIO
            if not count:
                return b"", ENDED
            done += count
        sums.append(granule_checksums(part))
    return b"".join(sums), 0
