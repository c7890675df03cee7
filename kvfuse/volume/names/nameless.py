"""Frees slots and records of inodes without names, once no caller can reach them any more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import trio

from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.content.chunks import Chunks
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.inodes.orphans import MADE_LATER, orphan_records
from kvfuse.volume.names.folders import end_namespace, number_of
from kvfuse.volume.names.large_removal import Removal
from kvfuse.volume.names.open_elsewhere import Removed
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import all_keys


@dataclass
class Nameless(ABC):
    """Frees slots and records of inodes without names. Each membership has one."""

    core: Core
    journal: Journal
    chunks: Chunks

    def __post_init__(self) -> None:
        self.removal = Removal(self.core, self.journal, self.chunks, self.reap)

    @abstractmethod
    def has_all_records(self, node: Node) -> bool:
        """Every record that is removed with the inode is known in memory."""

    @abstractmethod
    def note_removed(self, node: Node, heir: Node | None = None) -> None:
        """After an inode lost its last name: free everything, or make an orphan record while the file is open.

        ``heir``: the file that took the name. The commit that gives it the name also frees the former file.
        """

    @abstractmethod
    def reap(self, node: Node, heir: Node | None = None) -> None:
        """Free slots and records of an inode without names and handles. All its chunks must be in memory."""

    async def run(self) -> None:
        """Free inodes that take several commits, until cancelled."""
        await self.removal.run()

    def reap_unnamed(self) -> None:
        """Free files without names that only the kernel knows: for space, or at the end of the mount."""
        for node in list(self.core.unnamed.values()):
            self.reap(node)

    async def free_unnamed_files(self, deadline: float, namespace: int | None) -> bool:
        """A `Source`: `reap_unnamed`. True: slots of uncommitted files became free."""
        free_before, before = self.core.slabs.free_bytes, self.core.namespaces.accounts.returned(namespace or 0)
        self.reap_unnamed()
        if namespace is not None:
            return self.core.namespaces.accounts.returned(namespace) > before
        return self.core.slabs.free_bytes > free_before

    async def store_removals(self) -> None:
        """Commit all pending changes, and so delete the records of removed inodes. EngineError."""
        self.reap_unnamed()
        await self.journal.commit()

    def needs_loading(self, node: Node) -> bool:
        """The inode is about to lose its last name, and not all its records are known yet."""
        return not self.has_all_records(node) and node.nlink == (2 if node.is_directory else 1)

    async def load(self, node: Node) -> None:
        """Read all chunks and attribute names that are removed with the inode. EngineError."""
        await self.chunks.load_all(node)
        if node.flags & schema.FLAG_XATTRS:
            keys = await all_keys(self.core.records, schema.xattr_prefix(node.ino))
            node.xattr_names |= {schema.xattr_name(key) for key in keys}
        node.complete = True


class OwnNameless(Nameless):
    """Frees inodes of a volume of one host."""

    def has_all_records(self, node: Node) -> bool:
        return node.complete or not node.flags & (schema.FLAG_CHUNK_RECORDS | schema.FLAG_XATTRS)

    def note_removed(self, node: Node, heir: Node | None = None) -> None:
        self.core.file_count -= 1
        if node.unstored is not None:
            node.unstored.node(node)
        self.journal.pending.reconsider(node)
        records = node.extra
        if node.own_record:
            records[schema.inode_key(node.ino)] = None
        self.core.tier.drop(node.ino)
        if node.is_directory:
            self.core.tier.retire([node.ino])
            records[schema.times_key(node.ino)] = None
            self.core.dentries.directory_removed(node.ino)
            if self.core.blocks is not None:
                self.core.blocks.directory_removed(node.ino)
            if number_of(node) is not None:
                end_namespace(self.core, node)
        large = self.removal.is_large(node) and (node.stored or node.committing)
        kept = large or (node.is_file and (node.handles or self.core.places.known(node.ino)))
        if kept and (node.stored or node.committing):
            records.update(orphan_records(node) if heir is not None else {schema.orphan_key(node.ino): MADE_LATER})
        elif not (node.stored or node.committing):
            self.journal.pending.loose.withdraw_attributes(node)  # no other record refers to the inode
        node.heir = heir
        if node.namespace:
            self._count_out(node, heir)
        self._pass_on(node, heir)
        if not kept:
            self.reap(node, heir)
        elif not node.handles:
            self.core.unnamed[node.ino] = node
            if large and not self.core.places.known(node.ino):
                self.reap(node)

    def _count_out(self, node: Node, heir: Node | None) -> None:
        """Count a file less in the namespace: with the commit that removes it, or at once if the store never had it.

        An heir that is not stored yet enters the namespace in the commit that removes the files whose name it took. So
        no count ever has both.
        """
        count = 0
        if node.is_file and (node.stored or node.committing):
            node.lost_files += 1
        elif node.is_file and not node.lost_files:
            count += 1
        if heir is not None and node.lost_files:
            count += heir.is_file and not (heir.stored or heir.committing or heir.lost_files)
            heir.lost_files += node.lost_files
            node.lost_files = 0
        if count:
            self.core.namespaces.accounts.add_files(node.namespace, -count)

    def _pass_on(self, node: Node, heir: Node | None) -> None:
        """Pass slots and records of a freed inode to its heir, or to the next commit."""
        if heir is not None:
            heir.dead += node.dead
            self.core.givers[heir] = None
            heir.extra.update(node.extra)
            self.journal.pending.loose.withdraw(node.extra)
            node.dead, node.extra = [], {}
        else:
            self.journal.pending.add_gone(node)

    def reap(self, node: Node, heir: Node | None = None) -> None:
        self.core.nodes.note_saved(node)
        if node.unstored is not None:
            node.unstored.node(node)
        if self.removal.is_large(node):
            self.removal.begin_freeing(node)
            return
        self.core.unnamed.pop(node.ino, None)
        node.reaped = True
        later = node.heir
        while later is not None:
            if schema.orphan_key(node.ino) in later.extra:
                heir = later  # the store still has the name: the slots may not be freed before that changes
            later = later.heir
        node.extra.update(self.chunks.drop_all(node))
        for name in node.xattr_names:
            node.extra[schema.xattr_key(node.ino, name)] = None
        if node.flags & schema.FLAG_PLACED:
            node.extra[schema.place_key(node.ino)] = None
        if node.stored or node.committing:
            node.extra[schema.orphan_key(node.ino)] = None
        self._pass_on(node, heir)
        if not self.core.places.known(node.ino):
            self.core.nodes.drop(node)


class SharedNameless(Nameless):
    """Frees inodes of a shared volume: stored ones later, by their orphan records."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.orphans = Removed(self.core, self.journal, self.chunks)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.removal.run)
            nursery.start_soon(self.orphans.run)

    def has_all_records(self, node: Node) -> bool:
        return True

    def note_removed(self, node: Node, heir: Node | None = None) -> None:
        """After a file lost its only name: if it is stored, the commit of that change puts its orphan record.

        No file has an heir. Handles can still read it.
        """
        self.core.file_count -= 1
        self.journal.pending.reconsider(node)
        self.core.tier.drop(node.ino)
        self.journal.pending.loose.withdraw_attributes(node)
        if node.is_file and node.namespace and not (node.version or node.committing):
            self.core.namespaces.accounts.add_files(node.namespace, -1)  # else the commit of its name counts it out
        node.dead = []  # the stored record has them, and they are freed with it
        if node.handles:
            return
        if self.core.places.known(node.ino):
            self.core.unnamed[node.ino] = node
        else:
            self.reap(node)

    def reap(self, node: Node, heir: Node | None = None) -> None:
        self.chunks.reap_unstored(node)
