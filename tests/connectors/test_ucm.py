"""UCM's own factory over a mount: blocks there and back, shards, prefixes, ranks, faults."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
from pathlib import Path

import pytest
from engine_host import EngineError, EngineHost
from engine_mounts import WORDS, Known, damage, outliving_mount, run_beside_all, started
from mounting import KvfuseMount, wait_until

from kvfuse.connectors.ucm.config import TRANSFER, configuration, connector

pytestmark = pytest.mark.needs("ucm")

BLOCKS = 8
TENSOR = 16 << 10


def block_ids(count: int = BLOCKS, rank: int = 0) -> list[bytes]:
    """As UCM's RequestHasher makes them: of another rank, others."""
    return [hashlib.md5(f"{rank} {number}".encode()).digest() for number in range(count)]


@pytest.mark.parametrize("device", [-1, 0], ids=["host", "device"])
@pytest.mark.parametrize("layerwise", [True, False], ids=["layers", "whole"])
@pytest.mark.parametrize("tensors", [True, False], ids=["tensors", "addresses"])
def test_blocks_go_from_one_worker_to_another(
    host: EngineHost, mount: KvfuseMount, device: int, layerwise: bool, tensors: bool
) -> None:
    namespace = f"go/{device}-{layerwise}-{tensors}"
    options = {"layerwise": layerwise, "device": device}
    with (
        started(host, mount, namespace, is_worker=False, layerwise=layerwise) as scheduler,
        started(host, mount, namespace, **options) as first,
        started(host, mount, namespace, **options) as second,
    ):
        ids = block_ids()
        assert scheduler.lookup(ids) == ([False] * BLOCKS, -1)
        first.dump(ids[:5], tensors=tensors)
        assert scheduler.lookup(ids) == ([True] * 5 + [False] * 3, 4)
        scheduler.prefetch(ids)
        assert second.load(ids[:5], tensors=tensors) == ""
        assert second.load(ids, tensors=tensors).startswith("LoadFailed: 3 of 8 blocks were not loaded")
        stored = first.stored()
        first.dump(ids[:5])
        assert first.stored() == stored  # they are there


@pytest.mark.timeout(600)
def test_kills_and_upgrades_are_not_noticed(host: EngineHost, seed: int) -> None:
    with (
        outliving_mount() as mount,
        started(host, mount, "here", is_worker=False) as scheduler,
        started(host, mount, "here") as first,
        started(host, mount, "here") as second,
    ):
        known = Known(is_lossy=True)

        def dump_and_load(chance: random.Random, may_miss: bool) -> None:
            rank = chance.randrange(1 << 32)
            first.dump(block_ids(rank=rank))
            assert scheduler.lookup(block_ids(rank=rank)) == ([True] * BLOCKS, BLOCKS - 1) or may_miss
            known.store_and_load(rank, lambda one: second.load(block_ids(rank=one)) == "", chance, may_miss)

        run_beside_all(mount, seed, {"worker": dump_and_load})


def test_a_block_without_one_of_its_shards_ends_the_prefix(host: EngineHost, mount: KvfuseMount) -> None:
    with (
        started(host, mount, "gap", is_worker=False) as scheduler,
        started(host, mount, "gap") as worker,
    ):
        ids = block_ids()
        worker.dump(ids)
        assert scheduler.lookup(ids)[1] == BLOCKS - 1
        assert scheduler.shards() == 6
        os.remove(mount.point / "gap" / os.fsdecode(worker.names(ids[3])[4]))  # as an eviction
        assert scheduler.lookup(ids) == ([True] * 3 + [False] + [True] * 4, 2)
        assert worker.load(ids[:3]) == ""
        assert worker.load(ids).startswith("LoadFailed: 1 of 8")
        worker.dump(ids)
        assert scheduler.lookup(ids)[1] == BLOCKS - 1
        assert worker.load(ids) == ""


def test_a_damaged_block_fails_its_load_until_it_is_stored_again(host: EngineHost, own_mount: KvfuseMount) -> None:
    mount = own_mount
    ids = block_ids()
    with started(host, mount, "damage") as worker:
        worker.dump(ids)
        damage(mount, "damage", worker.names(ids[2])[0])
        assert worker.lookup(ids)[1] == -1
        mount.mount()
        wait_until(worker.is_up, "the worker to connect again")
        assert worker.load(ids[:2]) == ""
        assert worker.load(ids).startswith("LoadFailed: 1 of 8")
        worker.dump(ids)
        assert worker.load(ids) == ""


def test_two_ranks(host: EngineHost, mount: KvfuseMount) -> None:
    with started(host, mount, "ranks") as first, started(host, mount, "ranks") as second:
        first.dump(block_ids(rank=0), seed=1)
        assert second.lookup(block_ids(rank=1))[1] == -1
        second.dump(block_ids(rank=1), seed=2)
        assert first.load(block_ids(rank=0), seed=1) == second.load(block_ids(rank=1), seed=2) == ""


