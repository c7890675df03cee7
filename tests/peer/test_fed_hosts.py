"""Hosts that load the same files at the same time: each byte leaves the segments about once, and all of it is right."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from mounting import KvfuseMount, wait_until
from peer_lab import asked, listening, mounted, stats, wait_for_peers

from kvfuse_cluster.etcd import EtcdServers

HOSTS, SIZE = 3, 64 << 20
PIECE = 1 << 20
LATE = ("hedged", "late", "busy")
"""counts of reads that the segments were asked for beside another host"""


@pytest.fixture(scope="module")
def mounts(etcd: EtcdServers) -> Iterator[list[KvfuseMount]]:
    with mounted(etcd, [listening() for _ in range(HOSTS)]) as mounts:
        wait_for_peers(mounts)
        yield mounts


def test_hosts_feed_each_other(mounts: list[KvfuseMount]) -> None:
    data = os.urandom(SIZE)
    (mounts[0].point / "model").write_bytes(data)
    for mount in mounts:
        wait_until((mount.point / "model").exists, "the name on another host")
        wait_until(lambda mount=mount: (mount.point / "model").stat().st_size == SIZE, "the size on another host")
    descriptor = os.open(mounts[0].point / "model", os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    before = [(stats(mount)["segments"]["read_bytes"], asked(mount)) for mount in mounts]
    found: dict[int, bool] = {}

    def load(number: int) -> None:
        with open(mounts[number].point / "model", "rb", buffering=0) as file:
            parts = [file.read(PIECE) for _ in range(SIZE // PIECE)]
        found[number] = b"".join(parts) == data

    threads = [threading.Thread(target=load, args=(number,)) for number in range(HOSTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(HOSTS), True)
    after = [(stats(mount)["segments"]["read_bytes"], asked(mount)) for mount in mounts]
    read = sum(now - then for (now, _), (then, _) in zip(after, before, strict=True))
    late = sum(now[name] - then[name] for (_, now), (_, then) in zip(after, before, strict=True) for name in LATE)
    print(f"{HOSTS} hosts read {read / SIZE:.2f} times the file from the segments; {late} reads were late")
    assert all(now["right"] > then["right"] for (_, now), (_, then) in zip(after, before, strict=True))
    assert read <= 1.25 * SIZE + late * PIECE
