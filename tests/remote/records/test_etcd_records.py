"""What only the etcd engine promises: outcomes that are settled, leases that end, watches, limits."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from cluster_lab import changed, compact, etcd_place
from lossy_proxy import lossy_proxy

from kvfuse.errors import EngineError, EngineTimeout
from kvfuse.options.options import EtcdOptions
from kvfuse.remote.records import backlog
from kvfuse.remote.records.api import Change
from kvfuse.remote.records.etcd import messages
from kvfuse.remote.records.etcd import store as etcd_engine
from kvfuse.remote.records.etcd.calls import ATTEMPT_SHARE, KV_RANGE, EtcdClient
from kvfuse.remote.records.etcd.store import EtcdPlace, EtcdRecords
from kvfuse_cluster.etcd import EtcdServers

pytestmark = pytest.mark.ring(2)

DEADLINE = 1.5
SLOW = 0.25
"""of a deadline"""


@pytest.fixture
def place(own_etcd: EtcdServers, tmp_path: Path) -> EtcdPlace:
    return etcd_place(own_etcd, str(tmp_path))


@pytest.fixture
async def store(place: EtcdPlace) -> AsyncIterator[EtcdRecords]:
    store = await EtcdRecords.open(place)
    yield store
    await store.aclose()


async def keys_under(place: EtcdPlace, prefix: bytes) -> list[bytes]:
    """Raw keys, the engine's own included."""
    client = EtcdClient(place)
    asked = messages.get(prefix, messages.prefix_end(prefix), keys_only=True)
    answer = await client.call(KV_RANGE, asked, messages.RangeAnswer.parse, trio.current_time() + 10)
    await client.aclose()
    return [kv.key for kv in answer.kvs]


@pytest.mark.parametrize(("prefix", "end"), [(b"a", b"b"), (b"/t/", b"/t0"), (b"a\xff", b"b")])
def test_the_end_of_a_prefix(prefix: bytes, end: bytes) -> None:
    assert messages.prefix_end(prefix) == end


# -- outcomes -----------------------------------------------------------------------------------------


async def test_lost_answers_lost_requests_and_late_requests_change_no_outcome(
    own_etcd: EtcdServers, tmp_path: Path, rng: random.Random
) -> None:
    """Every commit puts a key of its own and moves a counter, so one that is done twice, or later, shows."""
    async with lossy_proxy(own_etcd.endpoints[0], rng) as proxy:
        place = EtcdPlace(EtcdOptions(endpoints=(proxy.endpoint,), deadline=0.25), f"/{tmp_path}/".encode())
        store = await open_at_last(place)
        judge = await EtcdRecords.open(changed(place, endpoints=own_etcd.endpoints, deadline=30.0))
        versions = {b"done": 0, b"refused": 0, b"unknown": 0}
        counter = 0
        unknown: dict[bytes, bool] = {}
        for number in range(80):
            key = b"%d" % number
            moved = rng.random() < 0.3
            proxy.loss = rng.choice([0.0, 0.5, 0.9])
            try:
                version = await store.commit({key: b"", b"counter": key}, expect={b"counter": counter - moved})
            except EngineTimeout:
                proxy.loss = 0.0
                await settle(store)
                (row,) = await judge.get([key])
                unknown[key] = row is not None
                versions[b"unknown"] += 1
                assert row is None or not moved
                counter = row.version if row else counter
            else:
                assert (version == 0) is moved, "refused by its own earlier attempt, or done against what it expected"
                counter = version or counter
                versions[b"refused" if moved else b"done"] += 1
            await proxy.deliver_late()
            (row,) = await judge.get([b"counter"])
            assert (row.version if row else 0) == counter, "a commit was applied after its outcome was told"
        print(versions, proxy.fates)
        assert all(versions.values())
        assert all(proxy.fates.values())
        present = await judge.get(list(unknown))
        assert [row is not None for row in present] == list(unknown.values())
        await store.aclose()
        await judge.aclose()


