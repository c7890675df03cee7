"""A connection that has ended keeps nothing of the daemon, without a search for cyclic garbage: a real mount."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator

import pytest
from mounting import KvfuseMount, temporary_mount, wait_until
from ring_lab import RawClient, footprint, is_within, wait_for_rings
from uncollected_daemon import UNCOLLECTED_DAEMON

from kvfuse.usrbio.client import BlockStore, connect
from kvfuse.usrbio.protocol.wire import Message, Request

pytestmark = pytest.mark.root

CLIENTS = 8


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    words = ("allow_other", "volume.capacity=256MiB", "volume.segment_size=64MiB", "cache.tier_size=16MiB")
    with temporary_mount(words, UNCOLLECTED_DAEMON) as mount:
        wait_for_rings(mount)
        use_blocks(mount)
        yield mount


def use_blocks(mount: KvfuseMount) -> None:
    with connect(mount.point) as client, BlockStore(client, "blocks") as store:
        store.put("key", b"x" * 100_000)
        for _ in range(3):
            assert store.get_into("key", bytearray(100_000)) == 100_000
        with client.file(mount.point / "blocks" / "key") as file:
            assert file.handle


def hang_up(mount: KvfuseMount) -> None:
    """Before the answers: the daemon fails to send them."""
    with RawClient(mount.point) as client:
        for number in range(50):
            client.socket.send(Message(Request.ADD_RING, number, values=(8, 4096, 0)).pack())


def send_garbage(mount: KvfuseMount) -> None:
    with RawClient(mount.point) as client:
        client.socket.send(b"xxx")


def be_refused(mount: KvfuseMount) -> None:
    with RawClient(mount.point) as client:
        for number in range(20):
            assert client.error(Request.MAP_ARENA, 1 << 30 | number) == errno.EACCES


@pytest.mark.parametrize("use", [use_blocks, hang_up, send_garbage, be_refused])
def test_ended_connections_keep_nothing(mount: KvfuseMount, use: Callable[[KvfuseMount], None]) -> None:
    before = footprint(mount)
    for _ in range(CLIENTS):
        use(mount)
    wait_until(lambda: is_within(footprint(mount), before), "all of the connections to be gone")
