"""What the journal does where other hosts write the same records: versions, conflicts, and what others removed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from kvfuse.errors import Stale
from kvfuse.remote.records.api import Versioned
from kvfuse.volume.commit.apply import BatchBuilder
from kvfuse.volume.commit.batch import Batch
from kvfuse.volume.commit.pending import NameChange
from kvfuse.volume.inodes.chunk import Extent
from kvfuse.volume.inodes.metadata_budget import NOT_STORED, Stored
from kvfuse.volume.inodes.node import NO_ATTRIBUTES, Node
from kvfuse.volume.store import schema

Merge = Callable[[Node, schema.InodeRecord, int], Awaitable[None]]
"""as `Merger.merge`"""


Renew = Callable[[Node], Awaitable[None]]


async def _no_renewal(node: Node) -> None:
    raise AssertionError("nobody else writes this volume")


async def _no_merge(node: Node, record: schema.InodeRecord, version: int) -> None:
    raise AssertionError("nobody else writes this volume")


@dataclass
class SharedJournal(BatchBuilder):
    """See the module. The hooks are set by the parts that know how."""

    merger: Merge = field(default=_no_merge, kw_only=True)
    """puts the changes of two hosts together"""
    reap: Callable[[Node], None] = field(default=lambda node: None, kw_only=True)
    """frees what an inode has in memory alone that nobody can ask for any more"""
    renew: Renew = field(default=_no_renewal, kw_only=True)
    """brings an inode up to what other hosts have stored; Stale, if it is gone"""
    free_later: Callable[[int], None] = field(default=lambda ino: None, kw_only=True)
    """is told of an inode that this client removed, in the store: it frees it when nobody has it open"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._doubtful: dict[Node, None] = {}

    def doubt(self, nodes: Iterable[Node]) -> None:
        """A commit was settled long after it happened: what others changed since may have been told in between."""
        if self.core.shared:
            self._doubtful.update(dict.fromkeys(nodes))
            self.core.known.clear()
            self._work.set()

    async def renew_doubtful(self) -> None:
        """Read anew what `doubt` was told of. EngineError leaves it to be done again."""
        while self._doubtful:
            node = next(iter(self._doubtful))
            if node.nlink:
                with suppress(Stale):
                    await self.renew(node)
            self._doubtful.pop(node, None)

    # -- inodes that are no more ---------------------------------------------------------------------

    def removed(self, node: Node) -> None:
        """A transaction took the last name of a file away: the store has its orphan record, of this client."""
        self.withdraw_attributes(node)
        self._forget(node)
        self.free_later(node.ino)
        if not node.handles:
            if self.core.places.known(node.ino):
                self.core.unnamed[node.ino] = node
            else:
                self.reap(node)

    def lost(self, node: Node) -> None:
        """Another host removed an inode that was changed here: the changes go where they would have gone then."""
        self.counters.lost_inodes += 1
        for parent, name, change in self._changes_of(node):
            self.stays(parent, name, change)
            self.forget_change(parent, name)
        if not node.version and node.nlink:
            self.core.file_count -= 1  # nobody ever got to know it
        node.nlink = 0
        self.withdraw_attributes(node)
        self._forget(node)
        if not node.handles:
            self.reap(node)

    def attribute_is(self, key: bytes, row: Versioned | None) -> None:
        """What the store has of an attribute that is to change here."""
        self.seen[key] = Stored.of(key, row)

    def freed_elsewhere(self, ino: int) -> None:
        """What a removed inode left, another host has freed already."""
        for node in [node for node in self._gone if node.ino == ino]:
            self._forget(node)
            node.dead = []

    def _forget(self, node: Node) -> None:
        """Nothing of the inode is to be stored any more."""
        self.reconsider(node)
        self._dirty.pop(node, None)
        self.core.metadata.release(self.core.metadata.taken(node))
        self._gone.pop(node, None)
        self._times.pop(node, None)
        self._ties.drop(node)
        node.changed = node.forced = node.times_changed = False
        self.forget_seen(node.extra)
        node.extra = {}

    def give_up_times(self, ino: int, current: Node | None) -> None:
        """Of a directory that memory dropped, or has anew as ``current``: others have changed it since."""
        for directory in [directory for directory in self._times if directory.ino == ino and directory is not current]:
            self._forget(directory)

    def _changes_of(self, node: Node) -> list[tuple[int, bytes, NameChange]]:
        return [
            (parent, name, change)
            for parent, changes in self.overlay.items()
            for name, change in changes.items()
            if change.node is node
        ]

    def changed(self, ino: int) -> list[Node]:
        """What is changed of an inode; in memory there may be another one of it by now, or none."""
        return [node for node in (*self._dirty, *self._aside) if node.ino == ino]

    def changed_inline(self, *, aside: bool) -> list[Node]:
        """Changed inodes whose records stand in their names. ``aside``: those that are aside, too."""
        return [node for node in (*self._dirty, *(self._aside if aside else ())) if not node.own_record]

    # -- names that meant something else than was thought --------------------------------------------

    def stays(self, parent: int, name: bytes, change: NameChange) -> None:
        """The inode that would have been removed with a change of its name is another's business now.

        Another host renamed or removed it: what is in memory is as it was when it was removed here.
        """
        leaves, change.leaves = change.leaves, None
        if leaves is None:
            return
        self.core.file_count += 1
        if isinstance(leaves, Node) and leaves.nlink == 0:
            self.revive(leaves)

    def revive(self, node: Node) -> None:
        """An inode that was removed here is alive: it is read anew, and open files go on with what is read then."""
        node.unstored_attributes = NO_ATTRIBUTES
        if node.reaped or not node.handles:
            self.reap(node)
            self.core.nodes.drop(node)

    def replaces(self, change: NameChange, record: schema.InodeRecord, version: int) -> None:
        """The change takes the name from this inode, which got it elsewhere: it is removed with it."""
        change.leaves = record
        self.core.file_count -= 1
        node = self.core.nodes.get(record.ino)
        if node is not None and node.nlink:
            node.version, node.base = version, record
            self.lost(node)

    def forget_change(self, parent: int, name: bytes) -> None:
        """The name is what it is in the store."""
        self.renaming(parent, name)
        self.epoch += 1
        self.core.known.drop(parent, name)
        names = self.overlay[parent]
        self._drop_name(names.pop(name))
        if not names:
            del self.overlay[parent]
            self.folders.pop(parent, None)

    # -- a refused commit ----------------------------------------------------------------------------

    async def merge(self, node: Node, record: schema.InodeRecord, version: int) -> None:
        """Bring a changed inode up to what another host stored. EngineError: to be tried again."""
        self.counters.merged += 1
        await self.merger(node, record, version)

    def recalled_dead(self, batch: Batch) -> list[Extent]:
        """What the refused commit would have freed, and another host did in the meantime.

        That host put an f record, where the slot is ours. When it was looked at while the commit was under way, the
        slot seemed to be free already, and only the record is to be deleted: so the slot is freed with it.
        """
        found = []
        for extent in batch.freed:
            key = schema.freed_key(self.core.geometry.slab_of(extent.addr), extent.addr, extent.generation)
            if self._extra.get(key, b"") is None:
                found.append(extent)
        return found

    def restore(self, batch: Batch, others: Iterable[bytes]) -> None:
        """What belongs to no inode is pending again. ``others``: keys of records that belong to one."""
        draft, theirs = batch.draft, set(others)
        self._extra = {**{key: value for key, value in draft.extra.items() if key not in theirs}, **self._extra}
        self._times = {**dict.fromkeys(draft.times), **self._times}
        self._gone = {**dict.fromkeys(draft.gone, 0), **self._gone}
        for first, second in batch.ties:
            if first in self._dirty or second in self._dirty:
                self._ties.add(first, second)
        for change in draft.names:
            if self.find(change.parent, change.name) is change:
                self._names[change] = None
        self._sent_extra = {}
        freed_twice = [extent for extent in self.recalled_dead(batch) if extent not in draft.dead]
        self.core.dead = [*draft.dead, *freed_twice, *self.core.dead]
        self.core.unborn = [*batch.unborn, *self.core.unborn]
        self._wake()

    def _settle_attributes(self, batch: Batch) -> None:
        """What the store has now of attributes that the commit changed, where they are to change once more."""
        for key in [key for key in batch.draft.extra if key in self.seen]:
            if key not in self._extra:
                del self.seen[key]
            elif (value := batch.puts.get(key)) is None:
                self.seen[key] = NOT_STORED
            else:
                self.seen[key] = Stored.of(key, Versioned(value, batch.version))

    def _settle_versions(self, batch: Batch) -> None:
        """The commit is in the store: what is stored has its version."""
        version, known = batch.version, self.core.known
        for directory in batch.times if not batch.too_large else ():  # else another part's version may be its own
            directory.times_version = version
        for node, record in batch.draft.records.items():
            node.version, node.base = version, record
            known.shelf.drop(node.parent, node.name)
            node.appends = node.appends and node.size > record.size
            change = None if node.own_record else self.find(node.parent, node.name)
            if change is not None and not change.sent:
                change.stored, change.version = True, version
        for change in batch.names:
            parent, name = change.parent, change.name
            current = self.overlay.get(parent, {}).get(name)
            if current is not None and current is not change:
                current.version = version if change.node is not None else 0
            elif change.node is not None:
                known.note(parent, name, change.node.ino, version)
            else:
                known.drop(parent, name, version)
        for parent, name in batch.vacated:
            if (later := self.find(parent, name)) is not None:
                later.version, later.leaves = 0, None
        for key in batch.puts:
            if key[:1] == b"o":
                self.free_later(schema.key_inode(key))
