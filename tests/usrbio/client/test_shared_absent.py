"""Clients of a shared volume know by themselves which blocks are absent, where their daemon knows it unasked."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster_lab import compact, etcd_cluster
from mounting import KvfuseMount, shared_conf, stopped, wait_until

from kvfuse.usrbio.client import BlockStore
from kvfuse_cluster.etcd import EtcdServers

pytestmark = pytest.mark.root

PUBLISH = "user.kvfuse.publish"
WORDS = ("namespace.kind=cache", "namespace.admission=all", "cache.tier_size=64MiB")
Mounts = tuple[KvfuseMount, KvfuseMount]


@contextmanager
def mounted_twice(etcd: EtcdServers, *words: str) -> Iterator[Mounts]:
    """A cache as two hosts have it mounted. At the end both are unmounted, and it must be clean."""
    with tempfile.TemporaryDirectory(prefix="kvfuse-absent-") as base:
        conf = shared_conf(Path(base), etcd)
        made = []
        try:
            for name in ("one", "two"):
                (Path(base) / name).mkdir()
                mount = KvfuseMount(Path(base) / name, (*WORDS, *words), source=conf)
                made.append(mount)
                mount.mount()
            yield made[0], made[1]
            for mount in made:
                mount.check_unexpected_errors()
                mount.unmount()
            made[0].fsck(verify=True)
        finally:
            for mount in made:
                mount.remove()


@pytest.fixture(scope="module")
def mounts(etcd: EtcdServers) -> Iterator[Mounts]:
    with mounted_twice(etcd) as made:
        yield made


@pytest.fixture
def name(tmp_path: Path) -> str:
    return tmp_path.name


def make_folder(mounts: Mounts, name: str, publish: str) -> None:
    """As both mounts have it."""
    (mounts[0].point / name).mkdir()
    os.setxattr(mounts[0].point / name, PUBLISH, publish.encode())
    wait_until(lambda: PUBLISH in os.listxattr(mounts[1].point / name), "the setting")


def are_absent(store: BlockStore, keys: list[bytes]) -> bool:
    """The client answers by itself that none of these blocks is there."""
    answer = store._resident.exists(keys)
    return answer is not None and not answer.any()


def until_absent(store: BlockStore, keys: list[bytes]) -> None:
    wait_until(lambda: are_absent(store, keys), "the names of the folder")


def test_absent_blocks_are_known_without_the_daemon_until_the_other_host_puts_them(mounts: Mounts, name: str) -> None:
    make_folder(mounts, name, "relaxed")
    one, two = mounts
    keys = [b"%07d" % number for number in range(60)]
    with BlockStore(one.point, name) as theirs, BlockStore(two.point, name) as store:
        assert theirs.put_many(keys[:20], [b"x" * 100] * 20).all()
        wait_until(lambda: bool(store.exists(keys[:20]).all()), "the other host's blocks")
        until_absent(store, keys[20:])
        with stopped(two.pid):
            assert store.exists(keys[20:]).tolist() == [False] * 40
            assert store.longest_prefix(keys[20:]) == 0
            assert store._resident.exists([keys[0]]) is None  # it is there: the daemon knows where
        assert theirs.put_many(keys[20:40], [b"y" * 100] * 20).all()
        (one.point / name / "file").write_bytes(b"z")
        os.rename(one.point / name / "file", one.point / name / keys[40].decode())
        wait_until(lambda: bool(store.exists(keys[:41]).all()), "what the other host put")
        assert bytes(store.get(keys[25]) or b"") == b"y" * 100
        assert bytes(store.get(keys[40]) or b"") == b"z"
        with stopped(two.pid):
            assert store.exists(keys[41:]).tolist() == [False] * 19


@pytest.mark.parametrize("setter", [0, 1], ids=["the other host", "this host"])
def test_a_folder_that_becomes_strict_ends_it(mounts: Mounts, name: str, setter: int) -> None:
    make_folder(mounts, name, "relaxed")
    one, two = mounts
    with BlockStore(one.point, name) as theirs, BlockStore(two.point, name) as store:
        until_absent(store, [b"a", b"b"])
        os.setxattr(mounts[setter].point / name, PUBLISH, b"strict")
        wait_until(lambda: not are_absent(store, [b"a"]), "the end of the index")
        for number in range(20):
            key = b"%d" % number
            theirs.put(key, b"x")
            assert bytes(store.get(key) or b"") == b"x"
            assert not are_absent(store, [b"a"])
        os.setxattr(mounts[setter].point / name, PUBLISH, b"relaxed")
        until_absent(store, [b"a", b"b"])
        assert not are_absent(store, [b"3"])


def test_a_strict_folder_is_asked_about_each_time(mounts: Mounts, name: str) -> None:
    make_folder(mounts, name, "strict")
    one, two = mounts
    with BlockStore(one.point, name) as theirs, BlockStore(two.point, name) as store:
        for number in range(50):
            key = b"%d" % number
            assert store.get(key) is None
            theirs.put(key, b"x")
            assert bytes(store.get(key) or b"") == b"x"
            assert not are_absent(store, [b"absent"])


def test_what_a_host_missed_is_not_absent(name: str) -> None:
    """Its daemon was stopped, and the store does not have the changes of that time any more."""
    with etcd_cluster(1) as etcd, mounted_twice(etcd, "publish=relaxed", "client.lease=60") as (one, two):

        def watches() -> int:
            return int(json.loads((two.point / ".kvfuse/stats").read_text())["coherence"]["watches"])

        with BlockStore(one.point, name) as theirs, BlockStore(two.point, name) as store:
            theirs.put(b"before", b"x")
            wait_until(lambda: bool(store.exists([b"before"]).all()), "the other host's block")
            until_absent(store, [b"a", b"b"])
            with stopped(two.pid):
                assert are_absent(store, [b"a", b"b"])
                etcd.kill(0)
                etcd.restart(0)
                etcd.wait_ready(0)
                for key in (b"a", b"c", b"d"):
                    theirs.put(key, b"x")
                    with (one.point / name / key.decode()).open("rb") as file:
                        os.fsync(file.fileno())
                compact(etcd)
            wait_until(lambda: watches() > 1, "a new watch")
            assert not are_absent(store, [b"a"])
            until_absent(store, [b"b"])
            assert store.exists([b"a", b"b"]).tolist() == [True, False]
