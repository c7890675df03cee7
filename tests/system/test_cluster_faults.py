"""Daemons, members of etcd and OSDs are killed and stopped under mounts of one volume that read and write.

Whatever fails, no acknowledged block is wrong or lost, no call hangs, and all goes on by itself.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import trio
from cluster_lab import wait_leader
from fault_load import IN_TIME, Load, block, heal, version_of
from mounting import KvfuseMount, shared_conf, stop_process, wait_until
from ring_lab import stats

from kvfuse.cluster.ceph import CephServers
from kvfuse.cluster.etcd import EtcdServers
from kvfuse.options import config
from kvfuse.remote.records.api import Record
from kvfuse.usrbio.client import BlockStore
from kvfuse.volume.opening import engines
from kvfuse.volume.opening.format import read_shared_superblock
from kvfuse.volume.store import schema
from kvfuse.volume.store.member import RENEWALS
from kvfuse.volume.store.sealed import as_formatted

pytestmark = pytest.mark.root

DEADLINE = 3.0
LEASE = 6.0
"""seconds, as the mounts have them"""
SLACK = 3.0
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


@pytest.fixture
def cluster(own_etcd: EtcdServers, own_ceph: CephServers) -> Iterator[Cluster]:
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


# -- what is killed -------------------------------------------------------------------------------------


def test_a_killed_daemon_takes_nothing_with_it(cluster: Cluster, seed: int) -> None:
    victim = cluster.mounts[0]
    client = cluster.client(victim)
    with load(cluster, seed) as work:
        work.forget(0)
        start = time.monotonic()
        victim.kill()
        work.wait_progress(1)
        adopted = wait_adopted(cluster, client, start)
        work.wait_progress(1)
        gap = report("a killed daemon", work, start, 1)
    assert gap < STALL_MAX
    assert adopted < ADOPTED_MAX
    victim.mount()
    work.check(victim.point)


def test_the_killed_leader_of_etcd_is_hardly_noticed(cluster: Cluster, seed: int) -> None:
    with load(cluster, seed) as work:
        leader = wait_leader(cluster.etcd)
        start = time.monotonic()
        cluster.etcd.kill(leader)
        work.wait_progress(0, 1)
        gap = report("a killed leader", work, start, 0, 1)
        cluster.etcd.restart(leader)
        work.wait_progress(0, 1)
    assert gap < STALL_MAX
    assert not work.errors(0, 1) or gap > OUTAGE_MAX, work.failed()


@pytest.mark.alone
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


def test_a_daemon_and_the_leader_are_killed_at_once(cluster: Cluster, seed: int) -> None:
    victim = cluster.mounts[0]
    client = cluster.client(victim)
    with load(cluster, seed) as work:
        leader = wait_leader(cluster.etcd)
        work.forget(0)
        start = time.monotonic()
        cluster.etcd.kill(leader)
        victim.kill()
        work.wait_progress(1)
        gap = report("a killed daemon and leader", work, start, 1)
        wait_adopted(cluster, client, start)
        cluster.etcd.restart(leader)
    assert gap < STALL_MAX  # a new leader gives every lease its whole time again: adoption takes that much longer
    assert not work.errors(1) or gap > OUTAGE_MAX, work.failed()


def test_a_daemon_and_an_osd_are_killed_at_once(cluster: Cluster, seed: int) -> None:
    victim = cluster.mounts[0]
    client = cluster.client(victim)
    with load(cluster, seed) as work:
        work.forget(0)
        start = time.monotonic()
        cluster.ceph.kill(0)
        victim.kill()
        work.wait_progress(1)
        gap = report("a killed daemon and OSD", work, start, 1)
        adopted = wait_adopted(cluster, client, start)
        cluster.ceph.restart(0)
        work.wait_progress(1)
    assert gap < STALL_MAX
    assert adopted < ADOPTED_MAX
    assert not work.errors(1), work.failed()


# -- what is stopped, and wakes ---------------------------------------------------------------------------


def test_an_osd_is_stopped_for_longer_than_the_deadline(cluster: Cluster, seed: int) -> None:
    """Until the cluster counts it as down, calls that need it fail; then replicas serve its objects."""
    with load(cluster, seed) as work:
        start = time.monotonic()
        cluster.ceph.kill(0, signal.SIGSTOP)
        wait_until(lambda: time.monotonic() > start + STOPPED, "the deadline, many times over")
        work.wait_progress(0, 1)
        report("a stopped OSD", work, start, 0, 1)
        cluster.ceph.kill(0, signal.SIGCONT)
        work.wait_progress(0, 1)


def test_the_leader_of_etcd_is_stopped_for_longer_than_the_deadline(cluster: Cluster, seed: int) -> None:
    with load(cluster, seed) as work:
        leader = wait_leader(cluster.etcd)
        start = time.monotonic()
        cluster.etcd.kill(leader, signal.SIGSTOP)
        work.wait_progress(0, 1)
        report("a stopped leader", work, start, 0, 1)
        wait_until(lambda: time.monotonic() > start + 2 * DEADLINE, "the deadline")
        cluster.etcd.kill(leader, signal.SIGCONT)
        work.wait_progress(0, 1)


def test_a_follower_of_etcd_is_stopped_for_longer_than_the_deadline(cluster: Cluster, seed: int) -> None:
    """Who was connected to it goes to another member; the one that wakes is behind, and tells nobody what it knew."""
    with load(cluster, seed) as work:
        leader = wait_leader(cluster.etcd)
        for follower in {0, 1, 2} - {leader}:
            start = time.monotonic()
            cluster.etcd.kill(follower, signal.SIGSTOP)
            work.wait_progress(0, 1)
            report("a stopped follower", work, start, 0, 1)
            wait_until(lambda: time.monotonic() > start + 2 * DEADLINE, "the deadline")  # noqa: B023
            cluster.etcd.kill(follower, signal.SIGCONT)
            work.wait_progress(0, 1)


def test_all_of_etcd_is_stopped_for_longer_than_the_deadline(cluster: Cluster, seed: int) -> None:
    with load(cluster, seed) as work:
        work.wait_progress(0, 1, blocks=40)  # all names are known to both
        start = time.monotonic()
        with work.silence():
            cluster.signal_members(signal.SIGSTOP)
            wait_until(lambda: time.monotonic() > start + DEADLINE + LEASE, "the deadline")
            cluster.signal_members(signal.SIGCONT)
            took = work.wait_progress(0, 1)
        report("all members stopped", work, start, 0, 1)
        print(f"all goes on {took:.2f} s after they woke")


def test_a_daemon_that_wakes_after_its_lease_commits_nothing_of_before(cluster: Cluster, seed: int) -> None:
    """What it is asked while it is stopped is either done by the client that it becomes, or refused and not there."""
    sleeper, survivor = cluster.mounts
    client = cluster.client(sleeper)
    with load(cluster, seed) as work:
        stop_process(sleeper.pid)
        work.forget(0)
        wait_until(lambda: client not in cluster.slabs().pids, "the end of its lease")
        work.wait_progress(1)
        late = threading.Thread(target=write_late, args=(sleeper.point, answers := {}), daemon=True)
        late.start()
        os.kill(sleeper.pid, signal.SIGCONT)
        late.join(CALL_MAX)
        assert not late.is_alive()
        wait_until(lambda: can_write(sleeper.point), "the mount that was stopped")
    assert client not in cluster.slabs().pids
    for name, number in answers.items():
        path = survivor.point / name
        assert number in IN_TIME | {0}, (name, number)
        if number == 0:
            assert version_of(name, path.read_bytes()) == 1
        else:
            assert not path.exists(), name


def write_late(folder: Path, answers: dict[str, int]) -> None:
    for number in range(3):
        name = f"late-{number}"
        try:
            (folder / f"{name}.tmp").write_bytes(block(name, 1))
            (folder / f"{name}.tmp").rename(folder / name)
        except OSError as error:
            answers[name] = error.errno or -1
        else:
            answers[name] = 0


def can_write(folder: Path) -> bool:
    try:
        (folder / "again").write_bytes(b"again")
    except OSError as error:
        assert error.errno in IN_TIME, error
        return False
    return True


# -- without the record store -----------------------------------------------------------------------------


def test_without_etcd_what_is_cached_is_read_and_the_rest_ends_in_time(cluster: Cluster) -> None:
    mount, other = cluster.mounts
    for number in range(3):
        (mount.point / f"file-{number}").write_bytes(block(f"file-{number}", 1))
    assert (other.point / "file-0").read_bytes() == block("file-0", 1)
    with BlockStore(mount.point, "kv", deadline=1.0) as store:
        store.put(b"here", block("here", 1))
        assert store.get(b"here") is not None
        cluster.signal_members(signal.SIGSTOP)
        for _ in range(2):
            for reader in (mount, other):
                with timed(CALL_MAX, "a read of a cached name"):
                    assert (reader.point / "file-0").read_bytes() == block("file-0", 1)
        with timed(1.0 + SLACK, "a block that is here"):
            assert bytes(store.get(b"here") or b"") == block("here", 1)
        with timed(1.0 + SLACK, "a block that is not"):
            assert store.get(b"not here") is None
        with timed(1.0 + SLACK, "asking for blocks"):
            assert not store.exists([b"neither", b"nor"]).any()
        with timed(CALL_MAX, "a write"), pytest.raises(OSError) as caught:
            (mount.point / "new").write_bytes(b"new")
        assert caught.value.errno in IN_TIME
        cluster.signal_members(signal.SIGCONT)
        wait_until(lambda: can_write(mount.point) and can_write(other.point), "both mounts")
        store.put(b"again", b"again")
        assert bytes(store.get(b"again") or b"") == b"again"
    assert (other.point / "file-2").read_bytes() == block("file-2", 1)


@contextmanager
def timed(seconds: float, what: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    took = time.monotonic() - start
    print(f"{what}: {took:.3f} s")
    assert took < seconds, what
