"""Records when the indexes that a daemon shows to clients expire; the next daemon waits for that before any change.

Block indexes (`tier.resident_indexes`) are memory that clients can only read, and so can the next daemon: it cannot
invalidate them. So an index of a daemon with a keeper expires soon, and the daemon renews it while it lives. A word of
shared memory has the latest expiry, stored before any index has it. The next daemon changes nothing before that time.
"""

from __future__ import annotations

import mmap
import os
import time

from kvfuse.kept.keeper import Keeper

ALIVE_SECONDS = 0.2
"""until an index expires; if a busy daemon renews it late, clients ask the daemon instead"""
RENEW_SECONDS = 0.05
_NAME = "tier/alive"


class Alive:
    """The word of this daemon. Made in the event loop."""

    def __init__(self, keeper: Keeper) -> None:
        descriptor = os.memfd_create("kvfuse-alive", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            self._word = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("Q")
            keeper.keep(_NAME, b"", [descriptor])
        finally:
            os.close(descriptor)

    def note_expiry(self, until: int) -> None:
        """Raise the expiry to ``until``, nanoseconds of CLOCK_MONOTONIC, before an index has it. It never falls."""
        self._word[0] = max(self._word[0], until)

    def expire_all(self) -> None:
        """Reset the word: all indexes have ended."""
        self._word[0] = 0


def seconds_to_wait(keeper: Keeper) -> float:
    """Seconds until all indexes of the former daemon have expired, at most `ALIVE_SECONDS`."""
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