async def open_at_last(place: EtcdPlace) -> EtcdRecords:
    """A busy machine may take longer than the deadline."""
    while True:
        try:
            return await EtcdRecords.open(place)
        except EngineTimeout:
            continue


async def settle(store: EtcdRecords) -> None:
    """After any commit that returned, the one before is done or never will be."""
    while True:
        try:
            await store.commit({})
        except EngineTimeout:
            continue
        return


async def test_a_cluster_that_is_only_slow_is_waited_for(place: EtcdPlace, rng: random.Random) -> None:
    """Its members answer, but when one of a healthy cluster would have been given up."""
    async with lossy_proxy(place.options.endpoints[0], rng) as proxy:
        store = await EtcdRecords.open(changed(place, endpoints=(proxy.endpoint,), deadline=DEADLINE))
        proxy.delay = DEADLINE * SLOW
        failures = 0
        for number in range(8):
            try:
                assert await store.commit({b"slow%d" % number: b"1"})
            except EngineTimeout:
                failures += 1
        assert failures <= 1, "then it is known to be slow"
        proxy.delay = 0.0
        for number in range(10):
            assert await store.commit({b"quick%d" % number: b"1"})
        assert store._client._patience == DEADLINE * ATTEMPT_SHARE
        await store.aclose()


async def test_a_cancelled_commit_is_settled_before_the_next(
    own_etcd: EtcdServers, tmp_path: Path, rng: random.Random
) -> None:
    async with lossy_proxy(own_etcd.endpoints[0], rng) as proxy:
        store = await EtcdRecords.open(EtcdPlace(EtcdOptions(endpoints=(proxy.endpoint,)), f"/{tmp_path}/".encode()))
        seen = set()
        for number in range(60):
            with trio.move_on_after(rng.choice([0.0, rng.random() * 0.01, 0.1])):
                await store.commit({b"k": b"%d" % number})
            last = await store.commit({b"other": b""})
            (row,) = await store.get([b"k"])
            assert row is None or row.version < last
            seen.add(row is not None and row.value == b"%d" % number)
        assert seen == {True, False}
        await store.aclose()


async def test_a_store_whose_own_lease_was_taken_goes_on(store: EtcdRecords) -> None:
    assert store._marker is not None
    first = await store.commit({b"a": b"1"})
    await store.revoke(store._marker.lease_id)
    with pytest.raises(EngineError, match="own lease"):
        await store.commit({b"a": b"2"}, expect={b"a": first})
    second = await store.commit({b"a": b"2"}, expect={b"a": first})
    assert second > first
    assert await store.commit({b"a": b"3"}, expect={b"a": first}) == 0


async def test_a_store_that_was_idle_for_hours_gets_a_new_marker(store: EtcdRecords) -> None:
    first = store._marker
    assert first is not None
    first.renewed_at -= 3600
    assert await store.commit({b"a": b"1"})
    assert store._marker is first, "its lease was alive and is renewed"
    first.renewed_at -= 3600
    await store.revoke(first.lease_id)
    assert await store.commit({b"a": b"2"})
    assert store._marker is not first


async def test_a_closed_store_leaves_its_records_and_nothing_else(place: EtcdPlace) -> None:
    store = await EtcdRecords.open(place)
    await store.commit({b"a": b"1"})
    assert len(await keys_under(place, place.prefix)) == 2
    await store.aclose()
    assert await keys_under(place, place.prefix) == [place.prefix + b"r/a"]


