"""A mount of a volume in etcd and RADOS with a disk tier on this host: what was read once makes no RADOS read."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from loop_lab import loop_device
from mounting import KVFUSE, KvfuseMount, shared_conf, temporary_mount, wait_until

from kvfuse.sizes import MIB
from kvfuse.usrbio.client import BlockStore, Tier
from kvfuse_cluster.ceph import CephServers
from kvfuse_cluster.etcd import EtcdServers

pytestmark = pytest.mark.root

BLOCKS = 1000
BLOCK_SIZE = 64 << 10
TIER_SIZE = 128 * MIB


@pytest.fixture(params=["folder", "device"])
def words(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, ...]]:
    if request.param == "folder":
        yield f"disk_path={tmp_path / 'tier'}", f"disk_size={TIER_SIZE}"
    else:
        with loop_device(tmp_path / "image", TIER_SIZE) as device:
            yield (f"disk_path={device}",)


@pytest.fixture
def conf(etcd: EtcdServers, ceph: CephServers, tmp_path: Path) -> Path:
    return shared_conf(tmp_path, etcd, ceph)


@pytest.fixture
def mount(conf: Path, words: tuple[str, ...]) -> Iterator[KvfuseMount]:
    with temporary_mount(words, source=conf) as mounted:
        yield mounted


def statistics(mount: KvfuseMount) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((mount.point / ".kvfuse" / "stats").read_text())
    return found


def rados_reads(mount: KvfuseMount) -> int:
    return int(statistics(mount)["segments"]["reads"])


def read_past_the_kernel(path: Path) -> bytes:
    """By the daemon: the kernel drops what it has cached of the file before."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.read()


def test_a_second_read_of_1000_blocks_makes_no_rados_read_also_after_a_kill(
    mount: KvfuseMount, rng: random.Random, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = {mount.point / f"block-{number}": rng.randbytes(BLOCK_SIZE) for number in range(BLOCKS)}

    def read_all() -> None:
        with ThreadPoolExecutor(8) as readers:
            assert list(readers.map(read_past_the_kernel, blocks)) == list(blocks.values())

    with ThreadPoolExecutor(8) as writers:
        list(writers.map(Path.write_bytes, blocks, blocks.values()))
    read_all()
    assert rados_reads(mount) >= BLOCKS
    wait_until(lambda: statistics(mount)["disk"]["copies"] == BLOCKS, "the copies")
    for kills in (False, True):
        if kills:
            mount.kill()
            mount.mount()
            wait_until(lambda: statistics(mount)["disk"]["is_adopted"] == 1, "the adoption")
        before = rados_reads(mount)
        read_all()
        assert rados_reads(mount) == before
    found = statistics(mount)["disk"]
    assert found["local_share"] == 1
    assert found["adopted"] == found["copies"] == BLOCKS
    assert found["hits"] >= BLOCKS
    with capsys.disabled():
        print(
            f"\nadopted {BLOCKS} copies in {found['adoption_seconds']} s, read at {found['local_bytes_per_second']} B/s"
        )


@pytest.mark.parametrize("words", ["folder"], indirect=True)
def test_blocks_are_on_it_when_memory_was_lost_and_look_ups_say_so(
    conf: Path, words: tuple[str, ...], rng: random.Random
) -> None:
    blocks = {f"block-{number}": rng.randbytes(300_000) for number in range(50)}
    keys = list(blocks)
    with temporary_mount((*words, "disk_keep=all", "cache"), source=conf) as mount:
        with BlockStore(mount.point, "cache") as store:
            store.put_many(keys, list(blocks.values()))
        folder = os.open(mount.point / "cache", os.O_RDONLY)
        os.fsync(folder)  # nothing keeps the memory of this mount when its daemon is killed
        os.close(folder)
        wait_until(lambda: statistics(mount)["disk"]["kept_bytes"] == 50 * 300_000, "the copies")
        mount.kill()
        mount.mount()
        wait_until(lambda: statistics(mount)["disk"]["is_adopted"] == 1, "the adoption")
        with BlockStore(mount.point, "cache") as store:
            tiers, milliseconds = store.costs(keys)
            assert set(tiers.tolist()) == {Tier.DISK}
            assert (milliseconds > 0).all()
            assert store.get_many(keys) == list(blocks.values())
            assert set(store.costs(keys).tiers.tolist()) == {Tier.DRAM}
        found = statistics(mount)["disk"]
        assert found["local_share"] == 1
        shown = subprocess.run([*KVFUSE, "top", str(mount.point), "--once"], capture_output=True, text=True, check=True)
        assert re.search(r"disk tier 15\.\d MB of 13\d\.\d MB, .* remote \(100\.0% local\)", shown.stdout), shown.stdout
        row = next(row for row in statistics(mount)["namespaces"] if row["cache"] is not None)
        assert row["cache"]["hits"]["disk"] >= len(keys)


def test_it_is_for_one_mount_and_one_volume(mount: KvfuseMount, words: tuple[str, ...], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    options = [argument for word in words for argument in ("-o", word)]
    command = [*KVFUSE, "mount", "--foreground", str(mount.source), str(other), *options]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.returncode != 0
    assert "is in use by another daemon" in second.stderr
