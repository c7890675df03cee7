"""Rows of the database: a record's value is stored behind its version, of ``VERSION_SIZE`` bytes."""

from __future__ import annotations

from collections.abc import Sequence

import lmdb

from kvfuse.remote.records.api import Record

VERSION_SIZE = 8


def seek(cursor: lmdb.Cursor[bytes], prefixes: Sequence[bytes]) -> list[Record | None]:
    rows: list[Record | None] = []
    for prefix in prefixes:
        key, value = cursor.item() if cursor.set_range(prefix) else (b"", b"")
        rows.append(Record(key, value[VERSION_SIZE:], version_of(value)) if key.startswith(prefix) and key else None)
    return rows


def scan(cursor: lmdb.Cursor[bytes], prefix: bytes, after: bytes, limit: int) -> list[Record]:
    records: list[Record] = []
    start = max(prefix, after)
    found = cursor.set_range(start) if start else cursor.first()
    if not found or limit <= 0:
        return records
    for key, value in cursor.iternext():
        if not key.startswith(prefix):
            break
        if key == after:
            continue
        records.append(Record(key, value[VERSION_SIZE:], version_of(value)))
        if len(records) == limit:
            break
    return records


def version_of(value: bytes | memoryview) -> int:
    return int.from_bytes(value[:VERSION_SIZE], "big")
