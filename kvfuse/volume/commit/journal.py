"""Group commit: what changed in memory, and how it reaches the record store.

Every operation changes memory at once - nodes, and the *overlay* of names over the record store - and marks what it
changed (`pending`). One task commits: while one commit is in flight, everything that arrives joins the next. A waiter
(strict publishing, fsync) makes the next commit start at once; without one it starts when the window since the first
change has passed, or when the batch is full.

A batch is built in one go from memory, between two awaits: it is a consistent state (`batch`). Before, the
staged bytes of its nodes are written to their slots, so no record ever names bytes that are not there.
A node that is open for writing stays out until it is closed, and costs no commit anything meanwhile (`late`): a name
that nobody published never touches the store, so create, close and rename that meet in one batch become one put.
A commit that failed may have happened. The same batch is sent again, before anything newer, until the
store takes it: with one writer a repeated put is harmless, and what belongs together stays together.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from kvfuse.errors import EngineError, EngineTimeout, KvfuseError
from kvfuse.slab.allocator import Slot
from kvfuse.volume.commit.batch import Batch
from kvfuse.volume.commit.committer import Committer
from kvfuse.volume.commit.conflicts import Conflicts
from kvfuse.volume.commit.late import is_held, settlers
from kvfuse.volume.commit.refusals import SharedJournal
from kvfuse.volume.inodes.chunk import RESTED, Extent
from kvfuse.volume.inodes.grace import Give
from kvfuse.volume.inodes.node import Node, check_remembered
from kvfuse.volume.store import schema

if TYPE_CHECKING:
    from kvfuse.volume.store.transaction import Transaction

log = logging.getLogger(__name__)

FILES_MAX = 400
"""Files whose bytes one commit takes along: it is built without a pause, which lasts some milliseconds then."""
RETRY_DELAYS = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Seconds between attempts after failed commits; the last goes on."""


class _Waiter:
    __slots__ = ("done", "durable", "error", "nodes", "serial")

    def __init__(self, nodes: tuple[Node, ...], durable: bool, serial: int) -> None:
        self.nodes = nodes
        self.durable = durable
        self.serial = serial
        """of the last change before it came"""
        self.done = trio.Event()
        self.error: KvfuseError | None = None


