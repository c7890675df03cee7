"""Who may use an etcd cluster, options that cannot work, and members that do not answer."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing
from cluster_lab import create_etcd_user, etcd_cluster, etcd_place

from kvfuse.errors import ConfigError, EngineError, EngineTimeout
from kvfuse.options.options import EtcdOptions
from kvfuse.remote.records.etcd.calls import Endpoint, EtcdClient
from kvfuse.remote.records.etcd.store import EtcdPlace, EtcdRecords
from kvfuse_cluster.etcd import EtcdServers, EtcdSettings

pytestmark = pytest.mark.ring(2)

ROOT_PASSWORD = "root's"


@pytest.fixture(scope="module")
def guarded() -> Iterator[EtcdServers]:
    """One member with TLS that asks for certificates and passwords; tenant ``blue`` may use /blue/."""
    with etcd_cluster(1, EtcdSettings(tls=True, root_password=ROOT_PASSWORD)) as servers:
        create_etcd_user(servers, "blue", "blue's", b"/blue/")
        yield servers


# -- users, TLS, options ------------------------------------------------------------------------------


async def test_a_user_of_one_prefix_can_do_everything_there(guarded: EtcdServers) -> None:
    place = etcd_place(guarded, "blue", user="blue", password="blue's")
    store = await EtcdRecords.open(place)
    watch = store.watch(b"")
    lease = await store.lease(30)
    version = await store.commit({b"a": b"1", b"b": b"2"}, [b"c"], lease=lease)
    assert (await store.get([b"a"]))[0].version == version
    assert [row.key for row in await store.scan(b"")] == [b"a", b"b"]
    assert (await anext(watch)).key == b"a"
    assert await lease.keepalive()
    await lease.revoke()
    assert await store.scan(b"") == []
    await store.aclose()


async def test_a_user_of_one_prefix_can_do_nothing_elsewhere(guarded: EtcdServers) -> None:
    with pytest.raises(EngineError, match="user 'blue' needs read and write"):
        await EtcdRecords.open(etcd_place(guarded, "red", user="blue", password="blue's"))


async def test_a_token_that_a_member_forgot_is_replaced(guarded: EtcdServers) -> None:
    place = etcd_place(guarded, "blue", user="blue", password="blue's", deadline=20.0)
    store = await EtcdRecords.open(place)
    lease = await store.lease(30)
    for _ in range(2):
        guarded.kill(0)
        await trio.to_thread.run_sync(guarded.restart, 0)
        assert await lease.keepalive()
        assert await store.commit({b"a": b"1"})
    await store.aclose()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"user": "blue", "password": "red's"}, "invalid user ID or password"),
        ({"user": "", "password": ""}, "records.user"),
        ({"cert_file": None, "key_file": None, "deadline": 1.0}, "did not answer"),
        ({"ca_file": None, "deadline": 1.0}, "CERTIFICATE_VERIFY_FAILED"),
    ],
)
async def test_who_is_not_let_in_is_told_why(guarded: EtcdServers, wrong: dict[str, object], message: str) -> None:
    place = etcd_place(guarded, "blue", **{"user": "blue", "password": "blue's", **wrong})
    with pytest.raises(EngineError, match=message):
        await EtcdRecords.open(place)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"operations_max": 2}, "no room"),
        ({"request_size_max": 4096}, "no room"),
        ({"endpoints": ("https://127.0.0.1:1",), "ca_file": Path("/absent/ca.pem")}, "/absent/ca.pem"),
    ],
)
async def test_options_that_cannot_work_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await EtcdRecords.open(EtcdPlace(EtcdOptions(**{"endpoints": ("http://127.0.0.1:1",), **wrong}), b"/"))


async def test_a_password_is_not_shown() -> None:
    assert "secret" not in repr(EtcdPlace(EtcdOptions(), b"/", "secret"))


# -- endpoints ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", b"SSH-2.0-x\r\n"])
async def test_something_else_than_etcd_is_an_answer_in_time(answer: bytes) -> None:
    async def serve(client: trio.SocketStream) -> None:
        await client.receive_some()
        await client.send_all(answer)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        endpoint = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        start = trio.current_time()
        with pytest.raises(EngineTimeout, match=endpoint):
            await EtcdRecords.open(EtcdPlace(EtcdOptions(endpoints=(endpoint,), deadline=0.5), b"/"))
        assert trio.current_time() - start < 2
        nursery.cancel_scope.cancel()


async def test_a_handshake_without_an_answer_leaves_no_connection() -> None:
    """Without a garbage collection."""
    begun = ended = 0

    async def serve(client: trio.SocketStream) -> None:
        nonlocal begun, ended
        begun += 1
        while await client.receive_some():
            pass
        ended += 1

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        endpoint = f"https://127.0.0.1:{listener.socket.getsockname()[1]}"
        gc.disable()
        try:
            with pytest.raises(EngineTimeout, match=endpoint):
                await EtcdRecords.open(EtcdPlace(EtcdOptions(endpoints=(endpoint,), deadline=0.5), b"/"))
            with trio.fail_after(20):
                while not begun or ended < begun:
                    await trio.lowlevel.checkpoint()
        finally:
            gc.enable()
        nursery.cancel_scope.cancel()


async def test_a_member_that_fails_is_left_alone_for_longer_and_longer(autojump_clock: trio.testing.MockClock) -> None:
    endpoint = Endpoint("http://127.0.0.1:1")
    waits = []
    for _ in range(8):
        for _ in range(10):
            endpoint.failed()  # ten calls at once are one failure
        waits.append(endpoint.shunned_until - trio.current_time())
        await trio.sleep(waits[-1])
    assert all(before * 1.1 < after for before, after in itertools.pairwise(waits[:5]))
    assert max(waits) < 25
    endpoint.answered()
    assert endpoint.shunned_until <= trio.current_time()


async def test_calls_stay_with_a_member_until_it_fails_and_then_go_to_another() -> None:
    client = EtcdClient(EtcdPlace(EtcdOptions(endpoints=("http://a", "http://b", "http://c")), b"/"))
    first = client.choose()
    assert client.choose() is first
    first.failed()
    second = client.choose()
    assert second is not first
    second.failed()
    third = client.choose()
    assert third not in (first, second)
    third.failed()
    assert client.choose() is min((first, second, third), key=lambda endpoint: endpoint.shunned_until)
    await client.aclose()
