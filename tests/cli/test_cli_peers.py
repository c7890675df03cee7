"""Other hosts on the pages of ``kvfuse status`` and ``kvfuse top``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cli_lab import kvfuse
from mounting import wait_until
from peer_lab import listening, mounted, stats, wait_for_peers
from rich.console import Console

from kvfuse.cli.mounts import read_virtual
from kvfuse.cli.peers import PeerRow, peers_of, totals_of
from kvfuse.cli.top import Look, page
from kvfuse.usrbio.client import BlockStore
from kvfuse_cluster.etcd import EtcdServers

HOST = {
    "client": "0" * 15 + "2",
    "addresses": ["10.0.0.2:7650"],
    "state": "connected",
    "connections": 2,
    "load_bytes": 5,
    "received_bytes": 7,
    "under_way_bytes": 0,
    "expected_ms_of_1MiB": 1.5,
}
ASKED = {"rows": 0, "right": 0, "absent": 0, "moved": 0, "busy": 0, "wrong": 0, "lost": 0, "late": 0}
SERVED = {"rows": 0, "here": 0, "absent": 0, "moved": 0, "elsewhere": 0, "busy": 0, "served": {}}


def peers(hosts: list[dict[str, Any]], asked: dict[str, int], served: dict[str, Any]) -> dict[str, Any]:
    return {
        "peers": {
            "hosts": hosts,
            "asked": {**ASKED, "hedged": 0, "overtaken": 0, **asked},
            "served": {**SERVED, "refused": 0, "malformed": 0, "given_up": 0, **served},
        }
    }


@pytest.mark.parametrize(
    ("more", "transport"),
    [
        ({}, "tcp"),
        ({"rdma_connections": 0}, "tcp"),
        ({"rdma_connections": 1}, "rdma, tcp"),
        ({"rdma_connections": 2}, "rdma"),
        ({"connections": 0, "rdma_connections": 0}, "-"),
    ],
)
def test_what_is_said_of_a_host(more: dict[str, int], transport: str) -> None:
    found = peers([{**HOST, **more}], {}, {"served": {"0" * 15 + "2": 9, "0" * 15 + "3": 11}})
    assert list(peers_of(found)) == [
        PeerRow("0" * 15 + "2", "10.0.0.2:7650", "connected", transport, 7, 9, 5, 1.5),
        PeerRow("0" * 15 + "3", "client 0000000000000003", "asks only", "-", 0, 11, 0, None),
    ]


def test_totals_name_the_reasons_that_there_were() -> None:
    assert list(totals_of({})) == list(totals_of(peers([], {}, {}))) == []
    asked = {"rows": 1200, "right": 1100, "late": 60, "absent": 40, "hedged": 70, "overtaken": 60}
    served = {"rows": 5, "here": 3, "elsewhere": 2, "given_up": 1}
    assert list(totals_of(peers([HOST], asked, served))) == [
        "asked 1,200: 1,100 right, 40 absent, 60 late; 70 hedged, 60 overtaken",
        "answered 5: 3 here, 2 elsewhere",
        "connections ended: 1 given up",
    ]


def test_pages_of_two_mounts(etcd: EtcdServers) -> None:
    with mounted(etcd, [listening(), ()]) as (writer, reader):
        wait_until(lambda: [host["state"] for host in stats(reader)["peers"]["hosts"]] == ["connected"], "the host")
        (address,) = stats(reader)["peers"]["hosts"][0]["addresses"]
        with BlockStore(writer.point, "blocks") as store:
            store.put(b"key", bytes(100_000))
        with BlockStore(reader.point, "blocks") as store:
            wait_until(lambda: bool(store.exists([b"key"]).all()), "the name")
            before = read_virtual(reader.point, "stats")
            assert store.get(b"key") is not None
        shown = kvfuse("status", reader.point).stdout
        (row,) = [line for line in shown.splitlines() if address in line]
        assert row.split()[1:3] == ["connected", "tcp"]
        assert "asked " in shown
        assert "asks only" in kvfuse("status", writer.point).stdout
        assert json.loads(kvfuse("status", writer.point, "--json").stdout)[0]["peers"]["served"]["rows"] >= 1
        done = kvfuse("top", reader.point, "--once")
        assert done.returncode == 0, done.stderr
        assert address in done.stdout
        console = Console(width=200, highlight=False)
        with console.capture() as capture:
            console.print(page(Look(before, read_virtual(reader.point, "stats"), 2.0), "/mnt/kv"))
        (row,) = [line for line in capture.get().splitlines() if address in line]
        assert row.split()[3:5] == ["50.0", "KB"], row


def test_a_mount_that_shares_with_nobody_shows_nothing(etcd: EtcdServers) -> None:
    with mounted(etcd, [listening(), listening()]) as mounts:
        wait_for_peers(mounts)
        mounts[1].unmount()
        wait_until(lambda: not stats(mounts[0])["peers"]["hosts"], "the end of the other host")
        assert "other hosts" not in kvfuse("status", mounts[0].point).stdout
        mounts[1].mount()
