"""Volumes that the command line makes: by `format`, and by `mount` where there is none yet."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import msgspec

from kvfuse.config import Options, check_capacity, default_capacity
from kvfuse.errors import VolumeError
from kvfuse.sizes import format_size


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
    """Make the volume if its folder is vacant, and return the line that says so; None where there is one.

    VolumeError where there is something else, or a volume that cannot be used: before anything, even a log, is
    written there.
    """
    from kvfuse.volume.format import read_superblock

    if not is_vacant(options.volume_path):
        read_superblock(options.volume_path)
        return None
    if options.mount.read_only:
        raise VolumeError(f"{options.volume_path} holds no volume, and a read-only mount makes none")
    return make_volume(options)


def make_volume(options: Options, *, replace: bool = False) -> str:
    """Format the volume and return the line that says so. ``replace``: what a volume there holds may be lost.

    ConfigError where the disk could not keep the promised capacity; VolumeError where something is in the way, or
    VolumeBusy. Nothing is changed then.
    """
    import trio

    from kvfuse.volume.format import format_volume  # loads numpy, which takes longer than all the rest

    disk = options.segments_path
    reclaimed = allocated_size(disk) if replace else 0
    capacity = options.volume.capacity or default_capacity(disk, reclaimed)
    check_capacity(capacity, disk, reclaimed)
    if not replace:
        _check_own_folders(options)
    shape = msgspec.structs.replace(options.volume, capacity=capacity)
    trio.run(functools.partial(format_volume, msgspec.structs.replace(options, volume=shape), replace=replace))
    return f"made the volume {options.volume_path} with a capacity of {format_size(capacity)}"


def _check_own_folders(options: Options) -> None:
    """VolumeError where a folder that mount.conf names for an engine holds something: formatting would remove it."""
    for key, folder in (("records.path", options.records.path), ("segments.path", options.segments.path)):
        if folder is not None and not is_vacant(folder):
            raise VolumeError(f"{key}: {folder} is not empty: choose an empty folder for a new volume")


def allocated_size(folder: Path) -> int:
    """Bytes that the files right in a folder take on the disk; 0 where there is none."""
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries)
    except OSError:
        return 0
