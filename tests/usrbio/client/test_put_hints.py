"""Hints of puts, for namespaces of blocks: how long a block is kept, and which goes first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from errno import EINVAL
from pathlib import Path

import numpy as np
import pytest
from mounting import KvfuseMount, temporary_mount, wait_until
from ring_lab import stats

from kvfuse.usrbio.client import BlockStore, PutHints

MIB = 1 << 20


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(["tier_size=64MiB,capacity=200MiB,outlive=false"]) as mounted:
        yield mounted


@pytest.fixture
def folder(mount: KvfuseMount, tmp_path: Path) -> Path:
    path = mount.point / tmp_path.name
    path.mkdir()
    os.setxattr(path, "user.kvfuse.namespace", b"kind=blocks eviction=lru admission=all capacity=8MiB")
    return path


@pytest.mark.parametrize(
    "hints", [PutHints(), PutHints(1, -1), PutHints((1 << 32) - 1, 127), PutHints(0, -128)], ids=str
)
def test_hints_are_packed(hints: PutHints) -> None:
    assert PutHints.unpack(hints.pack()) == hints
    assert hints.pack() < 1 << 40


@pytest.mark.parametrize("hints", [PutHints(-1), PutHints(1 << 32), PutHints(0, 128), PutHints(0, -129)], ids=str)
def test_hints_that_are_none(hints: PutHints) -> None:
    with pytest.raises(ValueError, match="a put has"):
        hints.pack()


def test_a_block_expires_when_its_put_says_so(mount: KvfuseMount, folder: Path) -> None:
    with BlockStore(mount.point, folder.name) as store:
        iov = store.client.iov(1 << 20)
        store.put("short", b"x", hints=PutHints(ttl=60))
        assert store.put_many(["many", "many 2"], [b"x", b"y" * 9000], hints=PutHints(ttl=60)).all()
        assert (store.put_at([b"at"], iov, [0], [4096], hints=PutHints(ttl=60)) == 4096).all()
        store.put("long", b"x", hints=PutHints(ttl=3600))
        store.put("stays", b"x")
        keys = ["short", "many", "many 2", "at", "long", "stays"]
        assert store.exists(keys).all()
        os.setxattr(folder, "user.kvfuse.namespace.advance", b"100")
        assert store.exists(keys).tolist() == [False] * 4 + [True] * 2
        assert store.get("many") is None
        mine = [row for row in stats(mount)["namespaces"] if row["path"] == f"/{folder.name}"]
        assert mine[0]["settings"]["ttl"] == 0
        wait_until(lambda: stats(mount)["store"]["evicted"]["expired"] >= 4, "their slots")


def test_the_namespace_bounds_how_long_a_block_is_kept(mount: KvfuseMount, folder: Path) -> None:
    os.setxattr(folder, "user.kvfuse.namespace.ttl", b"60")
    with BlockStore(mount.point, folder.name) as store:
        store.put("long", b"x", hints=PutHints(ttl=3600))
        assert store.exists(["long"]).all()
        os.setxattr(folder, "user.kvfuse.namespace.advance", b"100")
        assert not store.exists(["long"]).any()


def test_blocks_of_lower_priority_go_first(mount: KvfuseMount, folder: Path) -> None:
    with BlockStore(mount.point, folder.name) as store:
        kept = [f"high {number}" for number in range(10)]
        assert store.put_many(kept, [b"x" * 100_000] * 10, hints=PutHints(priority=100)).all()
        for number in range(300):
            priority = -100 if number % 2 else 0
            store.put(f"key {number}", b"x" * 100_000, hints=PutHints(priority=priority))
        assert store.exists(kept).all()
        there = store.exists([f"key {number}" for number in range(300)])
        assert there[0::2].sum() > 40 > there[1::2].sum()


def test_entries_of_one_submission_may_have_different_hints(mount: KvfuseMount, folder: Path) -> None:
    with BlockStore(mount.point, folder.name) as store, store.client.ring() as ring:
        iov = store.client.iov(1 << 16)
        hints = [PutHints(ttl=60), PutHints(ttl=60), PutHints(), PutHints(ttl=60, priority=3), PutHints()]
        for number, hint in enumerate(hints):
            iov.array[number] = number
            ring.prep_put(iov, number, store.namespace, f"key {number}".encode(), 1, hints=hint)
        ring.submit()
        assert (ring.wait(5)["result"] == 1).all()
        assert [bytes(store.get(f"key {number}") or b"") for number in range(5)] == [bytes([one]) for one in range(5)]
        os.setxattr(folder, "user.kvfuse.namespace.advance", b"100")
        assert store.exists([f"key {number}" for number in range(5)]).tolist() == [not hint.ttl for hint in hints]


def test_bits_that_mean_nothing_are_refused(mount: KvfuseMount, folder: Path) -> None:
    with BlockStore(mount.point, folder.name) as store, store.client.ring() as ring:
        iov = store.client.iov(1 << 16)
        ring.prep_put(iov, 0, store.namespace, b"before", 1)
        ring.attached.place_keys(5, [iov], np.array([0]), store.namespace, [b"key"], 1, 7, 0, 0, None, 1 << 41)
        ring.submit()
        assert sorted(ring.wait(2)["result"].tolist()) == [-EINVAL, 1]
        assert not store.exists(["key"]).any()
