"""What a commit that is in the store changes in memory, and when the slots that it gave up are free again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import trio

from kvfuse.errors import EngineError
from kvfuse.slab.allocator import Slot
from kvfuse.volume.inodes.chunk import RESTED, Extent
from kvfuse.volume.store import schema

if TYPE_CHECKING:
    from kvfuse.volume.commit.batch import Batch
    from kvfuse.volume.commit.pending import Pending
    from kvfuse.volume.commit.refusals import Refusals
    from kvfuse.volume.inodes.grace import Give
    from kvfuse.volume.inodes.node import Node
    from kvfuse.volume.slots.headers import HeaderWriter


class Settling:
    """Settles batches in memory, one at a time. The journal owns it."""

    def __init__(self, pending: Pending, refusals: Refusals, headers: HeaderWriter) -> None:
        self.core = pending.core
        self.pending = pending
        self.batch: Batch | None = None
        """built, until the slots that it frees are free"""
        self.is_always_durable = self.core.records.limits.durable and self.core.segments.limits.durable
        """what was committed, with the bytes that it names"""
        self._refusals = refusals
        self._headers = headers
        self._freeing = trio.Lock()
        self._durable_epoch = 0
        """of the last commit that was synced, and all before it with it"""

    def is_durable(self, node: Node) -> bool:
        """A synced commit has the file as it is here, or came after the one that has. Of others that is not known."""
        if node.changed or node.committing or node.nlink == 0 or not node.is_file:
            return False
        return self.is_always_durable or (node.stored_epoch or self.pending.epoch) <= self._durable_epoch

    def note_durable(self, nodes: Iterable[Node]) -> None:
        """A synced commit came after all that is stored of these files."""
        for node in nodes:
            if not (node.changed or node.committing):
                node.stored_epoch = self.pending.epoch

    def settle(self, batch: Batch, *, durable: bool) -> None:
        """Forget the overlay that the commit carried."""
        pending, draft = self.pending, batch.draft
        pending.epoch += 1
        self.core.metadata.release(batch.reserved)
        if durable:
            self._durable_epoch = pending.epoch
        pending.loose.sent = {}
        for directory in draft.times:
            directory.times_changed = directory in pending.times
        for node in draft.nodes:
            node.committing = False
            node.stored = True
            node.stored_epoch = pending.epoch
        if self.core.shared:
            self._settle_versions(batch)
            pending.loose.settle_attributes(draft.extra, batch.puts, batch.version)
        for change in draft.names:
            if not self.core.shared or batch.changes_name(change.parent, change.name):
                self.core.known.settle(change.parent, change.name, change.node is not None)
        pending.settle_names(draft.names)
        for place in draft.vacated:
            if (later := pending.find(*place)) is not None:
                later.stored = False

    def _settle_versions(self, batch: Batch) -> None:
        """In a shared volume: what is stored has the version of the commit."""
        version, draft, known = batch.version, batch.draft, self.core.known
        for directory in draft.times if not batch.too_large else ():  # else another part's version may be its own
            directory.times_version = version
        for node, record in draft.records.items():
            node.version, node.base = version, record
            known.shelf.drop(node.parent, node.name)
            node.appends = node.appends and node.size > record.size
            change = None if node.own_record else self.pending.find(node.parent, node.name)
            if change is not None and not change.sent:
                change.stored, change.version = True, version
        for change in draft.names:
            parent, name = change.parent, change.name
            current = self.pending.find(parent, name)
            if current is not None and current is not change:
                current.version = version if change.node is not None else 0
            elif change.node is not None:
                known.note(parent, name, change.node.ino, version)
            else:
                known.drop(parent, name, version)
        for place in draft.vacated:
            if (later := self.pending.find(*place)) is not None:
                later.version, later.leaves = 0, None
        for key in batch.puts:
            if key[:1] == b"o":
                self._refusals.free_later(schema.key_inode(key))

    # -- slots ---------------------------------------------------------------------------------------

    async def free_slots(self) -> None:
        """Let the slots that the last commit freed be used again, when nobody reads them any more."""
        batch = self.batch
        if batch is None:
            return
        async with self._freeing:
            if batch.freed or batch.unborn:
                try:
                    await self._headers.mark_free([extent.slot for extent in (*batch.freed, *batch.unborn)])
                except EngineError:
                    batch.is_unsure = True
                    raise
                self._retire(self.core.slabs.reclaim, batch.freed, batch)
                self._retire(self.core.slabs.cancel, batch.unborn, batch)
            self.batch = None

    def _retire(self, give: Give, extents: list[Extent], batch: Batch) -> None:
        """Let slots be used again: a grace later where another host may be reading them, or a write may still arrive.

        A host that has just come, and is not known of yet, finds out by the checksums.
        """
        at_once, resting = [extent.slot for extent in extents], list[Slot]()
        if self.core.shared and (batch.is_unsure or not self.core.is_alone()):
            at_once = [extent.slot for extent in extents if extent.state == RESTED and not batch.is_unsure]
            resting = [extent.slot for extent in extents if extent.state != RESTED or batch.is_unsure]
        self.core.reads.retire(give, at_once)
        self.core.reads.retire(self.core.grace.later(give), resting)

    async def freed(self) -> None:
        """Return when the slots are free that a commit gave up which has just returned."""
        async with self._freeing:
            pass
