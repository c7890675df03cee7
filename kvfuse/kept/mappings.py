"""Maps shared memory of one size that a keeper has for the next daemon."""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

from kvfuse.kept.keeper import Keeper


class KeptMapping(NamedTuple):
    """Shared memory. All bytes that nobody wrote are zero, and have no pages."""

    memory: mmap.mmap
    descriptor: int
    """the caller owns and closes it"""
    was_kept: bool
    """a former daemon left it"""


def map_kept(keeper: Keeper, name: str, content: bytes, size: int) -> KeptMapping:
    """Map the memory of the former daemon's entry, or new memory that the keeper has from now on.

    ``content``: of the entry; it identifies the format and the owner. An entry with another content, or of another
    size in bytes, is replaced. OSError: there is no memory.
    """
    kept = keeper.take(name)
    if kept is not None:
        descriptors = kept.descriptors
        if kept.content == content and len(descriptors) == 1 and os.fstat(descriptors[0]).st_size == size:
            return KeptMapping(mmap.mmap(descriptors[0], size), descriptors[0], True)
        for descriptor in descriptors:
            os.close(descriptor)
    descriptor = os.memfd_create(f"kvfuse-{name.replace('/', '-')}", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    keeper.keep(name, content, [descriptor])
    return KeptMapping(mmap.mmap(descriptor, size), descriptor, False)
