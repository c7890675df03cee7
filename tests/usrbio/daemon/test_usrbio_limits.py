"""How much a user may have registered, through all its connections, and what a connection may hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from errno import EDQUOT, EINVAL
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mounting import KvfuseMount, temporary_mount, wait_until
from posix_calls import GROUP, USER, as_user
from ring_lab import RawClient, stats, wait_for_rings

from kvfuse.access import namespace_handle
from kvfuse.access.client_process import ClientProcess
from kvfuse.access.namespace_handle import Group, NamespaceHandle, Remembered
from kvfuse.errors import Disconnected, QuotaExceeded
from kvfuse.options.options import UsrbioOptions
from kvfuse.usrbio.client import connect
from kvfuse.usrbio.daemon.call_memory import Share, SharedPool, UnderWay
from kvfuse.usrbio.daemon.client_registry import ClientRegistry
from kvfuse.usrbio.daemon.pins import NUMBER_MAX, Pinned, Pins
from kvfuse.usrbio.daemon.user_accounts import UserAccounts
from kvfuse.usrbio.protocol.wire import Request
from kvfuse.volume.tier.shared_tier import ReadClass, SharedTier, TierBlock

KIB = 1 << 10
LIMITS = {"user_connections": 3, "user_rings": 2, "user_files": 4, "user_iov_size": 64 * KIB}
WORDS = ("allow_other", "volume.capacity=64MiB", "volume.segment_size=64MiB", *(f"{k}={v}" for k, v in LIMITS.items()))
OTHER = USER + 1


@pytest.fixture(scope="module")
def one_mount() -> Iterator[KvfuseMount]:
    with temporary_mount(WORDS) as mount:
        wait_for_rings(mount)
        (mount.point / "folder").mkdir()
        (mount.point / "file").write_bytes(b"data")
        yield mount


@pytest.fixture
def mount(one_mount: KvfuseMount) -> Iterator[KvfuseMount]:
    """The module's, and nobody has anything of it: neither the tests before, nor this one at its end."""
    yield one_mount
    kinds = ("connections", "files", "iovs", "namespaces", "rings")
    wait_until(lambda: not any(stats(one_mount)["rings"][kind] for kind in kinds), "the end of the clients")


def as_client(mount: KvfuseMount, uid: int) -> RawClient:
    with as_user(uid, GROUP):
        return RawClient(mount.point)


def add_ring(client: RawClient, mount: Path) -> int:
    ring = client.ring(8, 0)
    ring.close()
    return ring.handle


def add_file(client: RawClient, mount: Path) -> int:
    descriptor = os.open(mount / "file", os.O_RDONLY)
    try:
        return client.handle(Request.ADD_FILE, 1, descriptors=[descriptor])
    finally:
        os.close(descriptor)


def add_namespace(client: RawClient, mount: Path) -> int:
    descriptor = os.open(mount / "folder", os.O_RDONLY)
    try:
        return client.handle(Request.OPEN_NAMESPACE, 0o644, descriptors=[descriptor])
    finally:
        os.close(descriptor)


def add_iov(client: RawClient, mount: Path) -> int:
    handle, descriptor = client.iov(32 * KIB)
    os.close(descriptor)
    return handle


KINDS: list[tuple[Callable[[RawClient, Path], int], Request, int]] = [
    (add_ring, Request.DROP_RING, 2),
    (add_file, Request.DROP_FILE, 4),
    (add_namespace, Request.CLOSE_NAMESPACE, 4),
    (add_iov, Request.DROP_IOV, 2),
]


