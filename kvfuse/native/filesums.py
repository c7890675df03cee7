"""Checksums of the granules of a file's range, kept or not, without the interpreter; in Python without a compiler."""

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
        if error := _fill(descriptor, part, offset + start, len(part)):
            return b"", error
        sums.append(granule_checksums(part))
    return b"".join(sums), 0


def fill_and_sum(descriptor: int, target: memoryview, offset: int, length: int) -> tuple[bytes, int]:
    """Fill ``target`` from ``offset`` on with at least ``length`` bytes; the checksums of these, as `sum_file`.

    All of ``target`` is asked for, so that a descriptor with O_DIRECT gets whole blocks. ValueError: it has fewer
    bytes. The interpreter lock is not held meanwhile. The sums are of what is in the memory then: nobody else may write
    to it.
    """
    if not IS_NATIVE:
        return python_fill_and_sum(descriptor, target, offset, length)
    found: tuple[bytes, int] = native.fill_and_sum(descriptor, target, offset, length)
    return found


def python_fill_and_sum(descriptor: int, target: memoryview, offset: int, length: int) -> tuple[bytes, int]:
    """As `fill_and_sum`."""
    if not 0 <= length <= len(target):
        raise ValueError("the target has fewer bytes")
    error = _fill(descriptor, target, offset, length)
    return (b"", error) if error else (granule_checksums(target[:length]), 0)


def _fill(descriptor: int, target: memoryview, offset: int, length: int) -> int:
    """Read at least ``length`` bytes. 0, an errno, or `ENDED`."""
    done = 0
    while done < length:
        try:
            count = os.preadv(descriptor, [target[done:]], offset + done)
        except OSError as error:
            return error.errno or errno.EIO
        if not count:
            return ENDED
        done += count
    return 0
