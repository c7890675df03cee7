"""Removal of many files of a shared volume by one commit each time, as an unlink does it for one.

The names' records go, and orphan records are left, as some host may have one of the files open: it stays readable
there. The other hosts hear of it by the watch, and the slots are freed a grace later (`open_elsewhere`). A commit
expects the records as they were read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvfuse.remote.records.api import Record
from kvfuse.volume.commit.committer import RESERVED_OPERATIONS
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.commit.terms import encode_orphan_of
from kvfuse.volume.content.kernel_news import KernelNews
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.metadata_budget import growth, inode_weight
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store import schema
from kvfuse.volume.store.transaction import Transaction

OPERATIONS_EACH = 3
"""of a commit for each file: its record is expected and deleted, and an orphan record put"""


class Going(NamedTuple):
    """A file that a commit is to remove: the record of its name, which has the inode."""

    row: Record
    record: schema.InodeRecord


@dataclass
class BulkRemoval:
    """Removes files that nobody here is changing."""

    core: Core
    journal: Journal
    news: KernelNews
    touch_entries: Callable[[Node], None]
    """updates the times of a directory whose entries have changed"""
    giving: set[int] = field(default_factory=set)
    """slabs that are being emptied for other hosts: their slots are no room here"""

    @property
    def files_max(self) -> int:
        """of one commit"""
        limits = self.core.records.limits
        return max(1, (limits.commit_operations_max - 2 * RESERVED_OPERATIONS) // OPERATIONS_EACH)

    async def commit(self, going: Sequence[Going], gone: Callable[[Going], None] = lambda one: None) -> bool:
        """Remove these files, or (False) none, as one of them has changed. EngineError: it may happen later.

        ``gone``: is called for each when it is gone, before the name is forgotten.
        """
        puts: dict[bytes, bytes] = {}
        before: dict[bytes, int] = {}
        for row, record in going:
            puts[schema.orphan_key(record.ino)] = encode_orphan_of(record, self.core.client)
            before[row.key] = inode_weight(len(row.key), len(record.target))
        expect = {row.key: row.version for row, _ in going}
        applied = partial(self._apply_commit, going, gone)
        size = growth(puts, expect, before)
        files = [record for _, record in going if schema.is_file(record)]
        counts = Counter([record.namespace for record in files if record.namespace])
        uses = {number: schema.Counts(-count, 0) for number, count in counts.items()}
        return await self.journal.transact(Transaction(expect, puts, list(expect), applied, -len(going), size, uses))

    def _apply_commit(self, going: Sequence[Going], gone: Callable[[Going], None], version: int) -> None:
        """The files are gone, in the store."""
        core, directories = self.core, set[int]()
        for one in going:
            record, (directory, _, name) = one.record, schema.split_entry_key(one.row.key)
            directories.add(directory)
            core.file_count -= 1
            if record.namespace and schema.is_file(record):
                core.namespaces.accounts.add_files(record.namespace, -1)
            core.counters.removes += 1
            core.tier.drop(record.ino)
            gone(one)
            core.dentries.note_stored(directory, name, is_stored=False)
            core.dentries.note(directory, name, 0, version)
            if core.places.known(record.ino):
                self.news.name(directory, name)
            self._note_removed(record, version)
        for ino in directories:
            if (node := core.nodes.peek(ino)) is not None:
                self.touch_entries(node)

    def _note_removed(self, record: schema.InodeRecord, version: int) -> None:
        """Free the file when no host has it open."""
        core, node = self.core, self.core.nodes.get(record.ino)
        addresses = [extent.addr for chunk in record.chunks for extent in chunk]
        own = [addr for addr in addresses if core.slabs.is_durable(addr)]
        size = sum([core.slabs.slot_size(addr) for addr in own if core.geometry.slab_of(addr) not in self.giving])
        self.journal.refusals.to_free.expect_size(record.ino, size, record.namespace)
        if node is not None and node.nlink:
            node.nlink, node.version = 0, version
            self.journal.refusals.note_removed(node)
        else:
            self.journal.refusals.to_free.add(record.ino)
