"""Adds to the journal's commits what a shared volume needs: `Terms`.

A commit to a shared volume expects the versions that this host knows of the records it replaces or deletes. So the
store refuses the commit if another host changed one first (`conflicts`), and this host knows their weights.

In a shared volume every slot that an inode gives up needs a record, and a file may have more slots than a commit has
records. Such a unit leaves a *bequest*: an orphan record of a new inode, with chunk records that list many slots
each. So the unit still fits into one commit, and `Removed` frees the slots piece by piece.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from stat import S_IFREG, S_ISREG
from typing import TYPE_CHECKING

import msgspec

from kvfuse.remote.records.api import ABSENT
from kvfuse.volume.commit.batch import Batch, Draft, Taken
from kvfuse.volume.commit.committer import Sequence
from kvfuse.volume.commit.conflicts import Conflicts
from kvfuse.volume.commit.pending import Pending
from kvfuse.volume.commit.refusals import Refusals
from kvfuse.volume.inodes.chunk import FRESH
from kvfuse.volume.inodes.dentries import NameChange
from kvfuse.volume.inodes.metadata_budget import NOT_STORED, TIMES_WEIGHT, entry_weight, growth, inode_weight
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store import schema

if TYPE_CHECKING:
    from kvfuse.remote.records.api import RecordLimits, Versioned

SLOT_SHARE = 4
"""Records of slots that are freed together: one for every so many operations that a commit may have."""


async def _repeat(batch: Batch, found: object) -> bool:
    return False


def _count_own_files(draft: Draft, batch: Batch) -> Counter[int]:
    """Namespace -> files that a commit adds, less those that it removes. Notes those that count until it is stored."""
    files: Counter[int] = Counter()
    for node in [*[node for node in draft.nodes if node.nlink], *draft.gone]:
        is_new = bool(node.nlink and node.is_file and not node.stored)
        if node.namespace and (is_new or node.lost_files):
            files[node.namespace] += is_new - node.lost_files
            # A new file that took the name of a stored one counts in its place: see `Nameless`.
            gone = node.lost_files - (is_new and node.lost_files > 0)
            batch.files_gone[node.namespace] = batch.files_gone.get(node.namespace, 0) + gone
            node.lost_files = 0
    return files


def _count_shared_files(draft: Draft, batch: Batch) -> Counter[int]:
    """As `_count_own_files`. A file that loses its name counts until then, whatever takes the name."""
    batch.files_gone = dict(draft.in_namespaces.given_up)
    files = Counter(draft.in_namespaces.made)
    files.subtract(draft.in_namespaces.gone)
    return files


@dataclass(frozen=True)
class Terms:
    """The parts of commits that depend on the kind of volume. The defaults are those of a volume that one host has."""

    refusals: Refusals
    sequence: Sequence | None = None
    """the committer writes it with each commit"""
    complete: Callable[[Draft], Draft] = Draft.measure
    """adds to a draft what it expects, when nothing more is put or deleted, and measures it"""
    count_files: Callable[[Draft, Batch], Counter[int]] = _count_own_files
    """counts files by namespace, when a batch is built"""
    bequeath: Callable[[Draft, Node], bool] = lambda draft, node: False
    """leaves the slots that an inode gives up to a new one. False: that would take no fewer records"""
    before_build: tuple[Callable[[], Awaitable[None]], ...] = ()
    before_apply: tuple[Callable[[Draft, Batch], None], ...] = ()
    before_settle: tuple[Callable[[Batch], None], ...] = ()
    """called before a batch is built, before its draft is applied to memory, and before its names are settled"""
    recall: Callable[[Batch, Mapping[bytes, Versioned | None]], Awaitable[bool]] = _repeat
    """makes a commit that did not happen pending again, see `Conflicts`. False: repeating it unchanged is harmless"""


class SharedTerms:
    """Makes the terms of a shared volume, in ``terms``."""

    def __init__(self, pending: Pending, refusals: Refusals) -> None:
        self.pending = pending
        self.core = core = pending.core
        client = core.client
        keys, left = (schema.sequence_key(client), schema.files_key(client)), core.left
        sequence = Sequence(keys[0], core.segments.identity(), keys[1], left.sequence_version, left.counts)
        conflicts = Conflicts(pending, refusals)
        before_build = conflicts.resolve_doubled_names, conflicts.drop_outside_borders
        before = before_build, (self.note_state,), (self.settle,)
        self.terms = Terms(
            refusals, sequence, self.complete, _count_shared_files, self.bequeath, *before, conflicts.recall
        )

    def complete(self, draft: Draft) -> Draft:
        for node in draft.nodes:
            if node.nlink:
                self._expect_node(draft, node)
        for node in draft.gone:
            self._expect_orphan(draft, node)
        for place in draft.vacated:
            if (change := self.core.dentries.get(*place).change) is not None:
                self._expect_name(draft, change)
                _count_leaving(draft, change)
        for change in draft.names:
            _count_leaving(draft, change)
            if change.node is not None or change.stored:
                self._expect_name(draft, change)
            directory = self.core.dentries.folders.get(change.parent)
            if change.node is not None:
                key = schema.delegation_key(change.parent)
                draft.expect[key] = self.core.dentries.delegated.get(change.parent, ABSENT)
                if directory is not None and directory.version:
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
        if not node.version and node.is_file and node.namespace:
            draft.in_namespaces.made[node.namespace] += 1
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
            draft.puts[schema.orphan_key(record.ino)] = encode_orphan_of(record, self.core.client)
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
        """Expect the directory of changed times: no host would delete the times of a removed one."""
        if directory.nlink:
            draft.before[schema.times_key(directory.ino)] = TIMES_WEIGHT
            if directory.version:
                draft.expect.setdefault(schema.inode_key(directory.ino), directory.version)

    def bequeath(self, draft: Draft, node: Node) -> bool:
        """Move the freed extents of the inode to a new orphan record. EngineError where no inode number is left."""
        draft.bequests.add(node)
        heir = Node(self.core.inodes.next(), S_IFREG | 0o600, node.uid, node.gid, node.chunk_size)
        heir.flags, heir.namespace = schema.FLAG_CHUNK_RECORDS, node.namespace
        heir.atime = heir.mtime = heir.ctime = node.ctime
        draft.puts[schema.orphan_key(heir.ino)] = encode_orphan_of(heir.record(), self.core.client)
        slots_max = slot_records_max(self.core.records.limits)
        for number, start in enumerate(range(0, len(node.dead), slots_max)):
            extents = tuple([extent.record() for extent in node.dead[start : start + slots_max]])
            draft.puts[schema.chunk_key(heir.ino, schema.INLINE_CHUNKS + number)] = schema.encode_chunk(extents)
        return True

    def note_state(self, draft: Draft, batch: Batch) -> None:
        """Save the state that a recall of the commit restores, and begin the next one."""
        gone = dict.fromkeys(draft.gone)
        batch.taken = [_copy_state(node, node in gone) for node in {**dict.fromkeys(draft.nodes), **gone}]
        for node in draft.nodes:
            if node.nlink:
                _begin_base(node)
        batch.size = growth(draft.puts, draft.deletes, draft.before)

    def settle(self, batch: Batch) -> None:
        """Note the commit's version as that of the stored records."""
        version, draft, dentries = batch.version, batch.draft, self.core.dentries
        for directory in draft.times if not batch.too_large else ():  # else the version may be another part's
            directory.times_version = version
        for node, record in draft.records.items():
            node.version, node.base = version, record
            node.appends = node.appends and node.size > record.size
            if not node.own_record:
                dentries.drop_record(node.parent, node.name)
                change = dentries.get(node.parent, node.name).change
                if change is not None and not change.sent:
                    change.stored, change.version = True, version
        for key in batch.puts:
            if key[:1] == b"o":
                self.terms.refusals.to_free.add(schema.key_inode(key))
        self.pending.loose.settle_attributes(draft.extra, batch.puts, version)
        for change in draft.names:
            key = schema.entry_key(change.parent, change.name)
            if key not in batch.puts and key not in batch.deletes:
                batch.untouched.add(change)


