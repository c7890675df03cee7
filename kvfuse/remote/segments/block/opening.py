"""Opens a set of devices: finds the map that counts, and all its devices. The calls are for threads."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from kvfuse.errors import ConfigError, EngineError, VolumeError
from kvfuse.remote.segments.block import finding
from kvfuse.remote.segments.block.finding import expected_in
from kvfuse.remote.segments.block.label import Label
from kvfuse.remote.segments.block.segment_map import MapName, SegmentMap
from kvfuse.remote.segments.block.set_device import SetDevice
from kvfuse.remote.segments.block.table import DeviceSet

log = logging.getLogger(__name__)


class _Found(NamedTuple):
    """A device at a path that was named."""

    path: Path
    fd: int
    label: Label
    maps: dict[MapName, SegmentMap]


def open_set(
    paths: Sequence[Path],
    volume_id: bytes | None,
    wanted: MapName | None,
    deadline: float,
    *,
    read_only: bool,
) -> DeviceSet:
    """Open all devices of a set, some of which are at ``paths``. ``wanted``: the map that counts; None: the newest.

    ConfigError, VolumeError, EngineError; nothing stays open then.
    """
    with ExitStack() as opened:
        found: dict[bytes, _Found] = {}
        for path in paths:
            device = _open_one(path, read_only=read_only)
            opened.callback(os.close, device.fd)
            _check_member(device, volume_id, found)
            found[device.label.device_id] = device
        names = {name for device in found.values() for name in device.maps}
        if wanted is not None and wanted not in names:
            raise VolumeError(
                f"segments.devices: none of {_titles(paths)} has map {wanted.number} of the volume's segments: name"
                " other devices of it; if hosts change them just now, try again"
            )
        problem: Exception = VolumeError(f"segments.devices: {_titles(paths)} have no map of segments")
        for name in [wanted] if wanted is not None else _complete(names, found):
            try:
                return _open_map(_map_named(name, found), found, deadline, read_only=read_only)
            except (VolumeError, EngineError) as error:
                problem = error
                log.info("map %d of the segments is not used: %s", name.number, error)
    raise problem


def _complete(names: set[MapName], found: dict[bytes, _Found]) -> list[MapName]:
    """The newest first; without those that were being stored when somebody was killed."""

    def is_complete(name: MapName) -> bool:
        rows = _map_named(name, found).rows
        return all(name in found[row.device_id].maps for row in rows if row.device_id in found)

    return [name for name in sorted(names, reverse=True) if is_complete(name)]


def _titles(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths))


def _open_one(path: Path, *, read_only: bool) -> _Found:
    try:
        fd = finding.open_direct(path, read_only=read_only)
        with ExitStack() as on_failure:
            on_failure.callback(os.close, fd)
            label = finding.read_label(fd)
            maps = finding.read_maps(fd, label)
            on_failure.pop_all()
    except VolumeError as error:
        raise VolumeError(f"segments.devices: {path}: {error}") from None
    except OSError as error:
        raise EngineError(f"segments.devices: {path} cannot be used: {error.strerror}") from error
    return _Found(path, fd, label, maps)


def _check_member(device: _Found, volume_id: bytes | None, others: dict[bytes, _Found]) -> None:
    """VolumeError unless it is one more of the same volume."""
    path, label = device.path, device.label
    if volume_id is not None and label.volume_id != volume_id:
        raise VolumeError(f"segments.devices: {path} is {label.title}, and this is the volume {volume_id.hex()}")
    twin = others.get(label.device_id)
    if twin is not None:
        raise ConfigError(f"segments.devices: {twin.path} and {path} are one and the same device")
    for other in others.values():
        if other.label.volume_id != label.volume_id:
            raise VolumeError(f"segments.devices: {path} is {label.title}, and {other.path} is {other.label.title}")


def _map_named(name: MapName, found: dict[bytes, _Found]) -> SegmentMap:
    made = [device.maps[name] for device in found.values() if name in device.maps]
    if any(one != made[0] for one in made):  # labels of version 1 have no checksum that names them
        raise VolumeError(
            f"segments.devices: {_titles([device.path for device in found.values()])} are of several sets"
        )
    return made[0]


def _open_map(made: SegmentMap, found: dict[bytes, _Found], deadline: float, *, read_only: bool) -> DeviceSet:
    """With descriptors of its own. VolumeError: a device is not there."""
    devices: dict[bytes, SetDevice] = {}
    with ExitStack() as on_failure:
        for index, row in enumerate(made.rows):
            here = found.get(row.device_id)
            device = open_member(made, index, here.path if here else None, deadline, read_only=read_only)
            on_failure.callback(device.close)
            devices[row.device_id] = device
        on_failure.pop_all()
    for device_id in found.keys() - devices.keys():
        log.warning("segments.devices: %s is none of the volume's devices any more", found[device_id].path)
    return DeviceSet(made, devices)


def open_member(made: SegmentMap, index: int, path: Path | None, deadline: float, *, read_only: bool) -> SetDevice:
    """A device of a map; ``path``: where it is, as far as this host was told. VolumeError: it is not found."""
    expected, row = expected_in(made, index), made.rows[index]
    try:
        fd, where = finding.find(path or Path(row.path), expected, read_only=read_only)
    except EngineError as error:
        raise VolumeError(
            f"segments.devices: the volume has {len(made.rows)} devices, and {row.title} is not among them: name them"
            f" all: {error}"
        ) from None
    return SetDevice(where, fd, expected, deadline, read_only=read_only)