async def test_the_stated_limits_are_those_of_the_members(store: EtcdRecords, rng: random.Random) -> None:
    """As many operations with as many bytes as a commit may have, half of them expectations, then all of them puts."""
    limits = store.limits
    for put_count in (limits.commit_operations_max // 2, limits.commit_operations_max):
        keys = [rng.randbytes(limits.key_size_max) for _ in range(limits.commit_operations_max)]
        expect = dict.fromkeys(keys[put_count:], 0)
        value_size = (limits.commit_bytes_max - sum(map(len, keys))) // put_count
        puts = {key: rng.randbytes(value_size) for key in keys[:put_count]}
        assert await store.commit(puts, expect=expect)
    with pytest.raises(EngineError, match="too many operations"):
        larger = changed(store._client.place, operations_max=200)
        other = await EtcdRecords.open(larger)
        try:
            await other.commit({b"%d" % number: b"" for number in range(198)})
        finally:
            await other.aclose()


# -- many keys, many rows -----------------------------------------------------------------------------


async def test_more_keys_than_an_answer_holds_are_read_at_one_revision(store: EtcdRecords) -> None:
    keys = [b"%04d" % number for number in range(3 * store.limits.commit_operations_max)]
    halves = keys[:100], keys[-100:]
    done = trio.Event()

    async def write() -> None:
        for number in range(20):
            await store.commit(dict.fromkeys(halves[0][:50] + halves[1][:50], b"%d" % number))
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        while not done.is_set():
            rows = await store.get(keys)
            assert len({row and row.version for row in rows[:50] + rows[-100:-50]}) == 1
    assert store.counters.gets >= 4


async def test_a_long_scan_comes_in_pages(store: EtcdRecords, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_engine, "SCAN_PAGE", 7)
    keys = [b"k%03d" % number for number in range(50)]
    await store.commit(dict.fromkeys(keys, b"v"))
    assert [row.key for row in await store.scan(b"k", limit=1000)] == keys
    assert [row.key for row in await store.scan(b"k", keys[3], limit=20)] == keys[4:24]
    assert store.counters.scans == 8 + 3


# -- leases -------------------------------------------------------------------------------------------


async def test_a_lease_that_is_not_renewed_ends_and_takes_its_records_along(place: EtcdPlace) -> None:
    """The cluster judges: the lease that is renewed outlives one that began later and is not."""
    store, other = await EtcdRecords.open(place), await EtcdRecords.open(place)
    kept, left = await store.lease(2), await store.lease(2)
    fence = await store.commit({b"kept": b"", b"own": b""}, lease=kept)
    await store.commit({b"left": b""}, lease=left)
    watch = other.watch(b"left")
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_renewing, kept)
            while (change := await anext(watch)).value is not None:
                pass  # it may show the put before
            nursery.cancel_scope.cancel()
    assert change.key == b"left"
    assert [row.key for row in await other.scan(b"")] == [b"kept", b"own"]
    assert not await left.keepalive()
    assert await store.commit({b"left": b""}, lease=left) == 0
    assert await store.commit({b"done": b""}, expect={b"kept": fence}, lease=kept)
    await store.aclose()
    await other.aclose()


async def keep_renewing(lease: etcd_engine.EtcdLease) -> None:
    while True:
        assert await lease.keepalive()
        await trio.sleep(lease.ttl / 4)


async def test_who_lost_its_lease_commits_nothing_that_expects_its_record(place: EtcdPlace) -> None:
    """The fence: another takes over by removing the client's record, or the lease's end does."""
    client, other = await EtcdRecords.open(place), await EtcdRecords.open(place)
    lease = await client.lease(30)
    alive = await client.commit({b"client": b""}, lease=lease)
    assert await client.commit({b"slab": b"1"}, expect={b"client": alive})
    assert await other.commit({b"slab": b"other's"}, [b"client"])
    assert await client.commit({b"slab": b"2"}, expect={b"client": alive}) == 0
    assert (await other.get([b"slab"]))[0].value == b"other's"
    await client.aclose()
    await other.aclose()


# -- watches ------------------------------------------------------------------------------------------


async def test_a_watch_shows_what_other_stores_commit(place: EtcdPlace) -> None:
    first, second = await EtcdRecords.open(place), await EtcdRecords.open(place)
    watch = first.watch(b"p")
    version = await second.commit({b"p1": b"1", b"q": b""})
    assert await anext(watch) == (b"p1", b"1", version)
    await first.aclose()
    await second.aclose()


