"""Take a volume off its devices, so that anything else may use them. The calls are for threads.

Nobody has the volume meanwhile. Devices whose label is another volume's, or that have none, are left alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from kvfuse.errors import ConfigError, EngineError, VolumeError
from kvfuse.remote.segments.block.block_device import HEAD_SIZE, PAGE_SIZE, BlockDevice
from kvfuse.remote.segments.block.finding import label_at, open_direct
from kvfuse.remote.segments.block.opening import open_set
from kvfuse.remote.segments.block.pieces import write_zeros

OPEN_SECONDS = 30.0
"""for which a device may take to answer"""


def members_of(paths: Sequence[Path], volume_id: bytes, *, whole: bool = True) -> list[Path]:
    """Where the devices of a volume are, some of which are at ``paths``, and a device that was to join it.

    ``whole``: VolumeError, EngineError or ConfigError unless all are found. Else those are left out.
    """
    ours = [path for path in paths if _is_of(path, volume_id)]
    try:
        members = open_set(ours, volume_id, None, OPEN_SECONDS, read_only=True)
    except (VolumeError, EngineError, ConfigError):
        if whole:
            raise
        return ours
    with ExitStack() as stack:
        for device in members.in_order():
            stack.callback(device.close)
        found = [device.path for device in members.in_order()]
    return [*dict.fromkeys([*found, *ours])]


def clear(path: Path, volume_id: bytes) -> bool:
    """Take maps and label, which goes last, off a device. False: it is not, or no more, one of that volume.

    EngineError: it is in use, or does not answer.
    """
    if not path.exists() or not _is_of(path, volume_id):
        return False
    try:
        with closing(BlockDevice(path)) as device:
            fd = open_direct(path)
            try:
                write_zeros(fd, PAGE_SIZE, HEAD_SIZE - PAGE_SIZE)
            finally:
                os.close(fd)
            device.put_first_page(bytes(PAGE_SIZE))
    except OSError as error:
        raise EngineError(f"segments.devices: {path} cannot be cleared: {error.strerror}") from error
    return True


def _is_of(path: Path, volume_id: bytes) -> bool:
    """EngineError where it does not answer."""
    try:
        return label_at(path).volume_id == volume_id
    except (VolumeError, FileNotFoundError):
        return False
    except OSError as error:
        raise EngineError(f"segments.devices: {path} cannot be used: {error.strerror}") from error
