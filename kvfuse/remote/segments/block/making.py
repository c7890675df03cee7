"""Make a set of devices for a new volume: find out what is on them, have zeros where they count, label them.

The calls are for threads. Nothing else has the devices open meanwhile.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from kvfuse.errors import ConfigError, EngineError, VolumeError
from kvfuse.remote.segments.block import label
from kvfuse.remote.segments.block.block_device import HEAD_SIZE, PAGE_SIZE, BlockDevice, place_size
from kvfuse.remote.segments.block.finding import open_direct, read_label
from kvfuse.remote.segments.block.label import ID_SIZE, Label
from kvfuse.remote.segments.block.pieces import write_bytes, write_zeros
from kvfuse.remote.segments.block.segment_map import DEVICES_MAX, PLACES_MAX, DeviceRow, SegmentMap, area_of


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
        found = label.parse(page)
    except VolumeError as error:
        return f"was a device of a kvfuse volume: {error}"
    return None if found.has_left else f"is {found.title}"


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
    domains: Sequence[str] = (),
    *,
    replace: bool = False,
) -> SegmentMap:
    """Label all devices, in this order; a weight for each, or they get segments as they have room; a domain, or none.

    ``head_size``: that much of a new segment reads as zeros. ConfigError: they have no room for ``segment_count``
    segments, or differ from ``weights`` or ``domains``; VolumeError: something is on one, and may not be replaced;
    EngineError. Nothing is written then, but what an EngineError left behind: devices without labels.
    """
    for key, values in (("weights", weights), ("domains", domains)):
        if values and len(values) != len(paths):
            raise ConfigError(f"segments.{key} has {len(values)} items, segments.devices {len(paths)} paths")
    if not 0 < len(paths) <= DEVICES_MAX:
        raise ConfigError(f"segments.devices: {len(paths)} of them; a volume has 1 to {DEVICES_MAX}")
    with ExitStack() as stack:
        devices = [stack.enter_context(_opened(path)) for path in paths]
        for device in devices:
            _check_content(device, replace=replace)
        rows = [
            _new_row(device, segment_size, weight, domain)
            for device, weight, domain in zip(
                devices, weights or [0] * len(paths), domains or [""] * len(paths), strict=True
            )
        ]
        places = sum(row.places for row in rows)
        if places < segment_count:
            raise ConfigError(
                f"segments.devices have room for {places} segments of {segment_size} bytes, the capacity"
                f" needs {segment_count}: lower volume.capacity, or volume.segment_size"
            )
        try:
            made = SegmentMap.choose(volume_id, segment_size, head_size, segment_count, rows)
            image = made.image
        except ValueError as error:
            raise ConfigError(f"volume.segment_size: {error}") from None
        with ThreadPoolExecutor(len(devices)) as pool:
            places_of = [
                [made.place(segment).offset for segment in made.segments_of(index)] for index in range(len(rows))
            ]
            for work in [pool.submit(_wipe, *pair, head_size) for pair in zip(devices, places_of, strict=True)]:
                work.result()
        for device, row in zip(devices, rows, strict=True):
            _put_label(device, Label(volume_id, row.device_id), made.number, image)
    return made


def prepare_device(
    path: Path,
    volume_id: bytes,
    segment_size: int,
    head_size: int,
    members: Collection[bytes],
    *,
    replace: bool = False,
) -> None:
    """Label a device that is to join a set, with no segments. ``members``: identities of those that the set has.

    ConfigError: it is too small; VolumeError: something is on it, and may not be replaced; EngineError. Then nothing
    was written, but what an EngineError left behind: a device without a label.
    """
    with _opened(path) as device:
        _check_content(device, replace=replace or _is_left_over(device, volume_id, members))
        row = _new_row(device, segment_size, 0, "")
        if not row.places:
            raise ConfigError(f"{path} has {device.size} bytes: no room for a segment of {segment_size} bytes")
        size = place_size(segment_size)
        _wipe(device, [HEAD_SIZE + place * size for place in range(row.places)], head_size)
        _put_label(device, Label(volume_id, row.device_id))


def _is_left_over(device: BlockDevice, volume_id: bytes, members: Collection[bytes]) -> bool:
    """It was labelled to join that volume, and did not, or has left it."""
    try:
        found = label.parse(device.first_page())
    except VolumeError:
        return False
    return found.volume_id == volume_id and found.device_id not in members


def _check_content(device: BlockDevice, *, replace: bool) -> None:
    content = None if replace else content_of(device)
    if content is not None:
        raise VolumeError(
            f"segments.devices: {device.path} {content}: 'kvfuse format' asks whether that may go for good"
        )


def _new_row(device: BlockDevice, segment_size: int, weight: int, domain: str) -> DeviceRow:
    """``weight`` 0: as it has room."""
    count = min(place_count(device.size, segment_size), PLACES_MAX)
    path = os.path.abspath(device.path)
    return DeviceRow(secrets.token_bytes(ID_SIZE), count, weight or max(count, 1), domain, path)


def _wipe(device: BlockDevice, places: Sequence[int], head_size: int) -> None:
    """No label, and zeros in these places, where they count."""
    with _as_engine_error(device.path):
        fd = open_direct(device.path)
        with ExitStack() as stack:
            stack.callback(os.close, fd)
            write_zeros(fd, 0, HEAD_SIZE)
            write_zeros(fd, (device.size - HEAD_SIZE) // PAGE_SIZE * PAGE_SIZE, HEAD_SIZE)  # other things end there
            for offset in places:
                write_zeros(fd, offset, PAGE_SIZE)
                write_zeros(fd, offset + HEAD_SIZE, -(-head_size // PAGE_SIZE) * PAGE_SIZE)


def _put_label(device: BlockDevice, found: Label, number: int = 0, image: bytes = b"") -> None:
    """The map first, if there is one: a label says that this is a device of a volume."""
    with _as_engine_error(device.path):
        if image:
            fd = open_direct(device.path)
            with ExitStack() as stack:
                stack.callback(os.close, fd)
                write_bytes(fd, area_of(number), image)
        device.put_first_page(label.pack_label(found))


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
