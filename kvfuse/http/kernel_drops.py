"""Has the kernel drop what a change of this door made untrue, before the change is reported as done.

The kernel may wait for an answer of the event loop meanwhile: so threads tell it, a few at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

import trio

from kvfuse.volume.api import RingApi
from kvfuse.volume.views.kernel_cache import KernelCache

THREADS = 4


class KernelDrops:
    """What this door has the kernel drop. Where there is no mount, nothing."""

    def __init__(self, volume: RingApi) -> None:
        self._volume = volume
        self._limiter = trio.CapacityLimiter(THREADS)

    async def drop(
        self,
        names: Iterable[tuple[int, bytes]] = (),
        contents: Iterable[int] = (),
        attributes: Iterable[int] = (),
    ) -> None:
        """Seal the change for the next daemon, then drop (folder, name) pairs, bytes and attributes of inodes."""
        if (seal := self._volume.seal) is not None:
            seal()
        if (kernel := self._volume.kernel) is None:
            return
        pairs, files, others = list(names), list(contents), list(attributes)
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(_drop, kernel, pairs, files, others, limiter=self._limiter)


def _drop(kernel: KernelCache, names: list[tuple[int, bytes]], contents: list[int], attributes: list[int]) -> None:
    """In a thread. EngineError where the kernel refuses."""
    for folder, name in names:
        kernel.drop_any_name(folder, name)
    for ino in contents:
        kernel.drop_content(ino)
    for ino in {*attributes, *(folder for folder, _ in names)}:
        kernel.drop_attributes(ino)
