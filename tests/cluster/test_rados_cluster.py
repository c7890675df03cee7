"""The Ceph cluster for trying and tests: found by other processes, stopped servers, users."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from kvfuse.cluster.ceph import FOLDER_LENGTH_MAX, CephServers
from kvfuse.errors import ClusterError


def test_another_process_finds_the_cluster(ceph: CephServers) -> None:
    found = CephServers.load(ceph.folder)
    assert found.settings == ceph.settings
    assert [server.pid for server in found.osds] == [server.pid for server in ceph.osds]
    assert found.status() == [
        f"mon.a {ceph.conf_file} running",
        *(f"osd.{index} running, up" for index in range(len(ceph.osds))),
    ]


@pytest.mark.alone  # it kills an OSD that others use
def test_a_killed_osd_is_shown_and_comes_back(ceph: CephServers) -> None:
    before = ceph.osds[2].pid
    ceph.kill(2, signal.SIGKILL)
    try:
        assert ceph.status()[3].startswith("osd.2 not running")
    finally:
        ceph.restart(2)
        ceph.wait_clean()
    assert ceph.osds[2].pid not in (0, before)
    assert ceph.status()[3] == "osd.2 running, up"


def test_a_users_key_is_the_same_every_time(ceph: CephServers) -> None:
    keyring = ceph.create_user("twice", "somewhere")
    assert keyring.stat().st_mode & 0o077 == 0
    text = keyring.read_text()
    assert "[client.twice]" in text
    assert ceph.create_user("twice", "somewhere").read_text() == text


def test_what_is_no_cluster_is_said(ceph: CephServers, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="holds no Ceph cluster"):
        CephServers.load(tmp_path)
    with pytest.raises(ClusterError, match="would not fit"):
        CephServers.start(tmp_path / ("x" * FOLDER_LENGTH_MAX))
    with pytest.raises(ClusterError, match="unrecognized pool"):
        ceph.command("osd", "pool", "get", "nowhere", "size")
