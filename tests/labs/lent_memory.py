"""Memory that hosts lend each other in tests."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def shared_memory(size: int) -> Bytes:
    """As an arena of the tier is made."""
    descriptor = os.memfd_create("arena")
    try:
        os.ftruncate(descriptor, size)
        return np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
    finally:
        os.close(descriptor)
