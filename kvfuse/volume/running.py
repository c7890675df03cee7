"""Runs a mounted volume: opens it, joins it again after a lost lease, and stores everything at the end."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import trio

from kvfuse import errors, failing
from kvfuse.kept.alive import RENEW_SECONDS
from kvfuse.kept.keeper import NO_KEEPER, Keeper
from kvfuse.options.config import Options
from kvfuse.volume.check.scrub import Scrubber
from kvfuse.volume.content.chunks import forget_lost
from kvfuse.volume.disk.disk_tier import DiskTier, opened_tier
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.inodes.unstored import Unstored
from kvfuse.volume.names.restorer import FAILED, LogLost, Restorer, find_kept_changes
from kvfuse.volume.names.restorer import NAME as UNSTORED
from kvfuse.volume.opening.former_caches import convert_caches
from kvfuse.volume.opening.held_volume import HeldVolume, hold
from kvfuse.volume.opening.loading import load_core
from kvfuse.volume.parts import Parts
from kvfuse.volume.store import schema
from kvfuse.volume.store.joined_reads import SharedRecords
from kvfuse.volume.store.sealed import ScanPages
from kvfuse.volume.tier.shared_tier import SharedTier
from kvfuse.volume.views.handover import Handover
from kvfuse.volume.views.ring_files import cut_ring_files, find_ring_files
from kvfuse.volume.volume import Volume

FINISH_ATTEMPTS = 3
FINISH_PAUSE = 1.0
"""Seconds between two of these."""
FREE_SECONDS = 5.0
"""Time to free removed files at the end; the next client frees the rest."""
REJOIN_SECONDS = 0.5
"""Pause before the next attempt to join a volume again."""

REAP_PAUSE = 1.0
"""Seconds between two attempts to store removals."""

TOUCHED_SECONDS = 1.0
TOUCHED_PAUSE = 0.005
"""Seconds between scans for memory of the tier that only readers have touched, and between parts that are freed."""
PINS_SECONDS = 60.0
"""limit of the tier's wait for clients of a former daemon, if not all are known"""

log = logging.getLogger(__name__)


async def make_parts(
    options: Options,
    held: HeldVolume,
    former: Core | None = None,
    disk: DiskTier | None = None,
    keeper: Keeper = NO_KEEPER,
    handover: Handover | None = None,
    blocks_keeper: Keeper | None = None,
) -> Parts:
    """Make the parts of a volume, from its records. ``former``: of the last membership, which has the ``disk`` tier.

    ``keeper``, ``handover``: have the state that a former daemon left. ``blocks_keeper``: of the block store, if that
    is another one.
    """
    if handover is not None and former is None:
        find_ring_files(keeper, handover)
    records = held.records if held.member is None else SharedRecords(held.records)
    core = await load_core(options, held._replace(records=records), keeper, handover)
    core.disk = disk if former is None else former.disk
    if former is not None:
        core.succeed(former)
    return Parts(core, options, held.member, keeper if blocks_keeper is None else blocks_keeper)


