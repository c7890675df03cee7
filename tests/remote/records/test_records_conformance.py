"""The contract of ``kvfuse/remote/records/api.py``, sentence by sentence, for every engine and decorator.

``record_engines`` has the engines; watches and leases are in ``test_records_watches``.
"""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing
from record_engines import Reopen, content, opened

from kvfuse.remote.records.api import ABSENT, RecordStore


async def values(store: RecordStore, *keys: bytes) -> list[bytes | None]:
    return [None if row is None else row.value for row in await store.get(keys)]


# -- get, versions, commit ----------------------------------------------------------------------------


async def test_get_answers_in_the_order_of_the_keys(store: RecordStore) -> None:
    await store.commit({b"a": b"1", b"b": b"", b"c": b"3" * 10_000})
    assert await values(store, b"c", b"absent", b"a", b"b", b"a") == [b"3" * 10_000, None, b"1", b"", b"1"]
    assert await store.get([]) == []


async def test_a_version_is_positive_and_grows_with_each_put(store: RecordStore) -> None:
    seen = [ABSENT]
    for value in (b"1", b"1", b"2"):
        assert await store.commit({b"k": value})
        seen.append((await store.get([b"k"]))[0].version)
        await store.commit({b"other": value})
    await store.commit({}, [b"k"])
    await store.commit({b"k": b"3"})
    seen.append((await store.get([b"k"]))[0].version)
    assert seen == sorted(set(seen))
    assert (await store.scan(b"k"))[0].version == seen[-1]


async def test_a_commit_answers_the_version_of_all_its_puts(store: RecordStore) -> None:
    first = await store.commit({b"a": b"1", b"b": b"1"})
    second = await store.commit({b"b": b"2"}, [b"c"], {b"a": first})
    assert 0 < first < second
    a, b = await store.get([b"a", b"b"])
    assert (a.version, b.version) == (first, second)


async def test_a_put_of_another_key_leaves_the_version(store: RecordStore) -> None:
    await store.commit({b"k": b"1"})
    before = await store.get([b"k"])
    await store.commit({b"j": b"1"}, [b"l"])
    assert await store.get([b"k"]) == before


async def test_a_commit_that_meets_its_expectations_is_applied(store: RecordStore) -> None:
    await store.commit({b"a": b"1", b"b": b"1"})
    a, b = await store.get([b"a", b"b"])
    assert await store.commit({b"a": b"2"}, [b"b"], {b"a": a.version, b"b": b.version, b"c": ABSENT})
    assert await content(store) == {b"a": b"2"}


@pytest.mark.parametrize("moved", [b"present", b"deleted", b"created"])
async def test_a_moved_version_refuses_the_whole_commit(store: RecordStore, moved: bytes) -> None:
    await store.commit({b"present": b"1", b"deleted": b"1", b"victim": b"1"})
    rows = dict(zip((b"present", b"deleted"), await store.get([b"present", b"deleted"]), strict=True))
    expect = {key: row.version for key, row in rows.items()} | {b"created": ABSENT}
    await store.commit({} if moved == b"deleted" else {moved: b"2"}, [b"deleted"] if moved == b"deleted" else [])
    before = await content(store)
    assert await store.commit({b"new": b"x", b"present": b"x"}, [b"victim"], expect) == 0
    assert await content(store) == before
    assert store.counters.conflicts == 1


async def test_expectations_alone_are_only_checked(store: RecordStore) -> None:
    await store.commit({b"a": b"1"})
    (row,) = await store.get([b"a"])
    assert await store.commit({}, expect={b"a": row.version})
    assert not await store.commit({}, expect={b"a": row.version + 1})
    assert not await store.commit({}, expect={b"a": ABSENT})
    assert await store.get([b"a"]) == [row]


async def test_deleting_an_absent_key_is_no_error(store: RecordStore) -> None:
    assert await store.commit({b"a": b"1"}, [b"absent"])
    assert await store.commit({}, [b"absent"], durable=True)
    assert await content(store) == {b"a": b"1"}


async def test_an_empty_commit_succeeds(store: RecordStore) -> None:
    assert await store.commit({})
    assert await store.commit({}, durable=True)


async def test_keys_are_bytes_ordered_as_bytes(store: RecordStore) -> None:
    keys = [b"\x00", b"\x00\x00", b"\x01", b"a", b"a\x00", b"ab", b"b", b"\xfe\xff", b"\xff", b"\xff\xff"]
    await store.commit(dict.fromkeys(reversed(keys), b"v"))
    assert [row.key for row in await store.scan(b"")] == keys


# -- limits -------------------------------------------------------------------------------------------


async def test_the_largest_of_everything_is_taken(store: RecordStore) -> None:
    limits = store.limits
    key = b"k" * limits.key_size_max
    value = random.Random(1).randbytes(limits.value_size_max)
    assert await store.commit({key: value})
    assert await values(store, key) == [value]
    operations = {b"%d" % i: b"" for i in range(limits.commit_operations_max)}
    assert await store.commit(operations)
    assert len(await store.scan(b"", limit=1_000_000)) == limits.commit_operations_max + 1


