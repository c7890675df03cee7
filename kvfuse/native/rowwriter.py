"""Writes many pieces of memory to files at once, without the interpreter; the same in Python without a compiler.

A piece is a row of seven numbers: the file's descriptor, the offset there; address and length (at least 1) of the
piece in bytes; a descriptor of the same memory, the offset there; the address at which the file has this offset mapped,
or 0.

Some file systems take 6 us for a pwrite(2) of a page that is there already (ext4 looks at all blocks of a large folio).
So a short piece is read from its memory into the map, by pread(2), where the map's pages are resident: the kernel
copies then, too, and says EFAULT where the medium, or its space, fails; pwrite(2) is tried after it.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import numpy.typing as npt

native: Any
try:
    from kvfuse.native import _native as native
except ImportError:  # it was built without a compiler
    native = None

Numbers = npt.NDArray[np.int64]


def write_rows(rows: Numbers) -> tuple[int, int]:
    """(rows that were written, 0 or the errno of the next one, of which a part may be). Neighbours share a call.

    The kernel copies: memory that is not there is EFAULT. The interpreter lock is not held meanwhile.
    """
    if native is None:
        return python_write_rows(rows)
    found: tuple[int, int] = native.write_rows(np.ascontiguousarray(rows))
    return found


def python_write_rows(rows: Numbers) -> tuple[int, int]:
    """As `write_rows`, a system call for each row."""
    for number, (descriptor, offset, address, length, *_) in enumerate(rows.tolist()):
        view = memoryview((ctypes.c_uint8 * length).from_address(address)).cast("B")
        while view:
            try:
                count = os.pwrite(descriptor, view, offset)
            except OSError as error:
                return number, error.errno or 5
            view, offset = view[count:], offset + count
    return len(rows), 0
