"""The cold tier in the objects of a Ceph cluster, through its gateway."""

from __future__ import annotations

import random

from cold_lab import KIB, Beside, cold_figures, cold_mount, settle

from kvfuse.usrbio.client.block_store import BlockStore
from kvfuse_cluster.rados_gateway import RadosGateway

COUNT = 400
AT_ONCE = 20


def test_blocks_leave_and_come_back_over_a_restart(gateway: RadosGateway, rng: random.Random) -> None:
    names = [b"block-%06d" % number for number in range(COUNT)]
    with cold_mount(gateway, deadline=60) as mount:
        beside = Beside(mount, "ns", rng)
        for first in range(0, COUNT, AT_ONCE):
            beside.put(names[first : first + AT_ONCE], 64 * KIB)
            settle(mount)
        assert settle(mount)["blocks"] > COUNT // 3
        beside.store.close()
        mount.unmount()
        mount.mount()
        beside.store = BlockStore(mount.point, "ns")
        hits = 0
        for first in range(0, COUNT, AT_ONCE):
            hits += beside.check(names[first : first + AT_ONCE])
            settle(mount)
        figures = cold_figures(mount)
        assert hits + figures["surrendered"] >= COUNT, figures
        assert figures["promoted"] > COUNT // 3
        beside.store.close()
