"""Gives memory back to the machine that the C library keeps for later.

Bytes that calls have under way are up to half a GiB, and much of that stays with the process when they have ended:
glibc maps large pieces by themselves at first, but no more once some were freed, and gives only the end of its heap
back. Would each piece be mapped by itself, each call would pay for its pages anew. So what is free is looked at now and
then.
"""

from __future__ import annotations

import ctypes

import trio

LOOK_SECONDS = 5.0
FREE_MAX = 64 << 20
"""bytes that stay with the process"""
STEP = 16 << 20
"""What was given back is still free: it is done anew when so many bytes more are."""


class _Info(ctypes.Structure):
    """struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


class Heap:
    """Of this process. Without glibc 2.33 or later nothing is known of it, and nothing done."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self._info = getattr(libc, "mallinfo2", None)
        self._trim = getattr(libc, "malloc_trim", None)
        if self._info is not None:
            self._info.restype = _Info
        self._known = 0
        """bytes that were free after they were given back, as far as they are still"""

    @property
    def free(self) -> int:
        """Bytes that nobody uses, whether the machine has them back or not."""
        return int(self._info().fordblks) if self._info is not None else 0

    @property
    def is_due(self) -> bool:
        """There is something to `give_back`."""
        free = self.free
        self._known = min(self._known, free)
        return free > FREE_MAX and free > self._known + STEP

    def give_back(self) -> None:
        """In a thread: about 0.1 s for each GiB."""
        if self._trim is not None:
            self._trim(ctypes.c_size_t(0))
        self._known = self.free


async def give_memory_back() -> None:
    """Whenever much of it is free, until cancelled."""
    heap = Heap()
    while True:
        await trio.sleep(LOOK_SECONDS)
        if heap.is_due:
            await trio.to_thread.run_sync(heap.give_back)
