"""What every record store promises of watches, leases, its end and its counters."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing
from record_engines import Reopen, content, opened

from kvfuse.errors import EngineError
from kvfuse.remote.records.api import ABSENT, Change, RecordStore


async def test_a_watch_shows_later_changes_in_commit_order(store: RecordStore) -> None:
    await store.commit({b"p1": b"before"})
    watch = store.watch(b"p")
    for number in range(3):
        await store.commit({b"p%d" % number: b"%d" % number, b"q": b"hidden"})
    await store.commit({}, [b"p1", b"pabsent"])
    rows = await store.get([b"p0", b"p1", b"p2"])
    seen = [await anext(watch) for _ in range(4)]
    assert [(change.key, change.value) for change in seen] == [
        (b"p0", b"0"),
        (b"p1", b"1"),
        (b"p2", b"2"),
        (b"p1", None),
    ]
    assert (seen[0].version, seen[2].version) == (rows[0].version, rows[2].version)
    assert [change.version for change in seen] == sorted(change.version for change in seen)


async def test_a_watch_wakes_its_reader_and_ends_with_the_store(opener: Reopen) -> None:
    seen: list[Change] = []
    all_seen = trio.Event()

    async def read(watch: AsyncIterator[Change]) -> None:
        async for change in watch:
            seen.append(change)
            if len(seen) == 3:
                all_seen.set()

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery, opened(opener) as store:
            nursery.start_soon(read, store.watch(b""))
            nursery.start_soon(read, store.watch(b"a"))
            await trio.testing.wait_all_tasks_blocked()
            await store.commit({b"a": b"1"})
            await store.commit({b"b": b"1"})
            await all_seen.wait()
    assert sorted(change.key for change in seen) == [b"a", b"a", b"b"]


async def test_a_cancelled_wait_for_a_change_loses_none(store: RecordStore) -> None:
    watch = store.watch(b"p")
    for number in range(5):
        with trio.move_on_after(0.02):
            await anext(watch)
            raise AssertionError("nothing had changed")
        await store.commit({b"p%d" % number: b""})
        assert (await anext(watch)).key == b"p%d" % number


async def test_a_refused_commit_is_not_watched(store: RecordStore) -> None:
    watch = store.watch(b"")
    await store.commit({b"a": b"1"}, expect={b"a": 77})
    await store.commit({b"b": b"1"})
    assert (await anext(watch)).key == b"b"


async def test_a_watch_of_a_closed_store_has_ended(opener: Reopen) -> None:
    async with opened(opener) as store:
        pass
    assert [change async for change in store.watch(b"")] == []


async def test_a_following_shows_what_was_added_and_nothing_of_what_was_removed(store: RecordStore) -> None:
    following = store.follow()
    following.add(b"a")
    following.add(b"bb")
    following.add(b"a")
    await store.commit({b"a": b"1", b"b": b"1", b"bb": b"1", b"c": b"1"})
    following.add(b"c")
    seen = sorted([(await anext(following)).key for _ in range(2)])
    assert seen == [b"a", b"bb"]
    following.remove(b"a")
    following.remove(b"never added")
    await store.commit({b"a": b"2"})
    await store.commit({b"c": b"2"})
    while (change := await anext(following)).key == b"a":  # shown or not: it may have been on its way
        pass
    assert (change.key, change.value) == (b"c", b"2")


async def test_a_prefix_that_joins_misses_nothing_that_a_later_read_has_not(store: RecordStore) -> None:
    following = store.follow()
    for number in range(20):
        key = b"p%d" % number
        following.add(key)
        (row,) = await store.get([key])
        assert row is None
        version = await store.commit({key: b"new"})
        assert await anext(following) == Change(key, b"new", version)


async def test_caught_up_means_that_the_reader_has_come_back_for_the_next(store: RecordStore) -> None:
    following = store.follow()
    following.add(b"p")
    seen: list[bytes] = []
    may_go_on = trio.Event()

    async def read() -> None:
        async for change in following:
            await may_go_on.wait()
            seen.append(change.key)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await following.catch_up()
            for number in range(3):
                await store.commit({b"p%d" % number: b"", b"q": b""})
            with trio.move_on_after(0.2) as waited:
                await following.catch_up()
            assert waited.cancelled_caught
            may_go_on.set()
            await following.catch_up()
            assert seen == [b"p0", b"p1", b"p2"]
            nursery.cancel_scope.cancel()


async def test_nobody_catches_up_with_a_store_that_is_closed(opener: Reopen) -> None:
    async with opened(opener) as store:
        following = store.follow()
        following.add(b"p")
    with pytest.raises(EngineError), trio.fail_after(30):
        await following.catch_up()


async def test_a_lease_lives_until_it_is_revoked(store: RecordStore) -> None:
    lease = await store.lease(30)
    assert lease.ttl == 30
    assert await lease.keepalive()
    await lease.revoke()
    await lease.revoke()
    assert not await lease.keepalive()


async def test_a_lease_takes_the_records_put_under_it_along(store: RecordStore) -> None:
    lease, other = await store.lease(30), await store.lease(30)
    await store.commit({b"a": b"1", b"again": b"1", b"other": b"1", b"gone": b"1"}, lease=lease)
    await store.commit({b"plain": b"1", b"again": b"2"}, [b"gone"])
    await store.commit({b"other": b"2"}, lease=other)
    watch = store.watch(b"")
    await lease.revoke()
    assert await content(store) == {b"plain": b"1", b"again": b"2", b"other": b"2"}
    change = await anext(watch)
    assert (change.key, change.value) == (b"a", None)
    await other.revoke()
    assert await content(store) == {b"plain": b"1", b"again": b"2"}


async def test_a_commit_under_a_lease_that_is_gone_is_refused(store: RecordStore) -> None:
    lease = await store.lease(30)
    await lease.revoke()
    assert await store.commit({b"a": b"1"}, lease=lease) == 0
    assert await content(store) == {}
    assert await store.commit({b"a": b"1"})


async def test_a_lease_of_another_store_is_no_lease(opener: Reopen) -> None:
    async with opened(opener) as first:
        lease = await first.lease(30)
    async with opened(opener) as second:
        with pytest.raises(ValueError):
            await second.commit({b"a": b"1"}, lease=lease)


async def test_a_lease_goes_on_with_whoever_knows_its_identity(opener: Reopen) -> None:
    async with opened(opener) as first:
        lease = await first.lease(30)
        await first.commit({b"a": b"1", b"b": b"1"}, lease=lease)
    async with opened(opener) as second:
        again = await second.resume_lease(lease.identity)
        if not lease.identity:
            assert again is None, "only its own process has it"
            return
        assert again is not None
        assert (again.ttl, again.identity) == (30, lease.identity)
        assert await again.keepalive()
        await second.commit({b"b": b"2"})
        await second.commit({b"c": b"1"}, lease=again)
        assert await content(second) == {b"a": b"1", b"b": b"2", b"c": b"1"}
        await again.revoke()
        assert await content(second) == {b"b": b"2"}
        assert await second.resume_lease(lease.identity) is None
        assert await second.commit({b"a": b"1"}, lease=again) == 0


@pytest.mark.parametrize("identity", [b"", b"\0" * 8, b"\x7f" + b"\xff" * 7, b"no lease at all"])
async def test_an_identity_that_names_no_lease_resumes_none(store: RecordStore, identity: bytes) -> None:
    assert await store.resume_lease(identity) is None


async def test_close_finishes_what_is_in_flight(opener: Reopen) -> None:
    store = await opener()
    results: list[int] = []

    async def put(number: int, *, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()  # and the call begins before anybody else runs
        results.append(await store.commit({b"%d" % number: b""}))

    async with trio.open_nursery() as nursery:
        for number in range(5):
            await nursery.start(put, number)
        await store.aclose()
        await store.aclose()
    assert results == sorted(set(results)) != [0]
    assert len(results) == 5
    with pytest.raises(EngineError):
        await store.commit({b"late": b""})
    with pytest.raises(EngineError):
        await store.get([b"0"])
    async with opened(opener) as again:
        assert len(await again.scan(b"")) == 5


async def test_counters_count_what_was_asked(store: RecordStore) -> None:
    await store.get([b"a", b"b"])
    await store.scan(b"")
    await store.commit({b"a": b"", b"b": b""}, [b"c"], {b"a": ABSENT})
    await store.commit({b"a": b""}, expect={b"a": ABSENT})
    counters = store.counters
    assert (counters.gets, counters.scans, counters.commits, counters.conflicts) == (1, 1, 2, 1)
    assert counters.commit_operations == 6
    assert counters.round_trips == 4
