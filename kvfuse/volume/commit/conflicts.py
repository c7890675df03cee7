"""Resolves conflicts: another host changed the same names or inodes, so the store refused a commit.

The commit is *recalled* first: everything in it is pending again. Then each key with an unexpected version is resolved:

* A name: the later change replaces the earlier one. Our change removes the inode that has the name now, as it
  would have removed the former one. A directory, or a file with several names, stays: then our change is dropped, and
  counted. A removal here was meant for the former file: the one that has the name now stays, too.
* Two inodes with one name here: the one that the store has elsewhere is looked up there. Commits check for this, too.
* An inode: both changes are merged (`Merger`). An inode that another host renamed is looked up; a removed one
  is dropped here, as if it had been unlinked while it was open.
* A directory to which names were added: commits expect its new version; if it was removed, the names are dropped.
* A directory that is delegated to another host: that one is asked for it, and the names wait for that.

Nothing else commits meanwhile. Other tasks change memory at each await, so a decision and its effect have none between.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from kvfuse.remote.records.api import ABSENT
from kvfuse.volume.commit.batch import Batch, Taken
from kvfuse.volume.inodes.chunk import COMMITTED, FRESH, Extent
from kvfuse.volume.inodes.dentries import NameChange
from kvfuse.volume.inodes.node import MovedAgain, Node
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import get_marked, get_sound
from kvfuse.volume.store.search import search_names

if TYPE_CHECKING:
    from kvfuse.remote.records.api import Versioned
    from kvfuse.volume.commit.pending import Pending
    from kvfuse.volume.commit.refusals import Refusals

FOLLOW_SECONDS = 2.0
"""limit of the wait for the watch to report the new place of an inode"""
LOOK_SECONDS = 0.02
"""pause between two reads for it"""

log = logging.getLogger(__name__)


class Conflicts:
    """Resolves the conflicts of a refused commit. `SharedTerms` owns it."""

    def __init__(self, pending: Pending, refusals: Refusals) -> None:
        self.pending = pending
        self.refusals = refusals
        self.core = pending.core

    # -- recalling -----------------------------------------------------------------------------------

    async def recall(self, batch: Batch, found: Mapping[bytes, Versioned | None]) -> bool:
        """Undo a commit's effects on memory, as it did not happen; later changes stay. Returns True. EngineError.

        ``found``: key with an unexpected version -> its present record. These conflicts are resolved.
        """
        self._take_back(batch)
        for key, row in found.items():
            if key[:1] == b"d":
                await self._resolve_entry(key, row)
            elif key[:1] == b"i":
                await self._resolve_inode(key, row)
            elif key[:1] == b"o":
                self.refusals.note_freed_elsewhere(schema.key_inode(key))
            elif key[:1] == b"x":
                self.pending.loose.note_attribute(key, row)
            elif key[:1] == schema.DELEGATION_PREFIX and row is not None:
                await self._leave_out(schema.key_inode(key))
        return True

    async def _leave_out(self, directory: int) -> None:
        """The directory is delegated to another host, which is asked for it. So that both hosts go on that ask each
        other, the next commit leaves new files out of it; the one after that is refused, or they are given back."""
        self.pending.left_out.add(directory)
        self.refusals.to_recall.add(directory)
        await trio.sleep(LOOK_SECONDS)

    def _take_back(self, batch: Batch) -> None:
        draft = batch.draft
        committed: list[Extent] = []
        for taken in batch.taken:
            self._recall_node(taken, committed)
        images = [schema.key_slab(key) for key in (*batch.puts, *batch.deletes) if key[:1] == b"s"]
        self.core.slabs.recall([extent.slot for extent in committed], [extent.slot for extent in batch.freed], images)
        for change in draft.names:
            change.sent = False
            current = self.core.dentries.get(change.parent, change.name).change
            if current is not None and current is not change and change.vacated:
                current.moved, current.vacated = change.moved, True
            if current is not None and current is not change:
                self._count_out(current.leaves)
                current.leaves = change.leaves
        self._make_pending(batch, {key for taken in batch.taken for key in taken.extra})

    def _count_out(self, leaves: Node | schema.InodeRecord | None) -> None:
        """Count out a file that lost its name before it was stored: no commit will count it out."""
        if isinstance(leaves, Node) and not leaves.version and leaves.is_file and leaves.namespace:
            self.core.namespaces.accounts.add_files(leaves.namespace, -1)

    def _recall_node(self, taken: Taken, committed: list[Extent]) -> None:
        node = taken.node
        node.committing = False
        node.extra = {**taken.extra, **node.extra}
        if node.nlink or taken.is_gone:  # else its orphan record frees the stored extents
            node.dead = [*taken.dead, *node.dead]
        for extent in taken.born:
            if extent.state == COMMITTED:
                extent.state = FRESH
                committed.append(extent)
                node.born.append(extent)
            else:  # it was given up since, and no record refers to it
                committed.append(extent)
                self.core.unborn.append(extent)
                node.dead = [other for other in node.dead if other is not extent]
        if node.nlink:
            node.reserved += taken.reserved
            if taken.cut_size is not None:
                node.cut_size = taken.cut_size if node.cut_size is None else min(node.cut_size, taken.cut_size)
            node.forced = node.forced or taken.forced or not node.writers
            node.dirty_chunks = {*taken.dirty_chunks, *node.dirty_chunks}
            for chunk, base, dirty in taken.chunks:
                chunk.base = base
                chunk.dirty = [*dirty, *[span for span in chunk.dirty if span not in dirty]]
            self.core.givers[node] = None
            self.pending.touch(node)
        else:
            self.core.metadata.release(taken.reserved)

    def _make_pending(self, batch: Batch, others: Iterable[bytes]) -> None:
        """Make changes that belong to no inode pending again. ``others``: keys of records that belong to one."""
        draft, theirs = batch.draft, set(others)
        pending, loose = self.pending, self.pending.loose
        loose.changes = {**{key: value for key, value in draft.extra.items() if key not in theirs}, **loose.changes}
        pending.times = {**dict.fromkeys(draft.times), **pending.times}
        pending.gone = {**dict.fromkeys(draft.gone, 0), **pending.gone}
        for first, second in batch.ties:
            if first in pending.dirty or second in pending.dirty:
                pending.ties.add(first, second)
        for change in draft.names:
            if self.core.dentries.get(change.parent, change.name).change is change:
                pending.names[change] = None
        loose.sent = {}
        freed_twice = [extent for extent in batch.freed if self._is_freed_twice(extent) and extent not in draft.dead]
        self.core.dead = [*draft.dead, *freed_twice, *self.core.dead]
        self.core.unborn = [*batch.unborn, *self.core.unborn]
        pending.load.work.set()

    def _is_freed_twice(self, extent: Extent) -> bool:
        """The refused commit would have freed the slot, and another host freed it meanwhile.

        That host put an f record for our slot. While the commit was in flight, the slot was taken for free already,
        and only the deletion of the record became pending: so the slot is freed with it.
        """
        key = schema.freed_key(self.core.geometry.slab_of(extent.addr), extent.addr, extent.generation)
        return self.pending.loose.changes.get(key, b"") is None

    # -- resolving -----------------------------------------------------------------------------------

    async def resolve_doubled_names(self) -> None:
        """Resolve, before a commit is built, two inodes changed here that have the same name. EngineError.

        Another host has renamed or removed one of them, and the watch did not report it in time. Both records have the
        same key, so the commit would replace one inode with the other.
        """
        while keys := self._find_contested():
            rows = await get_marked(self.core.records, keys)
            for key, row in zip(keys, rows, strict=True):
                await self._resolve_entry(key, row)

    async def drop_outside_borders(self) -> None:
        """Drop, before a commit is built, files that were to be added to a directory that another host made a namespace
        meanwhile, or ended as one. It was empty then: so it is as if it had been removed and made anew.
        """
        for ino in self.core.namespaces.take_moved_borders():
            directory = self.core.nodes.get(ino) or self.core.dentries.folders.get(ino)
            for name, change in list(self.core.dentries.changes_in(ino).items()):
                node = change.node
                if node is None or node.version or directory is None:
                    continue
                if node.namespace != directory.namespace:
                    self.pending.counters.lost_names += 1
                    self._drop_change(ino, name, change)

    def _find_contested(self) -> list[bytes]:
        claims: dict[tuple[int, bytes], int] = {}
        contested: dict[tuple[int, bytes], None] = {}
        for node in [node for node in self.pending.list_changed_inline(aside=False) if node.nlink]:
            place = (node.parent, node.name)
            change = self.core.dentries.get(*place).change
            if claims.setdefault(place, node.ino) != node.ino or (change is not None and not _has_inode(change, node)):
                contested[place] = None
        return [schema.entry_key(*place) for place in contested]

    async def _resolve_entry(self, key: bytes, row: Versioned | None) -> None:
        parent, _, name = schema.split_entry_key(key)
        try:
            entry = schema.decode_entry(row.value) if row is not None else None
        except schema.Malformed:
            self._drop_entry(parent, name)
            return
        for node in self.pending.list_changed_inline(aside=True):
            change = self.core.dentries.get(parent, name).change
            if not node.nlink or (node.parent, node.name) != (parent, name):
                continue
            if change is not None and _has_inode(change, node):
                continue
            if row is None or not isinstance(entry, schema.InodeRecord) or entry.ino != node.ino:
                await self._find_renamed(node)
            elif change is None:
                try:
                    await self.refusals.merge(node, entry, row.version)
                except MovedAgain:
                    await self._find_renamed(node)
        change = self.core.dentries.get(parent, name).change
        if change is not None and change.version != (row.version if row is not None else ABSENT):
            self._resolve_name(parent, name, change, row)

    def _resolve_name(self, parent: int, name: bytes, change: NameChange, row: Versioned | None) -> None:
        """Resolve a change of a name whose record in the store is another one than when it was changed here."""
        entry = schema.decode_entry(row.value) if row is not None else None
        if isinstance(entry, int) or (isinstance(entry, schema.InodeRecord) and entry.nlink != 1):
            self.pending.counters.lost_names += 1
            log.warning("%r in directory %d: another host has taken the name, our change is lost", name, parent)
            self._drop_change(parent, name, change)
            return
        if change.node is None and change.moved is not None and entry is not None and entry.ino != change.moved.ino:
            self._drop_change(parent, name, change)
            return
        self.refusals.keep_inode(change)  # another host renamed or removed it
        change.stored, change.version = row is not None, row.version if row is not None else 0
        ours = change.node
        if isinstance(entry, schema.InodeRecord) and row is not None and (ours is None or entry.ino != ours.ino):
            self.refusals.replace_inode(change, entry, row.version)
        elif isinstance(entry, schema.InodeRecord) and row is not None and ours is not None:
            ours.version, ours.base = row.version, entry

    def _drop_entry(self, parent: int, name: bytes) -> None:
        """Drop changes of a name whose record is damaged: the record stays for fsck."""
        log.error("%r in directory %d: damaged record, changes are lost: run 'kvfuse fsck --repair'", name, parent)
        for node in self.pending.list_changed_inline(aside=True):
            if (node.parent, node.name) == (parent, name):
                self.refusals.drop_changes(node)
        change = self.core.dentries.get(parent, name).change
        if change is not None:
            self.pending.counters.lost_names += 1
            self._drop_change(parent, name, change)

    def _drop_change(self, parent: int, name: bytes, change: NameChange) -> None:
        node = change.node
        self.refusals.keep_inode(change)
        self.pending.forget_change(parent, name)
        if node is not None:
            self.refusals.drop_changes(node)

    async def _resolve_inode(self, key: bytes, row: Versioned | None) -> None:
        ino = schema.key_inode(key)
        current = self.core.nodes.get(ino) or self.core.dentries.folders.get(ino)
        self.pending.give_up_times(ino, current)
        try:
            record = schema.decode_inode(row.value) if row is not None else None
        except schema.Malformed:
            log.error("inode %d: damaged record, changes are lost: run 'kvfuse fsck --repair'", ino)
            record = None
        for node in dict.fromkeys([current, *self.pending.list_changed(ino)]):
            if node is None:
                continue
            if row is not None and record is not None:
                await self.refusals.merge(node, record, row.version)
            elif node.is_directory:
                self._drop_folder(node)
            else:
                self.refusals.drop_changes(node)

    def _drop_folder(self, directory: Node) -> None:
        """Drop a directory that another host removed, with the names that were to be added to it."""
        for name, change in list(self.core.dentries.changes_in(directory.ino).items()):
            self.pending.counters.lost_names += 1
            self._drop_change(directory.ino, name, change)
        self.refusals.drop_changes(directory)

    async def _find_renamed(self, node: Node) -> None:
        """Look up an inode that another host renamed or removed, and merge or drop its changes. EngineError."""
        deadline = trio.current_time() + FOLLOW_SECONDS
        here = (node.parent, node.name)
        while trio.current_time() < deadline and node.nlink:
            known = [here, node.moved_to, self.core.places.get(node.ino)]  # it may be back
            places = [place for place in dict.fromkeys(known) if place is not None and place[1]]
            keys = [schema.orphan_key(node.ino), schema.inode_key(node.ino)]
            removed, own, *entries = await get_sound(
                self.core.records, [*keys, *[schema.entry_key(*place) for place in places]]
            )
            if removed is not None:
                break
            if own is not None:  # it got a second name
                node.own_record = True
                await self.refusals.merge(node, schema.decode_inode(own.value), own.version)
                return
            for place, row in zip(places, entries, strict=True):
                entry = schema.decode_entry(row.value) if row is not None else None
                if row is not None and isinstance(entry, schema.InodeRecord) and entry.ino == node.ino:
                    node.parent, node.name = place
                    with suppress(MovedAgain):
                        await self.refusals.merge(node, entry, row.version)
                        return
            await trio.sleep(LOOK_SECONDS)
        else:
            if node.nlink and await self._search_names(node):
                return
        self.refusals.drop_changes(node)

    async def _search_names(self, node: Node) -> bool:
        """Read all names of its directory to find an inode whose new name the watch did not report. EngineError.

        This may take long, but otherwise its changes would be lost.
        """
        log.warning("inode %d was renamed by another host: reading all names of its directory to find it", node.ino)
        row = (await search_names(self.core.records, [node.parent], [node.ino])).get(node.ino)
        entry = schema.decode_entry(row.value) if row is not None else None
        if row is None or not isinstance(entry, schema.InodeRecord):
            return False
        node.parent, _, node.name = schema.split_entry_key(row.key)
        await self.refusals.merge(node, entry, row.version)
        return True


def _has_inode(change: NameChange, node: Node) -> bool:
    return change.node is not None and change.node.ino == node.ino
