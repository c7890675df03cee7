"""What of a machine decides by which way its GPUs are reached: `kvfuse doctor gpu` shows it."""

from __future__ import annotations

from typing import NamedTuple

from kvfuse.errors import DeviceError
from kvfuse.usrbio.client.gpu.device import Device
from kvfuse.usrbio.client.gpu.ways import Capabilities, Choice, choose_way


class Examined(NamedTuple):
    """One GPU, or the one reason why there is none."""

    name: str
    driver: str
    """CUDA version; "": there is none"""
    capabilities: Capabilities
    lacks_arena_pinning: str
    """of arenas, which the client cannot write; "": they can be pinned"""

    @property
    def choice(self) -> Choice:
        return choose_way(self.capabilities)


def capabilities_of(device: Device, lacks_adapter: str) -> Capabilities:
    """Of a device that is there. ``lacks_adapter``: why the daemon can register no dma-buf."""
    return Capabilities("", device.pinning_problem(read_only=False), device.lacks_export, lacks_adapter)


def examine(lacks_adapter: str) -> list[Examined]:
    """All GPUs of this machine, or one row that says why there are none."""
    from kvfuse.usrbio.client.gpu import cuda

    try:
        count = cuda.count_devices()
    except DeviceError as error:
        reason = str(error)
        return [Examined("GPU", "", Capabilities(reason, reason, reason, lacks_adapter), reason)]
    return [_examine_one(ordinal, lacks_adapter) for ordinal in range(count)]


def _examine_one(ordinal: int, lacks_adapter: str) -> Examined:
    from kvfuse.usrbio.client.gpu import cuda

    try:
        device = cuda.CudaDevice(ordinal)
    except DeviceError as error:
        reason = str(error)
        return Examined(f"GPU {ordinal}", "", Capabilities(reason, reason, reason, lacks_adapter), reason)
    try:
        arenas = device.pinning_problem(read_only=True)
        return Examined(device.name, device.facts.driver, capabilities_of(device, lacks_adapter), arenas)
    finally:
        device.close()