@pytest.mark.parametrize("what", ["empty key", "long key", "long value", "operations", "bytes", "put and deleted"])
async def test_a_commit_over_a_limit_does_nothing(store: RecordStore, what: str) -> None:
    limits = store.limits
    large = bytes(limits.value_size_max)
    puts = {
        "empty key": {b"": b""},
        "long key": {b"k" * (limits.key_size_max + 1): b""},
        "long value": {b"k": large + b"1"},
        "operations": {b"%d" % i: b"" for i in range(limits.commit_operations_max)},
        "bytes": {b"%d" % i: large for i in range(limits.commit_bytes_max // len(large) + 1)},
        "put and deleted": {b"gone": b""},
    }[what]
    await store.commit({b"gone": b"1"})
    with pytest.raises(ValueError):
        await store.commit(puts, [b"gone"])
    assert await content(store) == {b"gone": b"1"}


@pytest.mark.parametrize("size", [0, 1])
async def test_a_key_of_no_possible_size_is_refused_everywhere(store: RecordStore, size: int) -> None:
    key = b"k" * (store.limits.key_size_max + 1) * size
    with pytest.raises(ValueError):
        await store.get([b"a", key])
    with pytest.raises(ValueError):
        await store.commit({}, [key])
    with pytest.raises(ValueError):
        await store.commit({}, expect={key: ABSENT})


# -- scan ---------------------------------------------------------------------------------------------


async def test_scan_shows_a_prefix_in_order(store: RecordStore) -> None:
    await store.commit({b"a": b"0", b"p": b"1", b"p\x00": b"2", b"pq": b"3", b"p\xff": b"4", b"q": b"5"})
    assert [row.value for row in await store.scan(b"p")] == [b"1", b"2", b"3", b"4"]
    assert await store.scan(b"zzz") == []
    assert await store.scan(b"p" * store.limits.key_size_max) == []


async def test_seek_finds_the_first_under_each_prefix(store: RecordStore) -> None:
    await store.commit({b"a": b"0", b"p1": b"1", b"p2": b"2", b"q": b"5"})
    wanted = [b"p2", b"p", b"x", b"q", b"p0", b"a"]
    assert await store.seek(wanted) == [(await store.scan(prefix, limit=1) or [None])[0] for prefix in wanted]
    assert [row and row.value for row in await store.seek(wanted)] == [b"2", b"1", None, b"5", None, b"0"]
    assert await store.seek([]) == []


async def test_scan_resumes_after_a_key_present_or_not(store: RecordStore) -> None:
    await store.commit({b"p%d" % i: b"" for i in range(0, 10, 2)} | {b"o": b"", b"q": b""})

    async def after(key: bytes) -> list[bytes]:
        return [row.key for row in await store.scan(b"p", key)]

    assert await after(b"p4") == [b"p6", b"p8"]
    assert await after(b"p5") == [b"p6", b"p8"]
    assert await after(b"p8") == []
    assert await after(b"a") == await after(b"p") == await after(b"") == [b"p0", b"p2", b"p4", b"p6", b"p8"]
    assert await after(b"z") == []


async def test_scan_resumes_after_the_longest_key(store: RecordStore) -> None:
    longest = b"p" * store.limits.key_size_max
    await store.commit({longest: b"1", b"q": b"2"})
    assert [row.key for row in await store.scan(b"", longest)] == [b"q"]


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6])
async def test_fewer_rows_than_the_limit_mean_the_end(store: RecordStore, limit: int) -> None:
    keys = [b"k%d" % i for i in range(5)]
    await store.commit(dict.fromkeys(keys, b"v"))
    seen: list[bytes] = []
    while True:
        rows = await store.scan(b"k", seen[-1] if seen else b"", limit)
        seen += [row.key for row in rows]
        assert len(rows) <= limit
        if len(rows) < limit:
            break
    assert seen == keys


# -- concurrency --------------------------------------------------------------------------------------


async def test_concurrent_increments_lose_nothing(store: RecordStore) -> None:
    async def increment(times: int) -> None:
        while times:
            (row,) = await store.get([b"n"])
            value, version = (0, ABSENT) if row is None else (int(row.value), row.version)
            times -= bool(await store.commit({b"n": b"%d" % (value + 1)}, expect={b"n": version}))

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(increment, 10)
    assert await values(store, b"n") == [b"80"]


async def test_commits_are_applied_in_the_order_of_the_calls(store: RecordStore) -> None:
    called: list[int] = []

    async def put(number: int) -> None:
        called.append(number)
        await store.commit({b"last": b"%d" % number, b"%d" % number: b""})

    async with trio.open_nursery() as nursery:
        for number in range(30):
            nursery.start_soon(put, number)
    rows = await store.get([b"%d" % number for number in called])
    versions = [row.version for row in rows]
    assert versions == sorted(set(versions))
    assert await values(store, b"last") == [b"%d" % called[-1]]


