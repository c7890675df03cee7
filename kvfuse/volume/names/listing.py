"""Lists directories: rows of the store, with pending changes applied.

A page of rows counts only if no commit was settled while it was read (`Pending.epoch`). Inodes that are read afterwards
may move meanwhile: the row's place does not overwrite a place that memory, or the inode's record, has.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvfuse import errors
from kvfuse.volume.api import DirEntry
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.lookup import Lookup
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import get_sound, last_key, scan_page

log = logging.getLogger(__name__)

COOKIE_MAX = (1 << 63) - 1
Meant = tuple[int, Node | schema.InodeRecord | int | None, int]
"""(cookie of a listed name, what the name means, version of the row that says so)"""


@dataclass
class Listing:
    """Lists one directory, for one call of `TreeApi`."""

    lookup: Lookup
    ino: int

    def __post_init__(self) -> None:
        self.core, self.pending = self.lookup.core, self.lookup.journal.pending
        self._epoch = 0
        """the journal's epoch, when the page was read"""

    async def read_entries(self, after: int, limit: int) -> list[DirEntry]:
        """Entries behind the cookie ``after``, in the order of their cookies; see `TreeApi`.

        A name whose record is damaged is left out (the log names it), so that its neighbours can be listed.
        """
        await self.lookup.find_directory(self.ino)
        if not after:
            await self.lookup.await_names(self.ino)
        entries: list[DirEntry] = []
        while len(entries) < limit:
            epoch = self.pending.epoch
            start = schema.entry_after(self.ino, after)
            is_empty = self.lookup.is_memory_newest and self.core.dentries.is_empty(self.ino)
            prefix = schema.entry_prefix(self.ino)
            rows, damaged = await scan_page(self.core.records, prefix, start, limit) if not is_empty else ([], [])
            if epoch != self.pending.epoch:
                continue
            self._epoch = epoch
            more = len(rows) + len(damaged) == limit
            last = schema.split_entry_key(last_key(rows, damaged))[1] if more else COOKIE_MAX
            changes, last = self.core.dentries.changes_between(self.ino, after, last, limit)
            page: dict[bytes, Meant] = {}
            for row in rows:
                _, cookie, name = schema.split_entry_key(row.key)
                if cookie > last:
                    break
                try:
                    page[name] = cookie, schema.decode_entry(row.value), row.version
                except schema.Malformed as error:
                    log.error("%s", error)
            page.update([(change.name, (schema.name_hash(change.name), change.node, 0)) for change in changes])
            entries += await self._make_entries(page)
            if last == COOKIE_MAX:
                break
            after = last
        return entries[:limit]  # of the last page, which filled up what changes had taken from those before

    async def _make_entries(self, page: dict[bytes, Meant]) -> list[DirEntry]:
        entries = []
        if not self.lookup.is_memory_newest:
            await self._read_own([meant for _, meant, _ in page.values() if isinstance(meant, int)])
        nodes, is_current = self.core.nodes, self._epoch == self.pending.epoch
        for name, (cookie, meant, version) in sorted(page.items(), key=_cookie_of):
            if (
                is_current
                and isinstance(meant, schema.InodeRecord)
                and nodes.get(meant.ino) is None
                and not self.lookup.lacks_place(meant)
            ):
                entries.append(DirEntry(name, cookie, meant))  # memory keeps it only once it is changed or opened
                continue
            try:
                node = await self._find_node(name, meant, version)
                if node is None or not node.nlink:  # removed meanwhile; another inode may have the name
                    node = (await self.lookup.find_name(self.ino, name)).node
            except errors.Corrupt:
                continue
            is_current = self._epoch == self.pending.epoch
            if node is not None and node.nlink:
                entries.append(DirEntry(name, cookie, node))
        return entries

    async def _read_own(self, inodes: list[int]) -> None:
        """Read inodes with records of their own into memory, by one request."""
        self.lookup.expect_own(inodes)
        keys = [key for ino in inodes for key in (schema.inode_key(ino), schema.times_key(ino))]
        rows = await get_sound(self.core.records, keys) if keys else []
        for own, times in zip(rows[::2], rows[1::2], strict=True):
            if own is not None:
                node = self.lookup.take_record(schema.decode_inode(own.value), own.version, (0, b""), own=True)
                if times is not None:
                    self.lookup.refresher.take_times(node, times.value, times.version)

    async def _find_node(self, name: bytes, entry: Node | schema.InodeRecord | int | None, version: int) -> Node | None:
        """The inode of a listed name; None: it was removed."""
        if entry is None or isinstance(entry, Node):
            return entry
        if isinstance(entry, int):
            try:
                node = await self.lookup.find_node(entry)
            except errors.Stale:
                return None
            if node.name if self.lookup.is_memory_newest else node.is_directory:
                return node  # memory or the record has its place, and both may be newer than the row
            node.parent, node.name = self.ino, name
            return node
        if self.core.nodes.get(entry.ino) is not None:
            return self.lookup.take_record(entry, version, (self.ino, name), own=False)
        return None  # the row may be out of date


def _cookie_of(row: tuple[bytes, Meant]) -> tuple[int, bytes]:
    return row[1][0], row[0]
