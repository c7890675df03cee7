"""Versions that a commit to a shared volume expects: those that this host knows of the records it replaces or deletes.

So the store refuses the commit if another host changed one first (`conflicts`), and this host knows their weights.
"""

from __future__ import annotations

import msgspec

from kvfuse.volume.commit.batch import Draft
from kvfuse.volume.commit.pending import Pending
from kvfuse.volume.inodes.dentries import NameChange
from kvfuse.volume.inodes.metadata_budget import NOT_STORED, TIMES_WEIGHT, entry_weight, inode_weight
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store import schema


class Expectations:
    """Adds expected versions to drafts. The planner of a shared volume has one."""

    def __init__(self, pending: Pending) -> None:
        self.pending = pending
        self.core = pending.core

    def complete(self, draft: Draft) -> Draft:
        """Add all expected versions to the draft, and measure it. Returns the draft itself."""
        for node in draft.nodes:
            if node.nlink:
                self._expect_node(draft, node)
        for node in draft.gone:
            self._expect_orphan(draft, node)
        for place in draft.vacated:
            if (change := self.core.dentries.get(*place).change) is not None:
                self._expect_name(draft, change)
        for change in draft.names:
            if change.node is not None or change.stored:
                self._expect_name(draft, change)
            directory = self.pending.folders.get(change.parent)
            if change.node is not None and directory is not None and directory.version:
                self._expect_folder(draft, directory)
        for directory in draft.times:
            self._expect_times(draft, directory)
        for key in draft.extra:
            if key.startswith(schema.XATTR_PREFIX):
                draft.expect[key], draft.before[key] = self.pending.loose.seen.get(key, NOT_STORED)
        return draft.measure()

    def _expect_node(self, draft: Draft, node: Node) -> None:
        key = schema.inode_key(node.ino) if node.own_record else schema.entry_key(node.parent, node.name)
        draft.expect.setdefault(key, node.version)
        draft.files += not node.version
        if node.version:
            draft.before[key] = inode_weight(len(key), len(node.target))

    def _expect_orphan(self, draft: Draft, node: Node) -> None:
        """Expect the orphan record by which the inode was found, so that only one client frees it."""
        if node.version:
            key = schema.orphan_key(node.ino)
            draft.expect[key] = node.version
            draft.before[key] = inode_weight(len(key), len(node.target))

    def _expect_name(self, draft: Draft, change: NameChange) -> None:
        """Expect the name's record as it was when the name was changed here.

        An inode that loses its last name gets an orphan record with its stored state, which that version ensures.
        """
        key = schema.entry_key(change.parent, change.name)
        node = change.node
        draft.expect[key] = change.version
        record = change.leaves.base if isinstance(change.leaves, Node) else change.leaves
        if record is not None:
            draft.before[key] = inode_weight(len(key), len(record.target))
            draft.files -= 1
            draft.puts[schema.orphan_key(record.ino)] = orphan_of(record, self.core.client)
        elif change.version and (node is None or node.own_record or node.version != change.version):
            draft.before[key] = entry_weight(len(change.name))

    def _expect_folder(self, draft: Draft, directory: Node) -> None:
        """Expect the directory of a new name, so that it is not removed meanwhile; clear a remover's mark (LEAVING)."""
        key = schema.inode_key(directory.ino)
        draft.expect.setdefault(key, directory.version)
        if directory.base is not None and directory.base.flags & schema.FLAG_LEAVING:
            directory.flags &= ~schema.FLAG_LEAVING
            draft.records[directory] = record = directory.record()
            draft.puts[key] = schema.encode_inode(record)
            draft.before[key] = inode_weight(len(key), 0)

    def _expect_times(self, draft: Draft, directory: Node) -> None:
        """Expect the directory of changed times: nobody would delete the times of a removed one."""
        if directory.nlink:
            draft.before[schema.times_key(directory.ino)] = TIMES_WEIGHT
            if directory.version:
                draft.expect.setdefault(schema.inode_key(directory.ino), directory.version)


def orphan_of(record: schema.InodeRecord, client: int) -> bytes:
    """The orphan record of an inode as it is stored."""
    return schema.encode_orphan(msgspec.structs.replace(record, nlink=0), client)
