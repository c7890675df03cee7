"""A volume that two hosts share has blocks go to a bucket, and come back to either: mounts, rings, SeaweedFS."""

from __future__ import annotations

import functools
import math
import os
import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import trio
from cli_lab import kvfuse
from cold_lab import KIB, MIB, Beside, cold_figures, shared_cold_mounts
from killer import serving_of
from mounting import KvfuseMount, wait_until

from kvfuse.errors import Disconnected
from kvfuse.options import config
from kvfuse.remote.bucket import Bucket
from kvfuse.usrbio.client.block_store import BlockStore
from kvfuse.volume.check.volume_check import fsck
from kvfuse.volume.cold.host_objects import ObjectPlace, list_objects
from kvfuse.volume.opening.engines import cold_bucket, open_records
from kvfuse.volume.opening.formatting import read_shared_superblock
from kvfuse_cluster.etcd import EtcdServers
from kvfuse_cluster.seaweed import SeaweedServer

pytestmark = pytest.mark.ring(2)


def keys(start: int, end: int) -> list[bytes]:
    return [b"block-%06d" % number for number in range(start, end)]


def settle(mount: KvfuseMount) -> None:
    wait_until(lambda: cold_figures(mount)["is_loaded"] and not cold_figures(mount)["leaving_bytes"], "the cold tier")


class Host(Beside):
    """One host's view of the model that all have."""

    def share(self, first: Host) -> Host:
        self.known, self.versions, self.in_doubt = first.known, first.versions, first.in_doubt
        return self

    def fill(self, start: int, end: int, size: int = 64 * KIB) -> None:
        """Put some at a time, and let those that leave go to the bucket."""
        for first in range(start, end, 25):
            self.put(keys(first, min(first + 25, end)), size)
            settle(self.mount)

    def check_all(self, some: Sequence[bytes]) -> int:
        """Get some at a time: those that come back push out others. How many were there."""
        hits = 0
        for start in range(0, len(some), 20):
            part = some[start : start + 20]
            wait_until(lambda part=part: self.check(part) == sum(self.store.exists(part)), "cold blocks to come back")
            hits += sum(self.store.exists(part))
            settle(self.mount)
        return hits

    def cold(self, some: Sequence[bytes], count_min: int = 1) -> list[bytes]:
        """Those that the bucket has: the file door shows what is in the volume, of any host.

        At least ``count_min``: where a busy machine has the index answer late, they are absent for a second.
        """
        found = list[bytes]()

        def are_there() -> bool:
            hot = {name.encode() for name in map(str, kvfuse_names(self.mount, self.folder))}
            absent = [key for key in some if key not in hot]
            found[:] = [key for key, is_there in zip(absent, self.store.exists(absent), strict=True) if is_there]
            return len(found) >= count_min

        wait_until(are_there, "blocks in the bucket")
        return found


def kvfuse_names(mount: KvfuseMount, folder: str) -> list[str]:
    return [path.name for path in (mount.point / folder).iterdir()]


def lost(mounts: Sequence[KvfuseMount]) -> int:
    """Blocks that were to become cold, and did not: each of them is counted."""
    return sum(int(cold_figures(mount).get("surrendered", 0)) for mount in mounts)


def two_hosts(mounts: Sequence[KvfuseMount], rng: random.Random) -> tuple[Host, Host]:
    one = Host(mounts[0], "ns", rng)
    return one, Host(mounts[1], "ns", rng).share(one)


def test_blocks_that_left_come_back_to_either_host(
    etcd: EtcdServers, seaweed: SeaweedServer, rng: random.Random
) -> None:
    with shared_cold_mounts(seaweed, etcd, 2) as mounts:
        one, two = two_hosts(mounts, rng)
        one.fill(0, 900)
        cold = one.cold(keys(0, 900), 120)
        # One that is counted as lost may still be said to be there: what is asked for may be a moment old.
        assert sum(one.store.exists(keys(0, 900))) >= 900 - lost(mounts)
        assert sum(two.store.exists(cold)) == len(cold)
        assert two.store.longest_prefix(cold) == len(cold)
        first, second = cold[:60], cold[60:120]
        before = lost(mounts)

        def come_back(host: Host, some: Sequence[bytes]) -> None:
            """But for those that are counted as lost; an index that is late is asked again."""
            wait_until(lambda: host.check_all(some) >= len(some) - (lost(mounts) - before), "cold blocks on a host")

        come_back(two, first)
        assert cold_figures(two.mount)["promoted"] > 0, "this host reads objects of the other one"
        for host, some in ((one, first), (one, second), (two, second)):
            come_back(host, some)
        assert cold_figures(one.mount)["promoted"] > 0
        there = sum(two.store.exists(keys(0, 900)))
        assert there >= 900 - lost(mounts)
        one.store.close()
        two.store.close()


