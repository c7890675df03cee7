"""What `kvfuse resize` does with a volume on devices: it labels devices that join, and has the volume do the rest.

A volume that is not mounted is opened for that, as a mount would do it.
"""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import trio

from kvfuse.cli import Failure
from kvfuse.cli.console import confirm, note, print_table, say
from kvfuse.cli.resize_doors import CAPACITY, DEVICES, VolumeDoor, opened_door
from kvfuse.errors import ConfigError, KvfuseError, VolumeError
from kvfuse.mounttable import Mounted
from kvfuse.options.config import Options
from kvfuse.options.options import BlockOptions
from kvfuse.sizes import format_size

if TYPE_CHECKING:
    from kvfuse.remote.segments.block.label import Label
    from kvfuse.volume.inodes.device_changes import DeviceFacts, SetFacts

DOMAIN = re.compile(r"[A-Za-z0-9._-]{0,36}")


class DeviceWish(NamedTuple):
    """What the command was asked for."""

    capacity: int | None
    add: Path | None
    domain: str
    weight: int
    remove: str | None
    force: bool


def resize_devices(options: Options, mounted: Mounted | None, wish: DeviceWish) -> None:
    if not DOMAIN.fullmatch(wish.domain):
        raise ConfigError(f"--domain {wish.domain!r}: 1 to 36 letters, digits, '.', '_' and '-'")
    if wish.add is not None and not str(wish.add).isprintable():
        raise ConfigError(f"--add-device {str(wish.add)!r}: such a name cannot be kept")
    if wish.add is None and (wish.domain or wish.weight):
        raise ConfigError("--domain and --weight are for --add-device")
    trio.run(_resize_with_door, options, mounted, wish)


async def _resize_with_door(options: Options, mounted: Mounted | None, wish: DeviceWish) -> None:
    async with opened_door(options, mounted, alone=wish.remove is not None) as door:
        await _resize(door, options, wish)


async def _facts(door: VolumeDoor) -> SetFacts:
    from kvfuse.volume.inodes.device_changes import SetFacts

    return msgspec.json.decode(await door.get(DEVICES), type=SetFacts)


async def _resize(door: VolumeDoor, options: Options, wish: DeviceWish) -> None:
    before = int(await door.get(CAPACITY))
    leaving = _find(await _facts(door), wish.remove) if wish.remove is not None else None
    if wish.add is not None:
        await _add(door, wish, before)
    elif wish.capacity is not None:
        await door.set(CAPACITY, b"%d" % wish.capacity)
    if leaving is not None:
        await door.set(DEVICES, msgspec.json.encode({"remove": leaving}))
    is_less = wish.capacity is not None and wish.capacity < before
    if not options.is_shared or leaving is not None or is_less:
        await door.finish(options.title)
    facts, after = await _facts(door), int(await door.get(CAPACITY))
    say(f"{options.title}: {format_size(before)} -> {format_size(after)}, {len(facts.devices)} devices")
    _note_paths(options, facts)
    columns = ["device", "path", "domain", "weight", "segments", "places"]
    rows = [(row.device[:8], row.path, row.domain, row.weight, row.segments, row.places) for row in facts.devices]
    print_table(columns, rows)


def _note_paths(options: Options, facts: SetFacts) -> None:
    """Say which devices mount.conf names in vain: one that somebody else uses then is refused by a mount."""
    members = {row.device for row in facts.devices}
    for path in options.segments.devices if isinstance(options.segments, BlockOptions) else ():
        known = _label_at(Path(path))
        if known is None or known.device_id.hex() not in members:
            note(f"segments.devices still names {path}: take it out before the device is used for anything else")


def _label_at(path: Path) -> Label | None:
    from kvfuse.remote.segments.block import finding

    try:
        return finding.label_at(path)
    except (OSError, KvfuseError):
        return None


def _find(facts: SetFacts, wanted: str) -> str:
    """The identity of a device that was named by its path, under any name, or by its identity. VolumeError."""
    names = {wanted, os.path.realpath(wanted)}
    found = {row.device for row in facts.devices if row.path in names or os.path.realpath(row.path or "/") in names}
    label = _label_at(Path(wanted))
    if label is not None:
        found = {label.device_id.hex()}
    elif len(wanted) >= 4:
        found |= {row.device for row in facts.devices if row.device.startswith(wanted.lower())}
    ours = found & {row.device for row in facts.devices}
    if len(ours) != 1:
        raise VolumeError(f"{wanted} is none of the volume's devices")
    return ours.pop()


async def _add(door: VolumeDoor, wish: DeviceWish, capacity: int) -> None:
    """Label a device, and have the volume take it; one that was to leave stays.

    In the place of one that leaves it brings no more capacity.
    """
    assert wish.add is not None
    facts, path = await _facts(door), wish.add.absolute()
    known = _known_at(facts, path)
    if known is not None and known.leaving:
        await door.set(DEVICES, msgspec.json.encode({"keep": known.device}))
        return
    if known is not None:
        raise VolumeError(f"{path} is one of the volume's devices already")
    await trio.to_thread.run_sync(partial(_prepare, facts, path, wish.force))
    wanted = capacity if wish.capacity is None and wish.remove is not None else wish.capacity
    request = {"add": str(path), "weight": wish.weight, "domain": wish.domain, "capacity": wanted}
    await door.set(DEVICES, msgspec.json.encode(request))


def _known_at(facts: SetFacts, path: Path) -> DeviceFacts | None:
    label = _label_at(path)
    return next((row for row in facts.devices if label and row.device == label.device_id.hex()), None)


def _prepare(facts: SetFacts, path: Path, force: bool) -> None:
    """Label the device. Failure, click.Abort: something is on it, and may not be replaced."""
    from kvfuse.remote.segments.block import making

    members = [bytes.fromhex(row.device) for row in facts.devices]
    volume_id, sizes = bytes.fromhex(facts.volume), (facts.segment_size, facts.head_size)
    try:
        making.prepare_device(path, volume_id, *sizes, members, replace=force)
    except VolumeError:
        (found,) = making.examine([path])
        print_table(["device", "size", "found"], [(str(path), format_size(found.size), found.content or "nothing")])
        if not sys.stdin.isatty():
            raise Failure("nothing was written: 'kvfuse resize --force' adds the device whatever is on it") from None
        confirm("Add it to the volume? What is on it is lost for good")
        making.prepare_device(path, volume_id, *sizes, members, replace=True)
