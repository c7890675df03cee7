"""Records with a checksum each: the volume never believes a value that was changed behind its back.

Every value ends with the CRC32C of its key and itself, so a value under another key is found, too. A flag of the
superblock says whether the records of a volume are sealed; those of older volumes are not. `SealedRecords` stands
directly on the engine, so everything above it reads and writes plain values.

Versions are the engine's own, and no checksum covers them. Records that a client reads before it knows the superblock
have none, either: the superblock itself (it has its own checksum), and those that say which clients are alive. Nor has
the count that the store keeps of all others: it is compared with them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence

from kvfuse.checksum import CHECKSUM_SIZE, RESIDUE, extend
from kvfuse.errors import Corrupt
from kvfuse.remote.records.api import Change, Following, Lease, Record, RecordStore, Versioned
from kvfuse.remote.records.decorators import RecordDecorator
from kvfuse.slab.layout import FEATURE_SEALED_RECORDS, Superblock
from kvfuse.volume.store import schema

LOGGED_MAX = 1000
"""Damaged records that one daemon names in its log, once each."""

log = logging.getLogger(__name__)


class DamagedRecords(Corrupt):
    """Records do not match their checksums. The message names the first one.

    ``versions``: of the damaged records, by key. ``rows``, ``records``: the answer without them, for readers that go
    on: of `get` None in the place of each damaged one, of `scan` the sound ones.
    """

    def __init__(
        self,
        versions: Mapping[bytes, int],
        *,
        rows: Sequence[Versioned | None] = (),
        records: Sequence[Record] = (),
    ) -> None:
        more = f" (and {len(versions) - 1} others)" if len(versions) > 1 else ""
        remedy = "'kvfuse fsck --repair' mends it"
        super().__init__(f"the record of {describe(next(iter(versions)))}{more} does not match its checksum: {remedy}")
        self.versions = dict(versions)
        self.rows = list(rows)
        self.records = list(records)


class _Damaged(Exception):
    """One value does not match its checksum."""


def as_formatted(records: RecordStore, superblock: Superblock) -> RecordStore:
    """The records of a volume as its superblock says: sealed, or those of an older volume as they are."""
    return SealedRecords(records) if superblock.features & FEATURE_SEALED_RECORDS else records


_BARE_KINDS = b"mn"


def seal(rows: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The values that the engine stores for these keys and values."""
    return {
        key: value
        if key[0] in _BARE_KINDS and _is_bare(key)
        else value + extend(extend(0, key), value).to_bytes(CHECKSUM_SIZE, "little")
        for key, value in rows.items()
    }


def _open(key: bytes, stored: bytes) -> bytes:
    """The value in what the engine stores. _Damaged."""
    if key[0] in _BARE_KINDS and _is_bare(key):
        return stored
    if len(stored) < CHECKSUM_SIZE or extend(extend(0, key), stored) != RESIDUE:
        raise _Damaged
    return stored[:-CHECKSUM_SIZE]


def _is_bare(key: bytes) -> bool:
    return key[:1] == schema.MEMBER_PREFIX or key in (schema.SUPERBLOCK, schema.DESTROYED, schema.MOUNTED, schema.USAGE)


