"""Two hosts mount one volume, and daemons of both are killed over and over: neither notices what the other one suffers.

The daemon after one that was killed is the same client of the volume, so nothing of it is adopted.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import trio
from cluster_lab import DRAWN, MEMORY
from loop_lab import loop_devices
from mounting import KvfuseMount, conf_elsewhere, shared_conf
from test_outlive_load import kill_beside

from kvfuse.cluster.etcd import EtcdServers
from kvfuse.options import config
from kvfuse.volume.opening import engines
from kvfuse.volume.store import schema

pytestmark = pytest.mark.root

WORDS = "outlive=true", "publish=strict", "records.deadline=5"
KILLS = 3
DEVICE_SIZE = 640 << 20
LEASE = 30.0
"""seconds: longer than a machine that does much else lets a daemon wait for its turn"""
NOTICED = re.compile("lease|adopt|cut off|is gone|makes no sense|loses")
"""words of what a log says when another host has noticed"""


@contextmanager
def two_hosts(
    base: Path, etcd: EtcdServers, engine: str, request: pytest.FixtureRequest, lease: float = LEASE
) -> Iterator[list[KvfuseMount]]:
    """One volume, mounted twice; at the end both are unmounted, and it must be clean."""
    with ExitStack() as stack:
        if engine == "block":
            memory = stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY))
            devices = stack.enter_context(loop_devices(Path(memory) / "image", DEVICE_SIZE, 2))
            confs = [shared_conf(base, etcd, device=devices[0])]
            confs.append(conf_elsewhere(confs[0], *devices))
        else:
            ceph = request.getfixturevalue("ceph") if engine == "rados" else None
            confs = [shared_conf(base, etcd, ceph)] * 2
        for conf in set(confs):
            conf.write_text(conf.read_text().replace("client.lease = 6.0", f"client.lease = {lease}"))
        mounts = []
        for name, conf, words in zip(("one", "two"), confs, (WORDS, (*WORDS, "standby")), strict=True):
            (base / name).mkdir()
            mounts.append(KvfuseMount(base / name, words, source=conf))
            stack.callback(mounts[-1].remove)
            mounts[-1].mount()
        yield mounts
        for mount in mounts:
            mount.check_unexpected_errors()
            mount.unmount()
        mounts[0].fsck(verify=True)


def clients(conf: Path) -> set[int]:
    """Those that the record store takes for alive."""

    async def scan() -> set[int]:
        async with engines.open_records(config.load(conf).options) as records:
            return {schema.key_client(row.key) for row in await records.scan(schema.MEMBER_PREFIX)}

    return trio.run(scan)


def noticed(mounts: list[KvfuseMount]) -> list[str]:
    """What logs say of other clients."""
    return [line for mount in mounts for line in mount.log.read_text().splitlines() if NOTICED.search(line)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["file", DRAWN])
def test_neither_host_notices_kills(
    engine: str, request: pytest.FixtureRequest, etcd_alone: EtcdServers, tmp_path: Path, seed: int
) -> None:
    with two_hosts(tmp_path, etcd_alone, engine, request) as mounts:
        before = clients(mounts[0].source)
        kill_beside(mounts, ("stores", "names", "appends", "pages"), seed, KILLS)
        assert clients(mounts[0].source) == before
        assert noticed(mounts) == []