class Running:
    """The tasks of one volume beside its operations, from the first commit to the last, over any number of leases."""

    def __init__(
        self, volume: Volume, options: Options, nursery: trio.Nursery, held: HeldVolume, keeper: Keeper = NO_KEEPER
    ) -> None:
        self._volume = volume
        self._options = options
        self._nursery = nursery
        self._held = held
        self._keeper = keeper
        self._keeping = trio.CancelScope()
        self._living = trio.CancelScope()
        self._looking = trio.CancelScope()
        self._reaping = trio.CancelScope()
        self._scrubber = Scrubber(lambda: volume.parts, options)
        self._lost_leases = 0

    async def start(self) -> None:
        """Begin to commit and to write back, and free files that the last daemon could not free."""
        parts = self._volume.parts
        is_own = self._held.member is None and not parts.core.read_only
        if parts.core.doubt.is_any:
            parts.core.segments.distrust_cache()
        if parts.core.doubt.have_commits_failed:
            parts.core.records.distrust_cache()
        if is_own:
            try:
                await parts.journal.announce_numbers()
            except errors.EngineError as error:
                log.error("nothing can be stored at present, the volume serves its stored state: %s", error)
                parts.journal.pending.load.hurry()  # the journal tries it until it succeeds
        if parts.core.unstored is not None:
            await self._restore(parts, parts.core.unstored)
        else:
            self._keeper.drop(UNSTORED)
        await self._nursery.start(failing.vital_task, parts.run)
        if self._held.again is not None:
            self._nursery.start_soon(failing.vital_task, self._keep_membership)
        elif is_own:
            await self._nursery.start(failing.vital_task, self._reap_orphans, parts)
        if self._held.member is None:
            parts.core.nodes.handover.gives_from(parts.core.inodes.upcoming)
        if parts.core.nodes.handover.outlives:
            self._nursery.start_soon(failing.service, "open files", self._volume.left_open.load_all)
        if parts.core.tier.validity.alive is not None:
            self._nursery.start_soon(failing.vital_task, self._show_alive)
        if parts.core.tier.capacity:
            self._nursery.start_soon(failing.service, "tier", self._free_touched)
        if self._held.member is not None:
            self._volume.sections["lease"] = self._describe_lease
        if (disk := parts.core.disk) is not None:
            self._volume.sections["disk"] = disk.statistics
            self._nursery.start_soon(failing.service, "disk tier", partial(disk.run, parts.core.reads.speeds.disk))
        if self._options.scrub.rate:
            self._volume.sections["scrub"] = self._scrubber.statistics
            self._nursery.start_soon(failing.service, "scrub", self._scrubber.run)

    async def _restore(self, parts: Parts, unstored: Unstored) -> None:
        """Restore changes that a former daemon did not store. From here on the log has those of this daemon."""
        try:
            missed = await self._restore_left(parts)
        except (errors.EngineError, trio.Cancelled) as error:
            if isinstance(error, errors.Corrupt):
                self._note_all_missed(parts)
            raise
        except LogLost as error:
            log.error("changes that the last daemon had not stored are lost: %s", error)
            self._note_all_missed(parts)
        except Exception:  # a mistake of ours: the start fails, and the next daemon tries again, once
            if self._keeper.take(FAILED) is None:
                self._keeper.keep(FAILED)
            else:
                self._note_all_missed(parts)
            raise
        else:
            self._note_missed(parts, missed)
        self._keeper.drop(FAILED)
        unstored.begin(self._keeper, UNSTORED, parts.core.superblock.volume_id)

    async def _restore_left(self, parts: Parts) -> set[int]:
        """Restore the log's changes. Returns inodes whose bytes are lost."""
        left = find_kept_changes(self._keeper, parts.core.superblock.volume_id)
        if left is None:
            return set()
        parts.journal.go_on()
        nameless, chunks, staging = parts.names.nameless, parts.reader.chunks, parts.writer.staging
        return await Restorer(parts.core, parts.journal, parts.lookups, nameless, chunks, staging, left).restore()

    def _note_all_missed(self, parts: Parts) -> None:
        """Give up the log, for later daemons, too: all files open for writing may lack bytes."""
        before = parts.core.nodes.handover.still_open
        self._note_missed(parts, {ino for ino, one in before.items() if one.writers})
        self._keeper.drop(UNSTORED)

    def _note_missed(self, parts: Parts, inos: set[int]) -> None:
        """Have handles that are open for writing report that bytes of these files are lost."""
        if inos:
            parts.core.nodes.handover.miss(inos)
            cut_ring_files(self._keeper, parts.core.nodes.handover)

    async def _reap_orphans(self, parts: Parts, *, task_status: trio.TaskStatus[None]) -> None:
        """Free files that were unlinked, but open, when the last daemon ended.

        Started when their removal is stored, or when the store refuses it: then it is retried until stored.
        """
        refused = trio.Event()

        async def reap() -> None:
            try:
                await _reap_orphans(parts, refused)
            except errors.EngineError as error:
                log.error("removed files are freed at the next mount: %s", error)
            refused.set()

        with self._reaping:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(reap)
                await refused.wait()
                task_status.started()

    async def finish(self) -> None:
        """Store all changes, also if that fails at first, and end all tasks."""
        self._keeping.cancel()
        self._living.cancel()
        self._looking.cancel()
        self._reaping.cancel()
        self._scrubber.stop()
        parts = self._volume.parts
        is_stored = False
        try:
            if not parts.life.is_over:
                await self._store_and_leave(parts)
                is_stored = True
        finally:
            self._volume.parts.life.stop()
            if (unstored := self._volume.parts.core.unstored) is not None:
                unstored.close(is_stored=is_stored)
            if parts.engine is not None:
                parts.engine.shown.expire()
            end_indexes(parts.core.tier)
            if parts.core.disk is not None:
                parts.core.disk.stop()

    async def _show_alive(self) -> None:
        """Renew the expiry of indexes that clients read, and the keeper's entries of the tier, until `finish`."""
        tier = self._volume.parts.core.tier
        with self._living:
            clients_come_until = trio.current_time() + PINS_SECONDS
            while True:
                if trio.current_time() > clients_come_until:
                    tier.pins_are_known()
                self._volume.parts.core.tier.validity.live_on()
                if (engine := self._volume.parts.engine) is not None:
                    engine.shown.live_on()
                self._volume.parts.blocks.hear_of_tier()
                await trio.sleep(RENEW_SECONDS)

    async def _free_touched(self) -> None:
        """Free memory of the tier that only its readers have touched, until `finish`."""
        with self._looking:
            while True:
                tier = self._volume.parts.core.tier
                if tier.free_touched(looks_only=True):
                    await trio.to_thread.run_sync(tier.free_touched)
                    await trio.sleep(TOUCHED_PAUSE)  # others want the tier, too
                else:
                    await trio.sleep(TOUCHED_SECONDS)

    async def _store_and_leave(self, parts: Parts) -> None:
        is_writable = not parts.core.read_only
        if parts.core.nodes.handover.is_left and (self._held.member is None or self._held.member.goes_on):
            if is_writable:
                if parts.engine is not None:
                    await _retry(parts.engine.close)
                await _retry(self._volume.sync)  # with files that only open handles have
            await parts.hand_over()
        elif is_writable:
            if parts.engine is not None:
                await _retry(parts.engine.close)
            await _store_all(parts)
            if self._held.member is None:
                await _rewrite_all(parts)
            await _free_removed(parts)
            await parts.leave()

    # -- a lease that was lost -----------------------------------------------------------------------

    async def _keep_membership(self) -> None:
        """Join as another client whenever the lease is lost, until `finish`."""
        with self._keeping:
            while self._held.member is not None:
                await self._held.member.lost.wait()
                await self._join_again()

    async def _join_again(self) -> None:
        """Drop all that is not stored, and join again. Calls meanwhile read the former state, and change nothing."""
        former = self._volume.parts
        await former.abandon()
        self._lost_leases += 1
        log.error("the lease of the volume was lost, with all changes not stored by then: joining again")
        core = former.core
        while self._volume.parts is former:
            try:
                assert self._held.again is not None
                self._held = await self._held.again()
                parts = await make_parts(
                    self._options, self._held, core, handover=core.nodes.handover, blocks_keeper=self._keeper
                )
                core = parts.core  # it has the state that it took over, even if it never runs
                await self._run_again(parts)
            except (errors.EngineError, errors.VolumeError) as error:
                log.warning("the volume cannot be joined again yet: %s", error)
                await trio.sleep(REJOIN_SECONDS)
        log.warning("joined the volume again")
        news = parts.lookups.refresher.news
        for ino, parent, name in core.places:
            news.name(parent, name)
            news.content(ino)

    def _describe_lease(self) -> dict[str, float]:
        """Seconds that the store granted, seconds that are left for sure, and counts since this daemon began."""
        member = self._held.member
        assert member is not None
        return {
            "seconds": member.lease.ttl,
            "left": round(member.seconds_left, 3),
            "late_renewals": member.late_renewals,
            "losses": self._lost_leases,
        }

    async def _run_again(self, parts: Parts) -> None:
        try:
            await self._nursery.start(failing.vital_task, parts.run)
        except BaseException:
            parts.life.stop()
            raise
        self._volume.take_parts(parts)


