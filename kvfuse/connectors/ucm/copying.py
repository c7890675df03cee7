"""Bytes between an engine's tensors and blocks in shared memory: in the host's memory, or in that of a device."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch


class Copier(Protocol):
    """Gathers tensors to memory of the host, and scatters it to them. Returns when the bytes are there."""

    def wait_for(self, event: int) -> None:
        """For what the engine computes to be in the tensors. ``event``: the engine's handle, 0: it is there."""

    def gather(self, addresses: Sequence[int], sizes: Sequence[int], target: int) -> None:
        """Copy each tensor's bytes, one behind the other, to the address ``target``."""

    def scatter(self, source: int, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        """The other way."""


class HostCopier:
    """Tensors in the host's memory."""

    def wait_for(self, event: int) -> None:
        pass

    def gather(self, addresses: Sequence[int], sizes: Sequence[int], target: int) -> None:
        for address, size, offset in _parts(addresses, sizes):
            ctypes.memmove(target + offset, address, size)

    def scatter(self, source: int, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        for address, size, offset in _parts(addresses, sizes):
            ctypes.memmove(address, source + offset, size)


class DeviceCopier:
    """Tensors of a GPU or NPU, by UCM's own copies, in a stream for each thread."""

    def __init__(self, device_id: int) -> None:
        self._device_id = device_id
        self._local = threading.local()

    def wait_for(self, event: int) -> None:
        """UCM's streams cannot wait for one event, so wait for all that was begun."""
        if event:
            accelerator = getattr(torch, "npu", None) or torch.cuda
            accelerator.synchronize(self._device_id)

    def gather(self, addresses: Sequence[int], sizes: Sequence[int], target: int) -> None:
        stream = self._stream()
        kept = _runs(addresses, sizes)  # until the copies are done
        for pointers, size, offset in kept:
            stream.DeviceToHostGatherAsync(pointers, target + offset, size, len(pointers))
        stream.Synchronized()

    def scatter(self, source: int, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        stream = self._stream()
        kept = _runs(addresses, sizes)  # until the copies are done
        for pointers, size, offset in kept:
            stream.HostToDeviceScatterAsync(source + offset, pointers, size, len(pointers))
        stream.Synchronized()

    def _stream(self) -> Any:
        if not hasattr(self._local, "stream"):
            from ucm.shared.trans import ucmtrans

            self._local.device = ucmtrans.Device()
            self._local.device.Setup(self._device_id)
            self._local.stream = self._local.device.MakeStream()
        return self._local.stream


def _parts(addresses: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """(address, size, offset in the block) of each tensor."""
    offsets = accumulate(sizes[:-1], initial=0)
    return list(zip(addresses, sizes, offsets, strict=True))


def _runs(addresses: Sequence[int], sizes: Sequence[int]) -> list[tuple[Any, int, int]]:
    """(addresses, size of each, offset in the block) of tensors of one size that follow each other."""
    runs: list[tuple[list[int], int, int]] = []
    for address, size, offset in _parts(addresses, sizes):
        if runs and runs[-1][1] == size:
            runs[-1][0].append(address)
        else:
            runs.append(([address], size, offset))
    return [(np.array(pointers, np.uint64), size, offset) for pointers, size, offset in runs]
