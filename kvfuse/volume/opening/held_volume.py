"""A volume held alone: its superblock, and its engines open. One in a folder is locked, a shared one has a record."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import trio

from kvfuse.errors import EngineError, VolumeError
from kvfuse.kept.keeper import NO_KEEPER, Keeper
from kvfuse.mounttable import top_mount
from kvfuse.options.config import Options
from kvfuse.options.options import is_on_read_only
from kvfuse.remote.index.api import BlockIndex
from kvfuse.remote.records.api import RecordStore
from kvfuse.remote.segments.api import SegmentStore
from kvfuse.slab.layout import Superblock
from kvfuse.volume.inodes.core import ChangeSuperblock
from kvfuse.volume.inodes.metadata_budget import meter_of
from kvfuse.volume.opening import engines, formatting
from kvfuse.volume.store import schema, sealed
from kvfuse.volume.store.member import FencedRecords, FencedSegments, Member, memberships

LOCK_WAIT = 30.0
"""Seconds to wait for a daemon that flushes after its mount was taken away."""

log = logging.getLogger(__name__)


class HeldVolume(NamedTuple):
    """The parts of a volume while this process holds it."""

    superblock: Superblock
    records: RecordStore
    segments: SegmentStore
    member: Member | None = None
    """this client, where others may have the volume, too"""
    again: Callable[[], Awaitable[HeldVolume]] | None = None
    """has it as another client, when ``member`` lost its lease. EngineError, VolumeError where that cannot be yet"""
    change_superblock: ChangeSuperblock | None = None
    """changes the superblock durably, as it is then, and returns it. EngineError, VolumeError, and what the change
    raises. None: nobody needs to know"""
    block_index: BlockIndex | None = None
    """of the blocks of a shared volume"""


@asynccontextmanager
async def hold(
    options: Options,
    mountpoint: str = "",
    *,
    read_only: bool = False,
    alone: bool = True,
    keeper: Keeper = NO_KEEPER,
) -> AsyncIterator[HeldVolume]:
    """The volume that ``options`` name; given back at the end. VolumeError, VolumeBusy where it cannot be opened.

    ``mountpoint``: for others to know who holds it. Not ``alone``: together with others, where records are shared.
    ``keeper``: has the lock, or the lease, of a daemon before this one.
    Errors of the body come out as they are.
    """
    if options.is_shared:
        holding = _hold_shared(options, mountpoint, read_only, keeper, alone=alone)
    else:
        holding = _hold_folder(options, mountpoint, read_only, keeper)
    async with holding as held:
        yield held


@asynccontextmanager
async def _hold_folder(options: Options, mountpoint: str, read_only: bool, keeper: Keeper) -> AsyncIterator[HeldVolume]:
    path = options.volume_path
    superblock = formatting.read_superblock(path)
    async with AsyncExitStack() as stack:
        if read_only and is_on_read_only(path):
            stack.enter_context(formatting.shared(path))
        else:
            stack.enter_context(formatting.locked(path, mountpoint, LOCK_WAIT if _is_closing(path) else 0.0, keeper))
        folder = options.records_path
        if not folder.is_dir() or not any(folder.iterdir()):
            raise VolumeError(f"{folder} is empty, the records are lost: 'kvfuse fsck --rebuild' recovers blocks")
        try:
            records = await stack.enter_async_context(
                engines.open_records(options, read_only=read_only, meter=meter_of(superblock))
            )
        except EngineError as error:
            raise VolumeError(f"{error}: 'kvfuse fsck --rebuild' recovers blocks") from error
        segments = await stack.enter_async_context(
            engines.open_segments(options, read_only=read_only, superblock=superblock)
        )
        change = partial(formatting.change_superblock, path, trio.Lock())
        yield HeldVolume(superblock, sealed.as_formatted(records, superblock), segments, change_superblock=change)


@asynccontextmanager
async def _hold_shared(
    options: Options, mountpoint: str, read_only: bool, keeper: Keeper, *, alone: bool
) -> AsyncIterator[HeldVolume]:
    """Every commit and every write of the body is refused once this client's lease has ended."""
    async with engines.open_records(options) as plain_records:
        # Without one there is nothing to hold.
        superblock = await formatting.read_shared_superblock(plain_records, options.title)
        records = sealed.as_formatted(plain_records, superblock)
        async with memberships(
            records, options.client.lease, options.title, mountpoint, alone=alone, keeper=keeper
        ) as join:
            member = await join()
            async with (
                engines.open_segments(options, read_only=read_only, superblock=superblock) as segments,
                engines.open_index(options, volume_id=superblock.volume_id) as index,
            ):
                if member.before is not None and not await has_cut_off(member, records, segments):
                    member = await join()

                async def held(member: Member) -> HeldVolume:
                    superblock = await formatting.read_shared_superblock(records, options.title)
                    fenced = FencedRecords(records, member), FencedSegments(segments, member)
                    change = partial(formatting.change_shared_superblock, fenced[0])
                    if alone:
                        return HeldVolume(superblock, *fenced, change_superblock=change, block_index=index)
                    return HeldVolume(superblock, *fenced, member, again, change, index)

                async def again() -> HeldVolume:
                    await segments.renew()  # the others may have cut off the client that this one was
                    return await held(await join())

                yield await held(member)


async def has_cut_off(member: Member, records: RecordStore, segments: SegmentStore) -> bool:
    """The segment engine lets the daemon before this one, which was the same client, write no more, if it can do that.

    Before this one's first commit: until then the client's sequence record has the identity of that daemon, and
    whoever follows finds it there. False: it is not known whether that was done.
    """
    if member.before is None or member.before.resting == ():
        return True
    try:
        keys = schema.sequence_key(member.client), schema.files_key(member.client)
        sequence, _ = await records.get(keys)  # both are needed undamaged
        if sequence is not None and sequence.value != schema.NOBODY_TO_CUT_OFF:
            await segments.fence(sequence.value)
    except EngineError as error:
        log.warning("the daemon before this one could not be cut off, this one joins as another client: %s", error)
        member.let_run_out()
        return False
    return True


def _is_closing(path: Path) -> bool:
    """Somebody holds the volume whose mount is gone: a daemon that still flushes."""
    mountpoint = str(formatting.holder(path).get("mountpoint", ""))
    return bool(mountpoint) and top_mount(Path(mountpoint)) is None
