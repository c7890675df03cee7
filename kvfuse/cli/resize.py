"""kvfuse resize"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvfuse.cli.console import note, say
from kvfuse.cli.mounts import kvfuse_mounts
from kvfuse.cli.resize_doors import CAPACITY, has_devices, opened_door
from kvfuse.cli.volumes import allocated_size
from kvfuse.errors import ConfigError, VolumeError
from kvfuse.mounttable import Mounted
from kvfuse.options import config
from kvfuse.options.config import Options, check_capacity
from kvfuse.sizes import format_size, parse_size

if TYPE_CHECKING:
    from kvfuse.slab.layout import Superblock


@click.command()
@click.argument("source", type=Path)
@click.option("-c", "--config", "file", type=Path, help="Take the volume's options from this mount.conf.")
@click.option("--capacity", metavar="SIZE", help="Bytes that the volume is to have, in all.")
@click.option("--add-device", "add", metavar="PATH", type=Path, help="A block device that the volume gets.")
@click.option("--domain", metavar="NAME", default="", help="Devices of one name fail together; with --add-device.")
@click.option(
    "--weight", type=click.IntRange(1, 1_000_000), help="Its part of new segments; with --add-device [by its size]."
)
@click.option("--remove-device", "remove", metavar="PATH", help="A device that leaves: its path, or its identity.")
@click.option("--force", is_flag=True, help="Add the device whatever is on it.")
def resize(
    source: Path,
    file: Path | None,
    capacity: str | None,
    add: Path | None,
    domain: str,
    weight: int | None,
    remove: str | None,
    force: bool,
) -> None:
    """Give a volume more capacity, or less, or other devices, while it is mounted or not.

    SOURCE is the volume's folder, the mount.conf that names it, or a mount point.

    MORE: nothing moves, and no call waits. All hosts that have a volume of many hosts mounted use the new capacity at
    once; any of them, or one that has it not mounted, may give it. A volume grows by whole segments (1GiB each, unless
    it was formatted otherwise): what is left of SIZE is not used. The medium must have room for it: add disks to the
    file system, or OSDs to the pool, before.

    LESS: the last segments are emptied while the volume is in use, then removed. Files move to the others, blocks of
    caches there are dropped. It is refused where the files would not fit. Ctrl-C leaves it to go on by itself, also
    at the next mount; the former capacity, given again, ends it. All hosts that have a volume of many hosts mounted
    empty what they have there; programs of before that refuse it then.

    DEVICES of a volume on block devices (segments.engine = "block"): one that is added is labelled, and the volume
    grows by the segments that it has room for, or to --capacity. One that is removed gives its segments to the others,
    in the background; where they have no places for all, the volume gets smaller first, as above. Added again
    meanwhile, it stays. Devices leave a volume of many hosts while nobody has it mounted.

    Programs of before this command refuse a volume that was resized, so update all hosts first. What mount.conf or
    fstab say of the capacity may stay what it was: it counts when a volume is made.

    \b
    Examples:
      kvfuse resize /mnt/kv --capacity 400GiB
      kvfuse resize /etc/kvfuse/mount.conf --capacity 20TiB
      kvfuse resize /mnt/kv --capacity 100GiB               # less than it has: Ctrl-C does not stop it
      kvfuse resize /mnt/kv --add-device /dev/disk/by-id/nvme-uuid.91d2 --domain rack2
      kvfuse resize /mnt/kv --remove-device /dev/sdb
    """
    wanted = _parsed_capacity(capacity)
    mounted = _mount_of(source)
    effective = config.load(Path(mounted.source) if mounted is not None else source, file=file)
    options = effective.options
    if has_devices(options, mounted):
        from kvfuse.cli.resize_devices import DeviceWish, resize_devices

        resize_devices(options, mounted, DeviceWish(wanted, add, domain, weight or 0, remove, force))
        return
    if add is not None or remove is not None:
        raise ConfigError(f"{options.title} has no devices: segments.engine is '{options.segments.engine}'")
    if wanted is None:
        raise click.UsageError("say --capacity SIZE")
    _resize_by_capacity(options, mounted, wanted)
    said, origin = options.volume.capacity, effective.origins.get("volume.capacity", "default")
    if said is not None and said != wanted and origin != "default":
        note(f"{origin}: volume.capacity is still {format_size(said)} there: it counts where the volume is made anew")


def _parsed_capacity(capacity: str | None) -> int | None:
    try:
        return None if capacity is None else parse_size(capacity)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--capacity") from None


def _resize_by_capacity(options: Options, mounted: Mounted | None, wanted: int) -> None:
    import trio

    former, superblock = trio.run(_plan, options, wanted)
    is_change = superblock is not former
    if mounted is not None or superblock.target:
        trio.run(_change_opened, options, mounted, wanted if is_change else None, superblock.target)
    elif is_change:
        superblock = trio.run(_change, options, wanted)
    kept = superblock.kept_slab_count or superblock.geometry.slab_count
    size = format_size(kept * superblock.geometry.slab_size)
    say(f"{options.title}: {format_size(former.geometry.capacity)} -> {format_size(wanted)}, {size} for data")


def _mount_of(source: Path) -> Mounted | None:
    """A mount at ``source``, or of it."""
    paths = {os.path.abspath(source), os.path.realpath(source)}
    return next((row for row in kvfuse_mounts() if str(row.point) in paths or row.source in paths), None)


async def _plan(options: Options, capacity: int) -> tuple[Superblock, Superblock]:
    """(the volume's superblock, what it is with ``capacity``). VolumeError: it cannot have that; ConfigError: there is
    no room for it."""
    from kvfuse.volume.opening import engines, formatting

    if options.is_shared:
        async with engines.open_records(options) as records:
            former = await formatting.read_shared_superblock(records, options.title)
    else:
        former = formatting.read_superblock(options.volume_path)
    superblock = _resized(former, capacity)
    if superblock.geometry.slab_count > former.geometry.slab_count:
        free, place = await engines.free_space(options)
        taken = allocated_size(options.segments_path) if options.has_segment_files else former.geometry.size
        if free is not None:
            check_capacity(superblock.geometry.size, free + taken, f"{place}, with what it has")
    return former, superblock


async def _change_opened(options: Options, mounted: Mounted | None, wanted: int | None, target: int) -> None:
    """Have a volume change that is mounted, or has to empty segments; return when these are removed."""
    async with opened_door(options, mounted) as door:
        if wanted is not None:
            await door.set(CAPACITY, b"%d" % wanted)
        if target:
            await door.finish(options.title)


async def _change(options: Options, capacity: int) -> Superblock:
    """Of a volume that is not mounted here. VolumeBusy: who has it."""
    from kvfuse.volume.opening.held_volume import hold

    async with hold(options, alone=False) as held:
        assert held.change_superblock is not None
        return await held.change_superblock(partial(_resized, capacity=capacity))


def _resized(found: Superblock, capacity: int) -> Superblock:
    try:
        return found.resized(capacity)
    except ValueError as error:
        raise VolumeError(f"the volume keeps its {format_size(found.geometry.capacity)}: {error}") from None
