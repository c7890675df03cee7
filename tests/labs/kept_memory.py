"""What a daemon that is killed now would leave: descriptors and bytes that were kept, and shared memory as it is."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence

from kvfuse.kept.keeper import MemoryKeeper
from kvfuse.volume.tier.shared_tier import SharedTier


def after_kill(keeper: MemoryKeeper) -> MemoryKeeper:
    """As a daemon after this one would find it, whatever this one goes on to do."""
    copy = MemoryKeeper()
    for name in keeper.list_names(""):
        kept = keeper.take(name)
        assert kept is not None
        copies = _copies_of(kept.descriptors)
        copy.keep(name, kept.content, copies)
        for descriptor in (*kept.descriptors, *copies):
            os.close(descriptor)
    return copy


def let_go(*keepers: MemoryKeeper) -> None:
    """Close all that they keep."""
    for keeper in keepers:
        for name in keeper.list_names(""):
            keeper.drop(name)


def free(tier: SharedTier) -> None:
    """Give its memory back. A volume's ends with its process: blocks refer to themselves by arrays, which Python's
    collector does not look into."""
    for block in tier.kept.values():
        del block.buffer
    for left in tier.left.values():
        if left.block is not None:
            del left.block.buffer


def _copies_of(descriptors: Sequence[int]) -> list[int]:
    """Of one memory one copy, however many descriptors it has."""
    made: dict[int, int] = {}
    copies = []
    for descriptor in descriptors:
        inode = os.fstat(descriptor).st_ino
        if inode in made:
            copies.append(os.open(f"/proc/self/fd/{made[inode]}", os.O_RDONLY | os.O_CLOEXEC))
        else:
            made[inode] = _copy_of(descriptor)
            copies.append(made[inode])
    return copies


def _copy_of(descriptor: int) -> int:
    """A piece of shared memory with the same bytes and seals."""
    size, seals = os.fstat(descriptor).st_size, fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    copy = os.memfd_create("copy", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(copy, size)
    position = 0
    while position < size:  # holes stay holes: they take no memory
        try:
            start = os.lseek(descriptor, position, os.SEEK_DATA)
        except OSError:
            break
        position = os.lseek(descriptor, start, os.SEEK_HOLE)
        os.pwrite(copy, os.pread(descriptor, position - start, start), start)
    fcntl.fcntl(copy, fcntl.F_ADD_SEALS, seals & ~fcntl.F_SEAL_SEAL)
    return copy
