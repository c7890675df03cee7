"""Reads of a shared store: they share round trips, survive who cancels, and fail at once while the store is away."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence

import pytest
import trio
import trio.testing
from volume_lab import Chaos, Delay, Disk, MemoryRecords, lab_options

from kvfuse.errors import EngineError
from kvfuse.remote.records.api import RecordStore, Versioned
from kvfuse.remote.records.decorators import RecordDecorator
from kvfuse.volume.store.joined_reads import ASKS_MAX, CALLS_MAX, SharedRecords


def make(deadline: float = 1.0) -> tuple[SharedRecords, Chaos]:
    chaos = Chaos(random.Random(0), deadline=deadline)
    return SharedRecords(MemoryRecords(Disk.format(lab_options(), shared=True), chaos)), chaos


async def test_reads_that_wait_share_one_call(autojump_clock: trio.testing.MockClock) -> None:
    records, chaos = make()
    for number in range(100):
        await records.commit({b"k%d" % number: b"%d" % number})
    chaos.stalled = trio.Event()
    found: dict[int, bytes] = {}

    async def ask(number: int) -> None:
        row, absent = await records.get([b"k%d" % number, b"absent"])
        assert row is not None
        assert absent is None
        found[number] = row.value

    async with trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(ask, number)
        await trio.testing.wait_all_tasks_blocked()
        chaos.stalled.set()
    assert found == {number: b"%d" % number for number in range(100)}
    assert records.counters.gets <= CALLS_MAX + 2


async def test_a_reader_that_is_cancelled_takes_no_other_along(autojump_clock: trio.testing.MockClock) -> None:
    records, chaos = make()
    await records.commit({b"key": b"value"})
    chaos.stalled = trio.Event()
    answered = 0

    async def ask() -> None:
        nonlocal answered
        (row,) = await records.get([b"key"])
        assert row is not None
        answered += 1

    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as cancelled:
            for _ in range(CALLS_MAX + 3):
                cancelled.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(10):
                nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            cancelled.cancel_scope.cancel()
        chaos.stalled.set()
    assert answered == 10


async def test_a_store_that_is_away_fails_at_once_and_comes_back(autojump_clock: trio.testing.MockClock) -> None:
    records, chaos = make()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(records.run)
        chaos.cut = trio.Event()
        with pytest.raises(EngineError):
            await records.get([b"key"])
        begun = trio.current_time()
        for _ in range(100):
            with pytest.raises(EngineError, match="not reachable"):
                await records.get([b"key"])
        assert trio.current_time() == begun
        assert not records._news  # of which more and more would be kept as long as the error is
        chaos.cut.set()
        await trio.sleep(5)
        assert await records.get([b"key"]) == [None]
        nursery.cancel_scope.cancel()


async def test_commits_of_our_own_are_known_also_before_they_return(autojump_clock: trio.testing.MockClock) -> None:
    records, chaos = make()
    theirs = await records.inner.commit({b"key": b"theirs"})
    assert not await records.is_own(theirs)
    chaos.delay = 1.0
    changes = records.watch(b"")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(records.commit, {b"key": b"ours"})
        async for change in changes:
            assert await records.is_own(change.version)
            break


async def overtaken(
    records: SharedRecords, chaos: Chaos, change: Callable[[], Awaitable[object]]
) -> list[bytes | None]:
    """What an answer says that ``change`` overtook."""
    chaos.late = late = Delay(b"key")
    found: list[bytes | None] = []

    async def ask() -> None:
        found.extend([row and row.value for row in await records.get([b"other", b"key"])])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await late.given.wait()
        await change()
        late.arrives.set()
    return found


@pytest.mark.parametrize("before", [b"old", None])
@pytest.mark.parametrize("after", [b"new", None])
async def test_an_answer_that_news_overtook_is_not_told(
    autojump_clock: trio.testing.MockClock, before: bytes | None, after: bytes | None
) -> None:
    """Those of the watch, of our own commits, or none because there was no watch for a while."""
    for news in ("watch", "own", "lost"):
        records, chaos = make()
        if before is not None:
            await records.commit({b"key": before})

        async def change(records: SharedRecords = records, news: str = news) -> None:
            store = records if news == "own" else records.inner
            puts, deletes = ({b"key": after}, []) if after is not None else ({}, [b"key"])
            version = await store.commit(puts, deletes)
            if news == "watch":
                records.heard([b"key"], version, is_present=after is not None)
            elif news == "lost":
                records.lost_track()

        assert await overtaken(records, chaos, change) == [None, after]
        expected = 1 if (news, before, after) in {("watch", None, None), ("own", None, None)} else 2
        assert records.counters.gets == expected


async def test_older_news_than_an_answer_are_no_reason_to_ask_again(autojump_clock: trio.testing.MockClock) -> None:
    records, chaos = make()
    first = await records.commit({b"key": b"first"})
    second = await records.commit({b"key": b"second"})

    async def hear() -> None:
        for version in (second, first):
            records.heard([b"key"], version, is_present=True)
        records.heard([b"tkey"], second + 1, is_present=True)

    assert await overtaken(records, chaos, hear) == [None, b"second"]
    assert records.counters.gets == 1


class Overtaken(RecordDecorator):
    """Whatever is asked for another host changes, and the watch tells it before the answer comes: so many times."""

    def __init__(self, inner: RecordStore, count: int) -> None:
        super().__init__(inner)
        self.outer = SharedRecords(self)
        self.count = count

    async def get(self, keys: Sequence[bytes]) -> list[Versioned | None]:
        rows = await self.inner.get(keys)
        if self.count:
            self.count -= 1
            self.outer.heard(keys, await self.inner.commit(dict.fromkeys(keys, b"value")), is_present=True)
        return rows


async def test_records_that_change_before_every_answer(autojump_clock: trio.testing.MockClock) -> None:
    """Nobody waits for ever; who gets an answer gets the newest."""
    inner = make()[0].inner
    (row,) = await Overtaken(inner, ASKS_MAX - 1).outer.get([b"key"])
    assert row is not None
    assert [row] == await inner.get([b"key"])
    with pytest.raises(EngineError, match="changed before each of"):
        await Overtaken(inner, ASKS_MAX).outer.get([b"key"])