@pytest.mark.parametrize("is_owner", [True, False])
def test_replaced_and_removed_blocks_stay_so(
    etcd: EtcdServers, seaweed: SeaweedServer, rng: random.Random, is_owner: bool
) -> None:
    """Whichever host does that, and wherever what is newer goes then."""
    with shared_cold_mounts(seaweed, etcd, 2) as mounts:
        one, two = two_hosts(mounts, rng)
        one.fill(0, 600)
        cold = one.cold(keys(0, 600), 120)
        changer = one if is_owner else two
        changer.delete(cold[:40])
        changer.put(cold[40:80], 64 * KIB)
        for host in (one, two):
            assert not any(host.store.exists(cold[:40]))
            host.check(cold[:120])
        changer.fill(1000, 1600)  # what is newer leaves, too
        for host in (one, two):
            assert not any(host.store.exists(cold[:40]))
            assert host.check_all(cold[40:120]) >= 80 - lost(mounts)
        one.store.close()
        two.store.close()


@pytest.mark.ring(3)
def test_a_cleared_namespace_stays_so(etcd: EtcdServers, seaweed: SeaweedServer, rng: random.Random) -> None:
    with shared_cold_mounts(seaweed, etcd, 2) as mounts:
        one, two = (Host(mount, "a", rng) for mount in mounts)
        two.share(one)
        assert kvfuse("namespace", "create", mounts[0].point / "b").returncode == 0
        one.store.close()
        one.folder = two.folder = "b"
        one.reopen()
        assert kvfuse("namespace", "set", mounts[0].point / "b", "cold=all", "admission=all").returncode == 0
        one.fill(0, 600)
        two.reopen()
        cold = one.cold(keys(0, 600), 40)
        assert sum(two.store.exists(cold)) == len(cold)
        done = kvfuse("namespace", "clear", mounts[1].point / "b")
        assert done.returncode == 0, done.stderr
        assert not any(two.store.exists(cold))
        wait_until(lambda: not any(one.store.exists(cold)), "the other host to hear of it")
        assert [one.store.get(key) for key in cold[:20]] == [two.store.get(key) for key in cold[:20]] == [None] * 20
        wait_until(lambda: not cold_figures(mounts[0])["objects"], "objects to be deleted")
        one.store.close()
        two.store.close()


@pytest.mark.ring(3)
def test_blocks_of_a_host_that_is_gone_come_back_and_go(
    etcd: EtcdServers, seaweed: SeaweedServer, rng: random.Random
) -> None:
    """Its objects are as good as before; once they have no blocks any more, its heir deletes them."""
    with shared_cold_mounts(seaweed, etcd, 2, object_size="4MiB") as mounts:
        one, two = two_hosts(mounts, rng)
        one.fill(0, 600)
        cold = one.cold(keys(0, 600), 120)
        one.store.close()
        mounts[0].kill()
        assert two.check_all(cold[:40]) == 40
        mounts[0].mount()
        one.store = BlockStore(mounts[0].point, "ns")
        assert one.check_all(cold[40:80]) == 40
        two.delete(cold)
        one.delete(keys(0, 600))
        wait_until(lambda: not objects_of(mounts[0]), "objects to be deleted")
        one.store.close()
        two.store.close()


def objects_of(mount: KvfuseMount) -> dict[ObjectPlace, int]:
    """What the bucket has of a volume, and the bytes."""
    options = config.load(mount.source).options

    async def look() -> dict[ObjectPlace, int]:
        async with open_records(options) as records:
            volume_id = (await read_shared_superblock(records, options.title)).volume_id
        place = cold_bucket(options, volume_id)
        assert place is not None
        return await list_objects(Bucket(place, 30.0, 4))

    return trio.run(look)


