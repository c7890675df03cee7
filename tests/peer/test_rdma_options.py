"""What a mount's options say of RDMA: devices, queue pairs, and values that nobody may give."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvfuse.errors import ConfigError
from kvfuse.metrics.families import _rdma
from kvfuse.options.config import load
from kvfuse.options.options import PeerOptions
from kvfuse.peer import rdma
from kvfuse.peer.devices import DeviceInfo
from kvfuse.peer.queue_pair import LARGE_BLOCKS, SMALL_BLOCKS, QueuePairOptions
from kvfuse.peer.rdma import device_table, pair_options
from kvfuse.peer.verbs import NoDevice

DEVICES = [DeviceInfo(f"mlx5_{number}", 1, number // 2, "ACTIVE", "Ethernet") for number in range(4)]


def options_of(*words: str) -> PeerOptions:
    return load(Path("/v"), words=words).options.peer


def test_queue_pairs_are_for_large_blocks_or_small_ones() -> None:
    assert pair_options(options_of()) == LARGE_BLOCKS
    assert pair_options(options_of("peer.rdma_blocks=small")) == SMALL_BLOCKS
    words = (
        "rdma_blocks=small,rdma_depth=7,rdma_parallel_reads=8,rdma_timeout=9,rdma_retries=0,rdma_mtu=1024,"
        "rdma_traffic_class=106"
    )
    assert pair_options(options_of(words)) == QueuePairOptions(7, 8, 9, 0, 3, 106)
    mtus = [pair_options(options_of(f"rdma_mtu={256 << number}")).mtu for number in range(5)]
    assert mtus == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "word", ["rdma_mtu=1000", "rdma_mtu=8192", "rdma_depth=0", "rdma_timeout=32", "rdma_retries=8",
             "rdma_traffic_class=256", "rdma_blocks=huge", "peer.transport=udp", "rdma_devices=a+b"],
)  # fmt: skip
def test_what_no_queue_pair_can_have(word: str) -> None:
    key = f"peer.{word.partition('=')[0].removeprefix('peer.')}"
    with pytest.raises(ConfigError, match=f"{key} is wrong - expected"):
        options_of(word)


def test_devices_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "own_node", lambda: 1)
    rules = options_of("peer.rdma_devices=0=mlx5_3/1=mlx5_0/1=mlx5_1").rdma_devices
    assert device_table(rules, DEVICES) == {0: ["mlx5_3"], 1: ["mlx5_0", "mlx5_1"]}
    assert device_table(("0=mlx5_3", "mlx5_2"), DEVICES) == {0: ["mlx5_3"], 1: ["mlx5_2"]}
    assert device_table(("1=mlx5_3", "mlx5_2"), DEVICES) == {1: ["mlx5_3"]}
    with pytest.raises(NoDevice, match=r"peer\.rdma_devices: mlx5_9 is no active RDMA device"):
        device_table(("mlx5_9",), DEVICES)


def test_metrics_of_rdma() -> None:
    stats: dict[str, Any] = {
        "pairs": 3, "reads": 70, "batches": 5, "completions": 6, "bytes": 4096, "errors": {"REM_ACCESS_ERR": 1},
        "registered_bytes": 8192, "longest_call_ms": {"make": 1.5, "post": 2.5},
    }  # fmt: skip
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in _rdma(stats, {"placed_bytes": 77})
        for sample in family.samples
    }
    assert samples == {
        ("kvfuse_rdma_events_total", "read"): 70,
        ("kvfuse_rdma_events_total", "batch"): 5,
        ("kvfuse_rdma_events_total", "completion"): 6,
        ("kvfuse_rdma_events_total", "pair"): 3,
        ("kvfuse_rdma_bytes_total", "read"): 4096,
        ("kvfuse_rdma_bytes_total", "lent"): 77,
        ("kvfuse_rdma_errors_total", "REM_ACCESS_ERR"): 1,
        ("kvfuse_rdma_registered_bytes",): 8192,
        ("kvfuse_rdma_longest_call_seconds",): 0.0025,
    }
    assert all(sample.value == 0 for family in _rdma(Counter(), Counter()) for sample in family.samples)
