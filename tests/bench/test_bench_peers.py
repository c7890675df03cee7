"""Hosts in networks of their own that read from each other's memory: what is measured of it, and the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_lab import kvfuse

from kvfuse.errors import KvfuseError
from kvfuse.sizes import KIB, MIB
from kvfuse_bench.peers.blocks import KVFUSE, MEMCPY, Cell, measure_blocks
from kvfuse_bench.peers.clients import Blocks
from kvfuse_bench.peers.hot import measure_hot
from kvfuse_bench.peers.mounts import Hosts, peer_hosts
from kvfuse_bench.peers.networks import host_networks
from kvfuse_bench.plot import plot_spreads

pytestmark = [pytest.mark.root, pytest.mark.ring(3)]

CELLS = (Cell(4 * KIB, 1, 4), Cell(64 * KIB, 8, 16))
READERS = 2


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with peer_hosts(tmp_path_factory.mktemp("peers"), READERS + 1, 8 * MIB, lambda _: None) as found:
        yield found


def devices() -> set[str]:
    done = subprocess.run(["ip", "-json", "link"], capture_output=True, text=True, check=True)
    return {one["ifname"] for one in json.loads(done.stdout)}


def test_blocks_are_read_from_the_other_host(hosts: Hosts) -> None:
    rows = list(measure_blocks(hosts, CELLS, 2, None, lambda _: None))
    assert [[side.name for side in row] for row in rows] == [[KVFUSE, MEMCPY]] * len(CELLS)
    for row, cell in zip(rows, CELLS, strict=True):
        for side in row:
            assert [len(one.seconds) for one in side.rounds] == [cell.total // cell.depth] * 2
            assert 0 < side.milliseconds(50) <= side.milliseconds(99)
        read, _ = row
        assert read.hedged or not read.segment_bytes
        assert (read.processor("owner") or 0) > 0
        assert (read.processor("reader") or 0) > 0
    asked = hosts.readers[0].stats()["peers"]["asked"]
    assert asked["right"] + asked["hedged"] + asked["late"] >= 3 * sum(cell.total for cell in CELLS)


def test_hot_blocks_are_served_by_several(hosts: Hosts, tmp_path: Path) -> None:
    spread = measure_hot(hosts, READERS, 0.1, 1, lambda _: None)
    assert spread.readers == READERS
    assert [len(row) for row in spread.served] == [READERS] * (READERS + 1)
    assert spread.copies(0) >= 1 or spread.segment_bytes
    assert 0 <= spread.share(0) <= 1
    plot_spreads([spread], tmp_path / "peers.png")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_byte_is_noticed(hosts: Hosts) -> None:
    blocks = Blocks("wrong", 4 * KIB, 2, 4)
    with hosts.stored(blocks, hosts.readers):
        path = hosts.writer.point / "bench-peers" / blocks.keys()[2].decode()
        content = bytearray(path.read_bytes())
        content[100] ^= 1
        path.write_bytes(content)
        with pytest.raises(KvfuseError, match=r"wrong bytes.*differs in 1 bytes, the first at offset 100"):
            hosts.writer.client.ask("get", blocks=blocks)


def test_networks_are_gone_afterwards() -> None:
    before = devices()
    with host_networks(2) as networks:
        assert "bridge0" in devices()
        ping = "import socket, sys; print(socket.create_connection((sys.argv[1], 7650), 5).recv(2))"
        listen = "import socket, sys; s = socket.create_server((sys.argv[1], 7650)); print('', flush=True);"
        listen += "s.accept()[0].send(b'hi')"
        first, second = networks
        serving = [*first.within, sys.executable, "-c", listen, first.address]
        with subprocess.Popen(serving, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            server.stdout.readline()
            done = subprocess.run(
                [*second.within, sys.executable, "-c", ping, first.address], capture_output=True, text=True, timeout=60
            )
            server.kill()
        assert done.stdout == "b'hi'\n", done.stderr
    assert devices() == before


def test_others_than_root_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(KvfuseError, match="only root"), host_networks(2):
        pass


def test_the_command(tmp_path: Path) -> None:
    done = kvfuse("bench", "peers", "--help")
    assert done.returncode == 0
    assert "segments    bytes that came from the segments: 0" in done.stdout
    words = ["--quick", "--readers", "1", "--rounds", "1", "--folder", tmp_path, "--output", tmp_path / "out"]
    done = kvfuse("bench", "peers", *words, "--plot", tmp_path / "peers.png")
    assert done.returncode == 0, done.stderr
    assert "Blocks that all hosts read at once" in done.stdout
    (path,) = (tmp_path / "out").iterdir()
    result = json.loads(path.read_text())
    assert {one["size"] for one in result["blocks"]} == {4 * KIB, 64 * KIB, MIB, 2 * MIB, 4 * MIB}
    assert [one["readers"] for one in result["hot"]] == [1]
    assert (tmp_path / "peers.png").stat().st_size
    assert {one.name for one in tmp_path.iterdir()} == {"out", "peers.png"}
