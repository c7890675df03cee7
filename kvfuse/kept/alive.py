"""Until when what a daemon shows to clients in shared memory holds, for the daemon after it.

Indexes of blocks (`tier.resident`) are memory that clients can only read, and so can the next daemon: it cannot end
them. So an index of a daemon that something outlives holds for a moment, which the daemon prolongs while it lives. The
end of that moment stands in a word of shared memory, from before any index says so. The next daemon changes nothing
before.
"""

from __future__ import annotations

import mmap
import os
import time

from kvfuse.kept.keeper import Keeper

ALIVE_SECONDS = 0.2
"""for which indexes hold; a daemon that does not come to prolong them is asked by clients instead"""
RENEW_SECONDS = 0.05
_NAME = "tier/alive"


class Alive:
    """The word of this daemon. Event loop only, when it is made."""

    def __init__(self, keeper: Keeper) -> None:
        descriptor = os.memfd_create("kvfuse-alive", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            self._word = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("Q")
            keeper.keep(_NAME, b"", [descriptor])
        finally:
            os.close(descriptor)

    def note_expiry(self, until: int) -> None:
        """Something is about to hold until then: nanoseconds of CLOCK_MONOTONIC. It never says less than before."""
        self._word[0] = max(self._word[0], until)

    def expire_all(self) -> None:
        """Nothing holds any more: all indexes have ended."""
        self._word[0] = 0


def seconds_to_wait(keeper: Keeper) -> float:
    """From now on, until nothing holds any more that the daemon before this one showed; up to `ALIVE_SECONDS`."""
    kept = keeper.take(_NAME)
    if kept is None:
        return 0.0
    try:
        until = max([int.from_bytes(os.pread(descriptor, 8, 0), "little") for descriptor in kept.descriptors[:1]])
    except (OSError, ValueError):
        until = 0
    finally:
        for descriptor in kept.descriptors:
            os.close(descriptor)
    return min(max(0.0, (until - time.monotonic_ns()) / 1e9), ALIVE_SECONDS)
