"""Delays, deadlines and injected faults around either store. Time is trio's autojump clock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
import trio
import trio.testing

from kvfuse.errors import EngineError, EngineTimeout
from kvfuse.remote.faults import Fault, FaultPlan
from kvfuse.remote.records import decorators as record_decorators
from kvfuse.remote.records.lmdb.store import LmdbRecords
from kvfuse.remote.segments import decorators as segment_decorators
from kvfuse.remote.segments.api import Transfer
from kvfuse.remote.segments.file.store import FileSegments

_T = TypeVar("_T")

SIZE = 1 << 16


@pytest.fixture
async def records(tmp_path: Path) -> AsyncIterator[LmdbRecords]:
    store = LmdbRecords.open(tmp_path / "records")
    yield store
    await store.aclose()


@pytest.fixture
async def segments(tmp_path: Path) -> AsyncIterator[FileSegments]:
    store = FileSegments.open(tmp_path / "segments")
    await store.create(1, SIZE)
    yield store
    await store.aclose()


class HangingRecords(record_decorators.RecordDecorator):
    async def around(self, call: Callable[[], Awaitable[_T]], *, commits: bool) -> _T:
        await trio.sleep_forever()
        raise AssertionError


class HangingSegments(segment_decorators.SegmentDecorator):
    async def around(self, call: Callable[[], Awaitable[_T]], *, writes: bool) -> _T:
        await trio.sleep_forever()
        raise AssertionError


async def elapsed(call: Awaitable[object]) -> float:
    start = trio.current_time()
    await call
    return trio.current_time() - start


async def test_delayed_records(records: LmdbRecords, autojump_clock: trio.testing.MockClock) -> None:
    store = record_decorators.Delayed(records, commit_seconds=5, read_seconds=2)
    assert await elapsed(store.commit({b"a": b"1"})) == pytest.approx(5)
    assert await elapsed(store.get([b"a"])) == pytest.approx(2)
    assert await elapsed(store.scan(b"")) == pytest.approx(2)
    assert store.counters is records.counters
    assert records.counters.round_trips == 3


async def test_delayed_commits_keep_their_order(records: LmdbRecords, autojump_clock: trio.testing.MockClock) -> None:
    store = record_decorators.Delayed(records, commit_seconds=5)
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


async def test_delayed_segments(segments: FileSegments, autojump_clock: trio.testing.MockClock) -> None:
    store = segment_decorators.Delayed(segments, write_seconds=5, read_seconds=2)
    assert await elapsed(store.write([Transfer(1, 0, b"data")])) == pytest.approx(5)
    assert await elapsed(store.zero(1, 8, 8)) == pytest.approx(5)
    assert await elapsed(store.sync()) == pytest.approx(5)
    assert await elapsed(store.read([Transfer(1, 0, bytearray(4))])) == pytest.approx(2)
    assert store.counters is segments.counters


async def test_a_deadline_ends_every_hanging_record_call(
    records: LmdbRecords, autojump_clock: trio.testing.MockClock
) -> None:
    store = record_decorators.Deadlined(HangingRecords(records), seconds=3)
    for call in (store.get([b"a"]), store.scan(b""), store.commit({b"a": b""}), store.lease(1)):
        start = trio.current_time()
        with pytest.raises(EngineTimeout, match="3 s"):
            await call
        assert trio.current_time() - start == pytest.approx(3)


async def test_a_deadline_ends_every_hanging_segment_call(
    segments: FileSegments, autojump_clock: trio.testing.MockClock
) -> None:
    store = segment_decorators.Deadlined(HangingSegments(segments), seconds=3)
    transfer = Transfer(1, 0, bytearray(1))
    for call in (
        store.create(2, SIZE),
        store.remove(1),
        store.list(),
        store.read([transfer]),
        store.write([transfer]),
        store.zero(1, 0, 1),
        store.sync(),
    ):
        start = trio.current_time()
        with pytest.raises(EngineTimeout, match="3 s"):
            await call
        assert trio.current_time() - start == pytest.approx(3)


async def test_errors_before_and_after_a_commit(records: LmdbRecords) -> None:
    before = record_decorators.Faulty(records, FaultPlan(seed=1, error_before=1))
    after = record_decorators.Faulty(records, FaultPlan(seed=1, error_after=1))
    torn = record_decorators.Faulty(records, FaultPlan(seed=1, torn=1))
    for store, key in ((before, b"before"), (after, b"after"), (torn, b"torn")):
        with pytest.raises(EngineError):
            await store.commit({key: b"", key + b"2": b""})
    assert [row.key for row in await records.scan(b"")] == [b"after", b"after2"]


async def test_torn_writes_are_parts_of_the_batch(segments: FileSegments, seed: int) -> None:
    """Each transfer is there, absent, or - one at the most - a prefix; in many tries all of these are seen."""
    store = segment_decorators.Faulty(segments, FaultPlan(seed, torn=1))
    kinds: set[str] = set()
    for _ in range(100):
        await segments.zero(1, 0, SIZE)
        with pytest.raises(EngineError):
            await store.write([Transfer(1, index * 1000, b"x" * 1000) for index in range(4)])
        lengths = []
        for index in range(4):
            buffer = bytearray(1000)
            await segments.read([Transfer(1, index * 1000, buffer)])
            assert buffer == buffer.rstrip(b"\0").ljust(1000, b"\0")
            assert set(buffer) <= {0, ord("x")}
            lengths.append(buffer.count(b"x"))
        partial = [length for length in lengths if length not in (0, 1000)]
        assert len(partial) <= 1
        kinds |= {"whole" if length == 1000 else "absent" if length == 0 else "prefix" for length in lengths}
    assert kinds == {"whole", "absent", "prefix"}


async def test_errors_before_and_after_a_segment_call(segments: FileSegments) -> None:
    before = segment_decorators.Faulty(segments, FaultPlan(seed=1, error_before=1))
    after = segment_decorators.Faulty(segments, FaultPlan(seed=1, error_after=1))
    for store, offset in ((before, 0), (after, 10)):
        with pytest.raises(EngineError):
            await store.write([Transfer(1, offset, b"x" * 10)])
        with pytest.raises(EngineError):
            await store.sync()
    buffer = bytearray(20)
    await segments.read([Transfer(1, 0, buffer)])
    assert buffer == bytes(10) + b"x" * 10


async def test_fault_delays(records: LmdbRecords, autojump_clock: trio.testing.MockClock) -> None:
    store = record_decorators.Faulty(records, FaultPlan(seed=1, delay=1, delay_seconds=4))
    assert await elapsed(store.get([b"a"])) == pytest.approx(4)


def test_a_plan_repeats_and_keeps_its_odds(seed: int) -> None:
    def faults() -> list[Fault]:
        plan = FaultPlan(seed, error_before=0.1, error_after=0.2, torn=0.3)
        return [plan.draw() for _ in range(10_000)]

    drawn = faults()
    assert drawn == faults()
    for fault, share in ((Fault.ERROR_BEFORE, 0.1), (Fault.ERROR_AFTER, 0.2), (Fault.TORN, 0.3), (Fault.NONE, 0.4)):
        assert drawn.count(fault) / len(drawn) == pytest.approx(share, abs=0.03)
