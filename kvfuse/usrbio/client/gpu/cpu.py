"""A device that is none: ordinary memory which only its copies reach. For tests, and to try programs without a GPU.

Memory of the device has an address that faults when the processor uses it. Copies reach the bytes through another
mapping, in a thread for each stream, so a caller that does not wait for its copies finds other bytes.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from mmap import PROT_READ, PROT_WRITE, mmap
from queue import SimpleQueue
from typing import Any

import numpy as np

from kvfuse.errors import DeviceError
from kvfuse.usrbio.client.gpu.device import Device, Mark, Stream
from kvfuse.usrbio.client.iov import address_of
from kvfuse.usrbio.client.session import Bytes

PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)


class CpuMemory:
    """``size`` bytes of the device. It has the interface by which libraries show memory of a GPU."""

    def __init__(self, size: int) -> None:
        descriptor = self.descriptor = os.memfd_create("kvfuse-cpu-device", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, size)
        self._shown = np.frombuffer(mmap(descriptor, size, prot=PROT_READ | PROT_WRITE), np.uint8)
        self.bytes: Bytes = np.frombuffer(mmap(descriptor, size), np.uint8)
        """for the device's copies, and for whoever looks from outside"""
        self.address = address_of(self._shown)
        if _libc.mprotect(ctypes.c_void_p(self.address), ctypes.c_size_t(size), PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.bytes.shape,
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
            "strides": None,
            "stream": None,
        }


class CpuStream(Stream):
    """Copies in a thread of its own. ``before_copy`` is called there before each: tests hold and fail copies by it."""

    def __init__(self, find: Callable[[int, int], int], before_copy: Callable[[str], None]) -> None:
        """``find``: where bytes of the device are, for its copies."""
        self._find = find
        self._before_copy = before_copy
        self._jobs: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvfuse-cpu-device", daemon=True)
        self._thread.start()

    def to_device(self, target: int, source: int, size: int) -> Mark:
        return self._begin(partial(self._copy, "to device", self._find(target, size), source, size))

    def to_host(self, target: int, source: int, size: int) -> Mark:
        return self._begin(partial(self._copy, "to host", target, self._find(source, size), size))

    def follow(self, stream: int) -> None:
        """The device has no streams of others: all that they were given is done."""

    def mark(self) -> Mark:
        return self._begin(lambda: None)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _begin(self, copy: Callable[[], None]) -> Mark:
        future: Future[None] = Future()
        self._jobs.put((copy, future))
        return _CpuMark(future)

    def _copy(self, kind: str, target: int, source: int, size: int) -> None:
        self._before_copy(kind)
        ctypes.memmove(target, source, size)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            copy, future = job
            try:
                copy()
            except Exception as error:  # whatever it is, the waiting caller raises it
                future.set_exception(error)
            else:
                future.set_result(None)


class _CpuMark:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class CpuDevice(Device):
    """See the module. ``before_copy`` gets "to device" or "to host", in the thread of a stream."""

    name = "processor (no GPU)"

    def __init__(self, *, pins: bool = True, pins_read_only: bool = True, exports: bool = False) -> None:
        """``pins``, ``pins_read_only``: whether it says that it can pin memory: it never has to.

        ``exports``: it gives descriptors of its memory to others.
        """
        self._exports = exports
        self._pins_read_only = pins_read_only
        self.before_copy: Callable[[str], None] = lambda _kind: None
        self.pinned: dict[int, int] = {}
        """address -> size"""
        self._pins = pins
        self._memories: deque[CpuMemory] = deque()

    def allocate(self, size: int) -> CpuMemory:
        """New memory of the device, zeroed. It stays as long as the device."""
        memory = CpuMemory(size)
        self._memories.append(memory)
        return memory

    def check(self, address: int, size: int) -> None:
        self._find(address, size)

    def pin(self, address: int, size: int, *, read_only: bool) -> None:
        if not self._pins or (read_only and not self._pins_read_only) or address in self.pinned:
            raise DeviceError(f"{self.name}: it cannot pin {size} bytes")
        self.pinned[address] = size

    def unpin(self, address: int) -> None:
        if self.pinned.pop(address, None) is None:
            raise DeviceError(f"{self.name}: nothing is pinned at {address:#x}")

    @property
    def lacks_export(self) -> str:
        return "" if self._exports else f"{self.name}: it has no dma-buf"

    def export(self, address: int, size: int) -> tuple[int, int]:
        """A descriptor of the memory itself: no dma-buf, but what an adapter of tests can use in its place."""
        if not self._exports:
            raise DeviceError(self.lacks_export)
        for memory in self._memories:
            if memory.address <= address and address + size <= memory.address + len(memory.bytes):
                return os.dup(memory.descriptor), address - memory.address
        raise DeviceError(f"{self.name}: {size} bytes at {address:#x} are not its memory")

    def open_stream(self) -> Stream:
        return CpuStream(self._find, lambda kind: self.before_copy(kind))

    def close(self) -> None:
        self._memories.clear()

    def _find(self, address: int, size: int) -> int:
        for memory in self._memories:
            offset = address - memory.address
            if offset >= 0 and offset + size <= len(memory.bytes):
                return address_of(memory.bytes) + offset
        raise DeviceError(f"{self.name}: {size} bytes at {address:#x} are not its memory")
