"""By which way memory of a GPU is reached: the choice, what is found of a machine, and how the doctor shows it."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from cli_lab import kvfuse

from kvfuse.cli.doctor_gpu import ADAPTER
from kvfuse.errors import DeviceError
from kvfuse.peer.rdma_memories import problem
from kvfuse.usrbio.client.gpu.cpu import CpuDevice
from kvfuse.usrbio.client.gpu.cuda import count_devices
from kvfuse.usrbio.client.gpu.examine import capabilities_of
from kvfuse.usrbio.client.gpu.ways import Capabilities, Way, choose_way


def expected(has_device: bool, pins: bool, exports: bool, has_adapter: bool) -> Way | None:
    """The table of docs/gpu.md."""
    if not has_device:
        return None
    if exports and has_adapter:
        return Way.DMABUF
    return Way.PINNED if pins else Way.STAGING


@pytest.mark.parametrize("there", list(product([True, False], repeat=4)))
def test_the_best_way_is_taken_that_the_machine_has(there: tuple[bool, ...]) -> None:
    reasons = [
        "" if is_there else f"no {name}" for is_there, name in zip(there, ["gpu", "pin", "export", "nic"], strict=True)
    ]
    choice = choose_way(Capabilities(*reasons))
    assert choice.way == expected(*there)
    better = list(Way) if choice.way is None else list(Way)[: list(Way).index(choice.way)]
    assert list(choice.why_not) == better
    assert all(choice.why_not.values())


def test_reasons_name_what_is_missing_first() -> None:
    assert choose_way(Capabilities("", "", "no export", "no adapter")).why_not == {Way.DMABUF: "no export"}
    assert choose_way(Capabilities("", "", "", "no adapter")).why_not == {Way.DMABUF: "no adapter"}


@pytest.mark.parametrize(("pins", "way"), [(True, Way.PINNED), (False, Way.STAGING)])
def test_a_device_is_examined(pins: bool, way: Way) -> None:
    device = CpuDevice(pins=pins, pins_read_only=False)
    can = capabilities_of(device, "no adapter")
    assert choose_way(can).way is way
    assert bool(can.lacks_pinning) is not pins
    assert "cannot pin" in device.pinning_problem(read_only=True)
    assert device.pinned == {}  # the page of the probe is let go of


def has_gpu() -> bool:
    try:
        return count_devices() > 0
    except DeviceError:
        return False


@pytest.mark.skipif(has_gpu(), reason="about machines without a GPU")
def test_the_doctor_says_why_no_way_is_taken() -> None:
    done = kvfuse("doctor", "gpu", "--json")
    assert done.returncode == 1, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert set(rows) == {"GPU", "way dma-buf", "way pinned", "way staging", "adapter"}
    assert rows["adapter"]["detail"] == (problem() or ADAPTER)
    assert rows["GPU"]["remedy"]
    assert rows["way staging"]["detail"] == f"not taken: {rows['GPU']['detail']}"


def test_a_volume_that_is_called_gpu_is_a_volume_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "gpu").mkdir()
    done = kvfuse("doctor", "./gpu", "--json", cwd=tmp_path)
    assert "records" in {row["name"] for row in json.loads(done.stdout)}
