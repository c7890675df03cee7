"""Doors of two hosts of one volume: each answers what the other has taken."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
from http_lab import WebClient, client_of
from mounting import KvfuseMount, wait_until
from peer_lab import listening, mounted, wait_for_peers

from kvfuse_cluster.etcd import EtcdServers
from kvfuse_cluster.process import free_ports

STRICT = ('publish.mode = "strict"', 'cache.tier_size = "64MiB"')
Doors = list[tuple[KvfuseMount, WebClient]]


@pytest.fixture(scope="module")
def doors(etcd: EtcdServers) -> Iterator[Doors]:
    ports = free_ports(2)
    words = [(*listening(), f"http.listen=127.0.0.1:{port}", "http.anonymous=0:0") for port in ports]
    with mounted(etcd, words, STRICT) as mounts, client_of(ports[0]) as first, client_of(ports[1]) as second:
        wait_for_peers(mounts)
        yield list(zip(mounts, (first, second), strict=True))


def test_each_sees_files_of_the_other(doors: Doors) -> None:
    (_, ours), (mount, theirs) = doors
    data = secrets.token_bytes(3_000_001)
    assert ours.ask("PUT", "/v1/folders/files").status == 201
    assert ours.ask("PUT", "/v1/files/files/one", data).status == 201
    assert theirs.ask("GET", "/v1/files/files/one").body == data
    assert (mount.point / "files/one").read_bytes() == data
    assert theirs.ask("PATCH", "/v1/files/files/one?offset=1000000", b"changed").status == 204
    data = data[:1_000_000] + b"changed" + data[1_000_007:]
    assert ours.ask("GET", "/v1/files/files/one").body == data
    assert theirs.ask("POST", "/v1/rename/files/one?to=/files/two").status == 204
    assert ours.ask("GET", "/v1/files/files/one").status == 404
    assert [row["name"] for row in ours.ask("GET", "/v1/folders/files").json["entries"]] == ["two"]
    assert ours.ask("DELETE", "/v1/files/files/two").status == 204
    assert theirs.ask("GET", "/v1/files/files/two").status == 404


def test_each_gets_blocks_of_the_other(doors: Doors) -> None:
    (_, ours), (_, theirs) = doors
    keys = [b"block-%d" % number for number in range(20)]
    blocks = [secrets.token_bytes(100_000) for _ in keys]
    assert ours.ask("PUT", "/v1/namespaces/cache", b'{"kind": "blocks"}').status == 201
    wait_until(lambda: theirs.ask("GET", "/v1/namespaces/cache").status == 200, "the other host to hear of it")
    assert set(ours.put_blocks("cache", keys, blocks)) == {0}
    wait_until(lambda: theirs.get_blocks("cache", keys) == blocks, "the other host to hear of the blocks")
    assert theirs.ask("DELETE", "/v1/blocks/cache/block-3").status == 204
    wait_until(lambda: ours.get_blocks("cache", [b"block-3"]) == [None], "the first host to hear of the removal")
    assert ours.get_blocks("cache", keys[4:]) == blocks[4:]
