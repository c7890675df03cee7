"""Blocks between a mount and memory of a GPU, by rings, beside a bare copy of the same bytes from pinned memory."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from kvfuse.errors import DeviceError
from kvfuse.sizes import KIB, MIB
from kvfuse.usrbio.client import BlockStore, Client, GpuIov, connect
from kvfuse.usrbio.client.gpu.cpu import CpuDevice
from kvfuse.usrbio.client.gpu.gpu_memory import DeviceCopy

SIZES = (64 * KIB, MIB, 4 * MIB)
SET_SIZE = 64 * MIB
ROUNDS = 5


class Row(NamedTuple):
    """GB/s of one size of blocks, medians."""

    size: int
    way: str
    get: float
    put: float
    bare_in: float
    bare_out: float


@contextmanager
def _gpu_memory(client: Client, size: int, *, on_cpu: bool) -> Iterator[GpuIov]:
    """Memory of a device. DeviceError."""
    if on_cpu:
        device = CpuDevice()
        with client.iov_from_gpu(device.allocate(size), device=device) as iov:
            yield iov
        return
    from kvfuse.usrbio.client.gpu import cuda

    card = cuda.CudaDevice(0)
    try:
        with card.allocated(size) as memory, client.iov_from_gpu(memory) as iov:
            yield iov
    finally:
        card.close()


def bench_gpu(mount: Path, *, on_cpu: bool, set_size: int = SET_SIZE, rounds: int = ROUNDS) -> list[Row]:
    """Every byte is verified: what was got is copied back and compared. DeviceError, Disconnected, OSError."""
    name = f"bench-gpu-{secrets.token_hex(4)}"
    with connect(mount) as client, BlockStore(client, name) as store, client.iov(set_size) as host:
        try:
            with _gpu_memory(client, set_size, on_cpu=on_cpu) as iov:
                return [_bench_size(store, iov, host.array, size, rounds) for size in SIZES if size <= set_size]
        finally:
            for entry in os.scandir(store.namespace.path):
                os.unlink(entry)
            os.rmdir(store.namespace.path)


def _bench_size(store: BlockStore, iov: GpuIov, host: np.ndarray, size: int, rounds: int) -> Row:
    keys = [b"%d-%d" % (size, number) for number in range(iov.size // size)]
    places = [iov.range(number * size, size) for number in range(len(keys))]
    pattern = np.random.default_rng(size).integers(0, 256, len(keys) * size, np.uint8)
    address = host.__array_interface__["data"][0]
    total = len(pattern)

    def bare_in() -> None:
        _finish([iov.fill(number * size, address + number * size, size) for number in range(len(keys))])

    def bare_out() -> None:
        _finish([iov.take(number * size, address + number * size, size) for number in range(len(keys))])

    host[:total] = pattern
    device = iov.link.device
    device.pin(address, len(host), read_only=False)
    try:
        speeds: dict[str, list[float]] = {"put": [], "get": [], "in": [], "out": []}
        for _ in range(rounds):
            host[:total] = pattern
            speeds["in"].append(_speed(bare_in, total))
            speeds["put"].append(_speed(lambda: _check(bool(store.put_many(keys, places).all())), total))
            host[:total] = 0
            bare_in()  # else what is got would be there already
            speeds["get"].append(_speed(lambda: _check(bool((store.get_many_into(keys, places) == size).all())), total))
            speeds["out"].append(_speed(bare_out, total))
            _check(np.array_equal(host[:total], pattern), "the bytes on the device are not those that were put")
    finally:
        device.unpin(address)
    return Row(size, iov.way.value, *(median(speeds[name]) for name in ("get", "put", "in", "out")))


def _finish(destinations: Sequence[DeviceCopy]) -> None:
    for landing in destinations:
        if (error := landing.finish()) is not None:
            raise error


def _speed(move: Callable[[], None], size: int) -> float:
    start = time.perf_counter()
    move()
    return size / (time.perf_counter() - start) / 1e9


def _check(is_right: bool, message: str = "not all blocks were moved: has the volume room for them?") -> None:
    if not is_right:
        raise DeviceError(message)
