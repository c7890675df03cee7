"""The Ceph cluster for trying and tests: found by other processes, and what it says is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfuse.errors import ClusterError
from kvfuse_cluster.ceph import FOLDER_LENGTH_MAX, CephServers


def test_another_process_finds_the_cluster(ceph: CephServers) -> None:
    found = CephServers.load(ceph.folder)
    assert found.settings == ceph.settings
    assert [server.pid for server in found.osds] == [server.pid for server in ceph.osds]
    assert found.monitor.pid == ceph.monitor.pid
    assert len(found.command("osd", "dump")["osds"]) == len(ceph.osds)


def test_what_is_no_cluster_is_said(ceph: CephServers, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="holds no Ceph cluster"):
        CephServers.load(tmp_path)
    with pytest.raises(ClusterError, match="would not fit"):
        CephServers.start(tmp_path / ("x" * FOLDER_LENGTH_MAX))
    with pytest.raises(ClusterError, match="unrecognized pool"):
        ceph.command("osd", "pool", "get", "nowhere", "size")
