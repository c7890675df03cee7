"""A delay around a record store. Time is trio's autojump clock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest
import trio
import trio.testing

from kvfuse.remote.records.decorators import Delayed
from kvfuse.remote.records.lmdb.store import LmdbRecords


@pytest.fixture
async def records(tmp_path: Path) -> AsyncIterator[LmdbRecords]:
    store = LmdbRecords.open(tmp_path / "records")
    yield store
    await store.aclose()


async def elapsed(call: Awaitable[object]) -> float:
    start = trio.current_time()
    await call
    return trio.current_time() - start


async def test_commits_alone_are_delayed(records: LmdbRecords, autojump_clock: trio.testing.MockClock) -> None:
    store = Delayed(records, 5)
    assert await elapsed(store.commit({b"a": b"1"})) == pytest.approx(5)
    assert await elapsed(store.get([b"a"])) == pytest.approx(0)
    assert await elapsed(store.scan(b"")) == pytest.approx(0)
    assert store.counters is records.counters
    assert records.counters.round_trips == 3


async def test_delayed_commits_keep_their_order(records: LmdbRecords, autojump_clock: trio.testing.MockClock) -> None:
    store = Delayed(records, 5)
    called: list[bytes] = []

    async def put(value: bytes) -> None:
        called.append(value)
        await store.commit({b"last": value})

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(put, b"%d" % number)
    (row,) = await records.get([b"last"])
    assert row is not None
    assert row.value == called[-1]
