"""GPUs by CUDA's driver API, through `cuda-bindings`, which is imported when the first one is opened.

All is done in the device's primary context, which torch and other libraries use. It is made current for each call and
taken off again: what the calling thread has current stays.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from mmap import PAGESIZE
from typing import Any, NamedTuple

from kvfuse.errors import DeviceError
from kvfuse.usrbio.client.gpu.device import Device, Mark, Stream

HOW_TO_GET = "pip install 'cuda-bindings>=12.8'"
NAME_SIZE_MAX = 256
EVENTS_MAX = 256
"""that a stream keeps for later"""


class GpuFacts(NamedTuple):
    """What a GPU and its driver can do."""

    name: str
    driver: str
    """the CUDA version that it is for, as "13.1\""""
    exports_dmabuf: bool
    pins: bool
    pins_read_only: bool
    """memory that this process cannot write"""


def load_driver() -> Any:
    """The module of the driver API, initialised. DeviceError: it is not installed, or there is no driver or GPU."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(f"the package cuda-bindings is missing; type: {HOW_TO_GET} ({error})") from None
    try:
        _check(driver, "cuInit", driver.cuInit(0), "is a GPU there, and /dev/nvidia0 to be opened? see nvidia-smi")
    except RuntimeError as error:  # libcuda is not there
        raise DeviceError(f"there is no NVIDIA driver here: {error}") from None
    return driver


def count_devices() -> int:
    """How many GPUs there are, at least one. DeviceError."""
    driver = load_driver()
    (count,) = _check(driver, "cuDeviceGetCount", driver.cuDeviceGetCount())
    if not count:
        raise DeviceError("the driver shows no GPU to this process: is CUDA_VISIBLE_DEVICES empty?")
    return int(count)


def facts_of(ordinal: int) -> GpuFacts:
    """What a GPU can do. DeviceError."""
    driver = load_driver()
    device = _device(driver, ordinal)
    (name,) = _check(driver, "cuDeviceGetName", driver.cuDeviceGetName(NAME_SIZE_MAX, device))
    (version,) = _check(driver, "cuDriverGetVersion", driver.cuDriverGetVersion())
    wanted = driver.CUdevice_attribute
    attributes = (
        wanted.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED,
        wanted.CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED,
        wanted.CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED,
    )
    has = [
        bool(_check(driver, attribute.name, driver.cuDeviceGetAttribute(attribute, device))[0])
        for attribute in attributes
    ]
    return GpuFacts(bytes(name).rstrip(b"\0").decode(), f"{version // 1000}.{version % 1000 // 10}", *has)


def ordinal_of(address: int) -> int:
    """The GPU whose memory is at ``address``. DeviceError: that of none."""
    driver = load_driver()
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    (ordinal,) = _check(
        driver, "cuPointerGetAttribute", driver.cuPointerGetAttribute(attribute, driver.CUdeviceptr(address)),
        f"the memory at {address:#x} is no memory of a GPU, or of one that this process has not opened",
    )  # fmt: skip
    return int(ordinal)


class _Allocated:
    """As other libraries show their memory."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


