"""What a mount says of its namespaces of blocks: hits, misses by reason, puts, removals, and files beside blocks."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_lab import kvfuse
from mounting import KvfuseMount, temporary_mount, wait_until
from ring_lab import stats

from kvfuse.metrics.families import families
from kvfuse.policy.estimate import HitEstimate
from kvfuse.usrbio.client import BlockStore
from kvfuse.usrbio.protocol.costs import Tier
from kvfuse.volume.blocks.block_books import BlockBooks

MIB = 1 << 20


@pytest.fixture
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(["tier_size=64MiB", "capacity=200MiB"]) as mounted:
        yield mounted


def make(mount: KvfuseMount, **settings: object) -> Path:
    folder = mount.point / "kv"
    folder.mkdir()
    words = " ".join(f"{key}={value}" for key, value in {"kind": "blocks", **settings}.items())
    os.setxattr(folder, "user.kvfuse.namespace", words.encode())
    return folder


def figures(mount: KvfuseMount) -> Any:
    (row,) = [one for one in stats(mount)["namespaces"] if one["path"] == "/kv"]
    return row["cache"]


def test_hits_and_misses_are_counted_once(mount: KvfuseMount) -> None:
    make(mount)
    with BlockStore(mount.point, "kv") as store:
        assert store.put_many(["a", "b", "c"], [b"1" * 5000] * 3).all()
        assert store.longest_prefix(["a", "b", "c", "d"]) == 3
        wait_until(lambda: figures(mount)["asked"] == 4, "the look-up")
        assert all(view is not None for view in store.get_many(["a", "b", "c"]))
        assert store.get("e") is None
        wait_until(lambda: figures(mount)["asked"] == 5, "the get of what is not there")
        (mount.point / "kv" / "b").read_bytes()
        wait_until(lambda: figures(mount)["asked"] == 6, "the read of a file")
    found = figures(mount)
    assert (found["present"], found["absent"], found["stored"], found["blocks"]) == (4, 2, 3, 3)
    assert found["hits"] == {"dram": 4, "disk": 0, "remote": 0}
    assert found["hit_ratio"] == 0.6667
    assert found["bytes"] == 3 * 8192


def test_files_that_are_not_there_are_misses(mount: KvfuseMount) -> None:
    folder = make(mount)
    for number in range(20):
        (folder / f"part {number}").write_bytes(b"x" * 100)
        (folder / f"part {number}").rename(folder / f"{number}")
    assert not (folder / "absent").exists()
    with pytest.raises(FileNotFoundError):
        (folder / "absent").open()
    assert not (folder / "absent too").exists()
    wait_until(lambda: figures(mount)["absent"] == 2, "the misses")
    assert (folder / "7").read_bytes() == b"x" * 100
    wait_until(lambda: figures(mount)["present"] == 1, "the hit")
    assert figures(mount)["asked"] == 3


def test_gone_blocks_are_counted_by_reason(mount: KvfuseMount) -> None:
    folder = make(mount, capacity=8 * MIB, eviction="lru", admission="all")
    keys = [f"key-{number}" for number in range(120)]
    with BlockStore(mount.point, "kv") as store:
        for key in keys:
            store.put(key, b"x" * 100_000)
        found = figures(mount)
        assert found["room"] == 120 - found["blocks"] > 20
        assert sum(found["residence"]["counts"]) == found["room"]
        assert store.get(keys[0]) is None
        wait_until(lambda: figures(mount)["misses"]["evicted"] == 1, "the miss")
        os.setxattr(folder, "user.kvfuse.clear", b"1")
        assert not store.exists(keys[-2:]).any()
        wait_until(lambda: figures(mount)["misses"]["cleared"] == 2, "the misses")
        found = figures(mount)
        assert found["cleared"] == 120 - found["room"]
        wait_until(lambda: figures(mount)["blocks"] == 0, "the sweep of the table that ended")
        os.setxattr(folder, "user.kvfuse.namespace.ttl", b"1")
        store.put("short", b"x")
        wait_until(lambda: figures(mount)["expired"] == 1, "its end")
        assert store.get("short") is None
        wait_until(lambda: figures(mount)["misses"]["expired"] == 1, "the miss")
    assert stats(mount)["store"]["evicted"]["room"] == found["room"]


def test_what_is_read_from_the_medium_is_no_hit_of_memory(mount: KvfuseMount) -> None:
    make(mount)
    with BlockStore(mount.point, "kv") as store:
        assert store.put_many(["a", "b"], [b"1" * 5000] * 2).all()
    mount.unmount()
    mount.mount()
    wait_until(lambda: not stats(mount)["store"]["loading_slabs"], "the heads of all slabs")
    with BlockStore(mount.point, "kv") as store:
        assert store.get("a") is not None
        wait_until(lambda: figures(mount)["asked"] == 1, "the get")
        assert figures(mount)["hits"] == {"dram": 0, "disk": 1, "remote": 0}
        assert store.prefetch(["b"]).all()
        assert store.get("b") is not None
        wait_until(lambda: figures(mount)["asked"] == 2, "the get")
        assert figures(mount)["hits"] == {"dram": 1, "disk": 1, "remote": 0}


def test_what_is_refused_is_counted(mount: KvfuseMount) -> None:
    make(mount, capacity=8 * MIB, admission="second-touch", eviction="lru")
    with BlockStore(mount.point, "kv") as store:
        for number in range(300):
            store.put(f"key-{number}", b"x" * 100_000)
    assert figures(mount)["refused"] > 100
    assert figures(mount)["stored"] + figures(mount)["refused"] == 300


def test_commands_and_metrics_show_them(mount: KvfuseMount) -> None:
    folder = make(mount)
    (folder / "empty").touch()
    with BlockStore(mount.point, "kv") as store:
        assert store.put_many(["a", "b"], [b"1" * 5000] * 2).all()
        store.exists(["a", "c"])
        wait_until(lambda: figures(mount)["asked"] == 2, "the look-up")
    row = json.loads(kvfuse("namespace", "usage", str(folder), "--json").stdout)
    assert row["used"] == {"bytes": 2 * 8192, "files": 3, "blocks": 2, "block_bytes": 2 * 8192}
    shown = kvfuse("namespace", "usage", str(folder)).stdout
    assert "2, 16KiB" in shown
    assert "blocks stored" in shown
    (line,) = [line for line in kvfuse("namespace", "list", str(mount.point)).stdout.splitlines() if "/kv " in line]
    assert line.split()[3:7] == ["16KiB", "2", "1", "0.5"]
    told = stats(mount)
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families(told, told["space"])
        for sample in family.samples
    }
    assert found["kvfuse_blocks", ("cache", "/kv")] == 2
    hits = ("cache", "/kv"), ("result", "hit"), ("tier", "dram")
    assert found["kvfuse_blocks_requested_total", *hits] == 1


def test_other_capacities_are_estimated_from_fewer_keys_where_these_are_used_much(rng: random.Random) -> None:
    books, now = BlockBooks(), time.time()
    keys = np.array([rng.getrandbits(64) for _ in range(4000)], np.uint64)
    for turn in range(30):
        chosen = keys[[min(int(rng.expovariate(0.002)), 3999) for _ in range(2000)]]
        books.asked(chosen, np.ones(2000, np.bool_), now + turn)
        books.look(now + turn)
    ratios = books.statistics(500, 1)["estimated_hit_ratio"]
    exact = HitEstimate()
    rng.seed(1)
    for _ in range(30):
        exact.ask(keys[[min(int(rng.expovariate(0.002)), 3999) for _ in range(2000)]])
    for name, ratio in zip(ratios, exact.ratios(500).values(), strict=True):
        assert abs(ratios[name] - ratio) < 0.08, name


# -- look-ups that say more ----------------------------------------------------------------------------------


def test_costs_say_what_is_in_memory(mount: KvfuseMount) -> None:
    make(mount)
    with BlockStore(mount.point, "kv") as store:
        assert store.put_many(["a", "b"], [b"1" * 500_000] * 2).all()
    mount.unmount()
    mount.mount()
    wait_until(lambda: not stats(mount)["store"]["loading_slabs"], "the heads of all slabs")
    with BlockStore(mount.point, "kv") as store:
        assert store.prefetch(["a", "absent"]).tolist() == [True, False]
        found = store.costs(["a", "b", "absent"])
        assert found.tiers.tolist() == [Tier.DRAM, Tier.REMOTE, Tier.NONE]
        assert found.milliseconds[0] <= found.milliseconds[1] < 1000
        assert np.isinf(found.milliseconds[2])
        assert store.prefetch(["b"]).all()
        assert store.costs(["b"]).tiers.tolist() == [Tier.DRAM]


def test_what_is_computed_sooner_is_absent_for_look_ups(mount: KvfuseMount) -> None:
    folder = make(mount)
    with BlockStore(mount.point, "kv") as store:
        assert store.put_many(["a", "b"], [b"1" * 1000] * 2).all()
    mount.unmount()
    mount.mount()
    wait_until(lambda: not stats(mount)["store"]["loading_slabs"], "the heads of all slabs")
    with BlockStore(mount.point, "kv") as store:
        store.put("a", b"1" * 1000)  # 20 us away; the other one 1 ms, as long as nothing was read of the medium
        assert store.exists(["a", "b"]).all()
        os.setxattr(folder, "user.kvfuse.namespace", b"token_size=10000 recompute_speed=1000")
        wait_until(lambda: not store.exists(["b"]).any(), "the setting")
        assert store.longest_prefix(["b", "a"]) == 0
        assert store.exists(["a", "b"]).tolist() == [True, False]
        assert store.costs(["a", "b"]).tiers.tolist() == [Tier.DRAM, Tier.NONE]
        assert figures(mount)["misses"]["slow"] >= 3
        assert store.get("b") == b"1" * 1000
        os.setxattr(folder, "user.kvfuse.namespace.recompute_speed", b"0")
        wait_until(lambda: store.exists(["a", "b"]).all(), "the setting")


def test_a_clock_that_is_moved_ahead(mount: KvfuseMount) -> None:
    folder = make(mount, ttl=3600)
    with BlockStore(mount.point, "kv") as store:
        store.put("old", b"x")
        assert store.exists(["old"]).all()
        os.setxattr(folder, "user.kvfuse.namespace.advance", b"3000")
        store.put("new", b"x")
        assert store.exists(["old", "new"]).all()
        os.setxattr(folder, "user.kvfuse.namespace.advance", b"1000")
        assert store.exists(["old", "new"]).tolist() == [False, True]
        assert store.get_into("old", bytearray(10)) is None
        wait_until(lambda: figures(mount)["expired"] == 1, "its end")