def _count_leaving(draft: Draft, change: NameChange) -> None:
    """Count a file that loses its last name. One that is not in the store after all counts in memory alone."""
    leaves = change.leaves
    if leaves is not None and leaves.namespace and S_ISREG(leaves.mode):
        draft.namespaces.add(leaves.namespace)
        draft.in_namespaces.given_up[leaves.namespace] += 1
        draft.in_namespaces.gone[leaves.namespace] += not isinstance(leaves, Node) or leaves.base is not None


def encode_orphan_of(record: schema.InodeRecord, client: int) -> bytes:
    """The orphan record of an inode as it is stored."""
    return schema.encode_orphan(msgspec.structs.replace(record, nlink=0), client)


def slot_records_max(limits: RecordLimits) -> int:
    """Records of slots that fit into one commit beside a file's other records."""
    return max(1, limits.commit_operations_max // SLOT_SHARE)


def _copy_state(node: Node, is_gone: bool) -> Taken:
    chunks = [(chunk, chunk.base, chunk.dirty) for chunk in node.chunks.values() if chunk.base is not None]
    born = [extent for extent in node.born if extent.state == FRESH and node.nlink]
    dead, dirty_chunks = list(node.dead), node.dirty_chunks
    return Taken(node, node.forced, node.extra, born, dead, dirty_chunks, chunks, node.cut_size, node.reserved, is_gone)


def _begin_base(node: Node) -> None:
    """Let the stored state of each chunk, and the size to which the file was cut, be those of this commit."""
    node.cut_size = None
    for chunk in node.chunks.values():
        if chunk.base is not None:
            chunk.base = None if chunk.staged is None else tuple([extent.record() for extent in chunk.extents])
            chunk.dirty = [] if chunk.staged is None else chunk.dirty
