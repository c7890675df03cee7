"""A stand-in for `cuda.bindings.driver` over host memory, as far as `gpu/cuda.py` uses it: so it runs without a GPU.

Memory of a device has addresses that fault when the processor uses them; copies reach it another way, in a thread for
each stream. Calls check what a driver would: that a context is current, that streams, events and memory are there.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from queue import SimpleQueue
from types import ModuleType
from typing import Any

from kvfuse.usrbio.client.gpu.cpu import CpuMemory
from kvfuse.usrbio.client.iov import address_of

PAGE = 4096
DEFAULT_STREAMS = (0, 1, 2)
"""the handles of the default stream: legacy and per thread"""


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713
    CUDA_ERROR_NOT_SUPPORTED = 801


class CUdevice_attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED = 99
    CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED = 113
    CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED = 124


class CUpointer_attribute(IntEnum):
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9


class CUmemRangeHandleType(IntEnum):
    CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1


class CUstream_flags(IntEnum):
    CU_STREAM_NON_BLOCKING = 1


class CUevent_flags(IntEnum):
    CU_EVENT_DISABLE_TIMING = 2


CU_MEMHOSTREGISTER_PORTABLE = 1
CU_MEMHOSTREGISTER_READ_ONLY = 8


class Handle:
    """Of whatever the driver gives out."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def __int__(self) -> int:
        return self.value


class CUdeviceptr(Handle): ...


class CUstream(Handle): ...


class CUevent(Handle): ...


class CUcontext(Handle): ...


class _Refused(Exception):
    """A call's result."""

    def __init__(self, result: CUresult) -> None:
        self.result = result


