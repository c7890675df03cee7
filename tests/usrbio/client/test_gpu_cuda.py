"""The calls of CUDA, against a stand-in for its bindings: every one of them, and what becomes of each that fails."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from enum import IntEnum
from mmap import PAGESIZE
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cuda import CUresult, FakeDriver, fake_cuda
from mounting import KvfuseMount, temporary_mount
from ring_calls import PATIENCE_S

from kvfuse.errors import DeviceError
from kvfuse.usrbio.client import BlockStore, Way, connect
from kvfuse.usrbio.client.gpu import cuda
from kvfuse.usrbio.client.gpu.cpu import CpuMemory
from kvfuse.usrbio.client.gpu.cuda import CudaDevice
from kvfuse.usrbio.client.gpu.device import Stream
from kvfuse.usrbio.client.gpu.examine import examine
from kvfuse.usrbio.client.iov import address_of

SIZE = 64 << 10


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    with fake_cuda() as driver:
        yield driver


@pytest.fixture
def device(driver: FakeDriver) -> Iterator[CudaDevice]:
    device = CudaDevice(0)
    yield device
    device.close()
    assert driver.open["context"] == 0
    assert driver.contexts == []


@pytest.fixture
def stream(device: CudaDevice, driver: FakeDriver) -> Iterator[Stream]:
    stream = device.open_stream()
    yield stream
    stream.close()
    assert driver.open["stream"] == driver.open["event"] == 0


def host(size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, size, np.uint8)


# -- what is there ----------------------------------------------------------------------------------


def test_a_gpu_is_described(driver: FakeDriver) -> None:
    assert cuda.count_devices() == 1
    assert cuda.facts_of(0) == ("Stand-in 0", "13.1", True, True, True)
    with pytest.raises(DeviceError, match="cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE; is there a GPU 3"):
        cuda.facts_of(3)
    (row,) = examine("")
    assert (row.name, row.driver, row.choice.way) == ("GPU 0 (Stand-in 0)", "13.1", Way.DMABUF)
    assert driver.open["context"] == 0


@pytest.mark.parametrize(
    ("options", "lacks_adapter", "way"),
    [
        ({"exports": True}, "none", Way.PINNED),
        ({"exports": False}, "", Way.PINNED),
        ({"exports": True}, "", Way.DMABUF),
    ],
)
def test_the_way_follows_from_what_is_there(options: dict[str, bool], lacks_adapter: str, way: Way) -> None:
    with fake_cuda(2, **options):
        rows = examine(lacks_adapter)
    assert [row.choice.way for row in rows] == [way] * 2
    assert [row.name for row in rows] == ["GPU 0 (Stand-in 0)", "GPU 1 (Stand-in 1)"]


def test_a_gpu_that_cannot_be_opened_is_a_row(driver: FakeDriver) -> None:
    driver.failing["cuDevicePrimaryCtxRetain"] = [CUresult.CUDA_ERROR_OUT_OF_MEMORY]
    (row,) = examine("")
    assert row.choice.way is None
    assert "cuDevicePrimaryCtxRetain failed: CUDA_ERROR_OUT_OF_MEMORY" in row.capabilities.lacks_device


def test_no_device_no_driver_and_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda(0), pytest.raises(DeviceError, match="cuInit failed: CUDA_ERROR_NO_DEVICE"):
        cuda.count_devices()
    with fake_cuda() as driver:
        driver.count = 1
        monkeypatch.setattr(FakeDriver, "cuDeviceGetCount", lambda _: 0)
        with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES"):
            cuda.count_devices()

        def no_library(_driver: FakeDriver, _flags: int) -> None:
            raise RuntimeError("Failed to dlopen libcuda.so.1")

        monkeypatch.setattr(FakeDriver, "cuInit", no_library)
        with pytest.raises(DeviceError, match=r"no NVIDIA driver here: .*dlopen"):
            cuda.load_driver()
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(DeviceError, match=r"cuda-bindings is missing; type: pip install 'cuda-bindings>=12.8'"):
        cuda.load_driver()


def test_whose_memory_it_is() -> None:
    with fake_cuda(2) as driver:
        cuda.load_driver()
        first, second = driver.allocate(100, 0), driver.allocate(100, 1)
        assert [cuda.ordinal_of(memory.address) for memory in (first, second)] == [0, 1]
        with pytest.raises(DeviceError, match="is no memory of a GPU"):
            cuda.ordinal_of(address_of(host()))
        device = CudaDevice(0)
        device.check(first.address, 100)
        with pytest.raises(DeviceError, match="is that of GPU 1"):
            device.check(second.address, 100)
        device.close()


# -- pinning, export, memory ------------------------------------------------------------------------


def test_memory_is_pinned_and_let_go_of(device: CudaDevice, driver: FakeDriver) -> None:
    array = host()
    device.pin(address_of(array), SIZE, read_only=False)
    assert driver.registered == {address_of(array): (SIZE, driver.CU_MEMHOSTREGISTER_PORTABLE)}
    with pytest.raises(DeviceError, match="HOST_MEMORY_ALREADY_REGISTERED; 65536 bytes cannot be pinned"):
        device.pin(address_of(array), SIZE, read_only=True)
    device.unpin(address_of(array))
    with pytest.raises(DeviceError, match="cuMemHostUnregister failed: CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"):
        device.unpin(address_of(array))
    device.pin(address_of(array), SIZE, read_only=True)
    assert driver.registered[address_of(array)][1] & driver.CU_MEMHOSTREGISTER_READ_ONLY
    device.unpin(address_of(array))
    assert device.pinning_problem(read_only=True) == ""
    driver.attributes[113] = 0
    assert "NOT_SUPPORTED" in device.pinning_problem(read_only=True)
    assert driver.registered == {}


def test_memory_is_exported_in_whole_pages(device: CudaDevice, driver: FakeDriver) -> None:
    memory = driver.allocate(5 * PAGESIZE)
    memory.bytes[:] = host(5 * PAGESIZE)
    for start, size in [
        (0, PAGESIZE),
        (100, 200),
        (PAGESIZE - 1, 2),
        (PAGESIZE, 4 * PAGESIZE),
        (17, 5 * PAGESIZE - 17),
    ]:
        descriptor, offset = device.export(memory.address + start, size)
        with open(descriptor, "rb") as file:
            content = file.read()
        assert len(content) % PAGESIZE == 0
        assert content[offset : offset + size] == memory.bytes[start : start + size].tobytes()
        assert len(content) <= size + 2 * PAGESIZE
    with pytest.raises(DeviceError, match=r"cuMemGetHandleForAddressRange failed: .*; the open kernel modules"):
        device.export(0x1000, PAGESIZE)
    assert device.lacks_export == ""
    with fake_cuda(exports=False):
        other = CudaDevice(0)
        assert "the driver exports no dma-buf (CUDA 13.1)" in other.lacks_export


def test_memory_is_allocated_and_freed(device: CudaDevice, driver: FakeDriver) -> None:
    with pytest.raises(ZeroDivisionError), device.allocated(1000) as memory:
        address, read_only = memory.__cuda_array_interface__["data"]
        assert (cuda.ordinal_of(address), read_only) == (0, False)
        raise ZeroDivisionError
    assert driver.open["memory"] == 0
    driver.failing["cuMemAlloc"] = [CUresult.CUDA_ERROR_OUT_OF_MEMORY]
    with pytest.raises(DeviceError, match="is the GPU's memory full"), device.allocated(1000):
        pass


# -- copies -----------------------------------------------------------------------------------------


def test_copies_run_beside_the_caller_in_their_order(driver: FakeDriver, stream: Stream) -> None:
    memory, source, back = driver.allocate(SIZE), host(), np.zeros(SIZE, np.uint8)
    driver.held.clear()
    there = stream.to_device(memory.address, address_of(source), SIZE)
    here = stream.to_host(address_of(back), memory.address, SIZE)
    end = stream.mark()
    assert not memory.bytes.any()
    driver.held.set()
    for mark in (end, here, there, there):  # again does no harm
        mark.wait()
    assert np.array_equal(memory.bytes, source)
    assert np.array_equal(back, source)
    created = driver.calls["cuEventCreate"]
    for _ in range(10):
        stream.to_device(memory.address, address_of(source), 1).wait()
    assert driver.calls["cuEventCreate"] == created  # events are used again


def test_a_stream_follows_another_one(driver: FakeDriver, stream: Stream) -> None:
    memory, source = driver.allocate(SIZE), host()
    theirs, goes_on = driver.stream(), threading.Event()
    driver.run_in(theirs, lambda: goes_on.wait(PATIENCE_S))
    stream.follow(theirs)
    mark = stream.to_device(memory.address, address_of(source), SIZE)
    waiter = threading.Thread(target=mark.wait)
    waiter.start()
    waiter.join(0.02)
    assert waiter.is_alive()
    assert not memory.bytes.any()
    goes_on.set()
    waiter.join(PATIENCE_S)
    assert np.array_equal(memory.bytes, source)
    with pytest.raises(DeviceError, match=r"is 0x7 a stream of this GPU\? \(give `stream` to iov_from_gpu\)"):
        stream.follow(7)


@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync", "cuEventRecord", "cuEventCreate", "cuCtxPushCurrent"])
def test_a_copy_that_does_not_begin(driver: FakeDriver, stream: Stream, call: str) -> None:
    """It says so, and has ended; the next one is as ever."""
    memory, source = driver.allocate(SIZE), host()
    driver.failing[call] = [CUresult.CUDA_ERROR_INVALID_VALUE]
    with pytest.raises(DeviceError, match=f"GPU 0 .Stand-in 0.: {call} failed: CUDA_ERROR_INVALID_VALUE"):
        stream.to_device(memory.address, address_of(source), SIZE)
    stream.to_device(memory.address, address_of(source), SIZE).wait()
    assert np.array_equal(memory.bytes, source)
    driver.failing["cuEventRecord"] = [CUresult.CUDA_ERROR_INVALID_HANDLE]
    with pytest.raises(DeviceError, match="cuEventRecord"):
        stream.mark()
    assert driver.contexts == []


def test_a_copy_that_fails_later(driver: FakeDriver, device: CudaDevice) -> None:
    stream, source = device.open_stream(), host()
    mark = stream.to_device(0x1234, address_of(source), SIZE)
    with pytest.raises(DeviceError, match=r"ILLEGAL_ADDRESS; a kernel of this process may have failed before"):
        mark.wait()
    stream.close()
    assert driver.open["event"] == 0


def test_no_more_events_are_kept_than_a_few(
    driver: FakeDriver, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "EVENTS_MAX", 2)
    memory, source = driver.allocate(SIZE), host()
    marks = [stream.to_device(memory.address, address_of(source), 1) for _ in range(5)]
    for mark in marks:
        mark.wait()
    assert driver.open["event"] == 2


def test_the_callers_context_stays_current(driver: FakeDriver, device: CudaDevice) -> None:
    driver.cuCtxPushCurrent(77)
    device.pin(address_of(host()), SIZE, read_only=False)
    with pytest.raises(DeviceError):
        device.unpin(1)
    assert driver.contexts == [77]
    driver.cuCtxPopCurrent()


def test_the_stand_in_has_names_and_numbers_of_the_package() -> None:
    real = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    fake = FakeDriver()
    for name in dir(FakeDriver):
        if name.startswith(("cu", "CU")):
            assert hasattr(real, name), name
        if isinstance(found := getattr(FakeDriver, name), type) and issubclass(found, IntEnum):
            assert all(int(getattr(getattr(real, name), one.name)) == one for one in found)
    assert fake.CU_MEMHOSTREGISTER_PORTABLE == real.CU_MEMHOSTREGISTER_PORTABLE
    assert fake.CU_MEMHOSTREGISTER_READ_ONLY == real.CU_MEMHOSTREGISTER_READ_ONLY


# -- whole ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(["capacity=256MiB,cache,admission=all,cache.tier_size=64MiB"]) as mount:
        yield mount


def as_tensor(memory: CpuMemory) -> Any:
    return SimpleNamespace(
        device=SimpleNamespace(type="cuda", index=0), data_ptr=lambda: memory.address, is_contiguous=lambda: True,
        numel=lambda: len(memory.bytes) // 2, element_size=lambda: 2,
    )  # fmt: skip


@pytest.mark.parametrize("shape", ["interface", "tensor"])
def test_blocks_get_to_a_gpu_and_back(mount: KvfuseMount, driver: FakeDriver, tmp_path: Path, shape: str) -> None:
    memory, source = driver.allocate(SIZE), host()
    thing = memory if shape == "interface" else as_tensor(memory)
    with connect(mount.point) as client, BlockStore(client, tmp_path.name) as store:
        iov = client.iov_from_gpu(thing)
        assert iov.way is Way.PINNED
        assert iov.link.device.name == "GPU 0 (Stand-in 0)"
        store.put_many([b"a", b"b"], [source[:1000].tobytes(), source[1000:3000].tobytes()])
        assert store.get_many_into([b"a", b"b"], [iov.range(0, 1000), iov.range(1000, 2000)]).tolist() == [1000, 2000]
        assert np.array_equal(memory.bytes[:3000], source[:3000])
        memory.bytes[:] = source[::-1]
        store.put(b"all", thing)
        assert bytes(store.get(b"all") or b"") == source[::-1].tobytes()
        assert driver.registered
    assert driver.registered == {}
    assert driver.open["context"] == driver.open["stream"] == driver.open["event"] == 0
