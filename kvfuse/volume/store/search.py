"""Finds inodes by their numbers alone, in the names of all directories: long work, for what would else be lost."""

from __future__ import annotations

from collections.abc import Collection

from kvfuse.remote.records.api import Record, RecordStore
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import ScanPages

PAGE = 1000
"""records that are read together"""


async def search_names(records: RecordStore, inos: Collection[int]) -> dict[int, Record]:
    """Inode -> the record of its name, of those that are found. One with a record of its own has none. EngineError."""
    found: dict[int, Record] = {}
    wanted = set(inos)
    async for rows, _ in ScanPages(records, b"d", PAGE):
        for row in rows:
            entry = schema.decode_entry(row.value)
            if isinstance(entry, schema.InodeRecord) and entry.ino in wanted:
                found[entry.ino] = row
        if len(found) == len(wanted):
            break
    return found
