"""Changes the devices of a shared volume that nobody has mounted: segments move there without a word to other hosts."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from kvfuse.errors import VolumeError
from kvfuse.options.config import Options
from kvfuse.remote.records.api import RecordStore
from kvfuse.remote.segments.api import SegmentStore
from kvfuse.remote.segments.block.segment_map import MapName
from kvfuse.slab.layout import Geometry, Superblock
from kvfuse.volume.inodes.core import ChangeSuperblock
from kvfuse.volume.inodes.device_changes import DeviceChanges
from kvfuse.volume.opening.held_volume import hold
from kvfuse.volume.store import schema
from kvfuse.volume.store.member import FencedSegments

log = logging.getLogger(__name__)


@dataclass
class UnmountedVolume:
    """What `DeviceChanges` needs of a volume."""

    superblock: Superblock
    records: RecordStore
    segments: SegmentStore
    change_superblock: ChangeSuperblock
    resized: trio.Event = field(default_factory=trio.Event)

    @property
    def geometry(self) -> Geometry:
        return self.superblock.geometry

    async def change_superblock_by(self, change: Callable[[Superblock], Superblock]) -> None:
        self.superblock = await self.change_superblock(change)
        if self.segments.devices is not None:
            self.segments.devices.expect(MapName(*self.superblock.segment_map))

    def resized_superblock(
        self, found: Superblock, capacity: int, freeing: int, room: int | None = None
    ) -> Superblock:  # fmt: skip
        """ValueError: smaller, as nobody would empty the segments."""
        if capacity < found.geometry.size:
            raise ValueError(
                f"its other devices have no places for all segments: give it {capacity} bytes by --capacity before"
            )
        return found.resized(capacity, room)

    async def rebound(self) -> None:
        """A mount does so."""


@asynccontextmanager
async def held_devices(options: Options) -> AsyncIterator[DeviceChanges]:
    """VolumeBusy: somebody has the volume; VolumeError, EngineError."""
    async with hold(options, alone=True) as held:
        devices = held.segments.devices
        if devices is None or not isinstance(held.segments, FencedSegments) or held.change_superblock is None:
            raise VolumeError(f"{options.title} has no devices")
        await _settle_changer(held.records, held.segments.limits.quarantine)
        volume = UnmountedVolume(held.superblock, held.records, held.segments, held.change_superblock)
        devices.expect(MapName(*held.superblock.segment_map))
        yield DeviceChanges(volume, devices, held.segments.member, is_alone=True)


async def _settle_changer(records: RecordStore, quarantine: float) -> None:
    """Return when nothing may happen any more of what a host sent that died while it changed the devices."""
    (found,) = await records.get([schema.CHANGER])
    if found is not None:
        log.warning("a host died while it changed the volume's devices: its last writes are over in %g s", quarantine)
        await trio.sleep(quarantine)
        await records.commit({}, [schema.CHANGER], {schema.CHANGER: found.version}, durable=True)
