"""Followings of the etcd engine: prefixes that come and go, streams that end, members that fail."""

from __future__ import annotations

import random
import signal
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
from cluster_lab import changed, compact, etcd_place
from test_etcd_faults import heal

from kvfuse.errors import EngineError, EngineTimeout
from kvfuse.remote.records.api import Following
from kvfuse.remote.records.etcd import watch as etcd_watch
from kvfuse.remote.records.etcd.store import EtcdPlace, EtcdRecords
from kvfuse_cluster.etcd import EtcdServers

pytestmark = pytest.mark.ring(2)

PREFIXES = [b"%c/" % letter for letter in b"abcdefgh"]
DEADLINE = 10.0


@pytest.fixture
def place(own_etcd: EtcdServers, tmp_path: Path) -> EtcdPlace:
    return etcd_place(own_etcd, str(tmp_path), deadline=DEADLINE)


@pytest.fixture(params=["old", "new"])
async def store(
    place: EtcdPlace, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[EtcdRecords]:
    """With members that do not answer for their progress in order, and with members that do."""
    store = await EtcdRecords.open(place)
    if request.param == "old":
        monkeypatch.setattr(etcd_watch, "_has_progress", lambda version: False)
    elif not etcd_watch._has_progress(await store._client.version(store._client.choose())):
        await store.aclose()
        pytest.skip("the members' version is an old one")
    yield store
    await store.aclose()


@pytest.fixture
async def other(place: EtcdPlace) -> AsyncIterator[EtcdRecords]:
    store = await EtcdRecords.open(place)
    yield store
    await store.aclose()


def prefix_of(key: bytes) -> bytes:
    return key[:2]


@dataclass
class Model:
    """What was committed, and what a following was shown."""

    store: EtcdRecords
    """of the following"""
    following: Following
    committed: dict[bytes, int] = field(default_factory=dict)
    """key -> version of its last change"""
    shown: dict[bytes, int] = field(default_factory=dict)
    since: dict[bytes, int] = field(default_factory=dict)
    """prefix that is followed -> version after which all is shown"""
    ever: set[bytes] = field(default_factory=set)
    heard: dict[bytes, list[int]] = field(default_factory=lambda: defaultdict(list))
    """prefix -> versions, in their order"""

    async def read(self) -> None:
        async for change in self.following:
            assert prefix_of(change.key) in self.ever
            self.heard[prefix_of(change.key)].append(change.version)
            self.shown[change.key] = change.version

    def add(self, prefix: bytes) -> None:
        self.following.add(prefix)
        self.ever.add(prefix)
        self.since.setdefault(prefix, self.store._client.revision)

    def remove(self, prefix: bytes) -> None:
        self.following.remove(prefix)
        self.since.pop(prefix, None)

    async def write(self, store: EtcdRecords, rng: random.Random) -> None:
        while True:
            keys = [rng.choice(PREFIXES) + b"%d" % rng.randrange(5) for _ in range(rng.randint(1, 4))]
            deletes = {key for key in keys if rng.random() < 0.3}
            present = {key for key, row in zip(deletes, await store.get(list(deletes)), strict=True) if row}
            try:
                version = await store.commit(dict.fromkeys({*keys} - deletes, b""), present)
            except EngineError:
                continue
            self.committed |= dict.fromkeys(({*keys} - deletes) | present, version)

    async def check(self) -> None:
        expected = {
            key: version for key, version in self.committed.items() if version > self.since.get(prefix_of(key), 1 << 62)
        }
        await self.following.catch_up()
        late = {key: version for key, version in expected.items() if self.shown.get(key, 0) < version}
        assert not {key for key in late if prefix_of(key) in self.since}


async def test_after_catching_up_all_that_was_committed_was_shown(
    store: EtcdRecords, other: EtcdRecords, rng: random.Random
) -> None:
    model = Model(store, store.follow())
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(model.read)
            nursery.start_soon(model.write, other, rng)  # the only writer: it knows the last change of each key
            for _ in range(150):
                (model.add if rng.random() < 0.6 else model.remove)(rng.choice(PREFIXES))
                if rng.random() < 0.1 and store._feed._stream is not None:
                    store._feed._stream.connection.close()
                if rng.random() < 0.3:
                    await model.check()
                await trio.sleep(rng.random() * 0.01)
            await model.check()
            nursery.cancel_scope.cancel()
    for versions in model.heard.values():
        assert versions == sorted(versions)
    assert sum(map(len, model.heard.values())) > 50


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_every_prefix_goes_on_where_it_was_when_a_member_fails(
    store: EtcdRecords, other: EtcdRecords, own_etcd: EtcdServers, rng: random.Random, number: int
) -> None:
    model = Model(store, store.follow())
    for prefix in PREFIXES[::2]:
        model.add(prefix)
    with trio.fail_after(100):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(model.read)
            await model.check()
            nursery.start_soon(model.write, other, rng)
            assert store._feed._stream is not None
            member = own_etcd.endpoints.index(store._feed._stream.endpoint.url)
            await trio.to_thread.run_sync(own_etcd.kill, member, number)
            while True:
                try:
                    await model.check()
                except EngineError:
                    continue
                break
            await trio.to_thread.run_sync(heal, own_etcd)
            await model.check()
            nursery.cancel_scope.cancel()
    for prefix, versions in model.heard.items():
        assert prefix in PREFIXES[::2]
        assert versions == sorted(versions)


async def test_catching_up_while_no_member_answers_is_an_error_in_time(
    store: EtcdRecords, place: EtcdPlace, own_etcd: EtcdServers
) -> None:
    away = await EtcdRecords.open(changed(place, deadline=1.0))
    model = Model(away, away.follow())
    model.add(b"a/")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(model.read)
        await model.following.catch_up()
        for index in range(3):
            own_etcd.kill(index, signal.SIGSTOP)
        start = trio.current_time()
        with pytest.raises(EngineTimeout):
            await model.following.catch_up()
        assert trio.current_time() - start < 2.5
        await trio.to_thread.run_sync(heal, own_etcd)
        await model.following.catch_up()
        nursery.cancel_scope.cancel()
    await away.aclose()


async def test_a_member_spends_nothing_on_what_is_not_followed(
    store: EtcdRecords, other: EtcdRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    following = store.follow()
    following.add(b"a/")
    taken: list[bytes] = []
    take = store._feed._take

    def counted(stream: etcd_watch._Stream, message: bytes) -> None:
        taken.append(message)
        take(stream, message)

    monkeypatch.setattr(store._feed, "_take", counted)
    await other.commit({b"a/0": b""})
    assert (await anext(following)).key == b"a/0"
    before = len(taken)
    for number in range(50):
        await other.commit({b"b/%d" % number: b""})
    await other.commit({b"a/1": b""})
    assert (await anext(following)).key == b"a/1"
    assert len(taken) - before == 1


async def test_what_was_removed_costs_a_member_nothing_and_may_come_back(
    store: EtcdRecords, other: EtcdRecords
) -> None:
    following = store.follow()
    async with trio.open_nursery() as nursery:
        seen: list[bytes] = []

        async def read() -> None:
            async for change in following:
                seen.append(change.key)

        nursery.start_soon(read)
        for turn in range(3):
            for prefix in PREFIXES:
                following.add(prefix)
            await following.catch_up()
            for prefix in PREFIXES:
                following.remove(prefix)
            assert not store._feed._watchers
            await other.commit({b"a/%d" % turn: b""})
        following.add(b"a/")
        await store.get([b"a/0"])
        await other.commit({b"a/last": b""})
        await following.catch_up()
        assert seen[-1] == b"a/last"
        nursery.cancel_scope.cancel()


async def test_history_that_is_gone_fails_those_that_need_it(
    store: EtcdRecords, other: EtcdRecords, own_etcd: EtcdServers
) -> None:
    late, fresh = store.follow(), store.follow()
    late.add(b"a/")
    await other.commit({b"a/0": b""})
    await other.commit({b"a/1": b""})
    await trio.to_thread.run_sync(compact, own_etcd)
    await store.get([b"a/1"])
    if store._feed._stream is None:
        fresh.add(b"b/")
    with pytest.raises(EngineError, match="no longer kept: read the state anew"):
        await anext(late)
    with pytest.raises(EngineError, match="read the state anew"):
        await late.catch_up()
    again = store.follow()
    again.add(b"a/")
    await other.commit({b"a/2": b""})
    assert (await anext(again)).key == b"a/2"
