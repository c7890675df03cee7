"""Members of the cluster are killed and stopped under the etcd engine: who is told what, and how long it takes."""

from __future__ import annotations

import random
import signal
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
from cluster_lab import changed, etcd_place, wait_leader
from mounting import stop_process

from kvfuse.errors import EngineTimeout
from kvfuse.remote.records.etcd.calls import ATTEMPT_SHARE
from kvfuse.remote.records.etcd.store import EtcdPlace, EtcdRecords
from kvfuse_cluster.etcd import EtcdServers

pytestmark = pytest.mark.ring(2)

DEADLINE = 5.0
SLACK = 1.0
"""seconds that a busy machine may add to a deadline"""


@pytest.fixture
def cluster(own_etcd: EtcdServers) -> Iterator[EtcdServers]:
    """The cluster of this process, whole again afterwards."""
    yield own_etcd
    heal(own_etcd)


@pytest.fixture
def place(cluster: EtcdServers, tmp_path: Path) -> EtcdPlace:
    return etcd_place(cluster, str(tmp_path), deadline=DEADLINE)


@pytest.fixture
async def store(place: EtcdPlace) -> AsyncIterator[EtcdRecords]:
    store = await EtcdRecords.open(place)
    yield store
    await store.aclose()


def heal(cluster: EtcdServers) -> None:
    for index, member in enumerate(cluster.members):
        cluster.kill(index, signal.SIGCONT)
        if not member.pid:
            member.launch()
    for index in range(len(cluster.members)):
        cluster.wait_ready(index)


def asked_member(cluster: EtcdServers, store: EtcdRecords) -> int:
    """The member that this store's calls go to."""
    return cluster.endpoints.index(store._client.choose().url)


async def elapsed(call: Awaitable[object]) -> float:
    start = trio.current_time()
    await call
    return trio.current_time() - start


# -- one member fails ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_the_leader_fails_and_commits_go_on(cluster: EtcdServers, store: EtcdRecords, number: int) -> None:
    leader = await trio.to_thread.run_sync(wait_leader, cluster)
    failed = trio.Event()
    stalls = []
    last = 0

    async def fail() -> None:
        await trio.to_thread.run_sync(cluster.kill, leader, number)
        failed.set()

    async with trio.open_nursery() as nursery:
        while len(stalls) < 200 or not failed.is_set():
            start = trio.current_time()
            version = await store.commit({b"n": b"%d" % len(stalls)}, expect={b"n": last})
            assert version > last, "refused by an earlier attempt of its own"
            last = version
            stalls.append(trio.current_time() - start)
            if len(stalls) == 20:
                nursery.start_soon(fail)
    print(f"longest stall {max(stalls):.2f} s")
    assert max(stalls) < DEADLINE
    (row,) = await store.get([b"n"])
    assert row == (b"%d" % (len(stalls) - 1), last)


async def test_a_stopped_member_costs_one_attempt_and_is_then_left_alone(
    cluster: EtcdServers, place: EtcdPlace
) -> None:
    """No leader: an election may take longer than an attempt, and than a call."""
    leader = await trio.to_thread.run_sync(wait_leader, cluster)
    store = await EtcdRecords.open(place)
    while asked_member(cluster, store) == leader:  # clients spread at random
        await store.aclose()
        store = await EtcdRecords.open(place)
    await store.commit({b"a": b"1"})
    member = asked_member(cluster, store)
    stop_process(cluster.members[member].pid)
    attempt_seconds = DEADLINE * ATTEMPT_SHARE
    assert await elapsed(store.get([b"a"])) >= attempt_seconds
    assert asked_member(cluster, store) != member
    assert await elapsed(store.get([b"a"])) < attempt_seconds
    await store.aclose()


# -- all members fail ---------------------------------------------------------------------------------


async def test_all_members_stopped_is_an_answer_in_time_and_passes_by_itself(
    cluster: EtcdServers, place: EtcdPlace
) -> None:
    store = await EtcdRecords.open(changed(place, deadline=1.0))
    lease = await store.lease(60)
    await store.commit({b"a": b"1"})
    for index in range(3):
        cluster.kill(index, signal.SIGSTOP)
    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        calls = [store.get([b"a"]), store.scan(b""), store.lease(10), lease.keepalive()]
        calls += [store.commit({b"a": b"2"}) for _ in range(5)]
        for call in calls:
            nursery.start_soon(timed_out, call)
    assert trio.current_time() - start < 1.0 + SLACK
    heal(cluster)
    assert await store.commit({b"b": b"1"})
    assert [row.value for row in await store.get([b"a", b"b"])] in ([b"1", b"1"], [b"2", b"1"])
    assert await lease.keepalive()
    await store.aclose()


