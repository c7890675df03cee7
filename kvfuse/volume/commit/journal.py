"""Commits changes in memory to the record store, many at a time, by one task (group commit).

Every operation changes inodes and names in memory at once, and marks them as changed (`pending`). One task commits:
changes made while a commit is in flight join the next one. A waiter (strict publishing, fsync) makes the next commit
start at once; without one it starts when the window since the first change has passed, or when the batch is full.

A batch is built from memory between two awaits, so it is a consistent state (`batch`). Before that, the flusher writes
the staged bytes of its nodes to their slots, so no record ever refers to bytes that are not stored. Commits leave out a
node that is open for writing until it is closed, at no cost (`late`): a name that was never published is not written to
the store, so create, close and rename within one batch become one put. A commit that failed may have happened. The
journal sends the same batch again, before any newer one, until the store accepts it: with one writer a repeated put is
harmless, and no batch is stored in part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from kvfuse.errors import EngineError, EngineTimeout, KvfuseError
from kvfuse.volume.commit.apply import BatchBuilder, Settling
from kvfuse.volume.commit.batch import Batch
from kvfuse.volume.commit.committer import Committer, UseRecords
from kvfuse.volume.commit.late import Late, is_held, settlers
from kvfuse.volume.commit.pending import Pending
from kvfuse.volume.inodes.node import Node, check_remembered
from kvfuse.volume.store import schema
from kvfuse.volume.views.health import COMMIT, SYNC, WRITE

if TYPE_CHECKING:
    from kvfuse.volume.commit.terms import Terms
    from kvfuse.volume.slots.flusher import Flusher
    from kvfuse.volume.store.transaction import Transaction

log = logging.getLogger(__name__)

FILES_MAX = 400
"""Most files whose bytes one commit refers to: building it takes some milliseconds, without an await."""
BESIDE_READERS = 0.25
"""Part of the window while callers of other namespaces read: a commit is then built without a long pause for them."""
RETRY_DELAYS = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Seconds between attempts after failed commits; the last one repeats."""
CHUNK_SHARE = 8
"""Chunk records of one file that may wait for a commit: one for every so many operations that a commit may have,"""
CHUNK_MAX = 4096
"""and at most so many."""


@dataclass(eq=False, slots=True)
class CommitWaiter:
    """One caller that waits for a commit."""

    nodes: tuple[Node, ...]
    durable: bool
    strict: bool
    """it is for a strict folder: no sync of bytes is waited for"""
    serial: int
    """serial number of the last change before the caller began to wait"""
    done: trio.Event = field(default_factory=trio.Event)
    error: KvfuseError | None = None


