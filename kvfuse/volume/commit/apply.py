"""Applies a commit's effects to memory when it is built, between two awaits; settles them when the store has it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import trio

from kvfuse.errors import EngineError
from kvfuse.slab.allocator import Slot
from kvfuse.volume.commit.batch import NOTHING, Batch, Draft
from kvfuse.volume.commit.planner import Planner
from kvfuse.volume.disk.disk_tier import DiskTier
from kvfuse.volume.inodes.chunk import COMMITTED, FRESH, RESTED, Extent
from kvfuse.volume.inodes.dentries import settle_all
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.namespaces.namespace_uses import changes_of
from kvfuse.volume.store import schema

if TYPE_CHECKING:
    from kvfuse.volume.commit.pending import Pending
    from kvfuse.volume.commit.terms import Terms
    from kvfuse.volume.inodes.grace import Give
    from kvfuse.volume.slots.heads import HeaderWriter

GIVERS_MIN = 1000
"""see `BatchBuilder._givers_max`"""


class BatchBuilder:
    """Builds batches of pending changes: `Planner` drafts them, and this class applies them to memory."""

    def __init__(self, pending: Pending, terms: Terms) -> None:
        self.pending = pending
        self.core = pending.core
        self.planner = Planner(pending, terms)
        self._terms = terms
        self._limits = pending.core.records.limits
        self._givers_max = GIVERS_MIN
        """length of ``core.givers`` at which inodes without freed slots are removed from it"""

    def build(self, flushed: set[Node]) -> Batch:
        """Build a commit of all changes, except for nodes with bytes that no slot has: these wait for the next one.

        A node that staged more bytes during the flush is committed as it was flushed, and stays changed.
        """
        pending = self.pending
        batch = Batch(late=pending.find_late(flushed))
        count = len(pending.dirty) + len(pending.loose.changes)
        may_fit = count <= self._limits.commit_operations_max
        draft = self.planner.draft_all(batch.late) if may_fit else None
        if draft is None or not draft.has_room(NOTHING, self._limits):
            draft = self.planner.draft_some(batch)
        self._apply(draft, batch)
        pending.load.begin_anew([*[node.uid for node in pending.dirty], *[change.uid for change in pending.names]])
        if len(self.core.givers) > self._givers_max:
            pending.list_givers()
            self._givers_max = GIVERS_MIN + 2 * len(self.core.givers)
        return batch

    # -- applying ------------------------------------------------------------------------------------

    def _apply(self, draft: Draft, batch: Batch) -> None:
        """Bring memory to the state after the commit, except for what `Settling` does when it is stored."""
        for note in self._terms.before_apply:
            note(draft, batch)
        if self.pending.ties.others:
            batch.ties = [(node, other) for node in draft.nodes for other in self.pending.ties.drop(node)]
        self.pending.load.linked_count = len(self.pending.ties)
        dead: list[Extent] = []
        fresh: list[Slot] = []
        for node in draft.nodes:
            self._apply_node(node, [] if node in draft.bequests else dead, fresh)
            batch.reserved += node.reserved
            node.reserved = 0
        self.core.slabs.commit(fresh)
        for node in draft.gone:
            dead += node.dead
            node.extra, node.dead = {}, []
        dead += self._take_changes(draft, batch)
        batch.draft, batch.files = draft, draft.files
        batch.puts, batch.deletes, batch.expect = draft.puts, draft.deletes, draft.expect
        batch.unborn, self.core.unborn = self.core.unborn, []
        if batch.too_large:
            self.core.dead += dead  # sent in several commits: no slot may be free before the last
        else:
            batch.freed = self.core.sharing.release(dead, {slot.addr for slot in fresh}) if dead else []
        if self.core.disk is not None:
            self._drop_copies(self.core.disk, dead, batch)
        if self.core.namespaces.accounts.all:
            self._count_uses(draft, batch, fresh)
        self._put_slabs(batch, None if batch.too_large else draft)

    def _drop_copies(self, disk: DiskTier, dead: list[Extent], batch: Batch) -> None:
        """Drop copies in the disk tier of bytes that no file has any more. If the commit fails, they are read again."""
        for extent in (*dead, *batch.unborn):
            disk.drop(extent.addr, extent.length)

    def _count_uses(self, draft: Draft, batch: Batch, fresh: list[Slot]) -> None:
        """Count how the commit changes the use of namespaces."""
        files = self._terms.count_files(draft, batch)
        batch.uses = changes_of(fresh, [extent.slot for extent in batch.freed], files)

    def _take_changes(self, draft: Draft, batch: Batch) -> list[Extent]:
        """Remove the draft's changes from ``pending``. Returns extents of no inode that it frees."""
        pending = self.pending
        for node in draft.gone:
            del pending.gone[node]
        for change in draft.names:
            change.sent = True
            del pending.names[change]
        for node in draft.nodes:
            node.changed = bool(node.staged_count and node.nlink)
            if not node.changed:
                del pending.dirty[node]
        for key in draft.extra:
            pending.loose.changes.pop(key, None)
        pending.loose.sent = draft.extra
        if batch.left_serial is None:
            pending.times = {}
            dead, self.core.dead = self.core.dead, []
            return dead
        for directory in draft.times:
            del pending.times[directory]
        del self.core.dead[: len(draft.dead)]
        batch.late.update(self._find_attributed(pending.loose.changes))
        return draft.dead

    def _find_attributed(self, keys: Iterable[bytes]) -> list[Node]:
        """Inodes that have attributes among these records."""
        inos = {schema.key_inode(key) for key in keys if key.startswith(schema.XATTR_PREFIX)}
        return [node for node in map(self.core.nodes.get, inos) if node is not None]

    def _apply_node(self, node: Node, dead: list[Extent], fresh: list[Slot]) -> None:
        """Add the extents that leave the durable image to ``dead``, and the slots that enter it to ``fresh``."""
        node.forced = node.atime_moved = False
        node.committing = True
        node.extra = {}
        if not node.nlink:
            return
        node.dirty_chunks = frozenset()
        if node.born:
            for extent in node.born:
                if extent.state == FRESH:
                    extent.state = COMMITTED
                    fresh.append(extent.slot)
            node.born.clear()
            self.pending.counters.blocks += 1
        if node.dead:
            dead += node.dead
            node.dead.clear()

    def _put_slabs(self, batch: Batch, draft: Draft | None) -> None:
        """Put changed bitmaps and counters. ``draft``: names the bitmaps that must be in this commit; None: all.

        A recalled commit may have left other changed bitmaps: these are put while there is room.
        """
        wanted, others_max = (draft.slabs, draft.count_slab_room(self._limits)) if draft else (set(), None)
        batch.puts.update(self.core.inodes.take())
        batch.puts.update(self.core.generations.take())
        for state in self.core.slabs.take_dirty(wanted, others_max):
            if state.slot_size:
                batch.puts[schema.slab_key(state.slab)] = schema.encode_slab(state.slot_size, state.bitmap)
            else:
                batch.deletes.add(schema.slab_key(state.slab))