async def test_a_watch_that_missed_a_compaction_says_so(store: EtcdRecords, own_etcd: EtcdServers) -> None:
    watch = store.watch(b"")
    await store.commit({b"a": b"1"})
    await store.commit({b"a": b"2"})
    await trio.to_thread.run_sync(compact, own_etcd)
    for _ in range(2):
        with pytest.raises(EngineError, match="anew"):
            await anext(watch)
    fresh = store.watch(b"")
    await store.commit({b"a": b"3"})
    assert (await anext(fresh)).value == b"3"


async def test_a_watch_that_is_read_passes_over_a_compaction(store: EtcdRecords, own_etcd: EtcdServers) -> None:
    watch = store.watch(b"")
    await store.commit({b"a": b"1"})
    assert (await anext(watch)).value == b"1"
    await trio.to_thread.run_sync(compact, own_etcd)
    await store.commit({b"a": b"2"})
    assert (await anext(watch)).value == b"2"


async def test_all_watches_of_a_store_share_one_stream(
    place: EtcdPlace, own_etcd: EtcdServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever of their readers goes, another reads on: nothing is lost, and nobody waits for what came."""
    store, other = await EtcdRecords.open(place), await EtcdRecords.open(place)
    streams = 0
    stream = store._client.stream

    async def counted(*arguments: Any) -> Any:
        nonlocal streams
        streams += 1
        return await stream(*arguments)

    monkeypatch.setattr(store._client, "stream", counted)
    seen: dict[bytes, list[bytes]] = {prefix: [] for prefix in (b"", b"a", b"b", b"c")}

    async def read(prefix: bytes, watch: AsyncIterator[Change], count: int) -> None:
        for _ in range(count):
            seen[prefix].append((await anext(watch)).key)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            for prefix in (b"c", b"a", b"b", b""):  # the first one to wait reads for all, and hears of nothing
                nursery.start_soon(read, prefix, store.watch(prefix), 6 if prefix == b"" else 3)
                await trio.testing.wait_all_tasks_blocked()
            for name in (b"a", b"b", b"c"):
                for number in range(2):
                    await other.commit({b"%b%d" % (name, number): b""})
            while sum(map(len, seen.values())) < 12:
                await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.cancel_scope.cancel()
    assert [len(keys) for keys in seen.values()] == [6, 2, 2, 2]
    assert seen[b""] == [b"a0", b"a1", b"b0", b"b1", b"c0", b"c1"]
    assert streams == 1
    await store.aclose()
    await other.aclose()


async def test_another_reads_on_where_the_reader_of_all_watches_is_cancelled(place: EtcdPlace) -> None:
    store, other = await EtcdRecords.open(place), await EtcdRecords.open(place)
    watches = [store.watch(b"") for _ in range(3)]
    seen: list[bytes] = []

    async def read(watch: AsyncIterator[Change]) -> None:
        seen.append((await anext(watch)).key)

    with trio.fail_after(30):
        async with trio.open_nursery() as staying:
            async with trio.open_nursery() as going:
                going.start_soon(read, watches[0])
                await trio.testing.wait_all_tasks_blocked()
                for watch in watches[1:]:
                    staying.start_soon(read, watch)
                await trio.testing.wait_all_tasks_blocked()
                going.cancel_scope.cancel()
            await other.commit({b"key": b""})
    assert seen == [b"key", b"key"]
    assert (await anext(watches[0])).key == b"key"
    await store.aclose()
    await other.aclose()


async def test_a_watch_whose_reader_stays_away_says_so(store: EtcdRecords, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "BACKLOG_MAX", 2)
    away, read = store.watch(b""), store.watch(b"")
    for number in range(3):
        await store.commit({b"%d" % number: b""})
        await anext(read)
    with pytest.raises(EngineError, match="2 changes behind: read the state anew"):
        await anext(away)
    fresh = store.watch(b"")
    await store.commit({b"later": b""})
    assert (await anext(fresh)).key == (await anext(read)).key == b"later"