async def timed_out(call: Awaitable[object]) -> None:
    with pytest.raises(EngineTimeout):
        await call


async def test_a_store_closes_while_no_member_answers(cluster: EtcdServers, place: EtcdPlace) -> None:
    store = await EtcdRecords.open(place)
    for index in range(3):
        cluster.kill(index, signal.SIGSTOP)
    assert await elapsed(store.aclose()) < 2 + SLACK


# -- watches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_watch_outlives_the_member_it_hears_from(
    cluster: EtcdServers, store: EtcdRecords, place: EtcdPlace, number: int
) -> None:
    other = await EtcdRecords.open(place)
    watch = store.watch(b"")
    seen = []
    hears = trio.Event()

    async def read() -> None:
        while len(seen) < 60:
            seen.append((await anext(watch)).value)
            hears.set()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            for count in range(60):
                await other.commit({b"n": b"%d" % count})
                if count == 20:
                    await hears.wait()
                    member = cluster.endpoints.index(store._feed._stream.endpoint.url)
                    await trio.to_thread.run_sync(cluster.kill, member, number)
    assert seen == [b"%d" % count for count in range(60)], "none lost, none shown twice"
    await other.aclose()


# -- a random schedule --------------------------------------------------------------------------------


@dataclass
class Client:
    """One store, the sole writer of its counter, and what it was told."""

    store: EtcdRecords
    name: bytes
    counter: int = 0
    told: dict[bytes, bool] = field(default_factory=dict)
    """key -> it was done"""
    unknown: set[bytes] = field(default_factory=set)

    async def step(self, number: int, rng: random.Random) -> None:
        key = self.name + b"-%d" % number
        moved = rng.random() < 0.2
        try:
            version = await self.store.commit({key: b"", self.name: key}, expect={self.name: self.counter - moved})
        except EngineTimeout:
            self.unknown.add(key)
            return
        assert (version == 0) is moved, (key, version, self.counter)
        self.told[key] = version > 0
        self.counter = version or self.counter

    async def settle(self) -> None:
        """Learn what became of the last commit: after any commit that returned, it is what it is."""
        while True:
            try:
                await self.store.commit({})
                row, *found = await self.store.get([self.name, *self.unknown])
            except EngineTimeout:
                continue
            self.told |= {key: found_row is not None for key, found_row in zip(self.unknown, found, strict=True)}
            self.unknown.clear()
            self.counter = row.version if row else 0
            return


async def run_client(client: Client, rng: random.Random, done: trio.Event) -> None:
    number = 0
    while not done.is_set():
        await client.step(number, rng)
        if client.unknown:
            await client.settle()
        number += 1


async def disturb(cluster: EtcdServers, rng: random.Random, rounds: int) -> None:
    """Kill and stop members, one or two at a time; the clients' deadline is shorter than what that lasts."""
    for _ in range(rounds):
        await trio.sleep(rng.random() * 0.3)
        for index in rng.sample(range(3), rng.choice([1, 2])):
            number = rng.choice([signal.SIGKILL, signal.SIGSTOP])
            await trio.to_thread.run_sync(cluster.kill, index, number)
        await trio.sleep(rng.random() * 1.5)
        await trio.to_thread.run_sync(heal, cluster)


@pytest.mark.ring(3)
async def test_what_clients_were_told_is_what_the_store_says(
    cluster: EtcdServers, place: EtcdPlace, rng: random.Random
) -> None:
    stores = [await EtcdRecords.open(changed(place, deadline=0.5)) for _ in range(3)]
    clients = [Client(store, b"c%d" % index) for index, store in enumerate(stores)]
    done = trio.Event()
    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(run_client, client, random.Random(rng.random()), done)
        await disturb(cluster, rng, 6)
        done.set()
    for client in clients:
        await client.settle()
        rows = await client.store.get(list(client.told))
        assert [row is not None for row in rows] == list(client.told.values())
    print({client.name: len(client.told) for client in clients})
    for store in stores:
        await store.aclose()
