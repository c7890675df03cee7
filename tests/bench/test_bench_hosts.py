"""Requests on two hosts of one shared volume: whose blocks they find, what that is worth, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounting import KvfuseMount, shared_conf, temporary_mount

from kvfuse.connectors.steady_store import DescriptorMismatch
from kvfuse.errors import KvfuseError
from kvfuse_bench.hosts import Host, HostsReplay, Moved, Served, replay_on_hosts
from kvfuse_bench.plot import plot_hosts
from kvfuse_bench.replay import ReplayPlan
from kvfuse_bench.traffic import Request
from kvfuse_cluster.etcd import EtcdServers

pytestmark = pytest.mark.ring(3)

SIZE = 4096
PLAN = ReplayPlan("qwen2.5-0.5b", 512, SIZE)
SPEED = 1000.0

TRACE = [
    Request(0, 3 * 512, (0, 1, 2)),
    Request(10, 4 * 512, (0, 1, 2, 3)),  # host B: all of A's but the last
    Request(20, 5 * 512, (0, 1, 2, 3, 4)),  # host A: its own, and one of B's
    Request(30, 2 * 512, (9, 10)),
]


@pytest.fixture(scope="module")
def mounts(tmp_path_factory: pytest.TempPathFactory, etcd: EtcdServers) -> Iterator[list[KvfuseMount]]:
    """Two of one volume, which is clean at the end. Each test has a namespace of its own."""
    folder = tmp_path_factory.mktemp("hosts")
    conf = shared_conf(folder, etcd)
    with temporary_mount(source=conf) as first:
        second = KvfuseMount(folder, source=conf)
        second.mount()
        try:
            yield [first, second]
            second.unmount()
        finally:
            second.remove()


def served(result: HostsReplay) -> list[tuple[int, int, int, int, int]]:
    return [(one.host, one.own, one.others, one.alone, one.stored) for one in result.served]


def test_each_host_finds_what_the_other_wrote(mounts: list[KvfuseMount], tmp_path: Path) -> None:
    points = [mount.point for mount in mounts]
    shown: list[int] = []
    result = replay_on_hosts(TRACE, points, "llama", PLAN, SPEED, lambda some: shown.append(len(some.served)))
    assert served(result) == [(0, 0, 0, 0, 3), (1, 0, 3, 0, 1), (0, 3, 1, 3, 1), (1, 0, 0, 0, 2)]
    assert shown == [1, 2, 3, 4]
    assert (result.wrong_count, result.failures) == (0, {})
    assert (result.from_own.blocks, result.from_others.blocks, result.stored.blocks) == (3, 4, 7)
    plot_hosts(result, tmp_path / "hosts.png")
    assert (tmp_path / "hosts.png").read_bytes().startswith(b"\x89PNG")
    again = replay_on_hosts(TRACE, points, "llama", PLAN, SPEED, lambda _: None)
    assert sum(one.stored for one in again.served) == 0
    with pytest.raises(DescriptorMismatch):
        replay_on_hosts(TRACE, points, "llama", ReplayPlan("llama-3-8b", 512, SIZE), SPEED, lambda _: None)


def test_wrong_bytes_are_noticed(mounts: list[KvfuseMount]) -> None:
    with Host(0, mounts[0].point, "wrong", PLAN) as host:
        keys = [letter * 16 for letter in (b"a", b"b", b"c")]
        assert host.put(keys, Moved()) == keys
        path = mounts[0].point / "wrong" / keys[1].decode()
        path.write_bytes(bytes(SIZE))
        wrong: list[str] = []
        assert host.get(keys, Moved(), wrong.append)[0] == 3
        assert len(wrong) == 1
        assert "all zeros" in wrong[0]
        path.unlink()
        assert host.get(keys, Moved(), wrong.append)[0] == 1


def test_mounts_of_two_volumes_are_refused(mounts: list[KvfuseMount]) -> None:
    with temporary_mount() as other, pytest.raises(KvfuseError, match="of one shared volume"):
        replay_on_hosts(TRACE, [mounts[0].point, other.point], "none", PLAN, SPEED, lambda _: None)


def test_times_to_first_token() -> None:
    result = HostsReplay(PLAN, SPEED, from_own=Moved(8, 2.0), from_others=Moved(2, 3.0))
    one = Served(0, 0, 3 * 512, 3, own=1, others=1, alone=1, load_seconds=0.25, stored=1)
    assert result.computed(one) == pytest.approx(1.536)
    assert result.shared(one) == pytest.approx(0.25 + 0.512)
    assert result.alone(one) == pytest.approx(0.5 + 1.024)
    whole = one._replace(own=3, others=0)
    assert result.shared(whole) == pytest.approx(0.25 + 1 / SPEED), "the last token is always computed"
    assert result.rate(result.from_own) == pytest.approx(4 * SIZE / 1e9)
    assert result.rate(Moved()) is None


def test_the_command(mounts: list[KvfuseMount], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": one.arrival_ms, "input_length": one.prompt_tokens, "hash_ids": one.block_ids} for one in TRACE
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "kvfuse.cli", "bench", "hosts", *(str(mount.point) for mount in mounts)]
    command += ["--trace", str(trace), "--share", "1", "--tokens-per-block", "512", "--block-size", "4096"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "on what the other host wrote" in done.stdout
    assert "the shared volume" in done.stdout
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120, check=False)
    found = json.loads(done.stdout)
    assert [one["others"] for one in found["requests"]] == [0, 3, 1, 0]
    done = subprocess.run(command[:6], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "two mounts of one volume, or none" in done.stderr


def test_a_volume_is_made_where_there_is_none(tmp_path: Path) -> None:
    words = ["--requests", "4", "--tokens-per-block", "512", "--block-size", "4096", "--share", "1", "--json"]
    command = [sys.executable, "-m", "kvfuse.cli", "bench", "hosts", *words, "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["requests"]) == 4
    assert list(tmp_path.iterdir()) == []
