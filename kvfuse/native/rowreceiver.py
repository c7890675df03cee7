"""Receives into many pieces of memory with their checksums, without the interpreter; in Python without a compiler.

A piece is a row of four numbers, of 8 bytes each: the address that bytes go to, how many they are to be (at least 1),
how many have come, and their CRC32C. The memory has to be there, and to stay there: where it is not, that is a signal.
"""

from __future__ import annotations

import ctypes
import errno
import os
from array import array
from typing import Any

import numpy as np

from kvfuse.checksum import extend

native: Any
try:
    from kvfuse.native import _native as native
except ImportError:  # it was built without a compiler
    native = None

ROW = 4
IS_NATIVE = bool(getattr(native, "CHECKSUMS", False))
"""The processor has an instruction for checksums, and this program was built with a compiler."""

ENDED = -1
"""The other side ended the connection."""
_PIECES_MAX = 64
_PART_MAX = 256 << 10


def receive_rows(descriptor: int, rows: array[int], first: int, budget: int) -> tuple[int, int, int]:
    """Fill rows, one after the other from ``first`` on, with what is there of a connection, at most ``budget`` bytes.

    (The first row that is not full, bytes that came, 0 or an errno or `ENDED`); EAGAIN: no more is there now. It never
    waits. The interpreter lock is not held meanwhile.
    """
    if not IS_NATIVE:
        return python_receive_rows(descriptor, rows, first, budget)
    found: tuple[int, int, int] = native.receive_rows(descriptor, rows, first, budget)
    return found


def python_receive_rows(descriptor: int, rows: array[int], first: int, budget: int) -> tuple[int, int, int]:
    """As `receive_rows`, of a descriptor that does not wait."""
    came = 0
    while ROW * first < len(rows) and came < budget:
        views, room = [], min(budget - came, _PART_MAX)
        for place in range(ROW * first, min(len(rows), ROW * (first + _PIECES_MAX)), ROW):
            target, length, done, _ = rows[place : place + ROW]
            part = min(length - done, room)
            views.append(memoryview((ctypes.c_uint8 * part).from_address(target + done)).cast("B"))
            room -= part
            if not room:
                break
        try:
            count = os.readv(descriptor, views)
        except InterruptedError:
            continue
        except OSError as error:
            return first, came, error.errno or errno.EIO
        if not count:
            return first, came, ENDED
        came += count
        for view in views:
            part, place = min(count, len(view)), ROW * first
            rows[place + 3] = extend(rows[place + 3], np.frombuffer(view[:part], np.uint8))
            rows[place + 2] += part
            count -= part
            if rows[place + 2] < rows[place + 1]:
                break
            first += 1
    return first, came, 0
