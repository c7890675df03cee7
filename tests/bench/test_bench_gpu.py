"""kvfuse bench gpu: with the processor in the place of a GPU, and without one."""

from __future__ import annotations

import json

import pytest
from cli_lab import Place, assert_fails, kvfuse

from kvfuse.errors import DeviceError
from kvfuse.usrbio.client.gpu.cuda import count_devices

pytestmark = pytest.mark.ring(3)


def has_gpu() -> bool:
    try:
        return count_devices() > 0
    except DeviceError:
        return False


def test_the_processor_may_stand_in_for_a_gpu(place: Place) -> None:
    place.mount("-o", "capacity=512MiB")
    done = kvfuse("bench", "gpu", place.point, "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["blocks"]
    assert [row["size"] for row in rows] == [64 << 10, 1 << 20, 4 << 20]
    assert all(row["get"] > 0 and row["put"] > 0 for row in rows)
    assert not any(place.point.glob("bench-gpu-*"))
    if not has_gpu():
        assert_fails(kvfuse("bench", "gpu", place.point), 1, "doctor gpu.*--device cpu")


@pytest.mark.skipif(not has_gpu(), reason="needs a GPU")
def test_a_gpu_is_measured(place: Place) -> None:
    place.mount("-o", "capacity=512MiB")
    assert kvfuse("bench", "gpu", place.point, "--json").returncode == 0
