"""Volumes that the command line makes: by `format`, and by `mount` where there is none yet."""

from __future__ import annotations

import functools
import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from kvfuse.errors import ConfigError, VolumeBusy, VolumeError
from kvfuse.options.config import Effective, Options, check_capacity, default_capacity
from kvfuse.options.options import BlockOptions
from kvfuse.sizes import format_size

MAKING_SECONDS = 30.0
"""that another host may take to make the volume"""
MAKING_PAUSE_SECONDS = 0.2
SHAPE = ("volume.capacity", "volume.slab_size", "volume.segment_size", "volume.chunk_size", "volume.metadata_size")
"""keys that count when the volume is made"""


def is_vacant(folder: Path) -> bool:
    """The folder is absent or empty, so that a volume may be made there. VolumeError if it is no folder."""
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is None
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        raise VolumeError(f"{folder} is not a folder") from None


def ensure_volume(options: Options) -> str | None:
    """Make the volume if there is nothing yet where it is to be, and return the line that says so; None where it is.

    VolumeError where there is something else, or a volume that cannot be used: before anything, even a log, is
    written there. Of many hosts that begin with a new volume at the same time one makes it, the others wait.
    """
    deadline = time.monotonic() + MAKING_SECONDS
    while _has_room_for_a_volume(options):
        if options.mount.read_only:
            raise VolumeError(f"{options.title} holds no volume, and a read-only mount makes none")
        try:
            return make_volume(options)
        except VolumeBusy:
            if not options.is_shared or time.monotonic() > deadline:
                raise
            time.sleep(MAKING_PAUSE_SECONDS)  # another host is making it; no event loop runs yet that could wait
        except VolumeError:
            if not options.is_shared or _has_room_for_a_volume(options):
                raise
    return None


def _has_room_for_a_volume(options: Options) -> bool:
    """False: a volume is there. VolumeError: something else is."""
    import trio

    from kvfuse.volume.opening.formatting import read_superblock

    if options.is_shared:
        return trio.run(_look_for_shared, options)
    if is_vacant(options.volume_path):
        return True
    read_superblock(options.volume_path)
    return False


async def _look_for_shared(options: Options) -> bool:
    from kvfuse.volume.opening import engines, formatting

    async with engines.open_records(options) as records:
        if await formatting.is_vacant(records):
            return True
        await formatting.read_shared_superblock(records, options.title)
        return False


def check_shape(effective: Effective) -> None:
    """ConfigError where an option says that the volume, which is there, is of another shape than it has.

    Nothing changes that: an option that were ignored would promise what is not so. Those that say what is are welcome.
    """
    options = effective.options
    given = {key for key in SHAPE if effective.origins.get(key, "default") != "default"}
    if not given or _has_room_for_a_volume(options):
        return
    import trio

    found = trio.run(_shape_of, options)
    for key in sorted(given):
        has, remedy = found[key]
        said = getattr(options.volume, key.partition(".")[2])
        if said != has:
            raise ConfigError(
                f"{effective.origins[key]}: {key} is {format_size(said)} there, but the volume {options.title} has"
                f" {format_size(has)}: leave the option out, or {remedy}"
            )


