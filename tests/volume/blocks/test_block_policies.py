"""Settings of namespaces of blocks on a real mount: soft pin, quotas of nested namespaces, water marks, a token."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mounting import KvfuseMount, temporary_mount, wait_until
from ring_lab import stats

from kvfuse.usrbio.client import BlockStore

MIB = 1 << 20
SIZE = 100_000
"""of a block, which takes 102,400 bytes"""


@pytest.fixture
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(["tier_size=64MiB,capacity=100MiB,outlive=false"]) as mounted:
        yield mounted


def make(mount: KvfuseMount, name: str, **settings: object) -> Path:
    folder = mount.point / name
    folder.mkdir(parents=True)
    words = " ".join(f"{key}={value}" for key, value in {"kind": "blocks", "admission": "all", **settings}.items())
    os.setxattr(folder, "user.kvfuse.namespace", words.encode())
    return folder


def fill(mount: KvfuseMount, name: str, count: int, size: int = SIZE, prefix: str = "") -> None:
    with BlockStore(mount.point, name) as store:
        for start in range(0, count, 20):
            keys = [f"{prefix}{number}" for number in range(start, start + 20)]
            assert store.put_many(keys, [b"x" * size] * 20).all()


def present(mount: KvfuseMount, name: str, count: int) -> int:
    with BlockStore(mount.point, name) as store:
        return int(store.exists([f"{number}" for number in range(count)]).sum())


def row_of(mount: KvfuseMount, path: str) -> Any:
    (row,) = [one for one in stats(mount)["namespaces"] if one["path"] == path]
    return row


def test_pinned_blocks_go_last(mount: KvfuseMount) -> None:
    """Also where whole slabs are emptied, for blocks of other sizes."""
    make(mount, "pinned", soft_pin="true")
    fill(mount, "pinned", 200)
    make(mount, "other")
    for size in (4096, 60_000, 900_000, SIZE):
        fill(mount, "other", 2 * 100 * MIB // max(size, 60_000) // 20 * 20, size, f"{size} ")
    assert present(mount, "pinned", 200) == 200
    fill(mount, "pinned", 2000)  # but their own make room
    assert row_of(mount, "/pinned")["cache"]["room"] > 0


def test_nested_namespaces_give_by_what_they_have(mount: KvfuseMount) -> None:
    make(mount, "outer", capacity=20 * MIB)
    make(mount, "outer/inner", capacity=10 * MIB)
    fill(mount, "outer/inner", 200)
    before = row_of(mount, "/outer/inner")["cache"]
    assert 70 < before["blocks"] <= 102
    fill(mount, "outer", 140)
    rows = {row["path"]: row for row in stats(mount)["namespaces"]}  # of one moment: blocks are still evicted
    outer, inner = rows["/outer"], rows["/outer/inner"]
    assert outer["used"]["bytes"] <= 20 * MIB
    assert outer["cache"]["bytes"] == outer["used"]["bytes"] - inner["used"]["bytes"]
    assert inner["cache"]["blocks"] > 40
    assert outer["cache"]["blocks"] > 90


def test_figures_are_exact_when_blocks_are_replaced_and_deleted(mount: KvfuseMount) -> None:
    make(mount, "kv")
    for _ in range(3):
        fill(mount, "kv", 100)
    with BlockStore(mount.point, "kv") as store:
        store.delete_many([f"{number}" for number in range(40)])
    found = row_of(mount, "/kv")["cache"]
    assert (found["blocks"], found["bytes"]) == (60, 60 * 102_400)


def test_quotas_and_water_marks(mount: KvfuseMount) -> None:
    make(mount, "few", blocks=50)
    fill(mount, "few", 200, 1000)
    assert 40 <= row_of(mount, "/few")["used"]["blocks"] <= 50
    make(mount, "half", capacity=20 * MIB, high_water=0.8, low_water=0.5)
    fill(mount, "half", 400)
    wait_until(lambda: bool(row_of(mount, "/half")["used"]["bytes"] <= 16 * MIB), "the high water mark")
    assert row_of(mount, "/half")["used"]["bytes"] > 9 * MIB
