"""The folder of a disk tier: who may use it, and its files.

    tier             the superblock of the tier: the volume's id, and the tier's own geometry; locked by its daemon
    00000000.seg     segments, preallocated: head tables and slabs, as those of a volume

Nothing is made or removed in a folder that holds anything else.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio

from kvfuse.errors import EngineFull, VolumeBusy, VolumeError
from kvfuse.remote.segments.api import SegmentStore
from kvfuse.remote.segments.file.places import FILE_NAME
from kvfuse.remote.segments.file.store import FileSegments
from kvfuse.sizes import format_size
from kvfuse.slab.layout import PAGE_SIZE, SUPERBLOCK_SIZE, Geometry, Superblock, pack_superblock, parse_superblock

_T = TypeVar("_T")

TIER_FILE = "tier"
LOCK_WAIT = 10.0
"""Seconds to wait for a daemon whose mount was just taken away, and that still flushes."""


@dataclass(frozen=True)
class Folder:
    """The open folder, or device, of a tier. ``opened_folder`` or ``opened_device`` owns it."""

    volume_id: bytes
    geometry: Geometry
    segments: SegmentStore
    is_new: bool
    """it has no copies"""


@asynccontextmanager
async def opened_folder(path: Path, size: int, volume_id: bytes) -> AsyncIterator[Folder]:
    """The folder ``path`` as a tier of ``size`` bytes in all, wholly preallocated; made where it is absent.

    One of another size is emptied. VolumeError, with nothing removed: it is another volume's, of a newer format, holds
    something else, or the disk has less room. VolumeBusy: another daemon uses it. EngineError: the disk fails.
    """
    async with AsyncExitStack() as stack:
        try:
            folder = await _open(path, size, volume_id, stack)
        except OSError as error:
            raise VolumeError(f"cache.disk_path: {path} cannot be used: {error.strerror}") from error
        yield folder


async def _open(path: Path, size: int, volume_id: bytes, stack: AsyncExitStack) -> Folder:
    """OSError, and as `opened_folder`. The stack closes what was opened."""
    superblock = Superblock(volume_id, Geometry.choose(size - PAGE_SIZE), time.time_ns())
    _check_names(path)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path / TIER_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    stack.callback(os.close, descriptor)
    await wait_until_free(path, partial(fcntl.flock, descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB))
    is_known = _check_tier(path, descriptor, superblock)
    segments = FileSegments.open(path)
    stack.push_async_callback(segments.aclose)
    await _prepare(path, segments, superblock, descriptor, is_known)
    return Folder(volume_id, superblock.geometry, segments, not is_known)


async def wait_until_free(path: Path, take: Callable[[], _T]) -> _T:
    """Be the only daemon that uses the folder or device, by ``take``. OSError; VolumeBusy."""
    with trio.move_on_after(LOCK_WAIT):
        while True:
            try:
                return take()
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EBUSY):
                    raise
            await trio.sleep(0.05)
    raise VolumeBusy(f"cache.disk_path: {path} is in use by another daemon, or mounted: each mount has its own")


def _check_names(path: Path) -> None:
    """VolumeError where something stands in the folder that no tier has, or segments that are no tier's."""
    if not path.exists():
        return
    if not path.is_dir():
        raise VolumeError(f"cache.disk_path: {path} is no folder")
    names = sorted(os.listdir(path))
    strangers = [name for name in names if name != TIER_FILE and not FILE_NAME.fullmatch(name)]
    if strangers or (names and TIER_FILE not in names):
        name = (strangers or names)[0]
        raise VolumeError(f"cache.disk_path: {path} holds {name!r}, which is not a disk tier's: name an empty folder")


def _check_tier(path: Path, descriptor: int, superblock: Superblock) -> bool:
    """The folder has a tier of this geometry. VolumeError where it is another volume's, or cannot be read."""
    image = os.pread(descriptor, SUPERBLOCK_SIZE, 0)
    if not image:
        return False
    try:
        found = parse_superblock(image)
    except VolumeError as error:
        raise VolumeError(f"cache.disk_path: {path}: {error}; a folder that is emptied can be used") from None
    if found.volume_id != superblock.volume_id:
        raise VolumeError(
            f"cache.disk_path: {path} has copies of volume {found.volume_id.hex()}, this is volume"
            f" {superblock.volume_id.hex()}: name another folder, or empty it"
        )
    return found.geometry == superblock.geometry


async def _prepare(path: Path, segments: SegmentStore, superblock: Superblock, descriptor: int, is_known: bool) -> None:
    """Have the files of this geometry. VolumeError where the disk has no room for them."""
    geometry = superblock.geometry
    sizes = {number: geometry.segment_size(number) for number in range(geometry.segment_count)}
    present = {info.segment: info.size for info in await segments.list()}
    kept = {number for number, size in present.items() if is_known and sizes.get(number) == size}
    missing = sum(size for number, size in sizes.items() if number not in kept)
    room = _free(path) + sum(size for number, size in present.items() if number not in kept)
    if missing > room:
        raise _too_large(path, missing, room)
    for number in present.keys() - kept:
        await segments.remove(number)
    if not is_known:
        os.pwrite(descriptor, pack_superblock(superblock), 0)
        os.fsync(descriptor)
    try:
        for number, size in sizes.items():
            await segments.create(number, size)
    except EngineFull:
        raise _too_large(path, missing, room) from None


def _free(path: Path) -> int:
    figures = os.statvfs(path)
    return figures.f_bavail * figures.f_frsize


def _too_large(path: Path, missing: int, room: int) -> VolumeError:
    return VolumeError(
        f"cache.disk_size: the disk tier needs {format_size(missing)} more, but the disk of {path} has"
        f" {format_size(room)}: make it smaller"
    )
