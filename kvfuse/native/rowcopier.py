"""Copies many pieces of memory and makes their checksums, without the interpreter; in Python without a compiler.

A piece is a row of three numbers: the address that it is copied from, the one that it is copied to, and its length (at
least 1) in bytes. The memory has to be there, and to stay there: where it is not, that is a signal.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfuse.checksum import granule_checksums

native: Any
try:
    from kvfuse.native import _native as native
except ImportError:  # it was built without a compiler
    native = None

Numbers = npt.NDArray[np.int64]
IS_NATIVE = bool(getattr(native, "COPIES", False))
"""The processor has an instruction for checksums, and this program was built with a compiler."""


def copy_rows(rows: Numbers) -> bytes:
    """Copy, in this order. The checksums of the granules of each copy, one behind the other: see `granule_checksums`.

    They are those of what was copied, whatever becomes of the source. The interpreter lock is not held meanwhile.
    """
    if not IS_NATIVE:
        return python_copy_rows(rows)
    found: bytes = native.copy_rows(np.ascontiguousarray(rows))
    return found


def python_copy_rows(rows: Numbers) -> bytes:
    """As `copy_rows`, a call for each row."""
    found = []
    for source, target, length in rows.tolist():
        copy = np.frombuffer((ctypes.c_uint8 * length).from_address(target), np.uint8)
        np.copyto(copy, np.frombuffer((ctypes.c_uint8 * length).from_address(source), np.uint8))
        found.append(granule_checksums(copy.data))
    return b"".join(found)