class CudaDevice(Device):
    """One GPU, by its number in this process."""

    def __init__(self, ordinal: int) -> None:
        """DeviceError."""
        facts = facts_of(ordinal)
        self.name = f"GPU {ordinal} ({facts.name})"
        self.ordinal = ordinal
        self.facts = facts
        self._driver = load_driver()
        self._device = _device(self._driver, ordinal)
        (self._context,) = self.call("cuDevicePrimaryCtxRetain", self._device, remedy="is the GPU's memory full?")

    def call(self, function: str, *arguments: Any, remedy: str = "") -> tuple[Any, ...]:
        """The values that a function of the driver returned. DeviceError, with its name, for any other result."""
        result = getattr(self._driver, function)(*arguments)
        return _check(self._driver, f"{self.name}: {function}", result, remedy)

    @contextmanager
    def current(self) -> Iterator[Any]:
        """The driver, with the context of this device current in this thread."""
        self.call("cuCtxPushCurrent", self._context)
        try:
            yield self._driver
        finally:
            self._driver.cuCtxPopCurrent()

    def check(self, address: int, size: int) -> None:
        for place in (address, address + size - 1):
            if (ordinal := ordinal_of(place)) != self.ordinal:
                raise DeviceError(f"{self.name}: the memory at {place:#x} is that of GPU {ordinal}")

    def pin(self, address: int, size: int, *, read_only: bool) -> None:
        with self.current() as driver:
            flags = driver.CU_MEMHOSTREGISTER_PORTABLE | (driver.CU_MEMHOSTREGISTER_READ_ONLY if read_only else 0)
            self.call("cuMemHostRegister", address, size, flags, remedy=f"{size} bytes cannot be pinned")

    def unpin(self, address: int) -> None:
        with self.current():
            self.call("cuMemHostUnregister", address)

    @property
    def lacks_export(self) -> str:
        return (
            ""
            if self.facts.exports_dmabuf
            else f"{self.name}: the driver exports no dma-buf (CUDA {self.facts.driver})"
        )

    def export(self, address: int, size: int) -> tuple[int, int]:
        start = address // PAGESIZE * PAGESIZE
        end = -(-(address + size) // PAGESIZE) * PAGESIZE  # the driver exports whole pages of the host alone
        with self.current() as driver:
            kind = driver.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
            (descriptor,) = self.call(
                "cuMemGetHandleForAddressRange", driver.CUdeviceptr(start), end - start, kind, 0,
                remedy="the open kernel modules of NVIDIA's driver export memory, of one allocation at a time",
            )  # fmt: skip
        return int(descriptor), address - start

    @contextmanager
    def allocated(self, size: int) -> Iterator[_Allocated]:
        """Memory of the device, which goes with the body. DeviceError."""
        with self.current():
            (pointer,) = self.call("cuMemAlloc", size, remedy="is the GPU's memory full?")
        try:
            yield _Allocated(int(pointer), size)
        finally:
            with self.current():
                self.call("cuMemFree", pointer)

    def open_stream(self) -> Stream:
        return CudaStream(self)

    def close(self) -> None:
        with suppress(DeviceError):  # the process may be about to end, and the driver with it
            self.call("cuDevicePrimaryCtxRelease", self._device)


class CudaStream(Stream):
    """A stream that waits for no other one unless it is told to."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._events: list[Any] = []
        """idle ones"""
        with device.current() as driver:
            (self._stream,) = device.call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value)

    def to_device(self, target: int, source: int, size: int) -> Mark:
        return self._copy("cuMemcpyHtoDAsync", self._device._driver.CUdeviceptr(target), source, size)

    def to_host(self, target: int, source: int, size: int) -> Mark:
        return self._copy("cuMemcpyDtoHAsync", target, self._device._driver.CUdeviceptr(source), size)

    def _copy(self, function: str, target: Any, source: Any, size: int) -> Mark:
        with self._device.current() as driver:
            event = self._take_event()
            try:
                self._device.call(function, target, source, size, self._stream)
                self._device.call("cuEventRecord", event, self._stream)
            except DeviceError:
                driver.cuStreamSynchronize(self._stream)  # what may have begun has ended when the caller hears of it
                self._give_back(event)
                raise
        return _CudaMark(self, event)

    def follow(self, stream: int) -> None:
        with self._device.current() as driver:
            event = self._take_event()
            try:
                self._device.call(
                    "cuEventRecord", event, driver.CUstream(stream),
                    remedy=f"is {stream:#x} a stream of this GPU? (give `stream` to iov_from_gpu)",
                )  # fmt: skip
                self._device.call("cuStreamWaitEvent", self._stream, event, 0)
            finally:
                self._give_back(event)  # a wait is for what was recorded before it

    def mark(self) -> Mark:
        with self._device.current():
            event = self._take_event()
            try:
                self._device.call("cuEventRecord", event, self._stream)
            except DeviceError:
                self._give_back(event)
                raise
        return _CudaMark(self, event)

    def wait_for(self, event: Any) -> None:
        """Return when what an event of this stream was recorded after has ended. DeviceError."""
        with self._device.current():
            try:
                self._device.call("cuEventSynchronize", event, remedy="a kernel of this process may have failed before")
            finally:
                self._give_back(event)

    def close(self) -> None:
        with suppress(DeviceError), self._device.current() as driver:
            driver.cuStreamSynchronize(self._stream)
            for event in self._events:
                driver.cuEventDestroy(event)
            self._events.clear()
            driver.cuStreamDestroy(self._stream)

    def _take_event(self) -> Any:
        with self._lock:
            if self._events:
                return self._events.pop()
        flags = self._device._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
        (event,) = self._device.call("cuEventCreate", flags)
        return event

    def _give_back(self, event: Any) -> None:
        with self._lock:
            if len(self._events) < EVENTS_MAX:
                self._events.append(event)
                return
        self._device._driver.cuEventDestroy(event)


class _CudaMark:
    def __init__(self, stream: CudaStream, event: Any) -> None:
        self._stream = stream
        self._event = event

    def wait(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            self._stream.wait_for(event)


def _device(driver: Any, ordinal: int) -> Any:
    (device,) = _check(driver, "cuDeviceGet", driver.cuDeviceGet(ordinal), f"is there a GPU {ordinal}?")
    return device


def _check(driver: Any, what: str, result: tuple[Any, ...], remedy: str = "") -> tuple[Any, ...]:
    """The values behind the status of a call. DeviceError."""
    status, *values = result
    if status == driver.CUresult.CUDA_SUCCESS:
        return tuple(values)
    name = getattr(status, "name", str(status))
    raise DeviceError(f"{what} failed: {name}" + (f"; {remedy}" if remedy else ""))