class Settling:
    """Settles batches in memory, one at a time. The journal owns it."""

    def __init__(self, pending: Pending, terms: Terms, headers: HeaderWriter) -> None:
        self.core = pending.core
        self.pending = pending
        self.batch: Batch | None = None
        """the batch from when it is built until its slots are free"""
        self.is_always_durable = self.core.records.limits.durable and self.core.segments.limits.durable
        """each commit, with the bytes that it refers to, survives a loss of power"""
        self._terms = terms
        self._headers = headers
        self._freeing = trio.Lock()
        self._durable_epoch = -1  # the daemon before may have been killed between a commit and its sync
        """epoch of the last synced commit, which made all before it durable, too"""

    def is_durable(self, node: Node) -> bool:
        """A synced commit contains the file in its present state, or came after one that does. Files only."""
        if node.changed or node.committing or node.nlink == 0 or not node.is_file or self._is_doubtful(node):
            return False
        return self.is_always_durable or (node.stored_epoch or self.pending.epoch) <= self._durable_epoch

    def _is_doubtful(self, node: Node) -> bool:
        """Bytes of it may be in doubt; those of chunks that are not in memory, too."""
        doubt = self.core.doubt
        is_far = bool(node.flags & schema.FLAG_CHUNK_RECORDS)
        return doubt.is_any and (is_far or doubt.covers(node.ino, node.chunks.values()))

    def note_durable(self, nodes: Iterable[Node]) -> None:
        """Note that a synced commit came after the last commit of each of these files."""
        for node in nodes:
            if not (node.changed or node.committing):
                node.stored_epoch = self.pending.epoch

    def settle(self, batch: Batch, *, durable: bool) -> None:
        """Note in memory that the commit is in the store."""
        pending, draft = self.pending, batch.draft
        pending.epoch += 1
        self.core.metadata.release(batch.reserved)
        for namespace, count in batch.files_gone.items():
            self.core.namespaces.accounts.add_files(namespace, -count)
        if durable:
            self._durable_epoch = pending.epoch
        pending.loose.sent = {}
        for directory in draft.times:
            directory.times_changed = directory in pending.times
        epoch = pending.epoch
        for node in draft.nodes:
            node.committing = False
            if not node.stored:
                node.stored = True
                self.core.nodes.handover.stored(node.ino)
            node.stored_epoch = epoch
            if node.unsaved and not node.changed and node.nlink:
                self.core.nodes.note_saved(node)
        for note in self._terms.before_settle:
            note(batch)
        settle_all(self.core.dentries, draft.names, batch.version, batch.untouched)
        for place in draft.vacated:
            if (later := self.core.dentries.get(*place).change) is not None:
                later.stored, later.version, later.leaves = False, 0, None
        if self.core.unstored is not None:
            names = [(change.parent, change.name) for change in draft.names]
            extra = [key for key in draft.extra if key not in pending.loose.changes]
            self.core.unstored.settled((*draft.nodes, *draft.gone), names, draft.times, extra)

    # -- slots ---------------------------------------------------------------------------------------

    async def free_slots(self) -> None:
        """Mark the slots that the last commit freed as free; they are reused when no read needs them. EngineError."""
        batch = self.batch
        if batch is None:
            return
        async with self._freeing:
            if batch.freed or batch.unborn:
                slots = [extent.slot for extent in (*batch.freed, *batch.unborn)]
                try:
                    await self._headers.mark_free(slots)
                except EngineError:
                    batch.is_unsure = True
                    raise
                self._retire_slots(self.core.slabs.reclaim, batch.freed, batch)
                self._retire_slots(self.core.slabs.cancel, batch.unborn, batch)
            self.batch = None

    def _retire_slots(self, give: Give, extents: list[Extent], batch: Batch) -> None:
        """Hand slots to ``give`` for reuse: a grace later if another host may read them, or a write may still arrive.

        A host that joined just now, and is not known here yet, detects reuse by the checksums.
        """
        at_once, resting = [extent.slot for extent in extents], list[Slot]()
        if batch.is_unsure or not self.core.is_alone():
            at_once = [extent.slot for extent in extents if extent.state == RESTED and not batch.is_unsure]
            resting = [extent.slot for extent in extents if extent.state != RESTED or batch.is_unsure]
        self.core.reads.retire(give, at_once)
        self.core.reads.retire(self.core.grace.later(give), resting)

    async def await_freed(self) -> None:
        """Return when the slots of the commit that returned last are free."""
        async with self._freeing:
            pass
