"""Empties the last segments of a volume that is to have a smaller capacity, while it is in use, and removes them. Then
segments of devices that are to leave move to others.

The superblock says how far (`Superblock.target`); who is killed goes on where he was:

1. From then on nothing is put into slabs of these segments. Files that have bytes there get other slots, as if they
   were written anew; blocks there are dropped.
2. Once all these slabs are free, in records that are durable, the superblock has the smaller capacity.
3. The segments are removed, and then the target.
4. Each segment of a device that leaves moves to another one, as the map of segments says; then the device leaves.

Of volumes of one host; `SharedDrain` does the first three steps where hosts share one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from kvfuse.errors import KvfuseError, NoSpace
from kvfuse.slab.layout import Superblock
from kvfuse.volume.blocks.block_engine import BlockEngine
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.device_changes import DeviceChanges
from kvfuse.volume.names.rewriting import Rewriter

PAUSE_MIN, PAUSE_MAX = 0.05, 10.0
"""Seconds between two rounds: after one that moved something, and at most."""

GRACE_SECONDS = 1.0
"""before segments are removed: who looked up a place there before finds the file, and then that it is another's"""

log = logging.getLogger(__name__)


@dataclass
class Drain:
    """One per membership. Event loop only."""

    core: Core
    journal: Journal
    rewriter: Rewriter
    engine: BlockEngine | None
    devices: DeviceChanges | None
    """of a volume on devices"""
    failure: str = ""
    """why the last round did not move all"""
    _slab_count: int = 0
    _segment_count: int = 0

    @property
    def left(self) -> int:
        """Slabs that are to go, and in use."""
        return len(self.core.slabs.going)

    def statistics(self) -> dict[str, object]:
        """``slabs``: those that were in use when this began, ``left`` of them; ``leaving``: devices; ``segments``:
        those of devices that leave when this began, ``segments_left`` of them."""
        target = self.core.superblock.target
        left = self.left if target else 0
        segments = self.devices.left_count if self.devices is not None else 0
        return {
            "target": target, "slabs": max(self._slab_count, left), "left": left,
            "leaving": self.devices.leaving_count if self.devices is not None else 0,
            "segments": max(self._segment_count, segments), "segments_left": segments, "failure": self.failure,
        }  # fmt: skip

    async def run(self) -> None:
        """Empty what is to go, whenever something is, until cancelled."""
        while True:
            self.core.resized = trio.Event()
            kept = self.core.superblock.kept_slab_count
            await self._keep_to(kept)
            if kept is None and not self._are_leaving:
                await self.core.resized.wait()
                continue
            await self._empty(kept)

    @property
    def _are_leaving(self) -> bool:
        return self.devices is not None and self.devices.leaving_count > 0

    async def _empty(self, kept: int | None) -> None:
        """Until all is done, or something else is wanted."""
        pause = PAUSE_MIN
        while not self.core.resized.is_set():
            left = self.left
            self._slab_count = max(self._slab_count, left)
            with self._noting():
                if await (self._step(kept) if kept is not None else self._move_off()):
                    break
            pause = PAUSE_MIN if self.left < left else min(2 * pause, PAUSE_MAX)
            with trio.move_on_after(pause):
                await self.core.resized.wait()

    async def _move_off(self) -> bool:
        """Move what is on devices that leave, until another capacity is wanted. True: none leaves any more."""
        assert self.devices is not None
        self._segment_count = max(self._segment_count, self.devices.left_count)
        while self.core.superblock.kept_slab_count is None:
            if not await self.devices.move_off():
                self._segment_count = 0
                return True
        return True

    @contextmanager
    def _noting(self) -> Iterator[None]:
        failure = ""
        try:
            yield
        except NoSpace as error:
            failure = f"files do not fit: {error}"
        except KvfuseError as error:
            failure = str(error)
        if failure and failure != self.failure:
            log.warning("the volume does not get smaller yet: %s", failure)
        self.failure = failure

    async def _keep_to(self, slab_count: int | None) -> None:
        self._slab_count = self.left
        if self.engine is not None:
            with self._noting():
                await self.engine.keep_to(slab_count)

    async def _step(self, kept: int) -> bool:
        """Move what can be moved. True: the volume has the smaller capacity, and no other segments."""
        await self._drop_blocks(kept)
        if self.core.slabs.going - self.core.slabs.lent.keys():
            await self.rewriter.move_all(kept * self.core.geometry.slab_size)
        await self.journal.sync()  # no record names a slot there
        if not self.core.slabs.has_given_up:
            return False
        await self.core.change_superblock_by(Superblock.emptied)
        await self.core.reads.passed()
        await trio.sleep(GRACE_SECONDS)
        await self._remove_segments()
        log.warning("the volume has a capacity of %d bytes now", self.core.geometry.capacity)
        return True

    async def _drop_blocks(self, kept: int) -> None:
        """What this host has in slabs that are to go."""
        if self.engine is not None and self.core.slabs.going & self.core.slabs.lent.keys():
            await self.engine.keep_to(kept)

    async def _remove_segments(self) -> None:
        """Remove segments that the volume does not have any more. EngineError."""
        core = self.core
        for info in await core.segments.list():
            if info.segment >= core.geometry.segment_count:
                await core.segments.remove(info.segment)
                core.made_segments.discard(info.segment)
        await core.change_superblock_by(Superblock.settled)
