"""Two hosts on a cluster that is broken under them, and what that may cost them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import trio
from fault_load import Load, heal
from mounting import KvfuseMount, shared_conf, wait_until
from ring_lab import stats

from kvfuse.options import config
from kvfuse.remote.records.api import Record
from kvfuse.volume.opening import engines
from kvfuse.volume.opening.formatting import read_shared_superblock
from kvfuse.volume.store import schema
from kvfuse.volume.store.member import RENEWALS
from kvfuse.volume.store.sealed import as_formatted
from kvfuse_cluster.ceph import CephServers
from kvfuse_cluster.etcd import EtcdServers

DEADLINE = 3.0
LEASE = 6.0
"""seconds, as the mounts have them"""
SLACK = 8.0
"""what a busy machine may add"""
CALL_MAX = 2 * DEADLINE + SLACK
"""of a call of the file system: it waits for one store, then for the other, and for neither twice"""
STOPPED = 4 * DEADLINE
"""for which an OSD is: longer than the cluster takes to count it as down"""
STALL_MAX = 3.0 + SLACK
"""for which a killed OSD, or leader, may keep anybody waiting"""
OUTAGE_MAX = LEASE * (1 - 1 / RENEWALS) - DEADLINE
"""for which no lease is renewed, and no write fails yet: after that one could outlast the lease, and is not begun"""
ADOPTED_MAX = LEASE + 5.0
"""from the death of a client until others may use its slabs"""


class Slabs(NamedTuple):
    """What the record store says of who holds what."""

    pids: dict[int, int]
    """client -> process, of the clients that are alive"""
    holders: list[int]
    """a client for each slab that is held"""


class Cluster:
    """A volume of the test's own, mounted as by two hosts."""

    def __init__(self, etcd: EtcdServers, ceph: CephServers, folder: Path) -> None:
        self.etcd, self.ceph = etcd, ceph
        self.conf = shared_conf(folder, etcd, ceph)
        words = f"records.deadline={DEADLINE}", f"segments.deadline={DEADLINE}", f"client.lease={LEASE}"
        bases = [folder / f"host-{number}" for number in range(2)]
        for base in bases:
            base.mkdir()
        self.mounts = [KvfuseMount(base, words, source=self.conf) for base in bases]

    def signal_members(self, number: int) -> None:
        for index in range(len(self.etcd.members)):
            self.etcd.kill(index, number)

    def slabs(self) -> Slabs:
        members, holders = trio.run(self._scan, [schema.MEMBER_PREFIX, b"l"])
        pids = {schema.key_client(row.key): schema.decode_member(row.value).pid for row in members}
        return Slabs(pids, [schema.decode_holder(row.value).client for row in holders])

    async def _scan(self, prefixes: list[bytes]) -> list[list[Record]]:
        async with engines.open_records(config.load(self.conf).options) as records:
            sealed_records = as_formatted(records, await read_shared_superblock(records, "the volume"))
            return [await sealed_records.scan(prefix) for prefix in prefixes]

    def client(self, mount: KvfuseMount) -> int:
        return next(client for client, pid in self.slabs().pids.items() if pid == mount.pid)

    def are_adopted(self, client: int) -> bool:
        """The client is gone, and what it held others hold - and may write, as far as they are of this cluster."""
        pids, holders = self.slabs()
        if client in pids or client in holders:
            return False
        living = [mount for mount in self.mounts if mount.is_mounted and mount.pid in pids.values()]
        clients = {pid: client for client, pid in pids.items()}
        return all(holders.count(clients[mount.pid]) == granted(mount) for mount in living)


def granted(mount: KvfuseMount) -> int:
    """Slabs in which a daemon may allocate."""
    found = stats(mount)["slabs"]
    return int(found["slabs_free"] + found["slabs_partial"] + found["slabs_full"])


@contextmanager
def two_hosts(own_etcd: EtcdServers, own_ceph: CephServers) -> Iterator[Cluster]:
    """With two mounts. At the end everything runs, and the volume must be clean."""
    with tempfile.TemporaryDirectory(prefix="kvfuse-faults-") as folder, ExitStack() as stack:
        stack.callback(own_ceph.wait_clean)
        stack.callback(heal, own_etcd, own_ceph)
        made = Cluster(own_etcd, own_ceph, Path(folder))
        for mount in made.mounts:
            stack.callback(mount.remove)
            mount.mount()
        yield made
        for mount in made.mounts:
            print(mount.log.read_text())
        heal(own_etcd, own_ceph)
        for mount in made.mounts:
            if mount.is_mounted:
                mount.check_unexpected_errors()
                mount.unmount()
        made.mounts[0].fsck()


@contextmanager
def load(cluster: Cluster, seed: int) -> Iterator[Load]:
    """Reads and writes on all mounts around the body. Then what was acknowledged must be there, on each."""
    work = Load(cluster.mounts, seed)
    with work:
        work.wait_progress(*range(len(cluster.mounts)))
        yield work
    for mount in cluster.mounts:
        if mount.is_mounted:
            work.check(mount.point)
    slowest = max(work.calls, key=lambda row: row.seconds)
    print(f"{len(work.calls)} calls, errors {dict(work.errors(*range(len(cluster.mounts))))}, slowest {slowest}")
    assert slowest.seconds < CALL_MAX, slowest


def report(what: str, work: Load, since: float, *mounts: int) -> float:
    """Print what the failure cost those that survived; the longest time without a stored block."""
    gap, slowest = work.longest_gap(*mounts, since=since), work.longest(*mounts, since=since)
    print(f"{what}: {gap:.2f} s without a stored block; slowest call {slowest.what} {slowest.seconds:.2f} s")
    return gap


def wait_adopted(cluster: Cluster, client: int, since: float) -> float:
    """Until others have the slabs of a killed client; seconds from its death until then."""
    wait_until(lambda: cluster.are_adopted(client), "the slabs of the killed client")
    seconds = time.monotonic() - since
    print(f"its slabs are in use again after {seconds:.2f} s")
    return seconds