async def test_a_read_sees_a_commit_wholly_or_not_at_all(store: RecordStore) -> None:
    keys = [b"%04d" % i for i in range(min(2000, store.limits.commit_operations_max))]
    done = trio.Event()
    mixed: list[set[bytes]] = []
    rounds = 0

    async def read() -> None:
        nonlocal rounds
        while not done.is_set():
            got = {row.value for row in await store.get(keys) if row}
            scanned = {row.value for row in await store.scan(b"", limit=5000)}
            rounds += 1
            mixed.extend(seen for seen in (got, scanned) if len(seen) > 1)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        for number in range(10):
            await store.commit(dict.fromkeys(keys, b"%d" % number))
            assert await values(store, keys[0], keys[-1]) == [b"%d" % number] * 2
        done.set()
    assert rounds > 1
    assert mixed == []


@pytest.mark.parametrize("checkpoints", range(6))
@pytest.mark.parametrize("waiting", [False, True], ids=["alone", "in a queue"])
async def test_a_cancelled_commit_is_whole_or_absent(store: RecordStore, checkpoints: int, waiting: bool) -> None:
    keys = [b"%d" % i for i in range(min(1500, store.limits.commit_operations_max))]
    scope = trio.CancelScope()

    async def commit() -> None:
        with scope:
            await store.commit(dict.fromkeys(keys, b"v"), durable=True)

    async with trio.open_nursery() as nursery:
        if waiting:
            nursery.start_soon(store.commit, {b"other": b"v"})
            await trio.lowlevel.checkpoint()
        nursery.start_soon(commit)
        for _ in range(checkpoints):
            await trio.lowlevel.checkpoint()
        scope.cancel()
    found = len(await store.scan(b"", limit=5000)) - waiting
    assert found in (0, len(keys))
    assert await store.commit({b"after": b"v"}), "a cancelled commit left the store unusable"


async def test_a_cancelled_read_has_no_effect(store: RecordStore) -> None:
    await store.commit({b"a": b"1"})
    for read in (lambda: store.get([b"a"]), lambda: store.scan(b"")):
        with trio.CancelScope() as scope:
            scope.cancel()
            await read()
    assert await values(store, b"a") == [b"1"]


async def test_arguments_belong_to_the_caller_again_after_the_call_began(store: RecordStore) -> None:
    puts = {b"a": b"1"}

    async def commit(puts: dict[bytes, bytes], *, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()  # and the call begins before anybody else runs
        await store.commit(puts)

    async with trio.open_nursery() as nursery:
        await nursery.start(commit, {b"first": b""})
        await nursery.start(commit, puts)
        puts[b"a"] = b"2"
        puts[b"b"] = b"2"
    assert await content(store) == {b"first": b"", b"a": b"1"}


# -- durability (what a running test can see of it) ---------------------------------------------------


@pytest.mark.parametrize("durable", [False, True])
async def test_commits_outlive_the_store(opener: Reopen, durable: bool) -> None:
    async with opened(opener) as store:
        await store.commit({b"a": b"1", b"b": b"2"}, durable=durable)
        await store.commit({}, [b"b"], durable=durable)
        (before,) = await store.get([b"a"])
    async with opened(opener) as store:
        assert await store.get([b"a", b"b"]) == [before, None]
        assert await store.commit({b"a": b"3"}, expect={b"a": before.version})
        assert (await store.get([b"a"]))[0].version > before.version


# -- against a plain model ----------------------------------------------------------------------------


async def test_the_store_equals_a_dict_after_every_step(opener: Reopen, rng: random.Random) -> None:
    keys = [rng.randbytes(rng.randint(1, 3)) for _ in range(40)]
    model: dict[bytes, bytes] = {}
    versions: dict[bytes, int] = {}
    store = await opener()
    for _ in range(100 if store.limits.shared else 400):
        puts = {key: rng.randbytes(rng.choice([0, 1, 100, 5000])) for key in rng.sample(keys, 3)}
        deletes = [key for key in rng.sample(keys, 3) if key not in puts]
        expect = {key: versions.get(key, ABSENT) for key in rng.sample(keys, rng.randint(0, 3))}
        stale = bool(expect) and rng.random() < 0.3
        if stale:
            expect[rng.choice(list(expect))] += rng.choice([1, 1000])
        version = await store.commit(puts, deletes, expect, durable=rng.random() < 0.05)
        assert (version == 0) is stale
        if not stale:
            model.update(puts)
            for key in deletes:
                model.pop(key, None)
        if rng.random() < 0.05:
            await store.aclose()
            store = await opener()
        rows = await store.scan(b"")
        assert [(row.key, row.value) for row in rows] == sorted(model.items())
        assert await values(store, *keys) == [model.get(key) for key in keys]
        for row in rows:
            grew = row.version > versions.get(row.key, ABSENT)
            assert grew if (row.key in puts and not stale) else row.version == versions[row.key]
            assert row.version == version or row.key not in puts or stale
        versions = {row.key: row.version for row in rows}
        prefix, after, limit = rng.choice(keys)[:1], rng.choice(keys), rng.randint(1, 5)
        expected = [key for key in sorted(model) if key.startswith(prefix) and key > after][:limit]
        assert [row.key for row in await store.scan(prefix, after, limit)] == expected
    await store.aclose()
