"""Starting etcd for trying and for tests: servers that outlive who started them, found and ended by their pids."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_lab import etcd_cluster, wait_leader

from kvfuse.errors import ClusterError
from kvfuse_cluster.etcd import EtcdServers, EtcdSettings
from kvfuse_cluster.process import Server, free_ports, wait_until

SLEEPER = ["sleep", "1000"]
LOOK_STOP_LOOK = """
import sys
from pathlib import Path
from kvfuse_cluster.etcd import EtcdServers
found = EtcdServers.load(Path(sys.argv[1]))
print(found.leader(), found.is_healthy(0), found.endpoints[0])
found.stop()
print(found.members[0].pid)
"""


def test_another_process_finds_and_ends_a_cluster(etcd: EtcdServers) -> None:
    with etcd_cluster(1) as started:
        command = [sys.executable, "-c", LOOK_STOP_LOOK, str(started.folder)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        assert said == [f"0 True {started.endpoints[0]}", "0"]
        assert started.members[0].pid == 0


def healthy(etcd: EtcdServers) -> int:
    return sum(etcd.is_healthy(index) for index in range(len(etcd.members)))


def test_a_killed_leader_is_replaced_and_comes_back(own_etcd: EtcdServers) -> None:
    leader = wait_leader(own_etcd)
    own_etcd.kill(leader)
    assert wait_leader(own_etcd, other_than=leader) != leader
    assert healthy(own_etcd) == 2
    own_etcd.restart(leader)
    assert healthy(own_etcd) == 3


def test_a_cluster_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    with etcd_cluster(1) as running:
        pids = [member.pid for member in running.members]
        (tmp_path / "etcd0.data").write_text("in the way")
        with pytest.raises(ClusterError, match="etcd0"):
            EtcdServers.start(tmp_path, 1, EtcdSettings())
        assert [member.pid for member in EtcdServers.load(tmp_path).members] == [0]
        assert [member.pid for member in running.members] == pids


def test_no_cluster_is_found_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="holds no etcd cluster"):
        EtcdServers.load(tmp_path)


def test_a_server_is_ended_by_its_pid_even_when_it_is_stopped(tmp_path: Path) -> None:
    server = Server(tmp_path, "sleeper", SLEEPER)
    server.start(lambda: True)
    server.kill(signal.SIGSTOP)
    with pytest.raises(ClusterError, match="running already"):
        server.launch()
    Server(tmp_path, "sleeper").kill(signal.SIGTERM)  # as another process would, by the files alone
    server.stop()
    server.stop()
    assert server.pid == 0


def test_a_pid_that_was_given_to_another_process_is_not_touched(tmp_path: Path) -> None:
    with subprocess.Popen(SLEEPER) as stranger:
        (tmp_path / "server.pid").write_text(f"{stranger.pid} 1\n")
        server = Server(tmp_path, "server")
        assert server.pid == 0
        server.stop()
        assert stranger.poll() is None
        stranger.kill()


def test_a_server_that_ends_at_once_shows_its_log(tmp_path: Path) -> None:
    server = Server(tmp_path, "broken", ["sh", "-c", "echo it hurts; exit 3"])
    with pytest.raises(ClusterError, match="it hurts"):
        server.start(lambda: False)
    with pytest.raises(ClusterError, match="absent-program"):
        Server(tmp_path, "absent", ["absent-program"]).launch()


def test_a_server_that_ended_before_its_start_was_noted_is_not_running(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    (tmp_path / "brief.pid").write_text(f"{process.pid} 0\n")
    assert Server(tmp_path, "brief").pid == 0


def test_waiting_ends(tmp_path: Path) -> None:
    assert wait_until(lambda: True, 0)
    assert not wait_until(lambda: False, 0.05)
    assert len(set(free_ports(20))) == 20


def test_pid_files_hold_this_systems_start_times(tmp_path: Path) -> None:
    server = Server(tmp_path, "sleeper", SLEEPER)
    server.launch()
    pid, started = map(int, (tmp_path / "sleeper.pid").read_text().split())
    assert pid == server.pid
    uptime = float(Path("/proc/uptime").read_text().split()[0])  # as exact as a tick, so the product is not
    assert 0 < started <= round(uptime * os.sysconf("SC_CLK_TCK"))
    server.stop()