class SealedRecords(RecordDecorator):
    """Checks every value that it reads and seals every one that it commits. `get`, `scan`, watches: DamagedRecords."""

    def __init__(self, inner: RecordStore) -> None:
        super().__init__(inner)
        limits = inner.limits
        self.limits = dataclasses.replace(
            limits,
            value_size_max=limits.value_size_max - CHECKSUM_SIZE,
            commit_bytes_max=limits.commit_bytes_max - CHECKSUM_SIZE * limits.commit_operations_max,
        )
        self._logged: set[bytes] = set()

    async def get(self, keys: Sequence[bytes]) -> list[Versioned | None]:
        rows = await self.inner.get(keys)
        damaged: dict[bytes, int] = {}
        for index, row in enumerate(rows):
            if row is not None:
                try:
                    rows[index] = Versioned(_open(keys[index], row.value), row.version)
                except _Damaged:
                    rows[index] = None
                    damaged[keys[index]] = row.version
        if damaged:
            self._log(damaged)
            raise DamagedRecords(damaged, rows=rows)
        return rows

    async def scan(self, prefix: bytes, after: bytes = b"", limit: int = 1000) -> list[Record]:
        rows: list[Record] = []
        damaged: dict[bytes, int] = {}
        for key, stored, version in await self.inner.scan(prefix, after, limit):
            try:
                rows.append(Record(key, _open(key, stored), version))
            except _Damaged:
                damaged[key] = version
        if damaged:
            self._log(damaged)
            raise DamagedRecords(damaged, records=rows)
        return rows

    async def seek(self, prefixes: Sequence[bytes]) -> list[Record | None]:
        """Damaged ones are left out, as if they were absent."""
        found = await self.inner.seek(prefixes)
        for index, row in enumerate(found):
            if row is not None:
                try:
                    found[index] = Record(row.key, _open(row.key, row.value), row.version)
                except _Damaged:
                    found[index] = None
                    self._log([row.key])
        return found

    async def commit(
        self,
        puts: Mapping[bytes, bytes],
        deletes: Collection[bytes] = (),
        expect: Mapping[bytes, int] | None = None,
        *,
        durable: bool = False,
        lease: Lease | None = None,
    ) -> int:
        return await self.inner.commit(seal(puts), deletes, expect, durable=durable, lease=lease)

    def follow(self) -> Following:
        return _SealedFollowing(self.inner.follow())

    def _log(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key not in self._logged and len(self._logged) < LOGGED_MAX:
                self._logged.add(key)
                log.error("%s", DamagedRecords({key: 0}))


class _SealedFollowing(Following):
    """Changes with plain values. After a damaged one the reader has to read the state anew, as the contract says."""

    def __init__(self, inner: Following) -> None:
        self._inner = inner

    def add(self, prefix: bytes) -> None:
        self._inner.add(prefix)

    def remove(self, prefix: bytes) -> None:
        self._inner.remove(prefix)

    @property
    def is_catching_up_dear(self) -> bool:
        return self._inner.is_catching_up_dear

    def newest(self) -> int:
        return self._inner.newest()

    async def catch_up(self) -> None:
        await self._inner.catch_up()

    async def __anext__(self) -> Change:
        change = await anext(self._inner)
        if change.value is None:
            return change
        try:
            return Change(change.key, _open(change.key, change.value), change.version)
        except _Damaged:
            raise DamagedRecords({change.key: change.version}) from None


# -- readers that go on ------------------------------------------------------------------------------


async def scan_page(
    records: RecordStore, prefix: bytes, after: bytes = b"", limit: int = 1000
) -> tuple[list[Record], list[bytes]]:
    """(sound records, keys of damaged ones) of a page: both together are what `RecordStore.scan` counts."""
    try:
        return await records.scan(prefix, after, limit), []
    except DamagedRecords as error:
        return error.records, list(error.versions)


class ScanPages(AsyncIterator[tuple[list[Record], list[bytes]]]):
    """All pages under ``prefix``, each as of `scan_page`. No generator: a reader may leave in the middle."""

    def __init__(self, records: RecordStore, prefix: bytes, limit: int = 1000, after: bytes = b"") -> None:
        """``after``: begin behind this key."""
        self._records = records
        self._prefix = prefix
        self._limit = limit
        self._after = after

    async def __anext__(self) -> tuple[list[Record], list[bytes]]:
        rows, damaged = await scan_page(self._records, self._prefix, self._after, self._limit)
        if not rows and not damaged:
            raise StopAsyncIteration
        self._after = last_key(rows, damaged)
        return rows, damaged


def last_key(rows: Sequence[Record], damaged: Sequence[bytes]) -> bytes:
    """Of a page that is not empty."""
    return max([row.key for row in rows[-1:]] + [*damaged[-1:]])


async def all_keys(records: RecordStore, prefix: bytes) -> list[bytes]:
    """The keys of all records under ``prefix``, damaged ones too; not in order."""
    keys: list[bytes] = []
    async for rows, damaged in ScanPages(records, prefix):
        keys += [*damaged, *[row.key for row in rows]]
    return keys


async def get_page(records: RecordStore, keys: Sequence[bytes]) -> tuple[list[Versioned | None], dict[bytes, int]]:
    """(rows as of `RecordStore.get`, but None for damaged records; versions of those)"""
    try:
        return await records.get(keys), {}
    except DamagedRecords as error:
        return error.rows, error.versions


async def get_marked(records: RecordStore, keys: Sequence[bytes]) -> list[Versioned | None]:
    """As `RecordStore.get`, with an empty value, which nobody can decode, for each damaged record."""
    rows, damaged = await get_page(records, keys)
    return [Versioned(b"", damaged[key]) if key in damaged else row for key, row in zip(keys, rows, strict=True)]


async def get_sound(records: RecordStore, keys: Sequence[bytes]) -> list[Versioned | None]:
    """As `RecordStore.get`, with damaged records left out as if they were absent. The log names them."""
    return (await get_page(records, keys))[0]


def describe(key: bytes) -> str:
    """A record's key for people."""
    kind = key[:1]
    if not schema.is_key(key):
        return f"key {key!r}"
    if kind == b"d":
        parent, _, name = schema.split_entry_key(key)
        return f"the name {name!r} in directory {parent}"
    if kind in (b"i", b"t", b"o", b"c", b"x", b"j"):
        ino = schema.key_inode(key)
        return {
            b"i": f"inode {ino}",
            b"t": f"the times of directory {ino}",
            b"o": f"the removed inode {ino}",
            b"c": f"chunk {schema.chunk_index(key) if kind == b'c' else 0} of inode {ino}",
            b"x": f"the attribute {schema.xattr_name(key)!r} of inode {ino}",
            b"j": f"the place of inode {ino}",
        }[kind]
    if kind in (b"s", b"l", b"f"):
        what = {b"s": "slab", b"l": "the holder of slab", b"f": "a freed slot of slab"}[kind]
        return f"{what} {schema.key_slab(key)}"
    if kind in (b"k", b"q"):
        return f"{'the sequence' if kind == b'k' else 'the counts'} of client {schema.key_client(key):x}"
    if kind in (b"p", b"u", b"e"):
        return f"the {'settings' if kind == b'p' else 'use'} of namespace {schema.key_inode(key)}"
    if kind == b"n":
        return f"the counter {key[1:].decode(errors='replace')!r}"
    return f"key {key!r}"