class _Stream:
    """What it is given, one after the other, in a thread. ``broken``: a job failed, as every later call says."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.broken = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                job()
            except _Refused:
                self.broken = True

    def wait(self) -> None:
        reached = threading.Event()
        self.jobs.put(reached.set)
        reached.wait()


class _Event:
    def __init__(self) -> None:
        self.reached = threading.Event()
        self.reached.set()
        self.stream: _Stream | None = None


class FakeDriver(ModuleType):
    """``count`` devices. ``held``: cleared, copies wait for it. ``failing``: name of a call -> its next results.

    ``calls`` counts all calls, ``open`` what was given out and not taken back.
    """

    CUresult, CUdevice_attribute, CUpointer_attribute = CUresult, CUdevice_attribute, CUpointer_attribute
    CUmemRangeHandleType, CUstream_flags, CUevent_flags = CUmemRangeHandleType, CUstream_flags, CUevent_flags
    CUdeviceptr, CUstream = CUdeviceptr, CUstream
    CU_MEMHOSTREGISTER_PORTABLE = CU_MEMHOSTREGISTER_PORTABLE
    CU_MEMHOSTREGISTER_READ_ONLY = CU_MEMHOSTREGISTER_READ_ONLY

    def __init__(self, count: int = 1, *, pins_read_only: bool = True, exports: bool = True) -> None:
        super().__init__("cuda.bindings.driver")
        self.count = count
        self.attributes = {99: 1, 113: int(pins_read_only), 124: int(exports)}
        self.failing: dict[str, list[CUresult]] = {}
        self.calls: Counter[str] = Counter()
        self.open: Counter[str] = Counter()
        self.held = threading.Event()
        self.held.set()
        self.registered: dict[int, tuple[int, int]] = {}
        """address -> size, flags"""
        self._memories: dict[int, tuple[CpuMemory, int]] = {}
        """address -> memory, its device"""
        self._streams: dict[int, _Stream] = {number: _Stream() for number in DEFAULT_STREAMS}
        self._events: dict[int, _Event] = {}
        self._numbers = iter(range(0x1000, 1 << 62, 16))
        self._current = threading.local()
        self._is_initialised = False

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("cu"):
            return found

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls[name] += 1
            if self.failing.get(name):
                return (self.failing[name].pop(0), *(None,) * VALUES.get(name, 0))
            if not self._is_initialised and name != "cuInit":
                return (CUresult.CUDA_ERROR_INVALID_CONTEXT, *(None,) * VALUES.get(name, 0))
            try:
                values = found(*arguments)
            except _Refused as refused:
                return (refused.result, *(None,) * VALUES.get(name, 0))
            return (CUresult.CUDA_SUCCESS, *([values] if values is not None else []))

        return call

    # -- for tests -----------------------------------------------------------------------------------

    def allocate(self, size: int, device: int = 0) -> CpuMemory:
        """Memory of a device, as another library would show it."""
        memory = CpuMemory(size)
        self._memories[memory.address] = memory, device
        return memory

    def stream(self) -> int:
        """The handle of a stream of somebody else."""
        number = next(self._numbers)
        self._streams[number] = _Stream()
        return number

    def run_in(self, stream: int, job: Callable[[], object]) -> None:
        """As a kernel."""
        self._streams[stream].jobs.put(job)

    @property
    def contexts(self) -> list[int]:
        """Current in this thread, the outermost first."""
        if not hasattr(self._current, "stack"):
            self._current.stack = []
        found: list[int] = self._current.stack
        return found

    def _find(self, address: int, size: int) -> tuple[CpuMemory, int, int]:
        """Memory, offset in it, device."""
        for start, (memory, device) in self._memories.items():
            if start <= address and address + size <= start + len(memory.bytes):
                return memory, address - start, device
        raise _Refused(CUresult.CUDA_ERROR_INVALID_VALUE)

    def _need_context(self) -> int:
        if not self.contexts:
            raise _Refused(CUresult.CUDA_ERROR_INVALID_CONTEXT)
        return self.contexts[-1]

    def _stream_of(self, stream: Any) -> _Stream:
        if int(stream) not in self._streams:
            raise _Refused(CUresult.CUDA_ERROR_INVALID_HANDLE)
        return self._streams[int(stream)]

    # -- devices -------------------------------------------------------------------------------------

    def cuInit(self, flags: int) -> None:
        assert flags == 0
        if not self.count:
            raise _Refused(CUresult.CUDA_ERROR_NO_DEVICE)
        self._is_initialised = True

    def cuDriverGetVersion(self) -> int:
        return 13010

    def cuDeviceGetCount(self) -> int:
        return self.count

    def cuDeviceGet(self, ordinal: int) -> int:
        if not 0 <= ordinal < self.count:
            raise _Refused(CUresult.CUDA_ERROR_INVALID_DEVICE)
        return ordinal

    def cuDeviceGetName(self, size: int, device: int) -> bytes:
        return f"Stand-in {device}".encode().ljust(size, b"\0")

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> int:
        return self.attributes[attribute]

    def cuPointerGetAttribute(self, attribute: int, pointer: CUdeviceptr) -> int:
        assert attribute == CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        return self._find(int(pointer), 1)[2]

    def cuDevicePrimaryCtxRetain(self, device: int) -> CUcontext:
        self.open["context"] += 1
        return CUcontext(device + 1)

    def cuDevicePrimaryCtxRelease(self, device: int) -> None:
        self.open["context"] -= 1

    def cuCtxPushCurrent(self, context: CUcontext) -> None:
        self.contexts.append(int(context))

    def cuCtxPopCurrent(self) -> CUcontext:
        return CUcontext(self.contexts.pop())

    # -- memory --------------------------------------------------------------------------------------

    def cuMemAlloc(self, size: int) -> CUdeviceptr:
        device = self._need_context() - 1
        self.open["memory"] += 1
        return CUdeviceptr(self.allocate(size, device).address)

    def cuMemFree(self, pointer: CUdeviceptr) -> None:
        self._need_context()
        del self._memories[int(pointer)]
        self.open["memory"] -= 1

    def cuMemHostRegister(self, address: int, size: int, flags: int) -> None:
        self._need_context()
        if flags & CU_MEMHOSTREGISTER_READ_ONLY and not self.attributes[113]:
            raise _Refused(CUresult.CUDA_ERROR_NOT_SUPPORTED)
        if address in self.registered:
            raise _Refused(CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
        self.registered[address] = size, flags

    def cuMemHostUnregister(self, address: int) -> None:
        self._need_context()
        if self.registered.pop(address, None) is None:
            raise _Refused(CUresult.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)

    def cuMemGetHandleForAddressRange(self, pointer: CUdeviceptr, size: int, kind: int, flags: int) -> int:
        self._need_context()
        address = int(pointer)
        if not self.attributes[124]:
            raise _Refused(CUresult.CUDA_ERROR_NOT_SUPPORTED)
        if address % PAGE or size % PAGE or kind != 1 or flags:
            raise _Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        memory, offset, _ = self._find(address, min(size, PAGE))
        assert offset + size <= -(-len(memory.bytes) // PAGE) * PAGE
        copy = os.memfd_create("kvfuse-fake-dmabuf", os.MFD_CLOEXEC)  # a dma-buf has the range alone
        os.ftruncate(copy, size)
        os.pwrite(copy, memory.bytes[offset : offset + size].tobytes(), 0)
        return copy

    # -- streams and events --------------------------------------------------------------------------

    def cuStreamCreate(self, flags: int) -> CUstream:
        self._need_context()
        assert flags == CUstream_flags.CU_STREAM_NON_BLOCKING
        self.open["stream"] += 1
        return CUstream(self.stream())

    def cuStreamDestroy(self, stream: CUstream) -> None:
        self._streams.pop(int(stream)).jobs.put(None)
        self.open["stream"] -= 1

    def cuStreamSynchronize(self, stream: CUstream) -> None:
        self._stream_of(stream).wait()

    def cuStreamWaitEvent(self, stream: CUstream, event: CUevent, flags: int) -> None:
        self._need_context()
        reached = self._events[int(event)].reached
        self._stream_of(stream).jobs.put(reached.wait)

    def cuEventCreate(self, flags: int) -> CUevent:
        self._need_context()
        assert flags == CUevent_flags.CU_EVENT_DISABLE_TIMING
        self.open["event"] += 1
        number = next(self._numbers)
        self._events[number] = _Event()
        return CUevent(number)

    def cuEventDestroy(self, event: CUevent) -> None:
        del self._events[int(event)]
        self.open["event"] -= 1

    def cuEventRecord(self, event: CUevent, stream: CUstream) -> None:
        self._need_context()
        recorded, of = self._events[int(event)], self._stream_of(stream)
        recorded.reached, recorded.stream = threading.Event(), of
        of.jobs.put(recorded.reached.set)

    def cuEventSynchronize(self, event: CUevent) -> None:
        recorded = self._events[int(event)]
        recorded.reached.wait()
        if recorded.stream is not None and recorded.stream.broken:
            raise _Refused(CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)

    def cuMemcpyHtoDAsync(self, target: CUdeviceptr, source: int, size: int, stream: CUstream) -> None:
        self._copy(target, size, stream, lambda there: ctypes.memmove(there, source, size))

    def cuMemcpyDtoHAsync(self, target: int, source: CUdeviceptr, size: int, stream: CUstream) -> None:
        self._copy(source, size, stream, lambda there: ctypes.memmove(target, there, size))

    def _copy(self, pointer: CUdeviceptr, size: int, stream: CUstream, copy: Callable[[int], object]) -> None:
        self._need_context()

        def job() -> None:
            self.held.wait()
            memory, offset, _ = self._find(int(pointer), size)
            copy(address_of(memory.bytes) + offset)

        self._stream_of(stream).jobs.put(job)


VALUES = dict.fromkeys(
    (
        *("cuDeviceGetCount", "cuDeviceGetName", "cuDriverGetVersion", "cuDeviceGet", "cuDeviceGetAttribute"),
        *("cuPointerGetAttribute", "cuDevicePrimaryCtxRetain", "cuCtxPopCurrent", "cuMemAlloc", "cuStreamCreate"),
        *("cuMemGetHandleForAddressRange", "cuEventCreate"),
    ),
    1,
)
"""call -> how many values it returns behind its result"""


@contextmanager
def fake_cuda(count: int = 1, **options: bool) -> Iterator[FakeDriver]:
    """`from cuda.bindings import driver` imports the stand-in meanwhile."""
    driver = FakeDriver(count, **options)
    package, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
    vars(package)["bindings"], vars(bindings)["driver"] = bindings, driver
    modules = {"cuda": package, "cuda.bindings": bindings, "cuda.bindings.driver": driver}
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield driver
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
