"""Makes the parts of a mounted volume that belong to one membership, and ends them together.

A client that lost its lease can commit and write nothing any more (`FencedRecords`, `FencedSegments`): its parts'
changes in memory will never be stored. `Parts.abandon` ends them: every caller that waits for a commit gets an
EngineError, and their nodes are marked, so that an operation that began with one of them ends in an EngineError, too,
and does not bring it to the parts that follow.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import trio

from kvfuse import failing
from kvfuse.errors import EngineError, innermost
from kvfuse.kept.keeper import NO_KEEPER, Keeper
from kvfuse.machine_memory import dirty_size_max
from kvfuse.options.config import Options
from kvfuse.volume.blocks.block_engine import BlockEngine, Hosts
from kvfuse.volume.blocks.block_files import BlockFiles
from kvfuse.volume.blocks.block_names import BlockNames
from kvfuse.volume.blocks.block_room import BlockRoom
from kvfuse.volume.blocks.blocks import Blocks
from kvfuse.volume.blocks.draining import Drain
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.commit.pending import Pending
from kvfuse.volume.commit.refusals import Refusals
from kvfuse.volume.commit.terms import SharedTerms, Terms
from kvfuse.volume.content.access_times import AccessTimes
from kvfuse.volume.content.chunks import Chunks
from kvfuse.volume.content.cutting import Cutter
from kvfuse.volume.content.in_place import InPlaceWriter
from kvfuse.volume.content.kernel_news import KernelNews
from kvfuse.volume.content.mapper import Mapper
from kvfuse.volume.content.merge import Merger
from kvfuse.volume.content.past_cache import PastCache
from kvfuse.volume.content.reader import OwnExtents, Reader
from kvfuse.volume.content.refresh import Refresher
from kvfuse.volume.content.shared_extents import SharedExtents
from kvfuse.volume.content.writer import Staging, Writer
from kvfuse.volume.hosts.block_letters import BlockLetters
from kvfuse.volume.hosts.coherence import Coherence
from kvfuse.volume.hosts.giving import Giving
from kvfuse.volume.hosts.reports import Reports
from kvfuse.volume.hosts.room_elsewhere import RoomElsewhere
from kvfuse.volume.hosts.shared_drain import SharedDrain
from kvfuse.volume.hosts.slab_leases import SlabLeases
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.device_changes import DeviceChanges
from kvfuse.volume.inodes.sole_changer import SoleChanger
from kvfuse.volume.names.apply_first import ApplyFirst
from kvfuse.volume.names.changes import Names
from kvfuse.volume.names.commit_first import CommitFirst
from kvfuse.volume.names.delegations import Delegations
from kvfuse.volume.names.lookup import Lookup, OwnLookup
from kvfuse.volume.names.nameless import OwnNameless, SharedNameless
from kvfuse.volume.names.rewriting import Rewriter
from kvfuse.volume.names.shared_lookup import SharedLookup
from kvfuse.volume.names.synced import Synced
from kvfuse.volume.namespaces.namespace_registry import Namespace
from kvfuse.volume.opening.cold_opening import open_cold, open_shared_cold
from kvfuse.volume.slots.flusher import Flusher
from kvfuse.volume.slots.heads import HeaderWriter
from kvfuse.volume.slots.space import RoomFinder, RoomSource
from kvfuse.volume.store.joined_reads import SharedRecords
from kvfuse.volume.store.member import Member
from kvfuse.volume.store.noted_segments import NotedSegments
from kvfuse.volume.store.schema import Counts
from kvfuse.volume.tenancy.granting import Granting
from kvfuse.volume.tenancy.namespace_attributes import NamespaceAttributes
from kvfuse.volume.tenancy.namespace_news import NamespaceNews
from kvfuse.volume.tenancy.namespace_records import NamespaceRecords, OwnNamespaceRecords, SharedNamespaceRecords
from kvfuse.volume.tenancy.namespaces import NamespaceEditor
from kvfuse.volume.tenancy.xattrs import Xattrs

HEADS_SECONDS = 30.0
"""limit of an end's wait for slot heads whose servers are late: longer than a cluster takes to name others"""
LAST_COMMIT_SECONDS = 5.0
"""the same for what ended parts did last: slabs whose images are not stored by then are left as by who dies"""
HEADS_HANDED_OVER_SECONDS = 1.0
"""the same while callers wait for the next daemon"""

log = logging.getLogger(__name__)


