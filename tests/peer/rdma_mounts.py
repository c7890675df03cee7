"""Mounts of one volume that read from each other by RDMA. In the machine of scripts/rdma-vm.

Its hosts are late most of the time, by what mounts expect: so what is asserted is that all bytes are right, and that
some came by RDMA.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from mounting import KvfuseMount, wait_until
from peer_lab import LINES, listening, stats
from vm_mounts import vm_etcd, vm_mounts

from kvfuse.usrbio.client import BlockStore
from kvfuse.usrbio.client.session import SOCKET_PATH

SECONDS = 120.0
"""for something to come by RDMA"""


@pytest.fixture(scope="module")
def mounts() -> Iterator[list[KvfuseMount]]:
    words = [(*listening(), "peer.transport=rdma", "peer.rdma_devices=rxe0", "peer.deadline=20") for _ in range(2)]
    with vm_etcd() as etcd, vm_mounts(etcd, words, LINES) as mounts:
        for mount in mounts:
            wait_until((mount.point / SOCKET_PATH).exists, "the socket of rings")
            wait_until(lambda mount=mount: links(mount) == [2], "queue pairs between the hosts")
        yield mounts


def links(mount: KvfuseMount) -> list[int]:
    return [host["rdma_connections"] for host in stats(mount)["peers"]["hosts"]]


def rdma(mount: KvfuseMount) -> dict[str, Any]:
    return dict(stats(mount)["peers"]["rdma"])


def test_blocks_come_from_the_memory_of_who_put_them(mounts: list[KvfuseMount]) -> None:
    writer, reader = mounts
    until, number = time.monotonic() + SECONDS, 0
    with BlockStore(writer.point, "blocks") as theirs, BlockStore(reader.point, "blocks") as ours:
        while rdma(reader)["completions"] < 3:
            assert time.monotonic() < until, stats(reader)["peers"]
            number += 1
            keys = [b"%d-%d" % (number, place) for place in range(4)]
            data = [os.urandom(size) for size in (4096, 60_000, 65_536, 300_000)]
            assert theirs.put_many(keys, data).all()
            wait_until(lambda keys=keys: bool(ours.exists(keys).all()), "the names on the other host")
            assert [bytes(ours.get(key) or b"") for key in keys] == data
    print(stats(reader)["peers"])
    assert stats(writer)["peers"]["served"]["placed"] > 0
    assert stats(reader)["peers"]["asked"]["wrong"] == 0
