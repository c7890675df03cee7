"""An OSD is killed under mounts that read and write, with nothing else on the machine that would keep them waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from outage_lab import STALL_MAX, Cluster, load, report, two_hosts

from kvfuse_cluster.ceph import CephServers
from kvfuse_cluster.etcd import EtcdServers

pytestmark = [pytest.mark.root, pytest.mark.alone]


@pytest.fixture
def cluster(own_etcd: EtcdServers, own_ceph: CephServers) -> Iterator[Cluster]:
    with two_hosts(own_etcd, own_ceph) as cluster:
        yield cluster


def test_a_killed_osd_is_hardly_noticed(cluster: Cluster, seed: int) -> None:
    with load(cluster, seed) as work:
        start = time.monotonic()
        cluster.ceph.kill(0)
        work.wait_progress(0, 1)
        gap = report("a killed OSD", work, start, 0, 1)
        cluster.ceph.restart(0)
        work.wait_progress(0, 1)
    assert gap < STALL_MAX
    assert not work.errors(0, 1), work.failed()