class Waiters:
    """All callers that wait for a commit of pending changes. The journal owns it."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self.waiting: list[CommitWaiter] = []
        """always the same list: `Gathering` counts it"""
        self._has_stopped = False

    def add(self, nodes: tuple[Node, ...], durable: bool, strict: bool) -> CommitWaiter:
        """Add a waiter and have a commit start at once. EngineError after `stop`."""
        if self._has_stopped:
            raise EngineError("the volume is being unmounted, or lost its lease: nothing is committed any more")
        waiter = CommitWaiter(nodes, durable, strict, self._pending.serial)
        if nodes:
            self.force(nodes)
        self.waiting.append(waiter)
        self._pending.load.hurry()
        return waiter

    def force(self, nodes: Iterable[Node]) -> None:
        """Force inodes, and those tied to them, into the next commit even while they are open for writing."""
        for member in self._pending.ties.find_closure([settler for node in nodes for settler in settlers(node)]):
            if member.changed:
                member.forced = True
                self._pending.reconsider(member)

    def find_served(self, late: Late, left_serial: int | None, early: list[CommitWaiter]) -> list[CommitWaiter]:
        """Waiters whose changes are in the new batch. The others get the next commit at once.

        ``late``: inodes that are not in it. ``left_serial``: the oldest change for which it had no room.
        ``early``: waiters from before the bytes were written. Later ones are served if they have no staged bytes. The
        inodes of others may be in the batch in an older state, or tied to more inodes since: they are forced again.
        """
        served = []
        for waiter in self.waiting:
            nodes = waiter.nodes
            if not nodes:
                is_served = left_serial is None or waiter.serial < left_serial
            elif waiter in early or not any(node.staged_count and node.nlink for node in nodes):
                # As far as these are not open for writing. The store has lost an inode without names only once it has
                # the inode that took its name.
                is_served = not any(is_held(node, late) for node in nodes)
            else:
                is_served = False
            if is_served:
                served.append(waiter)
        if len(served) < len(self.waiting):
            self.force([node for waiter in self.waiting if waiter not in served for node in waiter.nodes])
            self._pending.load.hurry()
        return served

    def release(self, waiters: list[CommitWaiter], error: KvfuseError | None = None) -> None:
        """End the wait of these, with an error or none."""
        released = set(waiters)
        self.waiting[:] = [waiter for waiter in self.waiting if waiter not in released]
        for waiter in waiters:
            waiter.error = error
            waiter.done.set()

    def stop(self) -> None:
        """End all waits, now and later, with EngineError: nothing is committed any more."""
        self._has_stopped = True
        self.release(list(self.waiting), EngineError("nothing is committed any more"))


class Journal:
    """Commits pending changes, as one task, and lets callers wait for it. One per membership."""

    def __init__(
        self,
        pending: Pending,
        terms: Terms,
        flusher: Flusher,
        window: float,
        interval: float | None,
        is_coming: Callable[[], bool],
    ) -> None:
        """``window``: seconds from the first change to a commit without waiters; where the next daemon finds all
        changes, until their bytes are written. ``interval``: seconds until they are durable; None: only if somebody
        asks. ``is_coming``: see `Gathering`.
        """
        self.core = core = pending.core
        self.flusher = flusher
        self.window = window
        self.interval = interval
        self._may_be_behind = core.unstored is not None and interval is not None and not core.strict
        self.pending = pending
        self.counters = self.pending.counters
        self.waiters = Waiters(self.pending)
        self.committer = Committer(
            core.records,
            terms.sequence,
            UseRecords(core.namespaces.accounts.records, core.client),
            batch_waiters=self.waiters.waiting,
            on_late_commit=core.dentries.clear,
            is_coming=is_coming,
        )
        self.refusals = terms.refusals
        self.settling = Settling(self.pending, terms, flusher.headers)
        self.chunk_count_max = max(2, min(CHUNK_MAX, core.records.limits.commit_operations_max // CHUNK_SHARE))
        """chunk records of one file that may wait for a commit"""
        self.terms = terms
        self._builder = BatchBuilder(self.pending, terms)
        self._sent: Batch | None = None
        """the commit that is in flight, or failed and will be repeated"""
        self._has_left = False
        """the last commit had no room for all: the next one begins at once"""
        self.failure: EngineError | None = None
        """the last commit's error, if it failed"""
        self._can_sync = True
        """the last sync of the segments did not fail"""
        self._changed, self._due = trio.Event(), trio.Event()
        """something is not durable; it is to be so now"""
        self._opened = set[Node]()
        """changed files that were open for writing when the last interval ended"""

    # -- waiting -------------------------------------------------------------------------------------

    async def commit(self, *nodes: Node, durable: bool = False, strict: bool = False) -> None:
        """Return when all changes before the call are in the store, with the bytes of ``nodes``.

        ``durable``: and survive a loss of power; returns at once if they do already. ``strict``: for a strict folder.
        If the caller is cancelled, the commit happens all the same. EngineError: the changes stay
        visible here and are committed later.
        """
        check_remembered(*nodes)
        if durable and nodes and all(self.settling.is_durable(node) for node in nodes):
            return
        durable = durable and not self.settling.is_always_durable
        waiter = self.waiters.add(nodes, durable, strict)
        self.committer.gathering.add_caller()
        await waiter.done.wait()
        if waiter.error is not None:
            raise waiter.error

    def find_tied(self, nodes: Collection[Node | None]) -> list[Node] | None:
        """Inodes to commit before these are renamed or removed, because one of them is tied; None if none is.

        All tied inodes, once as many changes depend on each other as one commit may carry.
        """
        load, tied = self.pending.load, self.pending.ties.others
        if load.linked_count >= load.linked_max:
            return list(tied)
        if tied and any(node in tied for node in nodes):
            return [node for node in nodes if node is not None]
        return None

    async def free_given_up(self, deadline: float, namespace: int | None) -> bool:
        """A `Source`: free slots that were given up, with a commit if they need one. False: there were none."""
        slabs, reads, accounts = self.core.slabs, self.core.reads, self.core.namespaces.accounts
        removed = namespace is not None and (self.pending.has_removals or self.is_committing)
        if not (removed or self.freeing_bytes or slabs.pending_bytes or reads.has_retired):
            return False
        before = accounts.returned(namespace or 0)
        if self.flusher.dropped_size:
            await self.flusher.settled()  # slots of dropped bytes are given up when their write ends
        await self.commit(*self.pending.list_givers())
        await self.settling.await_freed()
        if namespace is None:
            return True
        await reads.passed()
        return accounts.returned(namespace) > before

    async def store_removals(self, deadline: float, namespace: int | None) -> bool:
        """A `Source` without room of its own: it stores removals, which the sources after it need."""
        if self.pending.gone or self.pending.names or self.is_committing:
            await self.commit()
        return False

    @property
    def freeing_bytes(self) -> int:
        """Bytes of slots that were given up and that a later commit will free."""
        batch, core = self.settling.batch, self.core
        given_up = [core.dead, core.unborn, batch.unborn if batch is not None else []]
        given_up += [node.dead for node in self.pending.list_givers()]
        chunks = [chunk for node in core.unnamed.values() for chunk in node.chunks.values()]
        given_up += [chunk.extents for chunk in chunks]
        staged_size = sum([chunk.staged.capacity for chunk in chunks if chunk.staged is not None])
        slot_size = sum([extent.slot_size for extents in given_up for extent in extents])
        return slot_size + self.flusher.dropped_size + staged_size

    @property
    def is_committing(self) -> bool:
        """A commit was built and did not free its slots yet."""
        return self.settling.batch is not None

    def is_sending(self, slab: int) -> bool:
        """A batch was built with the slab's image, and it is not known yet that this is in the store."""
        batch, key = self._sent, schema.slab_key(slab)
        return batch is not None and (key in batch.puts or key in batch.deletes)

    async def sync(self) -> None:
        """Return when all changes before the call are durable, also those of open files. EngineError."""
        await self.commit(*self.pending.dirty, *self.pending.aside.nodes, durable=True)
        await self.settling.await_freed()

    def go_on(self) -> None:
        """Make all durable now: a daemon before this one ended, perhaps before its interval did."""
        self._changed.set()
        self._due.set()

    def put(self, key: bytes, value: bytes | None) -> None:
        """Put or delete a loose record with the next commit; None deletes it."""
        self.pending.loose.put(key, value)

    async def transact(self, transaction: Transaction) -> bool:
        """Commit a transaction; False if an expected version had changed. See `Committer.transact`."""
        return await self.committer.transact(transaction)

    async def announce_numbers(self) -> None:
        """Announce numbers before the first is given, by a commit of their own: pending changes may need some. It is so
        small that a store on a full disk often has room for it. EngineError: until it succeeds no number is given.
        """
        ranges = self.core.inodes, self.core.generations
        try:
            async with self.committer.turn:
                await self.core.records.commit({key: value for one in ranges for key, value in one.take().items()})
        except EngineError as error:
            for one in ranges:
                one.withhold(error)
            raise
        for one in ranges:
            one.announced()

    # -- the committing task -------------------------------------------------------------------------

    async def run(self) -> None:
        """Commit pending changes until cancelled. Then every waiter gets EngineError."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.committer.run)
                if self.interval is not None:
                    nursery.start_soon(self._run_intervals, self.interval)
                await self._run()
        finally:
            self.waiters.stop()

    async def _run(self) -> None:
        load, failure_count = self.pending.load, 0
        while True:
            await load.work.wait()
            self._changed.set()
            while not (self.waiters.waiting or self._has_left):
                is_behind = self._may_be_behind and self._is_behind()
                if not is_behind and load.is_full:
                    break
                load.urgent = trio.Event()  # the last commit served the waiter that set it
                window = self.window
                for changed in self.pending.dirty:
                    of = self.core.namespaces.measures[changed.namespace]
                    if len(of.readers) > (of in of.readers) and of.is_beside_readers():
                        window *= BESIDE_READERS
                    break
                with trio.move_on_after(window):
                    await load.urgent.wait()
                if not is_behind:
                    break
                if load.is_full:
                    self._due.set()
                self.flusher.write_behind()
            await self.committer.gathering.await_callers()
            load.work, load.urgent = trio.Event(), trio.Event()
            try:
                await self._commit_batch()
                failure_count, self.failure = 0, None
            except EngineError as error:
                self.failure = error
                self.core.health.failed(COMMIT, error)
                self.core.doubt.note_commit(has_failed=True)
                level = logging.DEBUG if failure_count else logging.WARNING
                log.log(level, "a commit failed and will be repeated until it succeeds: %s", error)
                delay = RETRY_DELAYS[min(failure_count, len(RETRY_DELAYS) - 1)]
                failure_count += 1
                with trio.move_on_after(delay):
                    await load.urgent.wait()
                load.work.set()

    def _is_behind(self) -> bool:
        """The next daemon finds all changes, so none needs a commit before the interval ends."""
        is_kept = self.core.unstored is not None and self.core.unstored.is_on
        is_well = self._can_sync and self.failure is None and not self.core.generations.is_withheld
        is_behind = is_kept and is_well and self._sent is None
        self.flusher.is_behind = self.pending.load.is_behind = is_behind
        return is_behind

    async def _run_intervals(self, interval: float) -> None:
        """Make all changes durable so many seconds after the first of them, or when many wait, until cancelled."""
        while True:
            await self._changed.wait()
            with trio.move_on_after(interval):
                await self._due.wait()
            self._changed, self._due = trio.Event(), trio.Event()
            try:
                await self._store_interval()
            except EngineError as error:
                log.debug("changes are not durable at the end of their interval: %s", error)
                self._changed.set()
                await trio.sleep(RETRY_DELAYS[-1])
            self._due = trio.Event()

    async def _store_interval(self) -> None:
        """Make all changes durable but those of files that were opened for writing since the last time. EngineError.

        Most bytes are written and synced before the commit: nobody waits for that, and those who wait for a commit do
        not wait for a long sync either.

        A file that is renamed, or replaced, while its bytes are written is left out of a commit. It is in one more, or
        a loss of power would take what the interval has made durable.
        """
        begun, last = [node for node in self.pending.dirty if not node.writers], self.pending.serial
        await self.flusher.flush([node for node in begun if node.staged_count])
        await self._sync_segments()
        changed = [*self.pending.dirty, *self.pending.aside.nodes]
        opened = {node for node in changed if node.writers}
        self.waiters.force(opened & self._opened)
        self._opened = opened
        if opened:
            self._changed.set()
        await self.commit(durable=True)
        if behind := [node for node in begun if self._is_left_behind(node, last)]:
            await self.commit(*behind, durable=True)

    def _is_left_behind(self, node: Node, last: int) -> bool:
        """It changed before the change ``last`` and is not stored since, or what took its name is not.

        False where that is open for writing: it is as a file of which the interval takes no half.
        """
        if node.forgotten:
            return False
        changes = [(one, self.pending.dirty[one]) for one in settlers(node) if one in self.pending.dirty]
        return any(not one.writers and (one is not node or serial <= last) for one, serial in changes)

    async def _commit_batch(self) -> None:
        """Write bytes, build, commit, settle. Other tasks change memory at each await; `_build_batch` has none."""
        waiters = list(self.waiters.waiting)
        self._has_left = False
        began = trio.current_time()
        try:
            if self.core.generations.is_withheld:
                await self.announce_numbers()
            if self._sent is not None:
                async with self.committer.turn:
                    await self._send_again(self._sent)
                await self.settling.free_slots()
            if self.refusals.doubtful:
                await self.refusals.renew_doubtful()
            flushed, others, left = self._choose_files()
            for node in flushed:
                node.named = False
                node.flushed_size = node.size
            await self.flusher.flush([*flushed, *others])
            async with self.committer.turn:
                for prepare in self.terms.before_build:
                    await prepare()
                batch = self._build_batch(set(flushed), left)
                waiters = self.waiters.find_served(batch.late, batch.left_serial, waiters)
                if not await self._send(batch, waiters, began):
                    waiters = []
        except BaseException as error:
            self.counters.commit_failures += 1
            if isinstance(error, EngineTimeout):
                waiters = list(self.waiters.waiting)  # later ones, too: no caller waits for a second deadline
            shown = error if isinstance(error, KvfuseError) else EngineError("nothing is committed any more")
            self.waiters.release(waiters, shown)
            raise
        self.core.health.worked(COMMIT, WRITE)  # before any waiter returns
        self.core.doubt.note_commit(has_failed=False)
        self.waiters.release(waiters)
        await self.settling.free_slots()

    def _choose_files(self) -> tuple[list[Node], list[Node], int | None]:
        """Choose inodes whose bytes the next commit stores: (these, others, serial number of the oldest change that
        waits).

        Awaited inodes are first, then the oldest. The commit also takes others that have no staged bytes, whose
        descriptions may be out of date.
        """
        dirty = self.pending.dirty
        ready = [node for node in dirty if node.forced or not node.writers]
        if len(ready) <= FILES_MAX:
            return ready, [], None
        awaited = self.pending.ties.find_closure([node for waiter in self.waiters.waiting for node in waiter.nodes])
        ready.sort(key=lambda node: node not in awaited)
        others = [node for node in ready[FILES_MAX:] if not node.staged_count]
        left = [dirty[node] for node in ready[FILES_MAX:] if node.staged_count]
        return ready[:FILES_MAX], others, min(left, default=None)

    def _build_batch(self, flushed: set[Node], left: int | None) -> Batch:
        """``left``: serial number of the oldest change whose bytes were not written."""
        if self.core.unstored is not None:
            self.core.unstored.seal()
        self._sent = self.settling.batch = batch = self._builder.build(flushed)
        if left is not None:
            batch.left_serial = left if batch.left_serial is None else min(left, batch.left_serial)
        if batch.left_serial is not None:
            self._has_left = True
            self.pending.load.work.set()
        return batch

    async def _send_again(self, batch: Batch) -> None:
        """Resolve a commit that may have happened; send it again if it did not. The caller has the committer's turn."""
        await self.committer.resolve()
        if batch.version:
            self._sent = None
            self.settling.settle(batch, durable=False)
            self.refusals.mark_doubtful(batch.draft.records)
        elif await self.terms.recall(batch, {}):
            self._sent = self.settling.batch = None
        else:
            await self._send(batch)

    async def _sync_segments(self) -> None:
        """Sync the segments. EngineError: all bytes since the last sync are in doubt, and durable waiters get it."""
        try:
            with self.core.doubt.syncing():
                await self.core.segments.sync()
        except EngineError as error:
            self._can_sync = False
            self.core.health.failed(SYNC, error)
            self.waiters.release([waiter for waiter in self.waiters.waiting if waiter.durable], error)
            raise
        self._can_sync = True
        if not self.core.doubt.is_any:
            self.core.health.worked(SYNC)

    async def _send(self, batch: Batch, waiters: Collection[CommitWaiter] = (), began: float | None = None) -> bool:
        """Commit and settle ``_sent``; the caller has the committer's turn. EngineError: it is kept and sent again.

        False: another host changed the same records first. Conflicts were resolved; the next commit has the changes.
        """
        is_strict = bool(waiters) and all(waiter.strict for waiter in waiters)
        # Else a loss of power may leave names whose bytes are not there, or whose slots were given to others since.
        is_behind = self.pending.load.is_behind and self._can_sync and not is_strict
        durable = is_behind or any(waiter.durable for waiter in waiters)
        if durable:
            await self._sync_segments()
        if batch.puts or batch.deletes or durable:
            for part in batch.split(self.core.records.limits) if batch.too_large else [batch]:
                self.counters.commits += 1
                self.counters.operations += len(part.puts) + len(part.deletes)
                outcome = await self.committer.send(part, durable=durable, waiter_count=len(waiters), began=began)
                if not outcome.version:
                    self._sent = self.settling.batch = None
                    self.pending.load.hurry()
                    await self.terms.recall(batch, outcome.found)
                    self.waiters.force([node for waiter in self.waiters.waiting for node in waiter.nodes])
                    return False
        self._sent = None
        self.settling.settle(batch, durable=durable)
        if durable:
            self.settling.note_durable({node for waiter in waiters for node in waiter.nodes})
        return True
