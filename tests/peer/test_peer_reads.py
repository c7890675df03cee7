"""Mounts of one volume read from each other's memory, over TCP: right bytes, and none from the segments."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
from mounting import KvfuseMount, stopped, wait_until
from peer_lab import free_port, listening, mounted, stats, wait_for_peers

from kvfuse.usrbio.client import BlockStore
from kvfuse_cluster.etcd import EtcdServers

SIZES = (1, 4096, 65_536, 1 << 20)
TWO_CHUNKS = (4 << 20) + 12_345
"""of a file: no block is larger than a slab"""


def came_from_hosts(before: dict[str, Any], after: dict[str, Any], size: int) -> bool:
    """So many bytes were not read from segments meanwhile, but for what a busy machine was late with. Heads of blocks
    are read from there in rounds."""
    if "peers" not in after:
        return False  # it asks nobody
    grown = {name: after["peers"]["asked"][name] - count for name, count in before["peers"]["asked"].items()}
    return bool(grown["hedged"] or grown["late"] or grown["bytes"] >= size)


@pytest.fixture(scope="module")
def mounts(etcd: EtcdServers) -> Iterator[list[KvfuseMount]]:
    with mounted(etcd, [listening(), listening()]) as mounts:
        wait_for_peers(mounts)
        yield mounts


@pytest.fixture(params=["files", "blocks"])
def folder(mounts: list[KvfuseMount], tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """Of ordinary files: a folder that is there stays what it is. Or one that a store makes."""
    if request.param == "files":
        (mounts[0].point / tmp_path.name).mkdir()
    return tmp_path.name


def test_blocks_come_from_the_memory_of_who_put_them(mounts: list[KvfuseMount], folder: str) -> None:
    writer, reader = mounts
    sizes = (*SIZES, TWO_CHUNKS) if (writer.point / folder).exists() else SIZES
    with BlockStore(writer.point, folder) as theirs, BlockStore(reader.point, folder) as ours:
        for size in sizes:
            keys = [b"%d-%d" % (size, number) for number in range(4)]
            data = [os.urandom(size) for _ in keys]
            assert theirs.put_many(keys, data).all()
            wait_until(lambda keys=keys: bool(ours.exists(keys).all()), "the names on the other host")
            before = stats(reader)
            found = [bytes(ours.get(key) or b"") for key in keys]
            after = stats(reader)
            assert found == data
            assert came_from_hosts(before, after, 4 * size), size
            assert after["peers"]["asked"]["right"] > before["peers"]["asked"]["right"]


def test_files_come_from_there_too(mounts: list[KvfuseMount], folder: str) -> None:
    writer, reader = mounts
    data = os.urandom(1 << 20)
    with BlockStore(writer.point, folder) as store:
        store.put(b"block", data)
    path = reader.point / folder / "block"
    wait_until(path.exists, "the name on the other host")
    before = stats(reader)
    assert path.read_bytes() == data
    assert came_from_hosts(before, stats(reader), len(data))


def test_a_block_that_was_replaced_is_the_new_one(mounts: list[KvfuseMount], folder: str) -> None:
    writer, reader = mounts
    with BlockStore(writer.point, folder) as theirs, BlockStore(reader.point, folder) as ours:
        for content in (b"old" * 50_000, b"new" * 60_000):
            theirs.put(b"key", content)
            wait_until(lambda content=content: bytes(ours.get(b"key") or b"") == content, "the block on the other host")


def test_a_host_that_listens_nowhere_reads_from_those_that_do(etcd: EtcdServers) -> None:
    with mounted(etcd, [listening(), (), ("peer.reads=false",)]) as (writer, reader, alone):
        wait_until(
            lambda: [host["state"] for host in stats(reader)["peers"]["hosts"]] == ["connected"], "the connection"
        )
        data = os.urandom(100_000)
        with BlockStore(writer.point, "blocks") as store:
            store.put(b"key", data)
        for mount, is_near in ((reader, True), (alone, False)):
            with BlockStore(mount.point, "blocks") as store:
                wait_until(lambda store=store: bool(store.exists([b"key"]).all()), "the name on the other host")
                before = stats(mount)
                assert bytes(store.get(b"key") or b"") == data
                assert came_from_hosts(before, stats(mount), len(data)) == is_near
        assert not stats(writer)["peers"]["hosts"]


def test_a_host_is_reached_by_each_address_that_it_says(etcd: EtcdServers) -> None:
    """Connections are spread over them."""
    port = free_port()
    words = (f"peer.listen=[::]:{port}", f"peer.advertise=127.0.0.1:{port}/[::1]")
    with mounted(etcd, [words, ("peer.connections=2",)]) as (_, reader):
        wait_until(lambda: [host["connections"] for host in stats(reader)["peers"]["hosts"]] == [2], "connections")
        (host,) = stats(reader)["peers"]["hosts"]
        assert host["addresses"] == [f"127.0.0.1:{port}", f"[::1]:{port}"]
        assert sorted(_remote_addresses(reader.pid, port)) == ["127.0.0.1"] * 2 + ["::1"] * 2, "one of each kind"


def _remote_addresses(pid: int, port: int) -> list[str]:
    """That a process is connected to at this port."""
    found = []
    sockets = set()
    for opened in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it is closed by now
            sockets.add(opened.stat().st_ino)
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            text, _, remote_port = fields[2].partition(":")
            if int(fields[9]) in sockets and int(remote_port, 16) == port:
                words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
                found.append(socket.inet_ntop(family, b"".join(words)))
    return found


def test_a_get_keeps_its_own_deadline_where_other_hosts_are_asked(mounts: list[KvfuseMount], tmp_path: Path) -> None:
    """Not that of the store, for which a stopped daemon would be waited for while it is to bring blocks."""
    _, reader = mounts
    with BlockStore(reader.point, tmp_path.name, deadline=120.0) as store:  # blocks: of files there is no index
        store.put(b"key", b"here")
        wait_until(lambda: bool(store.exists([b"key"]).all()) and store._resident.brings(), "the index")
        memory = np.zeros(8, np.uint8)
        with stopped(reader.pid):
            began = monotonic()
            assert store.get_at([b"absent"], memory, [0], [8], deadline=0.5).tolist() == [-errno.ETIMEDOUT]
            assert monotonic() - began < 60
