"""The parts of a mounted volume that belong to one membership: they are made together, and forgotten together.

A client that lost its lease can commit and write nothing any more (`FencedRecords`, `FencedSegments`): what its
parts have in memory will never be stored. `Parts.abandon` ends them: every caller that waits for a commit gets an
EngineError, and their nodes are marked, so that an operation that began with one of them ends in an EngineError, too,
and does not bring it to the parts that follow.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from kvfuse.errors import EngineError
from kvfuse.options.config import Options
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.content.access_times import AccessTimes
from kvfuse.volume.content.chunks import Chunks
from kvfuse.volume.content.cutting import Cutter
from kvfuse.volume.content.in_place import InPlaceWriter
from kvfuse.volume.content.mapper import Mapper
from kvfuse.volume.content.merge import Merger
from kvfuse.volume.content.reader import OwnExtents, Reader
from kvfuse.volume.content.shared_extents import SharedExtents
from kvfuse.volume.content.writer import Writer
from kvfuse.volume.hosts.coherence import Coherence
from kvfuse.volume.hosts.room_elsewhere import RoomElsewhere
from kvfuse.volume.hosts.slab_leases import SlabLeases
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.names.apply_first import ApplyFirst
from kvfuse.volume.names.blocks import Blocks
from kvfuse.volume.names.changes import Names
from kvfuse.volume.names.commit_first import CommitFirst
from kvfuse.volume.names.lookup import Lookup
from kvfuse.volume.names.nameless import Nameless, OwnNameless, SharedNameless
from kvfuse.volume.names.shared_lookup import SharedLookup
from kvfuse.volume.names.xattrs import Xattrs
from kvfuse.volume.slots.flusher import Flusher
from kvfuse.volume.slots.heads import HeaderWriter
from kvfuse.volume.slots.space import Space
from kvfuse.volume.store import schema
from kvfuse.volume.store.joined_reads import SharedRecords
from kvfuse.volume.store.member import Member
from kvfuse.volume.store.schema import Counts

log = logging.getLogger(__name__)


class Lifetime:
    """The tasks of one membership, from their start to their end. `Parts` owns it."""

    def __init__(self) -> None:
        self._scope = trio.CancelScope()
        self._ended = trio.Event()

    async def run(self, start: Callable[[trio.Nursery], Awaitable[None]], task_status: trio.TaskStatus[None]) -> None:
        """Returns when all tasks have ended that ``start`` began. EngineError of the first that failed."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    await start(nursery)
                    self._scope.shield = True
                    task_status.started()
        except BaseExceptionGroup as group:
            if errors := group.subgroup(EngineError):
                raise EngineError(str(_first(errors))) from group
            raise
        finally:
            self._ended.set()

    @property
    def is_over(self) -> bool:
        """All tasks have ended: nothing is committed any more."""
        return self._ended.is_set()

    def stop(self) -> None:
        self._scope.cancel()

    async def end(self) -> None:
        """Stop, and wait for that."""
        self.stop()
        await self._ended.wait()


