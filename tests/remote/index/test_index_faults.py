"""Servers of the index stop, end and forget: calls end in time, and work when the server is back."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing
from cluster_lab import create_etcd_user, etcd_cluster, etcd_place, rados_place
from index_engines import Opener, opener, stoppable_osds
from redis_lab import RedisServer, redis_server

from kvfuse.errors import ConfigError, EngineError, EngineFull, EngineTimeout
from kvfuse.remote.index.api import KEY_SIZE, BlockIndex, Entry
from kvfuse.remote.index.etcd.store import EtcdIndex
from kvfuse.remote.index.omap.store import NoOmap, OmapIndex
from kvfuse.remote.index.redis.store import RedisIndex
from kvfuse_cluster.ceph import CephServers
from kvfuse_cluster.etcd import EtcdSettings

DEADLINE = 1.0
SLACK = 1.5
"""seconds that a busy machine may add to a deadline"""
BACK_SECONDS = 30.0
"""until a server that goes on serves again"""
KEY = b"\0\xff" * 8
ENTRY = Entry(KEY, 1, b"value")


@dataclass
class Stoppable:
    """An engine with servers of its own."""

    open: Opener
    signal: Callable[[int], None]
    """to all of its servers"""


@pytest.fixture(params=["etcd", "rados", "redis"])
def stoppable(request: pytest.FixtureRequest) -> Iterator[Stoppable]:
    if request.param == "etcd":
        with etcd_cluster(1) as etcd:
            place = etcd_place(etcd, "kv", deadline=DEADLINE)
            yield Stoppable(lambda volume: EtcdIndex.open(place), partial(etcd.kill, 0))
    elif request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis")
        yield Stoppable(opener("redis", request, deadline=DEADLINE), server.kill)
        server.kill(signal.SIGCONT)
    else:
        with stoppable_osds(request) as (ceph, send):
            place = rados_place(ceph, "stopped", deadline=DEADLINE)
            yield Stoppable(lambda volume: OmapIndex.open(place, "index", 16), send)


async def works_again(index: BlockIndex) -> None:
    with trio.fail_after(BACK_SECONDS):
        while True:
            try:
                await index.put([ENTRY])
                assert await index.find([KEY]) == [ENTRY]
            except EngineError:
                await trio.sleep(0.05)
            else:
                return


async def test_servers_that_stand_still_cost_a_deadline(stoppable: Stoppable, rng: random.Random) -> None:
    index = await stoppable.open("kv")
    await index.put([ENTRY])
    many = [Entry(rng.randbytes(KEY_SIZE), 1, b"") for _ in range(2000)]
    stoppable.signal(signal.SIGSTOP)
    failed = []

    async def fails(call: Callable[[], Awaitable[object]]) -> None:
        with pytest.raises(EngineTimeout):
            await call()
        failed.append(call)

    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fails, lambda: index.find([KEY]))
        nursery.start_soon(fails, lambda: index.put(many))
        nursery.start_soon(fails, lambda: index.drop([(KEY, 1)]))
        for _ in range(20):
            nursery.start_soon(fails, lambda: index.find([entry.key for entry in many]))
    assert trio.current_time() - start < DEADLINE + SLACK
    assert len(failed) == index.counters.errors == 23
    stoppable.signal(signal.SIGCONT)
    await works_again(index)
    await index.aclose()


async def test_it_closes_while_no_server_answers(stoppable: Stoppable) -> None:
    index = await stoppable.open("kv")
    stoppable.signal(signal.SIGSTOP)
    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_fails, index)
        await trio.testing.wait_all_tasks_blocked()
        await index.aclose()
    assert trio.current_time() - start < DEADLINE + SLACK


async def _fails(index: BlockIndex) -> None:
    with pytest.raises(EngineError):
        await index.put([ENTRY])


# -- etcd ---------------------------------------------------------------------------------------------


@pytest.mark.ring(2)
async def test_an_etcd_that_ended_is_found_again_with_all_entries() -> None:
    with etcd_cluster(1) as servers:
        index = await EtcdIndex.open(etcd_place(servers, "kv", deadline=DEADLINE))
        await index.put([ENTRY])
        servers.kill(0)
        start = trio.current_time()
        with pytest.raises(EngineError):
            await index.find([KEY])
        assert trio.current_time() - start < DEADLINE + SLACK
        await trio.to_thread.run_sync(servers.restart, 0)
        with trio.fail_after(BACK_SECONDS):
            while True:
                try:
                    assert await index.find([KEY]) == [ENTRY]
                except EngineError:
                    continue
                break
        await index.aclose()


@pytest.mark.ring(2)
@pytest.mark.parametrize("operations_max", [3, 16, 128, 1000])
async def test_transactions_keep_to_the_servers_limit(operations_max: int, rng: random.Random) -> None:
    with etcd_cluster(1, EtcdSettings(operations_max=operations_max)) as servers:
        index = await EtcdIndex.open(etcd_place(servers, "kv", operations_max=operations_max, deadline=30.0))
        entries = [Entry(rng.randbytes(KEY_SIZE), 1, bytes(512)) for _ in range(600)]
        assert await index.put(entries) == [None] * 600
        assert await index.find([entry.key for entry in entries]) == entries
        await index.drop([(entry.key, 1) for entry in entries])
        assert await index.find([entry.key for entry in entries]) == [None] * 600
        await index.aclose()


@pytest.mark.ring(2)
async def test_a_user_of_one_volume_has_its_index_and_no_other() -> None:
    with etcd_cluster(1, EtcdSettings(root_password="root's")) as servers:
        create_etcd_user(servers, "blue", "blue's", b"/blue/")
        who = {"user": "blue", "password": "blue's", "deadline": 30.0}
        index = await EtcdIndex.open(etcd_place(servers, "blue", **who))
        await index.put([ENTRY])
        await index.aclose()
        with pytest.raises(EngineError, match="user 'blue' needs read and write"):
            await EtcdIndex.open(etcd_place(servers, "red", **who))


# -- Redis --------------------------------------------------------------------------------------------


@pytest.fixture
async def index(redis: RedisServer, request: pytest.FixtureRequest) -> AsyncIterator[RedisIndex]:
    index = await RedisIndex.open(redis.place(request.node.name))
    yield index
    await index.aclose()


async def test_scripts_that_the_server_forgot_are_sent_again(index: RedisIndex, redis: RedisServer) -> None:
    for _ in range(2):
        await index.put([ENTRY])
        redis.cli("SCRIPT", "FLUSH")
        assert await index.put([ENTRY]) == [ENTRY]
        redis.cli("SCRIPT", "FLUSH")
        await index.drop([(KEY, 1)])
        assert await index.find([KEY]) == [None]
    assert index.counters.errors == 0


async def test_entries_that_the_server_lost_are_absent(index: RedisIndex, redis: RedisServer) -> None:
    await index.put([ENTRY])
    redis.cli("FLUSHALL")
    assert await index.find([KEY]) == [None]
    assert await index.put([ENTRY]) == [None]


async def test_connections_that_the_server_closed_are_made_anew(index: RedisIndex, redis: RedisServer) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(index.find, [KEY])
    redis.cli("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await index.put([ENTRY])
    assert await index.find([KEY]) == [ENTRY]
    assert index.counters.errors == 0


async def test_a_redis_that_ended_is_an_error_at_once_and_is_found_again(index: RedisIndex, redis: RedisServer) -> None:
    await index.put([ENTRY])
    redis.kill()
    try:
        for _ in range(3):
            with pytest.raises(EngineError, match=f"the index at {redis.url}: .*refused"):
                await index.find([KEY])
    finally:
        redis.begin()
    assert await index.find([KEY]) == [None], "it keeps nothing"
    assert await index.put([ENTRY]) == [None]


async def test_a_redis_that_is_full_says_so(index: RedisIndex, redis: RedisServer) -> None:
    redis.cli("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(EngineFull, match="maxmemory-policy"):
            await index.put([ENTRY])
        assert await index.find([KEY]) == [None]
    finally:
        redis.cli("CONFIG", "SET", "maxmemory", "0")


async def test_a_user_of_one_volume_as_the_documentation_makes_it(redis: RedisServer) -> None:
    text = (Path(__file__).parents[3] / "docs" / "engines.md").read_text()
    (words,) = re.findall(r"ACL (SETUSER alice .*)", text)
    redis.cli("ACL", *words.split())
    who = {"user": "alice", "password": "SECRET"}
    index = await RedisIndex.open(redis.place("/kvfuse/alice/index", **who, url=f"{redis.url}/0"))
    redis.cli("SCRIPT", "FLUSH")
    await index.put([ENTRY])
    assert await index.find([KEY]) == [ENTRY]
    await index.drop([(KEY, 1)])
    assert await index.find([KEY]) == [None]
    await index.aclose()
    index = await RedisIndex.open(redis.place("/kvfuse/bob/index", **who))
    with pytest.raises(EngineError, match="NOPERM"):
        await index.find([KEY])
    with pytest.raises(EngineError, match="NOPERM"):
        await index.put([ENTRY])
    await index.aclose()


@pytest.mark.ring(2)
async def test_tls_and_passwords() -> None:
    with redis_server(tls=True, password="hunter2") as server:
        index = await RedisIndex.open(server.place("kv"))
        await index.put([ENTRY])
        assert await index.find([KEY]) == [ENTRY]
        await index.aclose()
        index = await RedisIndex.open(server.place("kv", user="default", url=f"{server.url}/3"))
        assert await index.find([KEY]) == [None], "of another database"
        await index.aclose()
        for wrong, message in (
            ({"password": "wrong"}, "WRONGPASS"),
            ({"password": ""}, "NOAUTH"),
            ({"ca_file": None}, "CERTIFICATE_VERIFY_FAILED"),
            ({"url": f"redis://127.0.0.1:{server.port}", "ca_file": None}, "closed the connection|reset"),
        ):
            index = await RedisIndex.open(server.place("kv", **wrong))
            with pytest.raises(EngineError, match=message) as caught:
                await index.find([KEY])
            await index.aclose()
            assert "hunter2" not in str(caught.value)
        with pytest.raises(ConfigError, match=r"TLS to redis: .*absent\.pem"):
            await RedisIndex.open(server.place("kv", ca_file=server.folder / "absent.pem"))


# -- RADOS --------------------------------------------------------------------------------------------


async def test_a_pool_without_omaps_says_so(ceph: CephServers) -> None:
    ceph.command("osd", "erasure-code-profile", "set", "index", "k=2", "m=1", "crush-failure-domain=osd", as_json=False)
    ceph.command("osd", "pool", "create", "erasure", "8", "8", "erasure", "index", as_json=False)
    ceph.command("osd", "pool", "set", "erasure", "allow_ec_overwrites", "true", as_json=False)
    place = replace(rados_place(ceph, "kv", deadline=30.0), pool="erasure")
    with pytest.raises(NoOmap, match=r"RADOS pool erasure, namespace kv: the pool has no omaps"):
        await OmapIndex.open(place, "index", 16)


async def test_races_are_lost_by_one_host_at_a_time(ceph: CephServers, rng: random.Random) -> None:
    """All hosts put the same keys, in one object: in each round of trips one of them gets on."""
    place = rados_place(ceph, "races", deadline=30.0)
    hosts = [await OmapIndex.open(place, "index", 1) for _ in range(5)]
    keys = [rng.randbytes(KEY_SIZE) for _ in range(50)]
    replaced: list[Entry] = []

    async def put(host: OmapIndex, number: int) -> None:
        for turn in range(5):
            value = b"%d %d" % (number, turn)
            replaced.extend(filter(None, await host.put([Entry(key, 1, value) for key in keys])))

    async with trio.open_nursery() as nursery:
        for number, host in enumerate(hosts):
            nursery.start_soon(put, host, number)
    last = await hosts[0].find(keys)
    assert len({*replaced, *last}) == 25 * len(keys), "each entry was replaced once, or is there"
    assert len(replaced) == 24 * len(keys)
    for host in hosts:
        await host.aclose()