@pytest.mark.ring(3)
def test_hosts_share_the_capacity(etcd: EtcdServers, seaweed: SeaweedServer, rng: random.Random) -> None:
    """The oldest objects go, whoever has put them."""
    with shared_cold_mounts(seaweed, etcd, 2, cold_capacity="12MiB") as mounts:
        hosts = two_hosts(mounts, rng)
        for start in range(0, 1600, 50):
            hosts[start // 50 % 2].fill(start, start + 50)
            assert sum(objects_of(mounts[0]).values()) <= 12 * MIB
        found = objects_of(mounts[0])
        assert sum(found.values()) > 6 * MIB
        assert len({place.client for place in found}) == 2
        removed = [cold_figures(mount)["removed_objects"] for mount in mounts]
        assert min(removed) > 5, removed
        for host in hosts:
            assert host.check_all(keys(1200, 1600)) > 100
            assert not any(host.store.exists(keys(0, 200)))
            host.store.close()


@pytest.mark.ring(3)
def test_fsck_finds_what_is_wrong_in_objects_of_hosts(
    etcd: EtcdServers, seaweed: SeaweedServer, rng: random.Random
) -> None:
    with shared_cold_mounts(seaweed, etcd, 2) as mounts:
        hosts = two_hosts(mounts, rng)
        hosts[0].fill(0, 600)
        for host, mount in zip(hosts, mounts, strict=True):
            host.store.close()
            mount.unmount()
        options = config.load(mounts[0].source).options
        check = functools.partial(fsck, options, verify=True)
        clean = trio.run(check)
        assert clean.clean
        assert clean.cold_blocks > 100
        places = sorted(objects_of(mounts[0]))
        change_object(mounts[0], places[0], 100)  # its heads
        change_object(mounts[0], places[1], -100)  # bytes of its last block
        texts = [problem.text for problem in trio.run(check).problems]
        assert len(texts) == 2, texts
        assert places[0].name in texts[0]
        assert "1 blocks do not match" in texts[1]
        assert trio.run(functools.partial(fsck, options, verify=True, repair=True)).clean
        assert places[0] not in objects_of(mounts[0])
        assert trio.run(check).clean


def change_object(mount: KvfuseMount, place: ObjectPlace, at: int) -> None:
    """Flip a bit."""
    options = config.load(mount.source).options

    async def change() -> None:
        async with open_records(options) as records:
            volume_id = (await read_shared_superblock(records, options.title)).volume_id
        found = cold_bucket(options, volume_id)
        assert found is not None
        bucket = Bucket(found, 30.0, 4)
        data = bytearray((await bucket.get(place.name))[0])
        data[at] ^= 1
        await bucket.put(place.name, bytes(data))

    trio.run(change)


GRACE_SECONDS = 5.0
"""after which a host that is busy knows what another one did"""


class History:
    """What was asked of each key, and when: (beginning, end, bytes or None).

    A block may be got that nothing replaced or removed for sure, after it was put and before it was asked for. An end
    is infinite where nobody knows of one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changes: defaultdict[bytes, list[tuple[float, float, bytes | None]]] = defaultdict(list)
        self.hits = 0

    def begins(self, some: Sequence[bytes], values: Sequence[bytes | None]) -> float:
        """Nobody knows yet whether it is done."""
        began = time.monotonic()
        with self.lock:
            for key, value in zip(some, values, strict=True):
                self.changes[key].append((began, math.inf, value))
        return began

    def ended(self, key: bytes, began: float, value: bytes | None) -> None:
        """It was done."""
        with self.lock:
            self.changes[key].remove((began, math.inf, value))
            self.changes[key].append((began, time.monotonic(), value))

    def got(self, key: bytes, began: float, data: bytes | None) -> None:
        if data is None:
            return
        with self.lock:
            changes = list(self.changes[key])
            self.hits += 1
        puts = [one for one in changes if one[2] == data]
        assert puts, f"{key!r} has bytes that nobody put"
        (put,) = puts
        later = [one for one in changes if put[1] < one[0] and one[1] + GRACE_SECONDS < began]
        assert not later, (
            f"{key!r} was replaced or removed, and is back: {put[:2]}, {[one[:2] for one in later]}, {began}"
        )


class Worker:
    """A host's client, in a thread, which goes on when its daemon was killed."""

    def __init__(self, mount: KvfuseMount, history: History, own: list[bytes], rng: random.Random) -> None:
        """``own``: keys of blocks that this one puts and removes. All are got."""
        self.mount, self.history, self.own, self.rng = mount, history, own, rng
        self.is_up, self.is_over = threading.Event(), threading.Event()
        self.is_up.set()
        self.is_down = threading.Event()
        self.errors: list[Exception] = []

    def run(self) -> None:
        while not self.is_over.is_set():
            self.is_up.wait()
            self.is_down.clear()
            try:
                with BlockStore(self.mount.point, "ns", deadline=3.0) as store:
                    while not self.is_over.is_set() and self.is_up.is_set():
                        self.step(store)
            except (OSError, Disconnected) as error:
                self.errors.append(error)
            self.is_down.set()

    def step(self, store: BlockStore) -> None:
        kind, count = self.rng.random(), self.rng.randrange(1, 13)
        some = self.rng.sample(self.own if kind >= 0.85 else keys(0, 700), count)
        if kind < 0.85:
            began = time.monotonic()
            for key, data in zip(some, store.get_many(some), strict=True):
                self.history.got(key, began, bytes(data) if data is not None else None)
        elif kind < 0.96:
            blocks = [self.rng.randbytes(self.rng.randrange(20 * KIB, 90 * KIB)) for _ in some]
            began = self.history.begins(some, blocks)
            for key, block, was_stored in zip(some, blocks, store.put_many(some, blocks), strict=True):
                if was_stored:
                    self.history.ended(key, began, block)
        else:
            began = self.history.begins(some, [None] * len(some))
            store.delete_many(some)
            for key in some:
                self.history.ended(key, began, None)


@contextmanager
def daemon_killed(mount: KvfuseMount, worker: Worker, *, goes_on: bool) -> Iterator[None]:
    """``goes_on``: another daemon goes on as the same host; else it comes back as another host, after the body."""
    daemon = serving_of(mount.pid) if goes_on else None
    if daemon is not None:
        os.kill(daemon, signal.SIGKILL)
        wait_until(lambda: serving_of(mount.pid) not in (None, daemon), "another daemon")
        yield
        return
    worker.is_up.clear()
    mount.kill()
    yield
    mount.mount()
    worker.is_up.set()


@pytest.mark.ring(3)
@pytest.mark.parametrize("kind", ["etcd", "goes on", pytest.param("omap", marks=pytest.mark.needs("ceph"))])
def test_hosts_that_are_killed_serve_nothing_that_was_replaced(
    request: pytest.FixtureRequest, etcd: EtcdServers, seaweed: SeaweedServer, rng: random.Random, kind: str
) -> None:
    """Each puts and removes its own names, both get all, and blocks go out and come back all the while."""
    history, words = History(), ["outlive=true"] if kind == "goes on" else []
    ceph = request.getfixturevalue("ceph") if kind == "omap" else None
    with shared_cold_mounts(seaweed, etcd, 2, *words, ceph=ceph) as mounts, ThreadPoolExecutor(2) as pool:
        (mounts[0].point / "ns").mkdir()
        seeds = [random.Random(rng.random()) for _ in mounts]
        workers = [Worker(mounts[at], history, keys(0, 700)[at::2], seeds[at]) for at in range(2)]
        running = [pool.submit(worker.run) for worker in workers]
        try:
            for _ in range(6):
                until = time.monotonic() + rng.uniform(3, 12)
                wait_until(lambda until=until: time.monotonic() > until or any(map(Future.done, running)), "a moment")
                at = rng.randrange(2)
                with daemon_killed(mounts[at], workers[at], goes_on=bool(words)):
                    if not words:
                        wait_until(lambda at=at: workers[at].is_down.is_set() or running[at].done(), "its client")
        finally:
            for worker in workers:
                worker.is_over.set()
                worker.is_up.set()
            for task in running:
                task.result()
        figures = [cold_figures(mount) for mount in mounts]
        print(history.hits, [(one.get("demoted"), one.get("promoted"), one.get("surrendered")) for one in figures])
        assert history.hits > 100
        with BlockStore(mounts[0].point, "ns") as store:
            for key in keys(0, 700):
                began = time.monotonic()
                data = store.get(key)
                history.got(key, began, bytes(data) if data is not None else None)