def test_kinds_of_attention_have_blocks_of_their_own(host: EngineHost, mount: KvfuseMount) -> None:
    """A hybrid model has a store for each, which UCM tells apart by their ids; block ids may be the same."""
    ids = block_ids()
    full, window = ({"unique_id": f"engine_fawa_{kind}"} for kind in ("full", "window"))
    with (
        started(host, mount, "hybrid", extra=full) as first,
        started(host, mount, "hybrid", extra=window, tensor=4096) as second,
        started(host, mount, "hybrid", extra=window, is_worker=False) as scheduler,
    ):
        first.dump(ids, seed=1)
        assert scheduler.lookup(ids)[1] == second.lookup(ids)[1] == -1
        second.dump(ids[:3], seed=2)
        assert scheduler.lookup(ids)[1] == 2
        assert first.load(ids, seed=1) == second.load(ids[:3], seed=2) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"extra": {"model": "other"}}, "model is '', not 'other'"),
        ({"extra": {"weights": "v2"}, "is_worker": False}, "weights is '', not 'v2'"),
        ({"tensor": 4096}, "block_size is 196608, not 49152"),
        ({"layerwise": False}, "shard_size is 32768, not 196608"),
        ({"extra": {"share_buffer_enable": True}}, "mla is 0, not 1"),
    ],
)
def test_blocks_of_others_are_refused_at_the_start(
    host: EngineHost, mount: KvfuseMount, change: dict[str, object], words: str
) -> None:
    with started(host, mount, "refused"), host.engine() as other:
        with pytest.raises(EngineError, match="DescriptorMismatch") as refused:
            other.start(str(mount.point), "refused", **change)
        assert words in str(refused.value)


def test_a_start_without_a_mount_in_the_configuration(host: EngineHost) -> None:
    with host.engine() as engine, pytest.raises(EngineError, match="lacks mount and namespace"):
        engine.start("", "")


def test_a_restart_keeps_blocks_and_a_killed_daemon_comes_back(host: EngineHost, own_mount: KvfuseMount) -> None:
    mount = own_mount
    ids = block_ids()
    with started(host, mount, "kept") as worker:
        worker.dump(ids)
        mount.unmount()
        assert worker.lookup(ids) == ([False] * BLOCKS, -1)
        mount.mount()
        wait_until(worker.is_up, "the worker to connect again")
        assert worker.load(ids) == ""

        mount.kill()
        assert worker.load(ids).startswith("LoadFailed: 8 of 8")
        worker.dump(block_ids(rank=1))
        mount.mount()
        wait_until(worker.is_up, "the worker to connect again")
        worker.dump(block_ids(rank=1))
        with started(host, mount, "kept") as other:
            assert other.load(block_ids(rank=1)) == ""


def test_a_mount_that_comes_after_the_engine(host: EngineHost, tmp_path: Path) -> None:
    mount = KvfuseMount(tmp_path, WORDS)
    ids = block_ids()
    try:
        with started(host, mount, "later") as worker:
            worker.dump(ids)
            assert worker.lookup(ids)[1] == -1
            mount.mount()
            wait_until(worker.is_up, "the worker to connect")
            worker.dump(ids)
            assert worker.load(ids) == ""
            worker.close()
            assert worker.lookup(ids)[1] == -1
        mount.unmount()
        mount.fsck()
    finally:
        mount.remove()


def test_blocks_of_others_are_not_touched_where_the_mount_comes_late(host: EngineHost, own_mount: KvfuseMount) -> None:
    mount = own_mount
    ids = block_ids()
    with started(host, mount, "late") as worker:
        worker.dump(ids)
    mount.unmount()
    with started(host, mount, "late", tensor=TENSOR // 2, layers=12) as other, started(host, mount, "late") as same:
        mount.mount()
        wait_until(same.is_up, "the worker to connect")
        assert same.load(ids) == ""
        wait_until(other.is_connected, "the other one to connect")
        assert other.load(ids).startswith("LoadFailed: 8 of 8")


def test_the_configuration_and_the_example_are_as_ucm_reads_them(host: EngineHost, tmp_path: Path) -> None:
    printed, shown = tmp_path / "printed.yaml", tmp_path / "ucm.yaml"
    printed.write_text(configuration("/mnt/kv", "here"))
    environment = os.environ | {"MODEL": "llama", "MOUNT": "/mnt/kv", "NAMESPACE": "here", "VLLM": "echo"}
    example = Path(__file__).parents[2] / "examples" / "ucm" / "start.sh"
    words = subprocess.check_output([example, "--tp", "2"], env=environment | {"CONFIG": str(shown)}, text=True)
    assert words.startswith("serve llama --kv-transfer-config {")
    assert words.endswith("} --tp 2\n")
    transfer = TRANSFER | {"kv_connector_extra_config": {"UCM_CONFIG_FILE": str(shown)}}
    assert json.loads(words[words.index("{") : words.rindex("}") + 1]) == transfer
    assert json.dumps(TRANSFER) in configuration("/mnt/kv", "here")
    with host.engine() as engine:
        first, second = engine.parse(str(printed)), engine.parse(str(shown))
    assert first == second
    assert first["ucm_connectors"] == [connector("/mnt/kv", "here")]
    assert first["enable_event_sync"] is False
