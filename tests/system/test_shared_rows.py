"""Hosts of one volume, on a real record store, with a folder of blocks: what one stores, the others find."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from killer import serving_of
from mounting import KvfuseMount, shared_conf, wait_until
from peer_lab import listening

from kvfuse.usrbio.client import BlockStore
from kvfuse_cluster.etcd import EtcdServers

pytestmark = pytest.mark.root

WORDS = "volume.capacity=256MiB", "volume.segment_size=64MiB", "cache.tier_size=128MiB", "publish.interval=1"
HOSTS = "one", "two", "three"


@contextmanager
def hosts(
    etcd: EtcdServers, count: int, *words: str, lease: float = 6.0, are_peers: bool = False
) -> Iterator[list[KvfuseMount]]:
    """The volume as several hosts have it mounted. At the end all are unmounted, and it must be clean."""
    with tempfile.TemporaryDirectory(prefix="kvfuse-rows-") as base, ExitStack() as stack:
        conf = shared_conf(Path(base), etcd)
        conf.write_text(conf.read_text().replace("client.lease = 6.0", f"client.lease = {lease}"))
        made = []
        for name in HOSTS[:count]:
            (Path(base) / name).mkdir()
            own = listening() if are_peers else ()
            made.append(KvfuseMount(Path(base) / name, (*WORDS, *words, *own), source=conf))
            stack.callback(made[-1].remove)
            made[-1].mount()
        (made[0].point / "kv").mkdir()
        os.setxattr(made[0].point / "kv", "user.kvfuse.namespace", b"kind=blocks")
        for mount in made:
            wait_until(lambda mount=mount: kind_of(mount) == "blocks", "the namespace to be heard of")
        yield made
        for mount in made:
            if mount.is_mounted:
                mount.check_unexpected_errors()
                mount.unmount()
        made[0].fsck(verify=True)


def stats(mount: KvfuseMount) -> Any:
    return json.loads((mount.point / ".kvfuse" / "stats").read_text())


def kind_of(mount: KvfuseMount) -> str:
    return next((one["settings"]["kind"] for one in stats(mount)["namespaces"] if one["path"] == "/kv"), "")


def content(seed: int, name: str) -> bytes:
    rng = random.Random(f"{seed} {name}")
    return rng.randbytes(rng.choice([100, 4096, 65_536, 300_000]))


def test_blocks_are_found_by_all_hosts_and_outlive_theirs(etcd_alone: EtcdServers, seed: int) -> None:
    with hosts(etcd_alone, 3) as mounts:
        one, two, three = mounts
        names = [f"{number}" for number in range(60)]
        with (
            BlockStore(one.point, "kv", deadline=30) as first,
            BlockStore(two.point, "kv", deadline=30) as second,
            BlockStore(three.point, "kv", deadline=30) as third,
        ):
            stores = first, second, third
            for number, name in enumerate(names):
                stores[number % 3].put(name.encode(), content(seed, name))
            for store, mount in zip(stores, mounts, strict=True):
                wait_until(lambda store=store: all(store.exists([n.encode() for n in names])), "blocks to be written")
                for name in names:
                    assert store.get(name.encode()) == content(seed, name)
                    assert (mount.point / "kv" / name).read_bytes() == content(seed, name)
                assert sorted(os.listdir(mount.point / "kv")) == sorted(names)
            second.delete_many([b"0", b"1", b"2"])
            (three.point / "kv" / "3").unlink()
            gone, rest = names[:4], names[4:]
            for store in stores:
                wait_until(
                    lambda store=store: not any(store.exists([n.encode() for n in gone])), "removals to be heard of"
                )
                assert all(store.exists([n.encode() for n in rest]))
        two.kill()
        for mount in (one, three):
            with BlockStore(mount.point, "kv", deadline=30) as store:
                for name in rest:
                    assert store.get(name.encode()) == content(seed, name)

        def are_adopted() -> bool:
            return stats(one)["store"]["slabs"] + stats(three)["store"]["slabs"] > 0 and all(
                stats(mount)["store"]["loading_slabs"] == 0 for mount in (one, three)
            )

        wait_until(are_adopted, "slabs to be adopted")
        for mount in (one, three):
            assert sorted(os.listdir(mount.point / "kv")) == sorted(rest)
            for name in rest:
                assert (mount.point / "kv" / name).read_bytes() == content(seed, name)


def test_a_killed_daemon_of_a_shared_volume_goes_on(etcd_alone: EtcdServers, seed: int) -> None:
    with hosts(etcd_alone, 2, "outlive=true", lease=60.0) as mounts:
        one, two = mounts
        names = [f"{number}" for number in range(40)]
        with BlockStore(one.point, "kv", deadline=30) as store:
            for name in names:
                store.put(name.encode(), content(seed, name))
            pid = serving_of(one.pid)
            assert pid is not None
            os.kill(pid, 9)
            os.statvfs(one.point)
            for name in names:
                assert (one.point / "kv" / name).read_bytes() == content(seed, name)
        with BlockStore(two.point, "kv", deadline=30) as store:
            wait_until(lambda: all(store.exists([n.encode() for n in names])), "blocks to be written")
            for name in names:
                assert store.get(name.encode()) == content(seed, name)
        with BlockStore(one.point, "kv", deadline=30) as store:
            store.put(b"more", b"more")
            assert store.get(b"more") == b"more"


def test_hosts_that_answer_each_other_find_blocks_before_they_are_durable(etcd_alone: EtcdServers, seed: int) -> None:
    with hosts(etcd_alone, 2, "publish.interval=30", are_peers=True) as mounts:
        one, two = mounts
        for mount in mounts:
            wait_until(lambda mount=mount: any(host["connections"] for host in stats(mount)["peers"]["hosts"]), "peers")
        with BlockStore(one.point, "kv", deadline=30) as first, BlockStore(two.point, "kv", deadline=30) as second:
            for number in range(30):
                name = f"{number}"
                first.put(name.encode(), content(seed, name))
                wait_until(lambda name=name: second.get(name.encode()) is not None, "a block to be found")
                assert second.get(name.encode()) == content(seed, name)
                assert (two.point / "kv" / name).read_bytes() == content(seed, name)
                second.put(b"back-" + name.encode(), content(seed, name))
                wait_until((one.point / "kv" / f"back-{name}").exists, "a block to be found")
                assert (one.point / "kv" / f"back-{name}").read_bytes() == content(seed, name)
        assert stats(two)["peers"]["asked"]["right"] >= 30


def test_a_read_only_host_sees_the_blocks_of_others(etcd_alone: EtcdServers, seed: int) -> None:
    with hosts(etcd_alone, 1) as (one,), BlockStore(one.point, "kv", deadline=30) as store:
        for number in range(10):
            store.put(f"{number}".encode(), content(seed, f"{number}"))
        (one.point.parent.parent / "two").mkdir()
        reader = KvfuseMount(one.point.parent.parent / "two", (*WORDS, "ro"), source=one.source)
        try:
            reader.mount()
            wait_until(lambda: len(os.listdir(reader.point / "kv")) == 10, "blocks to be written")
            for number in range(10):
                assert (reader.point / "kv" / f"{number}").read_bytes() == content(seed, f"{number}")
            reader.unmount()
        finally:
            reader.remove()