class Lifetime:
    """The tasks of one membership, from their start to their end. `Parts` owns it."""

    def __init__(self) -> None:
        self._scope = trio.CancelScope()
        self._has_begun = False
        self._ended = trio.Event()

    async def run(self, start: Callable[[trio.Nursery], Awaitable[None]], task_status: trio.TaskStatus[None]) -> None:
        """Returns when all tasks have ended that ``start`` began. EngineError of the first that failed."""
        self._has_begun = True
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    await start(nursery)
                    self._scope.shield = True
                    task_status.started()
        except BaseExceptionGroup as group:
            if errors := group.subgroup(EngineError):
                raise EngineError(str(innermost(errors))) from group
            raise
        finally:
            self._ended.set()

    @property
    def is_over(self) -> bool:
        """No task runs, as none has begun, or all have ended: nothing is committed any more."""
        return not self._has_begun or self._ended.is_set()

    def stop(self) -> None:
        self._scope.cancel()

    async def end(self) -> None:
        """Stop all tasks, and wait for their end."""
        self.stop()
        await self._ended.wait()


class Parts:
    """Makes the parts of one membership, and ends them. ``member``: this client, on a shared volume."""

    def __init__(self, core: Core, options: Options, member: Member | None, keeper: Keeper = NO_KEEPER) -> None:
        self.core = core
        headers = HeaderWriter(core)
        flusher = Flusher(core, headers, min(options.cache.staging_size, dirty_size_max()))
        pending = Pending(core)
        chunks = Chunks(core, flusher)
        refresher = Refresher(core, chunks, KernelNews(core.kernel))
        extents = OwnExtents(core, chunks.load_chunk) if member is None else SharedExtents(core, refresher.renew)
        self.fetcher = extents.fetcher
        """of bytes that the kernel will ask for; None: the page cache of the engine has them"""
        self.checks = extents.checks
        """of bytes that the page cache of the engine is to have"""
        self.reader = Reader(core, chunks, extents)
        staging = Staging(core, pending, flusher)
        merger = Merger(core, chunks, self.reader, staging, refresher.news)
        refusals = Refusals(pending, merger.merge, refresher.renew, chunks.reap_unstored, chunks.revive)
        terms = Terms(refusals) if member is None else SharedTerms(pending, refusals).terms
        interval = options.publish.interval if member is None and not core.read_only else None
        self.journal = Journal(pending, terms, flusher, options.publish.window, interval, self._is_caller_coming)
        self.leases: SlabLeases | None = None
        self.coherence: Coherence | None = None
        self.delegations: Delegations | None = None
        """all on a shared volume"""
        self.space: RoomFinder
        self.lookups: Lookup
        self.names: Names
        if member is not None and isinstance(core.records, SharedRecords) and isinstance(extents, SharedExtents):
            namespaces = self._make_shared(member, core.records, extents, refresher)
        else:
            namespaces = self._make_own(refresher)
        mount = options.mount
        access = AccessTimes(core, self.journal, mount.access_times, directories=mount.diratime)
        self.mapper = Mapper(core, chunks, access, extents)
        self.past_cache = PastCache(core, chunks) if extents.checks is not None else None
        """None: the engine has no page cache to go past, or others free slots, too"""
        in_place = InPlaceWriter(core, self.journal, headers)
        self.writer = Writer(core, self.journal, flusher, self.space, self.reader, staging, in_place)
        self.cutter = Cutter(core, chunks, self.reader, self.writer)
        self.rewriter = Rewriter(core, self.journal, self.lookups, self.reader, staging, self.space)
        self.blocks = Blocks(
            core, self.journal, flusher, self.space, self.lookups, self.names, self.reader, self.mapper
        )
        devices = core.segments.devices
        self.devices = DeviceChanges(core, devices, member, member is None) if devices is not None else None
        editor = NamespaceEditor(self.names, namespaces)
        self.xattrs = Xattrs(core, self.journal, self.space, self.lookups, NamespaceAttributes(editor), self.devices)
        view = self.leases.view if self.leases is not None else None
        self.engine: BlockEngine | None = BlockEngine(
            core, keeper, self.journal.commit, self.journal.sync, options.publish.interval,
            options.cache.staging_size, self.blocks.search.ancestors, (lambda: view.lent) if view else None,
        )  # fmt: skip
        core.blocks = self.engine
        self._connect_cold(options, self.engine)
        self.letters: BlockLetters | None = None
        self.block_names: BlockNames | None = None
        """of a volume with a block store"""
        if self.engine is not None:
            files = BlockFiles(core, self.engine, self.lookups, self.names, self.writer, self.cutter)
            self.block_names = BlockNames(files)
            room = BlockRoom(self.engine)
            if self.coherence is not None and view is not None:
                granting, giving, engine = self.coherence.granting, self.coherence.giving, self.engine
                records = self.coherence.records
                self.letters = letters = BlockLetters(records, core.client, view, engine.has_slab, engine.hear)
                self.engine.meet(
                    Hosts(
                        giving.reports.ask, self.space.elsewhere[-1], (granting.take, granting.await_others),
                        letters.write, letters.send, lambda: letters.are_answered, letters.unanswered,
                        letters.look_again,
                        self.coherence.namespaces.look,
                    )
                )  # fmt: skip
                giving.connect(room)
            self.space.connect(room.make_room)
        self.drain = self._make_drain(member)
        self.life = Lifetime()
        self._writing, self._has_written = trio.CancelScope(), trio.Event()

    def _connect_cold(self, options: Options, engine: BlockEngine) -> None:
        core, leases = self.core, self.leases
        if leases is not None and core.block_index is not None:
            shared = open_shared_cold(
                options, core.superblock.volume_id, core.client, core.block_index, engine.is_valid_group,
                lambda: leases.view.members, leases.heir,
            )  # fmt: skip
            if shared is not None:
                engine.connect_shared_cold(shared)
        elif leases is None:
            cold = open_cold(options, core.superblock.volume_id, engine.is_valid_group, engine.latest_sequence)
            if cold is not None:
                engine.connect_cold(cold)

    def _make_drain(self, member: Member | None) -> Drain:
        parts = self.core, self.journal, self.rewriter, self.engine
        if member is None or self.leases is None:
            return Drain(*parts, self.devices)
        limits = self.core.segments.limits
        changer = SoleChanger(lambda: self.core.records, lambda: limits.quarantine, member)
        if self.devices is not None:
            changer = self.devices.changer
        return SharedDrain(*parts, None, leases=self.leases, member=member, changer=changer)

    def _late_slabs(self) -> set[int]:
        """Slabs to which something may still be written that this host has begun, or owes."""
        segments, owed = self.core.segments, self.journal.flusher.headers.owed_slabs
        return owed | segments.noted.slabs() if isinstance(segments, NotedSegments) else owed

    def _is_caller_coming(self) -> bool:
        """A caller is on its way that may soon wait for a commit: on a shared volume it pays to wait for it."""
        records = self.core.records
        return isinstance(records, SharedRecords) and (self.journal.flusher.has_callers or records.is_asked)

    def _make_own(self, refresher: Refresher) -> NamespaceRecords:
        """Make the parts of a volume that one host has. Sources of room that cost nothing are first."""
        core, journal = self.core, self.journal
        nameless = OwnNameless(core, journal, refresher.chunks)
        sources = [nameless.free_unnamed_files, journal.free_given_up]
        self.space = RoomFinder(core, sources, [], nameless.store_removals)
        self.lookups = OwnLookup(core, journal, refresher)
        memory = ApplyFirst(core, journal, self.space, self.lookups, nameless)
        self.names = Names(core, journal, self.lookups, nameless, memory, memory)
        return OwnNamespaceRecords(self.names)

    def _make_shared(
        self, member: Member, records: SharedRecords, extents: SharedExtents, refresher: Refresher
    ) -> NamespaceRecords:
        """Make the parts of a shared volume."""
        core, journal = self.core, self.journal
        nameless = SharedNameless(core, journal, refresher.chunks)
        orphans = nameless.orphans
        self.leases = leases = SlabLeases(core, journal, journal.refusals.to_free.add, self._late_slabs)
        sources: list[RoomSource] = [
            leases.take_unheld_slabs,
            nameless.free_unnamed_files,
            journal.free_given_up,
            journal.store_removals,
            orphans.free_removed_files,
        ]
        reports = Reports(core, records, member, leases.shares, leases.view)
        core.tier.validity.hold(member.seconds_left)
        member.on_change = core.tier.validity.hold
        elsewhere: list[RoomSource] = [RoomElsewhere(core, leases.shares, orphans, reports).await_other_hosts]
        record_sources = [orphans.free_removed_files]
        self.space = RoomFinder(core, sources, record_sources, nameless.store_removals, elsewhere=elsewhere)
        self.delegations = delegations = Delegations(records, journal, member)
        synced = Synced(core, records.followed)
        self.lookups = lookups = SharedLookup(core, journal, refresher, records, synced, delegations)
        memory = ApplyFirst(core, journal, self.space, lookups, nameless)
        executor = CommitFirst(core, journal, self.space, lookups, memory)
        self.names = Names(core, journal, lookups, nameless, memory, executor)
        view, committer = leases.view, journal.committer
        core.metadata.share_out(
            lambda: view.counts_beside(core.client).add(Counts(0, committer.size)).size, view.members
        )
        giving = Giving(core, reports, leases)
        news = NamespaceNews(core, journal, lookups, self.names.folders)
        granting = Granting(core, journal, news, view.has_orphans)
        sources.insert(0, granting.take)
        elsewhere.insert(0, granting.await_others)
        self.coherence = Coherence(core, lookups, journal, member, extents.fetcher, giving, news, granting)
        return SharedNamespaceRecords(self.names, executor, news, granting)

    def compression_of(self, namespace: Namespace) -> dict[str, Any]:
        """What compression saved in one namespace, since the mount."""
        if self.engine is not None and namespace.settings.is_blocks:
            return self.engine.packer.statistics(namespace.number)
        return self.journal.flusher.packer.statistics(namespace.number)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write, commit and follow other hosts until `life` ends; from its start on also when the caller is cancelled.

        Started once slabs and numbers can be given. EngineError before that: the store does not answer.
        """
        self.blocks.start()
        await self.life.run(self._start_tasks, task_status)

    async def _start_tasks(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self._write)
        nursery.start_soon(failing.vital_task, self.journal.run)
        if self.coherence is None or self.leases is None or self.delegations is None:
            nursery.start_soon(failing.service, "access times", self.mapper.access.run)
            nursery.start_soon(failing.vital_task, self.lookups.refresher.news.run)
            nursery.start_soon(failing.service, "paths of namespaces", self.names.folders.find_all)
            nursery.start_soon(failing.service, "rewriting", self.rewriter.run)
            if self.fetcher is not None:
                nursery.start_soon(failing.vital_task, self.fetcher.run)
            if self.checks is not None:
                nursery.start_soon(failing.vital_task, self.checks.run)
        else:
            nursery.start_soon(failing.vital_task, self.coherence.run)
            nursery.start_soon(failing.vital_task, self.delegations.run)
            if self.letters is not None:
                nursery.start_soon(failing.service, "letters about blocks", self.letters.run)
            await nursery.start(self.leases.run)
        if not self.core.read_only:
            nursery.start_soon(failing.service, "draining", self.drain.run)

    async def _write(self) -> None:
        """Run what begins writes to slots, but for the journal, until `_end_writes`, or until `life` ends."""
        try:
            with self._writing:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(failing.vital_task, self.journal.flusher.run)
                    nursery.start_soon(failing.service, "slots elsewhere", self.journal.flusher.elsewhere.run)
                    nursery.start_soon(failing.vital_task, self.journal.flusher.headers.run)
                    nursery.start_soon(failing.service, "removals", self.names.nameless.run)
                    if self.engine is not None:
                        nursery.start_soon(failing.vital_task, self.engine.run)
        finally:
            self._has_written.set()

    async def _end_writes(self) -> None:
        """Nothing is written to slots from here on, and what is committed is: a slab may then be another host's."""
        self._writing.cancel()
        await self._has_written.wait()
        self.journal.flusher.give_up()
        with trio.move_on_after(LAST_COMMIT_SECONDS), suppress(EngineError):
            await self.journal.sync()  # with what these parts did last

    async def leave(self) -> None:
        """End after everything was stored, and leave little that other hosts would have to clean up."""
        if self.leases is None or self.coherence is None:
            return
        self.coherence.granting.stop()
        self.coherence.member.begin_to_leave()
        await self.journal.flusher.headers.settle(HEADS_SECONDS)
        await self._end_writes()
        may_be_taken = await self.leases.close()
        await self.life.end()
        if not may_be_taken:
            self.coherence.member.let_run_out()
            return
        try:
            await self.core.records.commit(*self.leases.held.last_words())
        except EngineError as error:
            log.info("others take away this client's sequence record: %s", error)

    async def hand_over(self) -> None:
        """End after everything was stored, and leave all as it is to the next daemon, which stays this client."""
        await self.journal.flusher.headers.settle(HEADS_HANDED_OVER_SECONDS)
        await self.life.end()
        if self.leases is not None and self.coherence is not None:
            self.coherence.member.hand_over(self.leases.held.unsettled())

    async def abandon(self) -> None:
        """End everything: changes that are not stored by now never will be. Returns when nothing is in flight."""
        await self.life.end()
        if self.engine is not None:
            self.engine.abandon()
        self.journal.flusher.give_up()
        self.core.dentries.unbind_all()
        self.core.namespaces.gates.end()
        self.core.nodes.forget_all()
