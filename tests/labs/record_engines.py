"""The engines and decorators of record stores, on which tests of their contract run.

An engine joins with one line in ENGINES: a function that opens its store for a directory that is
empty, or holds what an earlier store of the same test left there. For etcd the directory names a part of the keys.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from kvfuse.remote.records import decorators
from kvfuse.remote.records.api import RecordStore
from kvfuse.remote.records.lmdb.store import LmdbRecords

Opener = Callable[[Path], Awaitable[RecordStore]]
Reopen = Callable[[], Awaitable[RecordStore]]


async def lmdb(path: Path) -> LmdbRecords:
    return LmdbRecords.open(path)


def decorated(decorate: Callable[[RecordStore], RecordStore]) -> Opener:
    """An engine that is lmdb inside."""

    async def open_decorated(path: Path) -> RecordStore:
        return decorate(LmdbRecords.open(path))

    return open_decorated


ENGINES: dict[str, Opener | None] = {
    "lmdb": lmdb,
    "passing": decorated(decorators.RecordDecorator),
    "delayed": decorated(lambda store: decorators.Delayed(store, 1e-4)),
    "etcd": None,
}
"""name -> what opens it; None: needs a cluster"""


@asynccontextmanager
async def opened(opener: Reopen) -> AsyncIterator[RecordStore]:
    store = await opener()
    try:
        yield store
    finally:
        await store.aclose()


async def content(store: RecordStore) -> dict[bytes, bytes]:
    return {key: value for key, value, _ in await store.scan(b"", limit=1_000_000)}