def end_indexes(tier: SharedTier) -> None:
    """The tables that clients read have ended: the next daemon need not wait for their expiry."""
    if tier.validity.alive is not None:
        tier.validity.alive.expire_all()


async def _store_all(parts: Parts) -> None:
    parts.names.nameless.reap_unnamed()
    parts.mapper.access.store_all()
    await _retry(parts.journal.sync)


async def _rewrite_all(parts: Parts) -> None:
    try:
        await _retry(parts.rewriter.rewrite_all)
    except errors.NoSpace as error:
        log.error("bytes that a failed sync left in doubt were not all written again, and may be lost: %s", error)


async def _retry(store: Callable[[], Awaitable[None]]) -> None:
    for _ in range(FINISH_ATTEMPTS - 1):
        try:
            await store()
        except errors.EngineError as error:
            log.warning("closing: %s; trying again", error)
            await trio.sleep(FINISH_PAUSE)
        else:
            return
    await store()


async def _free_removed(parts: Parts) -> None:
    """Free removed files, if that takes no grace."""
    if parts.core.is_alone():
        with trio.move_on_after(FREE_SECONDS), suppress(errors.EngineError):
            await parts.space.free_removed_files()
            await parts.journal.sync()


async def _reap_orphans(parts: Parts, refused: trio.Event) -> None:
    """Free all orphans. Sets ``refused`` when the store refuses a commit. EngineError: it cannot be read."""
    async for rows, _ in ScanPages(parts.core.records, b"o", 100):
        for row in rows:
            try:
                if (record := schema.decode_inode(row.value)).ino not in parts.core.nodes.handover.still_open:
                    await _reap_orphan(parts, record)
            except errors.Corrupt as error:
                log.error("a removed file is not freed: %s", error)
        while True:
            try:
                await parts.journal.commit()
                break
            except errors.EngineError:  # the journal logs it, and retries
                refused.set()
                await trio.sleep(REAP_PAUSE)


