"""What a commit to a shared volume expects: every record that it replaces or deletes is as this host knows it.

So it is refused where another host was faster (`conflicts`), and its host knows what the replaced records weigh.
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
    """Completes drafts. The planner of a shared volume has it."""

    def __init__(self, pending: Pending) -> None:
        self.pending = pending
        self.core = pending.core

    def complete(self, draft: Draft) -> Draft:
        """The draft with all that it expects, measured."""
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
        """What was found by an orphan record is freed once, by whom it concerns."""
        if node.version:
            key = schema.orphan_key(node.ino)
            draft.expect[key] = node.version
            draft.before[key] = inode_weight(len(key), len(node.target))

    def _expect_name(self, draft: Draft, change: NameChange) -> None:
        """The stored name is as it was when it was changed here.

        Whoever loses it is kept by an orphan record, as it is stored: so the name's version says.
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
        """A name comes into a directory, which must not be removed meanwhile: who is about to has marked it."""
        key = schema.inode_key(directory.ino)
        draft.expect.setdefault(key, directory.version)
        if directory.base is not None and directory.base.flags & schema.FLAG_LEAVING:
            directory.flags &= ~schema.FLAG_LEAVING
            draft.records[directory] = record = directory.record()
            draft.puts[key] = schema.encode_inode(record)
            draft.before[key] = inode_weight(len(key), 0)

    def _expect_times(self, draft: Draft, directory: Node) -> None:
        """Where another host removed the directory, nobody takes its times away."""
        if directory.nlink:
            draft.before[schema.times_key(directory.ino)] = TIMES_WEIGHT
            if directory.version:
                draft.expect.setdefault(schema.inode_key(directory.ino), directory.version)


def orphan_of(record: schema.InodeRecord, client: int) -> bytes:
    """The orphan record of an inode as it is stored."""
    return schema.encode_orphan(msgspec.structs.replace(record, nlink=0), client)
