"""Make a set of devices for a new volume: find out what is on them, have zeros where they count, label them.

The calls are for threads. Nothing else has the devices open meanwhile.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from kvfuse.errors import ConfigError, EngineError, VolumeError
from kvfuse.remote.segments.block import label
from kvfuse.remote.segments.block.block_device import HEAD_SIZE, PAGE_SIZE, BlockDevice
from kvfuse.remote.segments.block.finding import open_direct, read_label
from kvfuse.remote.segments.block.label import DEVICES_MAX, ID_SIZE, DeviceRow, DeviceSet
from kvfuse.remote.segments.block.pieces import write_zeros
from kvfuse.remote.segments.block.places import place_size


class DeviceContents(NamedTuple):
    """What is on a device before a volume is made there."""

    path: Path
    size: int
    content: str | None
    """in words; None: nothing that anybody would miss"""


def examine(paths: Sequence[Path]) -> list[DeviceContents]:
    """EngineError: one is not there, or is in use."""
    found = []
    for path in paths:
        with _opened(path) as device:
            found.append(DeviceContents(path, device.size, content_of(device)))
    return found


def describe(path: Path) -> tuple[int, str]:
    """Size, and what a device is, also while it is in use. EngineError, ConfigError: it cannot be one of a volume's."""
    with _as_engine_error(path), ExitStack() as stack:
        fd = open_direct(path, read_only=True)
        stack.callback(os.close, fd)
        size = os.lseek(fd, 0, os.SEEK_END)
        try:
            return size, read_label(fd).title
        except VolumeError:
            return size, "no device of a volume yet"


def content_of(device: BlockDevice) -> str | None:
    """As `BlockDevice.foreign_content`, with devices of volumes among it."""
    page = device.first_page()
    if not label.is_label(page):
        return device.foreign_content()
    try:
        return f"is {label.parse(page).title}"
    except VolumeError as error:
        return f"was a device of a kvfuse volume: {error}"


def sizes_of(paths: Sequence[Path]) -> list[int]:
    """In bytes, also of devices in use. EngineError."""
    return [describe(path)[0] for path in paths]


def place_count(size: int, segment_size: int) -> int:
    """Of segments of that size, how many a device has room for."""
    return max(size - HEAD_SIZE, 0) // place_size(segment_size)


def make_set(
    paths: Sequence[Path],
    volume_id: bytes,
    segment_size: int,
    head_size: int,
    segment_count: int,
    weights: Sequence[int] = (),
    *,
    replace: bool = False,
) -> DeviceSet:
    """Label all devices, in this order; a weight for each, or they get segments as they have room.

    ``head_size``: that much of a new segment reads as zeros. ConfigError: they have no room for ``segment_count``
    segments, or differ from ``weights``; VolumeError: something is on one, and may not be replaced; EngineError.
    Nothing is written then, but what an EngineError left behind: devices without labels.
    """
    if weights and len(weights) != len(paths):
        raise ConfigError(f"segments.weights has {len(weights)} numbers, segments.devices {len(paths)} paths")
    if not 0 < len(paths) <= DEVICES_MAX:
        raise ConfigError(f"segments.devices: {len(paths)} of them; a volume has 1 to {DEVICES_MAX}")
    with ExitStack() as stack:
        devices = [stack.enter_context(_opened(path)) for path in paths]
        for device in devices:
            content = None if replace else content_of(device)
            if content is not None:
                raise VolumeError(
                    f"segments.devices: {device.path} {content}: 'kvfuse format' asks whether that may go for good"
                )
        counts = [place_count(device.size, segment_size) for device in devices]
        rows = [
            DeviceRow(secrets.token_bytes(ID_SIZE), count, weight)
            for count, weight in zip(counts, weights or [max(count, 1) for count in counts], strict=True)
        ]
        made = DeviceSet(volume_id, segment_size, head_size, segment_count, tuple(rows))
        if sum(counts) < segment_count:
            raise ConfigError(
                f"segments.devices have room for {sum(counts)} segments of {segment_size} bytes, the capacity"
                f" needs {segment_count}: lower volume.capacity, or volume.segment_size"
            )
        with ThreadPoolExecutor(len(devices)) as pool:
            for work in [pool.submit(_wipe, device, made, index) for index, device in enumerate(devices)]:
                work.result()
        for index, device in enumerate(devices):
            with _as_engine_error(device.path):
                device.put_first_page(made.pack(index))
    return made


def _wipe(device: BlockDevice, made: DeviceSet, index: int) -> None:
    """No label, and zeros in all places where they count."""
    head_size = -(-made.head_size // PAGE_SIZE) * PAGE_SIZE
    with _as_engine_error(device.path):
        fd = open_direct(device.path)
        with ExitStack() as stack:
            stack.callback(os.close, fd)
            write_zeros(fd, 0, HEAD_SIZE)
            write_zeros(fd, (device.size - HEAD_SIZE) // PAGE_SIZE * PAGE_SIZE, HEAD_SIZE)  # other things end there
            for place in made.places:
                if place.device == index:
                    write_zeros(fd, place.offset, PAGE_SIZE)
                    write_zeros(fd, place.offset + HEAD_SIZE, head_size)


@contextmanager
def _opened(path: Path) -> Iterator[BlockDevice]:
    """Alone: neither mounted, nor part of anything. EngineError."""
    with _as_engine_error(path):
        device = BlockDevice(path)
    with closing(device):
        yield device


@contextmanager
def _as_engine_error(path: Path) -> Iterator[None]:
    try:
        yield
    except BlockingIOError:
        raise EngineError(f"segments.devices: {path} is in use by another process") from None
    except OSError as error:
        raise EngineError(f"segments.devices: {path} cannot be used: {error.strerror}") from error