async def _reap_orphan(parts: Parts, record: schema.InodeRecord) -> None:
    """Free one orphan. Corrupt, with nothing freed: a record of the file is damaged."""
    node, nameless = parts.reader.chunks.restore_chunks(Node.from_record(record), record), parts.names.nameless
    node.nlink = 0
    await nameless.load(node)
    forget_lost(node)
    if nameless.removal.is_large(node):
        await nameless.removal.free_in_pieces(node)
    else:
        nameless.reap(node)


@asynccontextmanager
async def open_volume(
    options: Options, mountpoint: str = "", keeper: Keeper = NO_KEEPER, handover: Handover | None = None
) -> AsyncIterator[Volume]:
    """Open the volume that ``options`` name; flush and close it at the end. One in a folder is held alone.

    VolumeError, VolumeBusy: it cannot be opened. ``mountpoint``: shown to others as that of the holder.
    ``keeper``: keeps state for the next daemon, and has that of a former one. ``handover``: its open files.
    """
    async with hold(options, mountpoint, read_only=options.mount.read_only, alone=False, keeper=keeper) as held:
        goes_on = handover is not None and not handover.is_first
        held, converted = await convert_caches(options, held, goes_on=goes_on)
        async with run_volume(options, held, keeper, handover) as volume:
            if converted is not None:
                volume.sections["conversion"] = converted.statistics
            yield volume


@asynccontextmanager
async def run_volume(
    options: Options, held: HeldVolume, keeper: Keeper = NO_KEEPER, handover: Handover | None = None
) -> AsyncIterator[Volume]:
    """Run a volume over engines that are open and stay the caller's; flush it at the end."""
    async with opened_tier(options.cache, held.superblock.volume_id) as disk:
        with failing.vital():
            parts = await make_parts(options, held, disk=disk, keeper=keeper, handover=handover)
        async with trio.open_nursery() as nursery:
            running = None
            try:
                async with trio.open_nursery() as background:
                    volume = Volume(parts, background)
                    running = Running(volume, options, nursery, held, keeper)
                    with failing.vital():
                        await running.start()
                        yield volume
            finally:
                if running is not None:
                    with trio.CancelScope(shield=True):
                        await running.finish()
