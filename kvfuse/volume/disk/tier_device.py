"""A block device as the place of a disk tier: whose it is, and that nothing else is on it.

    first page       the superblock of the tier: the volume's id, and the tier's own geometry
    from 1 MiB on    segments at fixed places (`remote/segments/block`)

Nothing is written to a device that holds anything else.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

import trio

from kvfuse.errors import VolumeError
from kvfuse.remote.segments.block.block_device import HEAD_SIZE, BlockDevice, place_size
from kvfuse.remote.segments.block.places import OWNER_SIZE, DevicePlaces
from kvfuse.remote.segments.file.store import FileSegments
from kvfuse.sizes import format_size
from kvfuse.slab.layout import SEGMENT_SIZE, SUPERBLOCK_MAGIC, Geometry, Superblock, pack_superblock, parse_superblock
from kvfuse.volume.disk.folder import Folder, wait_until_free

TIER_MARK = 0xFFFFFFFE
"""The segment number in the superblock of a device that is a tier's, and not a volume's."""


@asynccontextmanager
async def opened_device(path: Path, size: int | None, volume_id: bytes) -> AsyncIterator[Folder]:
    """The first ``size`` bytes of a device as a tier; None: all of it.

    A tier of another size is emptied. VolumeError, with nothing written: the device holds anything else, is another
    volume's, or smaller. VolumeBusy: it is in use. EngineError: it fails.
    """
    async with AsyncExitStack() as stack:
        try:
            device = await wait_until_free(path, lambda: BlockDevice(path))
            stack.callback(device.close)
            superblock, is_new = await trio.to_thread.run_sync(_claim, device, size, volume_id)
        except OSError as error:
            raise VolumeError(f"cache.disk_path: {path} cannot be used: {error.strerror}") from error
        segments = await trio.to_thread.run_sync(_open_segments, device, superblock)
        stack.push_async_callback(segments.aclose)
        geometry = superblock.geometry
        for number in range(geometry.segment_count):
            await segments.create(number, geometry.segment_size(number))
        yield Folder(volume_id, geometry, segments, is_new)


def examined_device(path: Path) -> str:
    """What is on a device that no mount uses, in words. VolumeError: what is not a tier's. OSError."""
    with closing(BlockDevice(path)) as device:
        found = find_superblock(device)
        size = format_size(device.size)
    return f"{path}, {size}, " + ("empty" if found is None else f"copies of volume {found.volume_id.hex()}")


def find_superblock(device: BlockDevice) -> Superblock | None:
    """Of the tier that is on a device; None: nothing is. VolumeError: something else, or nobody can tell what."""
    image, found, problem = device.first_page(), None, None
    if image.startswith(SUPERBLOCK_MAGIC):
        try:
            found = parse_superblock(image)
            problem = None if found.segment == TIER_MARK else "holds a part of a volume"
        except VolumeError as error:
            problem = f"has a disk tier that cannot be used: {error}"
    else:
        problem = device.foreign_content()
    if problem is not None:
        raise VolumeError(
            f"cache.disk_path: {device.path} {problem}. If that may go for good:"
            f" wipefs --all {device.path} && dd if=/dev/zero of={device.path} bs=1M count=1"
        )
    return found


def _claim(device: BlockDevice, size: int | None, volume_id: bytes) -> tuple[Superblock, bool]:
    """The superblock that the device has from now on, and whether it is a new one. OSError, and as `opened_device`."""
    if size is not None and size > device.size:
        raise VolumeError(
            f"cache.disk_size: {device.path} has {format_size(device.size)}: make it smaller, or leave it out"
        )
    try:
        geometry = _geometry(device.size if size is None else size)
    except ValueError as error:
        raise VolumeError(f"cache.disk_path: {device.path}: {error}") from None
    found = find_superblock(device)
    if found is not None and found.volume_id != volume_id:
        raise VolumeError(
            f"cache.disk_path: {device.path} has copies of volume {found.volume_id.hex()}, this is volume"
            f" {volume_id.hex()}: name another device, or wipe it (wipefs --all, then zeros in its first MiB)"
        )
    if found is not None and found.geometry == geometry:
        return found, False
    superblock = Superblock(volume_id, geometry, time.time_ns(), TIER_MARK)
    device.put_first_page(pack_superblock(superblock))
    return superblock, True


def _geometry(size: int) -> Geometry:
    """Of a tier on so many bytes, with all that is not a segment's. ValueError: they are too few."""
    overhead = place_size(SEGMENT_SIZE) - SEGMENT_SIZE + HEAD_SIZE
    return Geometry.choose(size - HEAD_SIZE - (size // SEGMENT_SIZE + 1) * overhead)


def _open_segments(device: BlockDevice, superblock: Superblock) -> FileSegments:
    """EngineError. Of a new segment the heads are read before they are written, and nothing else."""
    geometry = superblock.geometry
    owner = hashlib.blake2b(pack_superblock(superblock), digest_size=OWNER_SIZE).digest()
    return FileSegments(DevicePlaces(device.path, owner, geometry.segment_size(0), geometry.data_start(0)))