class Parts:
    """Makes the parts of one membership, and ends them. ``member``: this client, on a shared volume."""

    def __init__(self, core: Core, options: Options, member: Member | None) -> None:
        self.core = core
        headers = HeaderWriter(core)
        self.flusher = Flusher(core, headers, options.cache.staging_size)
        self.journal = Journal(core, self.flusher, options.publish.window)
        chunks = Chunks(core, self.flusher)
        self.leases: SlabLeases | None = None
        """where others have the volume open, too"""
        nameless = self._make_nameless(chunks)
        mount = options.mount
        access = AccessTimes(core, self.journal, mount.access_times, directories=mount.diratime)
        self.mapper = Mapper(core, chunks, access)
        self.lookups, self.names = self._make_names(chunks, nameless)
        extents = SharedExtents(core, self.lookups.renew) if core.shared else OwnExtents(core)
        self.reader = Reader(core, chunks, extents)
        in_place = InPlaceWriter(core, self.journal, headers)
        self.writer = Writer(core, self.journal, self.flusher, self.space, self.reader, in_place)
        self.cutter = Cutter(core, chunks, self.reader, self.writer)
        self.blocks = Blocks(
            core,
            self.journal,
            self.flusher,
            self.space,
            self.lookups,
            self.names,
            self.reader,
            self.mapper,
        )
        self.lookups.refresher.readers_change = self.blocks.readers_change
        self.xattrs = Xattrs(core, self.journal, self.space, self.lookups)
        self.coherence: Coherence | None = None
        """likewise"""
        if member is not None and self.leases is not None and isinstance(extents, SharedExtents):
            merger = Merger(core, chunks, self.reader, self.writer, self.lookups.refresher)
            view, committer = self.leases.view, self.journal.committer
            self.core.metadata.stored = lambda: view.counts_beside(core.client).add(Counts(0, committer.size)).size
            assert isinstance(self.lookups, SharedLookup)
            self.core.metadata.sharers = view.members
            flusher, records = self.flusher, self.lookups.records
            self.coherence = Coherence(core, records, self.journal, self.lookups, member, merger.merge, extents.fetcher)
            self.journal.refusals.merger = self.coherence.merge
            self.journal.committer.gathering.coming = lambda: flusher.has_callers or records.is_asked
        self.life = Lifetime()

    def _make_nameless(self, chunks: Chunks) -> Nameless:
        """And those who have room, in the order in which they are asked: what costs nobody anything comes first.

        An eviction would be the last one before other hosts.
        """
        core, journal = self.core, self.journal
        if not isinstance(core.records, SharedRecords):
            own = OwnNameless(core, journal, chunks)
            self.space = Space(core, [own.free_unnamed_files, journal.free_given_up], [], own.store_removals)
            return own
        shared = SharedNameless(core, journal, chunks)
        orphans = shared.orphans
        self.leases = SlabLeases(core, journal, orphans.later)
        sources = [
            self.leases.take_unheld_slabs,
            shared.free_unnamed_files,
            journal.free_given_up,
            orphans.free_removed_files,
            RoomElsewhere(core, self.leases.shares, orphans).await_other_hosts,
        ]
        self.space = Space(core, sources, [orphans.free_removed_files], shared.store_removals)
        return shared

    def _make_names(self, chunks: Chunks, nameless: Nameless) -> tuple[Lookup, Names]:
        core, journal, space = self.core, self.journal, self.space
        if not isinstance(core.records, SharedRecords):
            lookups = Lookup(core, journal, chunks)
            memory = ApplyFirst(core, journal, space, lookups, nameless)
            return lookups, Names(core, journal, lookups, nameless, memory, memory)
        shared = SharedLookup(core, journal, chunks, core.records)
        shared.refresher.revive, journal.refusals.renew = journal.refusals.revive, shared.renew
        memory = ApplyFirst(core, journal, space, shared, nameless)
        return shared, Names(core, journal, shared, nameless, memory, CommitFirst(core, journal, space, shared, memory))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write, commit and follow other hosts until `life` ends; from its start on also when the caller is cancelled.

        Started when slabs and numbers are there to be given. EngineError before, if the store does not answer.
        """
        self.blocks.start()
        await self.life.run(self._start, task_status)

    async def _start(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self.flusher.run)
        nursery.start_soon(self.journal.run)
        if not self.core.shared:
            nursery.start_soon(self.mapper.access.run)
        if isinstance(self.reader.extents, SharedExtents):
            nursery.start_soon(self.reader.extents.fetcher.run)
        if self.coherence is not None and self.leases is not None:
            nursery.start_soon(self.coherence.run)
            await nursery.start(self.leases.run)

    async def leave(self) -> None:
        """Everything is stored: leave nothing that others would have to see to, and end."""
        if self.leases is None:
            return
        await self.leases.close()
        await self.life.end()
        try:
            await self.core.records.commit({}, [schema.sequence_key(self.core.client)])
        except EngineError as error:
            log.info("others take away this client's sequence record: %s", error)

    async def abandon(self) -> None:
        """End everything: what is not in the store by now never will be. Returns when nothing is under way."""
        await self.life.end()
        self.flusher.give_up()
        self.core.dentries.unbind_all()
        self.core.nodes.forget_all()


def _first(group: BaseExceptionGroup[EngineError]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