async def _shape_of(options: Options) -> dict[str, tuple[int, str]]:
    """The volume's own values for the keys of ``SHAPE``, or what is given where that makes the same shape; and what
    gives other ones."""
    from kvfuse.slab.layout import FEATURE_SHRINKS, Geometry
    from kvfuse.volume.api import ROOT_INODE
    from kvfuse.volume.inodes.metadata_budget import default_size
    from kvfuse.volume.opening import engines, formatting
    from kvfuse.volume.store import schema, sealed

    async with engines.open_records(options, read_only=not options.is_shared) as records:
        if options.is_shared:
            superblock = await formatting.read_shared_superblock(records, options.title)
        else:
            superblock = formatting.read_superblock(options.volume_path)
        values = sealed.as_formatted(records, superblock)
        root, budget = await values.get([schema.inode_key(ROOT_INODE), schema.METADATA_SIZE])
    geometry, wanted = superblock.geometry, options.volume.segment_size
    segment_size = geometry.segment_size(0)
    with suppress(ValueError):
        first = replace(geometry, slab_count=geometry.first_slab_count)  # as it was formatted
        if Geometry.choose(first.size, first.slab_size, wanted).segment_slabs == geometry.segment_slabs:
            segment_size = wanted
    capacity = geometry.capacity
    if superblock.resizes and options.volume.capacity:  # mount.conf of hosts may say what the volume had before
        has_shrunk = superblock.features & FEATURE_SHRINKS
        capacity = options.volume.capacity if has_shrunk else min(capacity, options.volume.capacity)
    # A root that was rebuilt has none of its own: what is given counts.
    chunk_size = schema.decode_inode(root.value).chunk_size if root is not None else 0
    metadata_size = (
        schema.decode_u64(budget.value)
        if budget is not None
        else default_size(geometry.capacity, is_shared=options.is_shared)
    )
    anew = "make another volume ('kvfuse format') and copy to it"
    own = "set it as the attribute user.kvfuse.chunk_size of a folder of the mount"
    return {
        "volume.capacity": (capacity, "have 'kvfuse resize' give it more"),
        "volume.slab_size": (geometry.slab_size, anew),
        "volume.segment_size": (segment_size, anew),
        "volume.chunk_size": (chunk_size or options.volume.chunk_size, own),
        "volume.metadata_size": (metadata_size, anew),
    }


def make_volume(options: Options, *, replace: bool = False, overwrite: bool = False) -> str:
    """Format the volume and return the line that says so. ``replace``: what a volume there holds may be lost.

    ``overwrite``: so may what is on its devices.

    ConfigError where the medium could not keep the promised capacity; VolumeError where something is in the way, or
    VolumeBusy. Nothing is changed then.
    """
    import trio

    if not replace:
        _check_own_folders(options)
    return trio.run(functools.partial(_make_volume, options, replace=replace, overwrite=overwrite))


async def _make_volume(options: Options, *, replace: bool, overwrite: bool) -> str:
    from kvfuse.volume.opening import engines  # loads numpy, which takes longer than all the rest
    from kvfuse.volume.opening.formatting import format_volume

    free, place = await engines.free_space(options)
    if free is not None and replace and options.has_segment_files:
        free += allocated_size(options.segments_path)
    capacity = options.volume.capacity
    if capacity is None and options.has_devices:
        capacity = free  # they are the volume's alone
    capacity = _choose_capacity(capacity, free, place)
    shape = msgspec.structs.replace(options.volume, capacity=capacity)
    await format_volume(msgspec.structs.replace(options, volume=shape), replace=replace, overwrite=overwrite)
    return f"made the volume {options.title} with a capacity of {format_size(capacity)}"


def _choose_capacity(wanted: int | None, free: int | None, place: str) -> int:
    """ConfigError where there is no room for what is wanted, or nothing says what to choose."""
    if wanted is None:
        if free is None:
            raise ConfigError(f"the bytes that are free {place} are not known (no ceph-mgr?): set volume.capacity")
        return default_capacity(free)
    if free is not None:
        check_capacity(wanted, free, place)
    return wanted


def _check_own_folders(options: Options) -> None:
    """VolumeError where a folder that mount.conf names for an engine holds something: formatting would remove it."""
    for key, engine in (("records.path", options.records), ("segments.path", options.segments)):
        folder: Path | None = getattr(engine, "path", None)
        if folder is not None and not is_vacant(folder):
            raise VolumeError(f"{key}: {folder} is not empty: choose an empty folder for a new volume")


def found_on_devices(options: Options) -> list[tuple[str, str, str]]:
    """(path, size, what is there) of those of the volume's devices that anybody may miss; of all, if one is such."""
    if not isinstance(options.segments, BlockOptions):
        return []
    from kvfuse.remote.segments.block import making

    examined = making.examine([Path(path) for path in options.segments.devices])
    if all(device.content is None for device in examined):
        return []
    return [(str(device.path), format_size(device.size), device.content or "nothing") for device in examined]


def allocated_size(folder: Path) -> int:
    """Bytes that the files right in a folder take on the disk; 0 where there is none."""
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries)
    except OSError:
        return 0