@pytest.mark.root
@pytest.mark.parametrize(("add", "drop", "count"), KINDS, ids=["rings", "files", "namespaces", "iovs"])
def test_a_user_has_so_much_through_all_its_connections(
    mount: KvfuseMount, add: Callable[[RawClient, Path], int], drop: Request, count: int
) -> None:
    with as_client(mount, USER) as one, as_client(mount, USER) as two, as_client(mount, OTHER) as other:
        handles = [add(one, mount.point) for _ in range(count - 1)]
        add(two, mount.point)
        for client in (one, two):
            with pytest.raises(OSError, match=rf"user {USER} .* usrbio\.user_") as caught:
                add(client, mount.point)
            assert caught.value.errno == EDQUOT
        add(other, mount.point)
        assert one.error(drop, handles[0]) == 0
        add(two, mount.point)
    with as_client(mount, USER) as again:
        wait_until(lambda: stats(mount)["rings"]["connections"] == 1, "the end of the others")
        for _ in range(count):
            add(again, mount.point)


@pytest.mark.root
def test_what_was_refused_counts_for_nothing(mount: KvfuseMount) -> None:
    with as_client(mount, USER) as client:
        for _ in range(5):
            assert client.error(Request.ADD_RING, 3, 0) == EINVAL
            with open(mount.point / "file") as file:
                assert client.error(Request.OPEN_NAMESPACE, 0o644, descriptors=[file.fileno()]) != 0
            with open(os.devnull) as null:
                assert client.error(Request.ADD_IOV, 32 * KIB, descriptors=[null.fileno()]) == EINVAL
        for add, drop, count in KINDS:
            handles = [add(client, mount.point) for _ in range(count)]
            assert [client.error(drop, handle) for handle in handles] == [0] * count


@pytest.mark.root
def test_a_user_has_so_many_connections(mount: KvfuseMount) -> None:
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(as_client(mount, USER))
        with as_user(USER, GROUP), pytest.raises(Disconnected):
            connect(mount.point)
        stack.enter_context(as_client(mount, OTHER))
    wait_until(lambda: stats(mount)["rings"]["connections"] == 0, "the end of the connections")
    as_client(mount, USER).socket.close()
    assert "usrbio.user_connections is 3" in mount.log.read_text()


@pytest.mark.root
def test_root_may_have_what_the_daemon_can_hold(mount: KvfuseMount) -> None:
    with RawClient(mount.point) as client:
        for add, _, count in KINDS:
            for _ in range(count + 1):
                add(client, mount.point)


def test_an_account_is_of_all_connections_and_ends_with_them() -> None:
    accounts = UserAccounts(UsrbioOptions(user_files=2))
    peer = ClientProcess(1, os.geteuid() + 1, 0, frozenset())
    one, two = accounts.open(peer), accounts.open(peer)
    one.take("user_files")
    with pytest.raises(ZeroDivisionError), two.taking("user_files"):
        raise ZeroDivisionError
    two.take("user_files")
    with pytest.raises(QuotaExceeded, match="asks for 1 more than the 2 it has"):
        one.take("user_files")
    two.close()
    one.take("user_files")
    del one, two
    assert not accounts._users


# -- pins -------------------------------------------------------------------------------------------


def block() -> TierBlock:
    made = SharedTier(64 * KIB).allocate(4096, ReadClass(1, 0, 0, 0o444))
    assert made is not None
    return made


def test_a_pin_fits_a_completion_for_ever() -> None:
    """A busy client has had four thousand million of them after a day."""
    held = Pins(3, Pinned(64 * KIB))
    first = held.take(block())
    held._last = NUMBER_MAX - 1
    assert [held.take(block()), held.take(block())] == [NUMBER_MAX, first + 1]
    assert held.take(block()) == 0, "three are held"
    held.give(first)
    assert held.take(block()) not in (0, NUMBER_MAX, first + 1)


# -- keys -------------------------------------------------------------------------------------------


def test_a_connection_remembers_so_many_keys_however_many_namespaces_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace_handle, "BINDINGS_MAX", 10)
    together = Remembered()
    namespaces = [NamespaceHandle(number, 0o644, Group(0), remembered=together) for number in range(8)]
    meaning: Any = object()
    for number in range(100):
        namespace = namespaces[number % 7]
        for _ in range(2):
            namespace.remember(b"%d" % number, meaning)
        assert namespace.bindings[b"%d" % number] is meaning
        assert together.count == sum(len(other.bindings) for other in namespaces) <= 10


