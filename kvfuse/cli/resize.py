"""kvfuse resize"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvfuse.cli import Failure
from kvfuse.cli.console import Bars, bars, note, say
from kvfuse.cli.mounts import kvfuse_mounts, read_virtual, within
from kvfuse.cli.volumes import allocated_size
from kvfuse.errors import EngineTimeout, MountError, VolumeError
from kvfuse.mounttable import Mounted
from kvfuse.options import config
from kvfuse.options.config import Options, check_capacity
from kvfuse.sizes import format_size, parse_size

if TYPE_CHECKING:
    from kvfuse.slab.layout import Superblock

CAPACITY = "user.kvfuse.capacity"
"""extended attribute of a mount's root: bytes that the volume has, or is to have"""
ANSWER_SECONDS = 30.0
"""for which a daemon is waited for: its record store may be slow"""
LOOK_SECONDS = 0.3


@click.command()
@click.argument("source", type=Path)
@click.option("-c", "--config", "file", type=Path, help="Take the volume's options from this mount.conf.")
@click.option("--capacity", metavar="SIZE", required=True, help="Bytes that the volume is to have, in all.")
def resize(source: Path, file: Path | None, capacity: str) -> None:
    """Give a volume more capacity, or less, while it is mounted or not.

    SOURCE is the volume's folder, the mount.conf that names it, or a mount point.

    MORE: nothing moves, and no call waits. All hosts that have a volume of many hosts mounted use the new capacity at
    once; any of them, or one that has it not mounted, may give it. A volume grows by whole segments (1GiB each, unless
    it was formatted otherwise): what is left of SIZE is not used. The medium must have room for it: add disks to the
    file system, or OSDs to the pool, before.

    LESS: the last segments are emptied while the volume is in use, then removed. Files move to the others, blocks of
    caches there are dropped. It is refused where the files would not fit. Ctrl-C leaves it to go on by itself, also
    at the next mount; the former capacity, given again, ends it. For volumes of one host, not on block devices.

    Programs of before this command refuse a volume that was resized, so update all hosts first. What mount.conf or
    fstab say of the capacity may stay what it was: it counts when a volume is made.

    \b
    Examples:
      kvfuse resize /mnt/kv --capacity 400GiB
      kvfuse resize /etc/kvfuse/mount.conf --capacity 20TiB
      kvfuse resize /mnt/kv --capacity 100GiB               # less than it has: Ctrl-C does not stop it
    """
    try:
        wanted = parse_size(capacity)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--capacity") from None
    mounted = _mount_of(source)
    effective = config.load(Path(mounted.source) if mounted is not None else source, file=file)
    options = effective.options
    import trio

    former, superblock = trio.run(_plan, options, wanted)
    is_change = superblock is not former
    if mounted is not None:
        if is_change:
            _tell_daemon(mounted, wanted)
        if superblock.target:
            _watch(options.title, lambda: _drain_of(read_virtual(mounted.point, "stats")), time.sleep)
    elif superblock.target:
        trio.run(_shrink, options, wanted)
    elif is_change:
        superblock = trio.run(_change, options, wanted)
    kept = superblock.kept_slab_count or superblock.geometry.slab_count
    size = format_size(kept * superblock.geometry.slab_size)
    say(f"{options.title}: {format_size(former.geometry.capacity)} -> {format_size(wanted)}, {size} for data")
    said, origin = options.volume.capacity, effective.origins.get("volume.capacity", "default")
    if said is not None and said != wanted and origin != "default":
        note(f"{origin}: volume.capacity is still {format_size(said)} there: it counts where the volume is made anew")


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
    limit = former.geometry.segment_count if options.has_devices else None
    superblock = _resized(former, capacity, limit, may_shrink=not options.is_shared and not options.has_devices)
    if superblock.geometry.slab_count > former.geometry.slab_count:
        free, place = await engines.free_space(options)
        taken = allocated_size(options.segments_path) if options.has_segment_files else former.geometry.size
        if free is not None:
            check_capacity(superblock.geometry.size, free + taken, f"{place}, with what it has")
    return former, superblock


async def _change(options: Options, capacity: int) -> Superblock:
    """Of a volume that is not mounted here. VolumeBusy: who has it."""
    from kvfuse.volume.opening.held_volume import hold

    async with hold(options, alone=False) as held:
        assert held.change_superblock is not None
        limit = held.segments.limits.segment_count_max
        return await held.change_superblock(partial(_resized, capacity=capacity, segment_count_max=limit))


def _resized(
    found: Superblock, capacity: int, segment_count_max: int | None, *, may_shrink: bool = False
) -> Superblock:
    try:
        return found.resized(capacity, segment_count_max, may_shrink=may_shrink)
    except ValueError as error:
        raise VolumeError(f"the volume keeps its {format_size(found.geometry.capacity)}: {error}") from None


# -- less ---------------------------------------------------------------------------------------------


async def _shrink(options: Options, capacity: int) -> None:
    """Open a volume that is not mounted, and have it empty its last segments."""
    import trio

    from kvfuse.volume.api import ROOT_INODE
    from kvfuse.volume.running import open_volume

    async with open_volume(options) as volume:
        await volume.inodes.set_xattr(ROOT_INODE, CAPACITY.encode(), b"%d" % capacity)
        with bars() as shown:
            while True:
                await trio.sleep(LOOK_SECONDS)
                if _show(shown, options.title, _drain_of(volume.stats())):
                    break


def _watch(title: str, look: Callable[[], Mapping[str, Any]], pause: Callable[[float], object]) -> None:
    """Return when a mounted volume has emptied and removed its last segments."""
    try:
        with bars() as shown:
            while not _show(shown, title, look()):
                pause(LOOK_SECONDS)
    except KeyboardInterrupt:
        note("it goes on by itself: 'kvfuse stats' has \"drain\", and the same command shows this again")
        raise


def _drain_of(stats: Mapping[str, Any]) -> Mapping[str, Any]:
    found = stats.get("drain")
    if not isinstance(found, Mapping):
        raise MountError("the daemon does not say how far it is: ask as root, or as the user who mounted the volume")
    return found


def _show(shown: Bars, title: str, drain: Mapping[str, Any]) -> bool:
    """Whether it is done. Failure: files do not fit, or are damaged."""
    if drain["failure"]:
        raise Failure(f"{title} is not smaller yet, and tries it again by itself: {drain['failure']}")
    shown.show("slabs emptied", drain["slabs"] - drain["left"], drain["slabs"] or 1)
    return not drain["target"]


def _tell_daemon(row: Mounted, capacity: int) -> None:
    """MountError: it is of a former version, does not answer, or refuses."""
    try:
        within(ANSWER_SECONDS, os.getxattr, row.point, CAPACITY)
    except OSError as error:
        raise MountError(f"{row.point}: its daemon cannot do that, 'kvfuse upgrade': {error.strerror}") from None
    try:
        within(ANSWER_SECONDS, os.setxattr, row.point, CAPACITY, b"%d" % capacity)
    except EngineTimeout as error:
        raise MountError(f"the daemon of {row.point} does not answer: {error}") from None
    except OSError as error:
        reason = "its files do not fit into that" if error.errno == errno.EINVAL else error.strerror
        raise Failure(f"{row.point}: the volume keeps its capacity: {reason}") from None
