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
    assert found.monitor.pid == ceph.monitor.pid
    assert ups(found) == [True] * len(ceph.osds)


def ups(ceph: CephServers) -> list[bool]:
    """Of each OSD whether the cluster counts it as up."""
    return [bool(row["up"]) for row in ceph.command("osd", "dump")["osds"]]


@pytest.mark.alone  # it kills an OSD that others use
def test_a_killed_osd_is_shown_and_comes_back(ceph: CephServers) -> None:
    before = ceph.osds[2].pid
    ceph.kill(2, signal.SIGKILL)
    try:
        assert ceph.osds[2].pid == 0
    finally:
        ceph.restart(2)
        ceph.wait_clean()
    assert ceph.osds[2].pid not in (0, before)
    assert ups(ceph) == [True] * len(ceph.osds)


def test_what_is_no_cluster_is_said(ceph: CephServers, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="holds no Ceph cluster"):
        CephServers.load(tmp_path)
    with pytest.raises(ClusterError, match="would not fit"):
        CephServers.start(tmp_path / ("x" * FOLDER_LENGTH_MAX))
    with pytest.raises(ClusterError, match="unrecognized pool"):
        ceph.command("osd", "pool", "get", "nowhere", "size")