# -- parts of what all have together ----------------------------------------------------------------


def test_a_user_takes_no_more_than_it_leaves_to_others() -> None:
    pool = SharedPool(1000)
    taken = dict.fromkeys("abcd", 0)
    for user in taken:
        while pool.take(10, user):
            taken[user] += 10
    assert taken == {"a": 500, "b": 250, "c": 120, "d": 60}
    assert pool.take(70, "e"), "one that has nothing may take what is left"
    assert not pool.take(10, "f")
    pool.give(500, "a")
    assert pool.take(10, "d")
    assert pool.take(490), "one without a limit"
    assert not pool.free


def test_a_user_has_few_calls_under_way_and_hears_when_more_may_begin() -> None:
    calls, woken = UnderWay(1000, user_max=8), list[str]()

    def wakes(name: str) -> Callable[[], None]:
        return lambda: woken.append(name)

    first, second, gone = wakes("first"), wakes("second"), wakes("gone")
    assert calls.take(7, "a", first)
    assert calls.take(100, "a", first), "the last one may be heavy"
    for wake in (first, second, gone, first):
        assert not calls.take(1, "a", wake)
    assert calls.take(8, "b", wakes("of another user"))
    assert calls.take(10_000, None), "one without a limit"
    calls.forget("a", gone)
    calls.give(100, "a")
    assert woken == [], "only one more may begin: that is not worth to wake a ring"
    calls.give(3, "a")
    assert woken == ["first"]
    calls.give(4, "a")
    assert woken == ["first", "second"]
    assert not calls._waiting
    calls.give(8, "b")
    assert not calls._held


def test_calls_under_way_of_a_user_hold_no_more_than_half_of_the_tier() -> None:
    """Their blocks cannot be evicted. Beyond it a put has other memory."""
    tier, pool = SharedTier(64 * KIB), SharedPool(1000 * KIB)
    shares = [Share(pool, user) for user in "aab"]
    peer, limits = ClientProcess(1, 1, 1, frozenset()), SimpleNamespace(volume=SimpleNamespace(tier=tier))
    first, again, other = (SimpleNamespace(share=share, _peer=peer, _limits=limits) for share in shares)
    namespace, held = NamespaceHandle(1, 0o600, Group(1)), list[TierBlock | None]()

    def put(connection: Any) -> bool:
        assert connection.share.take(4 * KIB)
        held.append(ClientRegistry.allocate(connection, namespace, 4 * KIB))
        return held[-1] is not None

    assert [put(connection) for connection in [first, again] * 6] == [True] * 8 + [False] * 4
    assert put(other)
    shares[0].give(20 * KIB)
    assert put(again)


def test_a_user_pins_blocks_in_a_part_of_the_tier() -> None:
    tier = SharedTier(64 * KIB)
    blocks = [tier.allocate(4096, ReadClass(number, 0, 0, 0o444)) for number in range(16)]
    pinned = Pinned(tier.capacity)
    one, two = Pins(100, pinned, 1), Pins(100, pinned, 2)
    assert [bool(one.take(made)) for made in blocks if made] == [True] * 12 + [False] * 4
    assert [bool(two.take(made)) for made in blocks[12:] if made] == [True] * 3 + [False]
    assert one.take(blocks[0] or block()), "an arena in which it holds something"
    one.clear()
    two.clear()
    assert not pinned._held


def test_what_a_connection_was_left_is_free_when_it_ends() -> None:
    """The listener has what the daemon before it left for as long as it runs: its blocks stayed used, by nobody."""
    tier = SharedTier(64 * KIB)
    block = tier.allocate(64 * KIB, ReadClass(1, 0, 0, 0o444))
    assert block is not None
    left = {7: block}
    del block
    pins = Pins(10, Pinned(64 * KIB), 1000, left=left)
    assert len(pins) == 1
    assert tier.allocate(64 * KIB, ReadClass(1, 0, 0, 0o444)) is None
    pins.clear()
    assert tier.allocate(64 * KIB, ReadClass(1, 0, 0, 0o444)) is not None
    assert not left
