"""Finds inodes by their numbers, in the names of the directories in which they were.

An inode whose record is in a name has left that only for another name of the same directory: with another directory it
gets a record of its own (`names.name_change`). So there is no need to read the names of all directories.
"""

from __future__ import annotations

from collections.abc import Collection

from kvfuse.remote.records.api import Record, RecordStore
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import ScanPages

PAGE = 1000
"""records that are read together"""


async def search_names(records: RecordStore, directories: Collection[int], inos: Collection[int]) -> dict[int, Record]:
    """Inode -> the record of its name, of those that are found. One with a record of its own has none. EngineError."""
    found: dict[int, Record] = {}
    wanted = set(inos)
    for directory in sorted(set(directories)):
        async for rows, _ in ScanPages(records, schema.entry_prefix(directory), PAGE):
            for row in rows:
                entry = schema.decode_entry(row.value)
                if isinstance(entry, schema.InodeRecord) and entry.ino in wanted:
                    found[entry.ino] = row
            if len(found) == len(wanted):
                return found
    return found
