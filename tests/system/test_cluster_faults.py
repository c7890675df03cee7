"""Daemons, members of etcd and OSDs are killed and stopped under mounts of one volume that read and write.

Whatever fails, no acknowledged block is wrong or lost, no call hangs, and all goes on by itself.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster_lab import wait_leader
from fault_load import IN_TIME, block, version_of
from mounting import stop_process, wait_until
from outage_lab import (
    ADOPTED_MAX,
    CALL_MAX,
    DEADLINE,
    LEASE,
    OUTAGE_MAX,
    SLACK,
    STALL_MAX,
    STOPPED,
    Cluster,
    load,
    report,
    two_hosts,
    wait_adopted,
)
from ring_lab import stats

from kvfuse.usrbio.client import BlockStore
from kvfuse_cluster.ceph import CephServers
from kvfuse_cluster.etcd import EtcdServers

pytestmark = pytest.mark.root


@pytest.fixture
def cluster(own_etcd: EtcdServers, own_ceph: CephServers) -> Iterator[Cluster]:
    with two_hosts(own_etcd, own_ceph) as cluster:
        yield cluster


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
    """Stores go to objects of other OSDs. Until the cluster counts it as down, reads that need it fail; then replicas
    serve its objects."""
    with load(cluster, seed) as work:
        start = time.monotonic()
        cluster.ceph.kill(0, signal.SIGSTOP)
        wait_until(lambda: time.monotonic() > start + STOPPED, "the deadline, many times over")
        work.wait_progress(0, 1)
        report("a stopped OSD", work, start, 0, 1)
        stores = [row for row in work.calls if row.began > start and row.what in ("create", "rename")]
        cluster.ceph.kill(0, signal.SIGCONT)
        work.wait_progress(0, 1)
    assert not [row for row in stores if row.error]  # a write into a log may have to read first what is there
    assert sum(stats(mount)["segments"]["moved_slots"] for mount in cluster.mounts) > 0


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