@dataclass
class Journal(SharedJournal):
    """See the module. ``window`` in seconds."""

    window: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self.committer = Committer(self.core.records)
        self.committer.came_late = self.core.known.clear
        self.helpers: list[Callable[[], Awaitable[None]]] = []
        """run beside the committing task"""
        self.conflicts = Conflicts(self)
        self._sent: Batch | None = None
        """the commit that is under way, or failed and will be repeated"""
        self._settling: Batch | None = None
        """the same, until the slots that it frees are free"""
        self._waiters: list[_Waiter] = []
        self.committer.batch_waiters = lambda: len(self._waiters)
        self._has_left = False
        """the last commit had no room for all: the next one begins at once"""
        self._freeing = trio.Lock()
        self._failures = 0
        self._stopped = False
        self._is_always_durable = self.core.records.limits.durable and self.core.segments.limits.durable
        """what was committed, with the bytes that it names"""
        self._durable_epoch = 0
        """of the last commit that was synced, and all before it with it"""

    # -- waiting -------------------------------------------------------------------------------------

    async def commit(self, *nodes: Node, durable: bool = False) -> None:
        """Return when all that changed before the call is in the store, with the bytes of ``nodes``.

        At once, where these are durable as they are.
        A cancelled caller leaves the commit to happen. Raises what the engines raise; the changes then stay
        visible here and are tried again.
        """
        check_remembered(*nodes)
        if durable and nodes and all(self._is_durable(node) for node in nodes):
            return
        durable = durable and not self._is_always_durable
        self._force(nodes)
        if self._stopped:
            raise EngineError("nothing is committed any more")
        waiter = _Waiter(nodes, durable, self._serial)
        self._waiters.append(waiter)
        self._work.set()
        self._urgent.set()
        self.committer.gathering.came()
        await waiter.done.wait()
        if waiter.error is not None:
            raise waiter.error

    def _is_durable(self, node: Node) -> bool:
        """A synced commit has the file as it is here, or came after the one that has. Of others that is not known."""
        if node.changed or node.committing or node.nlink == 0 or not node.is_file:
            return False
        return self._is_always_durable or (node.stored_epoch or self.epoch) <= self._durable_epoch

    def _force(self, nodes: Iterable[Node]) -> None:
        """Have these, and what is tied to them, in the next commit even while they are being written."""
        for member in self._ties.closure([settler for node in nodes for settler in settlers(node)]):
            if member.changed:
                member.forced = True
                self.reconsider(member)

    async def untie(self, *nodes: Node) -> bool:
        """Have what is tied committed, before one of the two is renamed or removed; False when nothing was.

        So is all that is tied, before more depends on each other than one commit may carry.
        """
        if self._linked_count >= self._linked_max:
            await self.commit(*self._ties)
        elif any(self._ties.of(node) for node in nodes):
            await self.commit(*nodes)
        else:
            return False
        return True

    async def free_given_up(self, deadline: float) -> bool:
        """A `Source`: has slots freed that were given up, by a commit where it takes one. False: there were none."""
        if not (self.freeing_bytes or self.core.slabs.pending_bytes or self.core.reads.has_retired):
            if self.core.shared and (self._gone or self._names or self.is_committing):
                await self.commit()  # only then do the sources behind this one know what was removed
            return False
        if self.flusher.dropped_size:
            await self.flusher.settled()  # slots that are being written in vain are given up only then
        await self.commit(*self._giving_up())
        await self._freed()
        return True

    @property
    def freeing_bytes(self) -> int:
        """Bytes of slots that were given up and become free by a commit to come."""
        settling = self._settling.unborn if self._settling is not None else []
        return super().freeing_bytes + sum([extent.slot_size for extent in settling])

    @property
    def is_committing(self) -> bool:
        """See `JournalPart`."""
        return self._settling is not None

    async def sync(self) -> None:
        """All that changed before the call is durable, open files included."""
        await self.commit(*self._dirty, *self._aside, durable=True)
        await self._freed()

    async def transact(self, transaction: Transaction) -> bool:
        """Have a transaction in the store; False when an expected version had moved. See `Committer.transact`."""
        return await self.committer.transact(transaction)

    # -- the committing task -------------------------------------------------------------------------

    async def run(self) -> None:
        """Commit whenever there is something to commit, for ever. When it ends, so does every wait for a commit."""
        if self.core.shared:
            self.committer.sequence_key = schema.sequence_key(self.core.client)
            self.committer.files_key = schema.files_key(self.core.client)
            self.committer.sequence_value = self.core.segments.identity()
        try:
            async with trio.open_nursery() as nursery:
                for helper in (self.committer.run, *self.helpers):
                    nursery.start_soon(helper)
                await self._run()
        finally:
            self._stopped = True
            for waiter in self._waiters:
                waiter.error = EngineError("nothing is committed any more")
                waiter.done.set()

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            if not (self._waiters or self._is_full or self._has_left):
                self._urgent = trio.Event()  # who set it was served by the last commit
                with trio.move_on_after(self.window):
                    await self._urgent.wait()
            await self.committer.gathering.meet()
            self._work, self._urgent = trio.Event(), trio.Event()
            try:
                await self._commit_batch()
                self._failures = 0
            except EngineError as error:
                level = logging.DEBUG if self._failures else logging.WARNING
                log.log(level, "a commit failed and will be repeated until it succeeds: %s", error)
                delay = RETRY_DELAYS[min(self._failures, len(RETRY_DELAYS) - 1)]
                self._failures += 1
                with trio.move_on_after(delay):
                    await self._urgent.wait()
                self._work.set()

    async def _commit_batch(self) -> None:
        """Write bytes, build, commit, settle. Operations go on at each await; only `_build` sees one state."""
        waiters = list(self._waiters)
        self._has_left = False
        started = trio.current_time()
        try:
            if self._sent is not None:
                async with self.committer.turn():
                    await self._send_again(self._sent)
                await self._free_settled()
            await self.renew_doubtful()
            flushed, left = self._next_files()
            for node in flushed:
                node.named = False
                node.flushed_size = node.size
            await self.flusher.flush(flushed)
            async with self.committer.turn():
                if self.core.shared:
                    await self.conflicts.untangle()
                waiters = self._take_waiters(waiters)
                self._sent = self._settling = batch = self._build(set(flushed))
                if left is not None:
                    batch.left_serial = left if batch.left_serial is None else min(left, batch.left_serial)
                waiters = self._leave_late(waiters, batch)
                durable = any(waiter.durable for waiter in waiters)
                if durable:
                    await self.core.segments.sync()
                if not await self._send(batch, durable, len(waiters), started):
                    waiters = []
                elif durable:
                    self._note_durable(waiters)
        except BaseException as error:
            self.counters.commit_failures += 1
            if isinstance(error, EngineTimeout):
                waiters = list(self._waiters)  # who came meanwhile has no second deadline to wait for
            told = error if isinstance(error, KvfuseError) else EngineError("nothing is committed any more")
            for waiter in waiters:
                waiter.error = told
            raise
        finally:
            self._waiters = [waiter for waiter in self._waiters if waiter not in waiters]
            for waiter in waiters:
                waiter.done.set()
        await self._free_settled()

    def _next_files(self) -> tuple[list[Node], int | None]:
        """(changed inodes whose bytes go with the next commit, serial number of the oldest change that has to wait).

        Those that somebody waits for are first, then the oldest. Others that have no bytes to be written may go, too.
        """
        ready = [node for node in self._dirty if node.forced or not node.writers]
        if len(ready) <= FILES_MAX:
            return ready, None
        awaited = self._ties.closure([node for waiter in self._waiters for node in waiter.nodes])
        ready.sort(key=lambda node: node not in awaited)
        left = [self._dirty[node] for node in ready[FILES_MAX:] if node.staged_count]
        return ready[:FILES_MAX], min(left, default=None)

    def _note_durable(self, waiters: list[_Waiter]) -> None:
        """A synced commit came after all that is stored of these waiters' files."""
        for node in {node for waiter in waiters for node in waiter.nodes}:
            if not (node.changed or node.committing):
                node.stored_epoch = self.epoch

    def _take_waiters(self, early: list[_Waiter]) -> list[_Waiter]:
        """Who is served by this commit: those who came before the flush, and later ones with no bytes to be written."""
        return [
            waiter
            for waiter in self._waiters
            if waiter in early or not any(node.staged_count and node.nlink for node in waiter.nodes)
        ]

    def _leave_late(self, waiters: list[_Waiter], batch: Batch) -> list[_Waiter]:
        """Without those whose files are not in the batch; they and all other waiters get the next one at once.

        Their files may be in the batch as they were before, or tied to others since: they are forced anew.
        """
        served = [waiter for waiter in waiters if _is_served(waiter, batch)]
        if len(served) < len(self._waiters):
            for waiter in self._waiters:
                if waiter not in served:
                    self._force(waiter.nodes)
            self._work.set()
            self._urgent.set()
        elif batch.left_serial is not None:
            self._has_left = True
            self._work.set()
        return served

    async def _send_again(self, batch: Batch) -> None:
        """In turn: a commit failed that may have happened."""
        await self.committer.resolve()
        if batch.version:
            self._sent = None
            self._settle(batch, durable=False)
            self.doubt(batch.draft.records)
        elif self.core.shared:
            self._sent = self._settling = None
            self.conflicts.recall(batch)
        else:
            await self._send(batch, durable=False)

    async def _send(self, batch: Batch, durable: bool, waiter_count: int = 0, began: float | None = None) -> bool:
        """In turn: commit and settle ``_sent``. When that fails it stays to be sent again. See `Committer.send`.

        False: others were faster. Memory was brought to terms with that, and the next commit has what it had.
        """
        if batch.puts or batch.deletes or durable:
            for part in batch.parts(self.core.records.limits) if batch.too_large else [batch]:
                self.counters.commits += 1
                self.counters.operations += len(part.puts) + len(part.deletes)
                outcome = await self.committer.send(part, durable=durable, waiter_count=waiter_count, began=began)
                if not outcome.version:
                    self._sent = self._settling = None
                    self.conflicts.recall(batch)
                    self._work.set()
                    self._urgent.set()
                    await self.conflicts.resolve(outcome.found)
                    for waiter in self._waiters:
                        self._force(waiter.nodes)
                    return False
        self._sent = None
        self._settle(batch, durable)
        return True

    # -- when it is in the store ---------------------------------------------------------------------

    def _settle(self, batch: Batch, durable: bool) -> None:
        """Forget the overlay that the commit carried."""
        self.epoch += 1
        self.core.metadata.release(batch.reserved)
        if durable:
            self._durable_epoch = self.epoch
        self._sent_extra = {}
        for directory in batch.times:
            directory.times_changed = directory in self._times
        for node in batch.nodes:
            node.committing = False
            node.stored = True
            node.stored_epoch = self.epoch
        if self.core.shared:
            self._settle_versions(batch)
            self._settle_attributes(batch)
        for change in batch.names:
            parent, name = change.parent, change.name
            if not self.core.shared or batch.changes_name(parent, name):
                self.core.known.settle(parent, name, change.node is not None)
            names = self.overlay.get(parent, {})
            current = names.get(name)
            if current is None:
                continue  # it was given up meanwhile, as another host's change came before
            if current is change:
                del names[name]
                if not names:
                    del self.overlay[parent]
                    self.folders.pop(parent, None)
            else:
                current.stored = change.node is not None
        for parent, name in batch.vacated:
            if (later := self.find(parent, name)) is not None:
                later.stored = False

    async def _free_settled(self) -> None:
        """Let the slots that the last commit freed be used again, when nobody reads them any more."""
        batch = self._settling
        if batch is None:
            return
        async with self._freeing:
            if batch.freed or batch.unborn:
                try:
                    await self.flusher.headers.mark_free([extent.slot for extent in (*batch.freed, *batch.unborn)])
                except EngineError:
                    batch.is_unsure = True
                    raise
                self._retire(self.core.slabs.reclaim, batch.freed, batch)
                self._retire(self.core.slabs.cancel, batch.unborn, batch)
            self._settling = None

    def _retire(self, give: Give, extents: list[Extent], batch: Batch) -> None:
        """Let slots be used again: a grace later where another host may be reading them, or a write may still arrive.

        A host that has just come, and was not heard of yet, finds out by the checksums.
        """
        at_once, resting = [extent.slot for extent in extents], list[Slot]()
        if self.core.shared and (batch.is_unsure or not self.core.is_alone()):
            at_once = [extent.slot for extent in extents if extent.state == RESTED and not batch.is_unsure]
            resting = [extent.slot for extent in extents if extent.state != RESTED or batch.is_unsure]
        self.core.reads.retire(give, at_once)
        self.core.reads.retire(self.core.grace.later(give), resting)

    async def _freed(self) -> None:
        """Return when the slots are free that a commit gave up which has just returned."""
        async with self._freeing:
            pass


def _is_served(waiter: _Waiter, batch: Batch) -> bool:
    """The batch has what the waiter waits for, as far as it is not open for writing.

    An inode without names is gone from the store only when whoever took its name is there.
    """
    if not waiter.nodes:
        return batch.left_serial is None or waiter.serial < batch.left_serial
    return not any(is_held(node, batch.late) for node in waiter.nodes)
