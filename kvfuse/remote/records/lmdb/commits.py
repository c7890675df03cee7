"""One commit of an LMDB store, and the record with what all others weigh."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Mapping
from typing import Any

import lmdb

from kvfuse.remote.records.api import ABSENT, Change, Meter, Usage
from kvfuse.remote.records.lmdb import record_rows
from kvfuse.remote.records.lmdb.medium import Medium, is_full
from kvfuse.remote.records.lmdb.metapages import MetaPages
from kvfuse.remote.records.lmdb.record_rows import VERSION_SIZE

_USAGE = struct.Struct(">qq")


class MediumFailed(Exception):
    """A page of the file could not be read."""


class WriteTransaction:
    """One commit. Everything but the constructor runs in the writer's thread."""

    def __init__(
        self,
        puts: Mapping[bytes, bytes],
        deletes: Collection[bytes],
        expect: Mapping[bytes, int],
        durable: bool,
        meter: Meter | None,
    ) -> None:
        self._meter = meter
        # Copied: the caller may reuse its collections while this commit waits for its turn.
        self._expect = list(expect.items())
        self._changes: list[tuple[bytes, bytes | None]] = [*puts.items(), *((key, None) for key in deletes)]
        self._durable = durable
        self._transaction: Any = None
        self.operation_count = len(self._expect) + len(self._changes)
        self.id = 0
        self.usage: Usage | None = None
        """of all records, as this commit leaves them"""
        self.committed = False
        self.change_count = 0
        self.wants_changes = False
        """somebody watches, or the commit has a lease"""
        self.changes: list[Change] = []

    def use(self, environment: lmdb.Environment, medium: Medium, meta_pages: MetaPages) -> None:
        """Before it begins."""
        self._environment, self._medium, self._meta_pages = environment, medium, meta_pages

    def begin(self, stop: int) -> bool:
        """Have the store's write lock, and do the operations before ``stop``."""
        self._transaction = self._environment.begin(write=True)
        self.id = self._transaction.id()
        return self.step(0, stop)

    def step(self, start: int, stop: int) -> bool:
        """Do operations start..stop: first come the expectations, then the changes. False: a version had moved."""
        for key, version in self._expect[start:stop]:
            value = self._transaction.get(key)
            if (ABSENT if value is None else record_rows.version_of(value)) != version:
                self._check_medium()
                return False
        expect_count = len(self._expect)
        for key, put in self._changes[max(start - expect_count, 0) : max(stop - expect_count, 0)]:
            self._change(key, put)
        self._check_medium()
        return True

    def _check_medium(self) -> None:
        """MediumFailed before anything is made of pages that could not be read."""
        if not self._medium.is_intact():
            raise MediumFailed

    def _change(self, key: bytes, value: bytes | None) -> None:
        if self._meter is not None and self.usage is not None:
            self.usage = self._weighed(self._meter, self.usage, key, value)
        if value is not None:
            self._transaction.put(key, self.id.to_bytes(VERSION_SIZE, "big") + value)
        elif not self._transaction.delete(key):
            return
        self.change_count += 1
        if self.wants_changes:
            self.changes.append(Change(key, value, self.id))

    def _weighed(self, meter: Meter, usage: Usage, key: bytes, value: bytes | None) -> Usage:
        """As it is when the record is put or deleted."""
        if key == meter.key:
            return usage if value is None else Usage(*_USAGE.unpack_from(value))  # somebody counted, and knows better
        size, items = meter.weigh(key, value) if value is not None else (0, 0)
        old = self._transaction.get(key)
        if old is not None:
            old_size, old_items = meter.weigh(key, old[VERSION_SIZE:])
            size, items = size - old_size, items - old_items
        return Usage(usage.size + size, usage.items + items)

    @property
    def is_open(self) -> bool:
        """It holds the store's write lock."""
        return self._transaction is not None

    def finish(self) -> None:
        """OSError, too."""
        try:
            self._commit()
        except lmdb.Error:
            self._meta_pages.is_doubtful |= not is_full(self._medium.path.parent)
            raise
        self._check_medium()

    def _commit(self) -> None:
        if self.change_count:
            if self._meter is not None and self.usage is not None:
                self._transaction.put(self._meter.key, usage_row(self.usage, self.id))
            self._check_medium()
            transaction, self._transaction = self._transaction, None  # LMDB itself ends one that fails to commit
            transaction.commit()
            self.committed = True
            self._medium.grew()
            self._meta_pages.note()
        else:
            self.abort()
        if self._durable:
            self._environment.sync(True)

    def abort(self) -> None:
        self._transaction.abort()
        self._transaction = None


def usage_row(usage: Usage, version: int) -> bytes:
    """The record of the count as it is stored. One that is damaged, or not of the last commit, is counted anew."""
    row = version.to_bytes(VERSION_SIZE, "big") + _USAGE.pack(*usage)
    return row + zlib.crc32(row).to_bytes(4, "big")


def recorded_usage(transaction: lmdb.Transaction[bytes], meter: Meter) -> Usage:
    """The weight that the last transaction recorded; counted anew where it recorded none."""
    row = transaction.get(meter.key)
    if row is not None and len(row) >= VERSION_SIZE + _USAGE.size:
        usage = Usage(*_USAGE.unpack_from(row, VERSION_SIZE))
        if row == usage_row(usage, transaction.id()):
            return usage
    size = items = 0
    for key, value in transaction.cursor():
        more_size, more_items = meter.weigh(key, value[VERSION_SIZE:])
        size += more_size
        items += more_items
    return Usage(size, items)
