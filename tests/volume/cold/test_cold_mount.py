"""Blocks that leave a volume go to a bucket and come back: a mount, a ring's client, SeaweedFS."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from bucket_lab import BUCKET, bucket_server
from cli_lab import kvfuse
from cold_lab import KIB, MIB, Beside, cold_figures, cold_mount, settle
from killer import serving_of
from mounting import KvfuseMount, wait_until

from kvfuse.options.options import ColdBucketOptions
from kvfuse.remote.bucket import Bucket
from kvfuse.usrbio.client.block_store import BlockStore
from kvfuse_cluster.seaweed import SeaweedServer

pytestmark = pytest.mark.ring(2)


@pytest.fixture(scope="module")
def own_seaweed() -> Iterator[SeaweedServer]:
    """One that tests may stop."""
    with bucket_server() as server:
        yield server


def keys(start: int, end: int) -> list[bytes]:
    return [b"block-%06d" % number for number in range(start, end)]


def fill(beside: Beside, start: int, end: int, size: int = 64 * KIB) -> None:
    """Put some at a time, and let those that leave go to the bucket."""
    for first in range(start, end, 25):
        beside.put(keys(first, min(first + 25, end)), size)
        settle(beside.mount)


def check_all(beside: Beside, start: int, end: int) -> int:
    """Get some at a time: those that come back push out others. How many were there. A busy machine may be late with
    one that is known to be cold: that is a miss, and it is asked for again."""
    hits = 0
    for first in range(start, end, 20):
        some = keys(first, min(first + 20, end))
        wait_until(lambda some=some: beside.check(some) == sum(beside.store.exists(some)), "cold blocks to come back")
        hits += sum(beside.store.exists(some))
        settle(beside.mount)
    return hits


def check_lost(beside: Beside, hits: int, put: int) -> None:
    """No block is lost that is not counted. A bucket that is busy may be too slow for some."""
    figures = cold_figures(beside.mount)
    assert put - figures["surrendered"] <= hits <= put, figures


def test_blocks_that_left_come_back(seaweed: SeaweedServer, rng: random.Random) -> None:
    with cold_mount(seaweed) as mount:
        beside = Beside(mount, "ns", rng)
        fill(beside, 0, 600)
        assert settle(mount)["blocks"] > 300
        assert sum(beside.store.exists(keys(0, 600))) == 600
        assert beside.store.longest_prefix(keys(0, 600)) == 600
        cold, hot = (beside.store.costs(some).milliseconds[0] for some in (keys(0, 1), keys(599, 600)))
        assert hot < cold < 60_000, "a cold block is not expected later than a hot one"
        assert beside.check(keys(0, 100)) == 100
        assert cold_figures(mount)["promoted"] == 100
        line = next(line for line in kvfuse("status", mount.point).stdout.splitlines() if "cold tier" in line)
        assert f"{cold_figures(mount)['blocks']:,} blocks" in line
        assert "its bucket answers" in line
        assert beside.check(keys(0, 100)) == 100
        assert cold_figures(mount)["promoted"] == 100, "a block that came back is hot"
        beside.store.close()


def test_blocks_come_back_after_a_restart(seaweed: SeaweedServer, rng: random.Random) -> None:
    with cold_mount(seaweed) as mount:
        beside = Beside(mount, "ns", rng)
        fill(beside, 0, 600)
        count = settle(mount)["blocks"]
        beside.store.close()
        mount.unmount()
        mount.mount()
        assert settle(mount)["blocks"] >= count, "what is above the water mark waits until objects are known"
        beside.store = BlockStore(mount.point, "ns")
        assert sum(beside.store.exists(keys(0, 600))) == 600, "each was asked for before it is read"
        check_lost(beside, check_all(beside, 0, 600), 600)
        beside.store.close()


def test_a_block_that_was_brought_back_is_not_stored_twice(seaweed: SeaweedServer, rng: random.Random) -> None:
    with cold_mount(seaweed) as mount:
        beside = Beside(mount, "ns", rng)
        fill(beside, 0, 400)
        before = settle(mount)
        assert beside.check(keys(0, 60)) == 60  # they are hot, and others leave
        check_lost(beside, check_all(beside, 60, 250), 190)
        after = settle(mount)
        assert after["promoted"] > 150
        assert before["demoted"] < after["demoted"] <= 400, "blocks that came back were stored again"
        check_lost(beside, check_all(beside, 0, 400), 400)
        beside.store.close()


def test_puts_in_a_hurry_lose_what_is_counted(seaweed: SeaweedServer, rng: random.Random) -> None:
    """Blocks that a bucket is too slow for are evicted, and counted. The others are there all the time."""
    names = keys(0, 900)
    with cold_mount(seaweed) as mount:
        beside = Beside(mount, "ns", rng)
        for start in range(0, 900, 300):
            beside.put(names[start : start + 300], 64 * KIB)
            there, has_settled = beside.find(names), False
            while not has_settled:
                has_settled = not cold_figures(mount)["leaving_bytes"]
                before, there = there, beside.find(names)
                assert there <= before, "blocks were absent, and are back"
        assert (lost := settle(mount)["surrendered"]) > 0
        there = beside.find(names)
        assert len(there) + lost == len(beside.known) == 900
        for start in range(0, 900, 20):
            some = [name for name in names[start : start + 20] if name in there]
            assert beside.check(some) == len(some)
            settle(mount)
        beside.store.close()


def test_replaced_and_removed_blocks_stay_so(seaweed: SeaweedServer, rng: random.Random) -> None:
    with cold_mount(seaweed) as mount:
        beside = Beside(mount, "ns", rng)
        fill(beside, 0, 400)
        cold = [key for key in keys(0, 100) if beside.store.exists([key])[0]]
        beside.delete(cold[:30])
        beside.put(cold[30:60], 64 * KIB)
        beside.check(cold)
        fill(beside, 400, 800)  # what is newer leaves, too
        beside.check(cold)
        beside.store.close()
        mount.unmount()
        mount.mount()
        settle(mount)
        beside.store = BlockStore(mount.point, "ns")
        beside.check(cold)
        assert not any(beside.store.exists(cold[:30]))
        beside.store.close()


def test_a_server_that_hangs_is_a_miss(own_seaweed: SeaweedServer, rng: random.Random) -> None:
    with cold_mount(own_seaweed, deadline=1) as mount:
        beside = Beside(mount, "ns", rng)
        fill(beside, 0, 400)
        own_seaweed.kill(signal.SIGSTOP)
        try:
            assert beside.check(keys(0, 20)) == 0
            assert not any(beside.store.exists(keys(0, 20))), "the server is known to hang"
            beside.put(keys(1000, 1400), 64 * KIB)  # hot blocks do not care
            assert beside.check(keys(1390, 1400)) == 10
        finally:
            own_seaweed.kill(signal.SIGCONT)
        wait_until(lambda: beside.check(keys(0, 20)) > 0, "blocks to come back")
        own_seaweed.kill(signal.SIGSTOP)
        try:
            beside.put(keys(2000, 2200), 64 * KIB)
            wait_until(lambda: cold_figures(mount)["leaving_bytes"] > 0, "blocks that wait for the bucket")
            beside.store.close()
            began = time.monotonic()
            mount.unmount()
            assert time.monotonic() - began < 40, "the end of the daemon waits for the bucket"
        finally:
            own_seaweed.kill(signal.SIGCONT)


def test_the_bucket_holds_no_more_than_it_may(seaweed: SeaweedServer, rng: random.Random) -> None:
    with cold_mount(seaweed, cold_capacity="8MiB") as mount:
        beside = Beside(mount, "ns", rng)
        for start in range(0, 1000, 50):
            fill(beside, start, start + 50)
            assert cold_figures(mount)["used_bytes"] <= 8 * MIB
        found = settle(mount)
        assert found["removed_objects"] > 10
        assert 4 * MIB < found["used_bytes"] <= 8 * MIB
        assert beside.check(keys(0, 1000)) > 100
        beside.store.close()


@pytest.mark.ring(3)
def test_a_dict_beside_it_agrees(seaweed: SeaweedServer, rng: random.Random) -> None:
    """Random puts, gets, deletes, evictions, mounts and kills: no wrong byte."""
    names = keys(0, 500)
    with cold_mount(seaweed) as mount:
        beside = Beside(mount, "ns", rng)
        for _ in range(150):
            some = rng.sample(names, rng.randrange(1, 40))
            kind = rng.random()
            if kind < 0.45:
                beside.put(some)
            elif kind < 0.8:
                beside.check(some)
            elif kind < 0.9:
                beside.delete(some)
            elif kind < 0.95:
                settle(mount)
            else:
                beside.store.close()
                if rng.random() < 0.5:
                    mount.kill()
                    beside.note_kill()
                else:
                    mount.unmount()
                mount.mount()
                settle(mount)
                beside.store = BlockStore(mount.point, "ns")
        assert beside.hits > 100
        beside.store.close()


@pytest.mark.ring(3)
def test_a_killed_daemon_brings_nothing_back(seaweed: SeaweedServer, rng: random.Random) -> None:
    """Its mount outlives it: what was answered holds, also where a cold block is older than that."""
    names = keys(0, 500)
    with cold_mount(seaweed, "outlive=true") as mount:
        beside = Beside(mount, "ns", rng)
        for _ in range(120):
            some = rng.sample(names, rng.randrange(1, 40))
            kind = rng.random()
            if kind < 0.4:
                beside.put(some)
            elif kind < 0.75:
                beside.check(some)
            elif kind < 0.9:
                beside.delete(some)
            else:
                if rng.random() < 0.5:
                    settle(mount)
                daemon = serving_of(mount.pid)
                assert daemon is not None
                os.kill(daemon, signal.SIGKILL)
                wait_until(lambda former=daemon: serving_of(mount.pid) not in (None, former), "another daemon")
                settle(mount)
                beside.check(names)
        assert beside.hits > 100
        beside.store.close()


def test_objects_that_are_mostly_dead_are_packed_anew(seaweed: SeaweedServer, rng: random.Random) -> None:
    with cold_mount(seaweed) as mount:
        beside = Beside(mount, "ns", rng)
        fill(beside, 0, 400)
        before = settle(mount)
        beside.delete([key for number, key in enumerate(keys(0, 200)) if number % 3])
        wait_until(lambda: cold_figures(mount)["repacked_objects"] > 0, "objects to be packed anew")
        wait_until(lambda: cold_figures(mount)["used_bytes"] < before["used_bytes"] - 2 * MIB, "old objects to go")
        assert beside.check(keys(0, 200)[:60]) == 20
        settle(mount)
        assert beside.check(keys(0, 200)[60:120]) == 20
        beside.store.close()


def test_cleared_and_removed_folders_stay_so(seaweed: SeaweedServer, rng: random.Random) -> None:
    with cold_mount(seaweed) as mount:
        assert kvfuse("namespace", "create", mount.point / "a").returncode == 0
        assert kvfuse("namespace", "set", mount.point / "a", "cold=all", "admission=all").returncode == 0
        first, second = Beside(mount, "a", rng), Beside(mount, "b", rng)
        for start in range(0, 300, 25):
            for one in (first, second):
                one.put(keys(start, start + 25), 64 * KIB)
                settle(mount)
        assert first.check(keys(0, 20)) == second.check(keys(0, 20)) == 20
        before = int(sum(second.store.exists(keys(20, 40))))
        assert before == 20
        done = kvfuse("namespace", "clear", mount.point / "a")
        assert done.returncode == 0, done.stderr
        assert not any(first.store.exists(keys(0, 300)))
        assert second.check(keys(20, 40)) == before
        for one in (first, second):
            one.store.close()
        mount.unmount()
        mount.mount()
        settle(mount)
        first.store, second.store = BlockStore(mount.point, "a"), BlockStore(mount.point, "b")
        assert not any(first.store.exists(keys(0, 300)))
        assert second.check(keys(40, 60)) == 20
        for one in (first, second):
            one.store.close()


def test_a_file_takes_the_name_of_a_cold_block(seaweed: SeaweedServer, rng: random.Random) -> None:
    with cold_mount(seaweed) as mount:
        beside = Beside(mount, "ns", rng)
        fill(beside, 0, 400)
        (name,) = keys(3, 4)
        path = mount.point / "ns" / name.decode()
        assert not path.exists(), "files show hot blocks alone"
        with path.open("wb") as file:
            file.write(b"short")
        assert beside.store.get(name) == b"short"
        path.unlink()
        assert beside.store.get(name) is None
        (name,) = keys(5, 6)
        path = mount.point / "ns" / name.decode()
        path.write_bytes(bytes(5 * MIB))  # too large for a slab: it stays a file
        path.unlink()
        assert beside.store.get(name) is None
        beside.store.close()


def test_destroy_and_doctor_know_the_bucket(seaweed: SeaweedServer, rng: random.Random, tmp_path: Path) -> None:
    volume, conf = tmp_path / "volume", tmp_path / "mount.conf"
    lines = [f'volume.path = "{volume}"', 'volume.capacity = "16MiB"', 'namespace.kind = "blocks"']
    lines += ['namespace.cold = "all"', 'namespace.admission = "all"', "namespace.high_water = 0.8"]
    lines += ["namespace.low_water = 0.6", 'cold.engine = "s3"', f'cold.endpoint = "{seaweed.endpoint}"']
    lines += [f'cold.bucket = "{BUCKET}"', f'cold.prefix = "{tmp_path.name}/"', 'cold.capacity = "64MiB"']
    lines += ['cold.object_size = "1MiB"', f'cold.credentials_file = "{seaweed.credentials_file}"']
    conf.write_text("\n".join(lines) + "\n")
    assert "cold tier" in kvfuse("doctor", conf).stdout
    (tmp_path / "place").mkdir()
    mount = KvfuseMount(tmp_path / "place", source=conf)
    try:
        mount.mount()
        beside = Beside(mount, "ns", rng)
        fill(beside, 0, 300)
        beside.store.close()
        assert cold_figures(mount)["objects"] > 2
        metrics = [line for line in kvfuse("stats", mount.point).stdout.splitlines() if "cold" in line]
        assert metrics
        mount.unmount()
    finally:
        mount.remove()
    place = ColdBucketOptions(
        endpoint=seaweed.endpoint, bucket=BUCKET, prefix=f"{tmp_path.name}/", credentials_file=seaweed.credentials_file
    )

    async def count() -> int:
        return len(await Bucket(place, 30.0, 4).list(""))

    assert trio.run(count) > 2
    done = kvfuse("destroy", conf, "--yes", "volume")
    assert done.returncode == 0, done.stderr
    assert trio.run(count) == 0
    assert not volume.exists()


def test_keys_that_others_may_read_are_refused(seaweed: SeaweedServer, tmp_path: Path) -> None:
    keys_file, volume, point = tmp_path / "keys", tmp_path / "volume", tmp_path / "mnt"
    keys_file.write_text(seaweed.credentials_file.read_text())
    keys_file.chmod(0o644)
    point.mkdir()
    words = [f"cold.bucket={BUCKET}", f"cold.endpoint={seaweed.endpoint}", f"cold.credentials_file={keys_file}"]
    words = ["capacity=16MiB", "cold.engine=s3", "cold.capacity=1GiB", *words]
    done = kvfuse("mount", volume, point, *[part for word in words for part in ("-o", word)])
    assert done.returncode != 0
    assert "chmod" in done.stderr
    assert "kvfuse-secret" not in done.stderr
