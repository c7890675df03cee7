"""Every engine of the index, for tests of what all promise: in memory, etcd, RADOS, Redis."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from cluster_lab import etcd_place, rados_place
from memory_index import Entries, MemoryIndex
from redis_lab import RedisServer

from kvfuse.remote.index.api import BlockIndex
from kvfuse.remote.index.etcd.store import EtcdIndex
from kvfuse.remote.index.omap.store import OmapIndex
from kvfuse.remote.index.redis.store import RedisIndex
from kvfuse_cluster.ceph import CephServers

Opener = Callable[[str], Awaitable[BlockIndex]]
"""opens the index of one of a test's volumes, again and again"""

ENGINES = ("memory", "etcd", "rados", "redis")


def opener(engine: str, request: pytest.FixtureRequest, **more: object) -> Opener:
    """``request``: of the test that asks. ``more``: options; else deadlines are such that a busy machine meets them."""
    more = {"deadline": 60.0, **more}
    if engine == "etcd":
        place = etcd_place(request.getfixturevalue("etcd_alone"), request.node.name, **more)
        return lambda volume: EtcdIndex.open(replace(place, prefix=place.prefix + f"{volume}/index/".encode()))
    if engine == "rados":
        pool = rados_place(request.getfixturevalue("ceph"), request.node.name, **more)
        return lambda volume: OmapIndex.open(pool, f"index.{volume}", 16)
    if engine == "redis":
        server: RedisServer = request.getfixturevalue("redis")
        return lambda volume: RedisIndex.open(server.place(f"{request.node.name}/{volume}", **more))
    volumes: dict[str, Entries] = {}

    async def open_memory(volume: str) -> BlockIndex:
        return MemoryIndex(volumes.setdefault(volume, Entries()))

    return open_memory


@contextmanager
def stoppable_osds(request: pytest.FixtureRequest) -> Iterator[tuple[CephServers, Callable[[int], None]]]:
    """(servers of the test's own, what sends a signal to all their OSDs). At the end they go on."""
    ceph: CephServers = request.getfixturevalue("own_ceph")

    def send(number: int) -> None:
        for index in range(len(ceph.osds)):
            ceph.kill(index, number)

    yield ceph, send
    send(signal.SIGCONT)
    for index in range(len(ceph.osds)):
        ceph.wait_up(index)
    ceph.wait_clean()
