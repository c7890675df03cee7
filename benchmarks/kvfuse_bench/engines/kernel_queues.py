"""The kernel's two queues of file operations, through system calls alone: linux-aio and io_uring.

One thread submits a batch and waits for all of it in the same system call, which is also the barrier between what it
wrote into a ring and what the kernel reads there.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from contextlib import AbstractContextManager
from mmap import MAP_POPULATE, MAP_SHARED, mmap
from typing import NamedTuple

import numpy as np

from kvfuse.errors import KvfuseError

_libc = ctypes.CDLL(None, use_errno=True)

AIO_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""machine -> numbers of io_setup, io_destroy, io_getevents, io_submit"""
URING_SETUP, URING_ENTER = 425, 426
"""the same on both"""

IOCB = np.dtype(
    [
        ("data", "<u8"), ("key", "<u4"), ("rw_flags", "<i4"), ("opcode", "<u2"), ("priority", "<i2"), ("fd", "<u4"),
        ("buffer", "<u8"), ("size", "<u8"), ("offset", "<i8"), ("reserved", "<u8"), ("flags", "<u4"), ("event", "<u4"),
    ]
)  # fmt: skip
EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("result2", "<i8")])
IOCB_PREAD, IOCB_PWRITE = 0, 1

SQE = np.dtype(
    [
        ("opcode", "u1"), ("flags", "u1"), ("priority", "<u2"), ("fd", "<i4"), ("offset", "<u8"), ("address", "<u8"),
        ("size", "<u4"), ("rw_flags", "<u4"), ("user_data", "<u8"), ("rest", "V24"),
    ]
)  # fmt: skip
CQE = np.dtype([("user_data", "<u8"), ("result", "<i4"), ("flags", "<u4")])
OP_READ, OP_WRITE = 22, 23
ENTER_GETEVENTS = 1
OFF_SQ_RING, OFF_CQ_RING, OFF_SQES = 0, 0x8000000, 0x10000000
SUBMISSIONS = ("head", "tail", "ring_mask", "ring_entries", "flags", "dropped", "array", "reserved")
COMPLETIONS = ("head", "tail", "ring_mask", "ring_entries", "overflow", "cqes", "flags", "reserved")
PARAMS = np.dtype(
    [
        *((name, "<u4") for name in ("sq_entries", "cq_entries", "flags", "cpu", "idle", "features", "wq_fd")),
        ("reserved", "<u4", 3),
        ("sq", [*((name, "<u4") for name in SUBMISSIONS), ("user", "<u8")]),
        ("cq", [*((name, "<u4") for name in COMPLETIONS), ("user", "<u8")]),
    ]
)

assert (IOCB.itemsize, EVENT.itemsize, SQE.itemsize, CQE.itemsize, PARAMS.itemsize) == (64, 32, 64, 16, 120)


class Transfer(NamedTuple):
    """One read or write of a file."""

    address: int
    """of the memory"""
    size: int
    offset: int
    """in the file"""


def _call(what: str, number: int, *arguments: object) -> int:
    """A system call. KvfuseError that says which one and why."""
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise KvfuseError(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


class LinuxAio(AbstractContextManager["LinuxAio"]):
    """An aio context of up to ``depth`` operations."""

    def __init__(self, depth: int) -> None:
        """KvfuseError where the kernel refuses."""
        numbers = AIO_CALLS.get(platform.machine())
        if numbers is None:
            raise KvfuseError(f"linux-aio is not known on {platform.machine()}")
        self._setup, self._destroy, self._getevents, self._submit = numbers
        self._context = ctypes.c_ulong(0)
        _call("io_setup", self._setup, ctypes.c_uint(depth), ctypes.byref(self._context))
        self._iocbs = np.zeros(depth, IOCB)
        start = self._iocbs.ctypes.data
        self._pointers = (start + np.arange(depth) * IOCB.itemsize).astype(np.uint64)
        self._events = np.zeros(depth, EVENT)

    def move(self, descriptor: int, transfers: Sequence[Transfer], *, for_read: bool) -> int:
        """Do all; the bytes moved. KvfuseError where one failed."""
        count = len(transfers)
        some = self._iocbs[:count]
        some["opcode"] = IOCB_PREAD if for_read else IOCB_PWRITE
        some["fd"] = descriptor
        some["buffer"], some["size"], some["offset"] = zip(*transfers, strict=True)
        sent = 0
        while sent < count:
            pointers = ctypes.c_void_p(self._pointers[sent:].ctypes.data)
            sent += _call("io_submit", self._submit, self._context, ctypes.c_long(count - sent), pointers)
        found = 0
        while found < count:
            wanted = ctypes.c_long(count - found)
            events = ctypes.c_void_p(self._events[found:].ctypes.data)
            found += _call("io_getevents", self._getevents, self._context, wanted, wanted, events, None)
        return _sum(self._events["result"][:count])

    def __exit__(self, *_: object) -> None:
        _call("io_destroy", self._destroy, self._context)


class IoUring(AbstractContextManager["IoUring"]):
    """A ring of up to ``depth`` operations."""

    def __init__(self, depth: int) -> None:
        """KvfuseError where the kernel refuses, as a container's policy often has it do."""
        params = np.zeros((), PARAMS)
        pointer = ctypes.c_void_p(params.ctypes.data)
        self._descriptor = _call("io_uring_setup", URING_SETUP, ctypes.c_uint(depth), pointer)
        entries, completions = int(params["sq_entries"]), int(params["cq_entries"])
        self._sq, self._cq = params["sq"], params["cq"]
        self._submissions = self._map(int(self._sq["array"]) + 4 * entries, OFF_SQ_RING)
        self._completions = self._map(int(self._cq["cqes"]) + CQE.itemsize * completions, OFF_CQ_RING)
        self._sqes = np.frombuffer(self._map(entries * SQE.itemsize, OFF_SQES), SQE)
        self._cqes = np.frombuffer(self._completions, CQE, completions, int(self._cq["cqes"]))
        self._array = np.frombuffer(self._submissions, np.uint32, entries, int(self._sq["array"]))
        self._tail = self._word(self._submissions, int(self._sq["tail"]))
        self._found_head = self._word(self._completions, int(self._cq["head"]))

    def _map(self, size: int, offset: int) -> mmap:
        return mmap(self._descriptor, size, flags=MAP_SHARED | MAP_POPULATE, offset=offset)

    @staticmethod
    def _word(ring: mmap, offset: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        return np.frombuffer(ring, np.uint32, 1, offset)

    def move(self, descriptor: int, transfers: Sequence[Transfer], *, for_read: bool) -> int:
        """Do all; the bytes moved. KvfuseError where one failed."""
        count, size = len(transfers), len(self._sqes)
        places = (int(self._tail[0]) + np.arange(count)) % size
        new = np.zeros(count, SQE)
        new["opcode"] = OP_READ if for_read else OP_WRITE
        new["fd"] = descriptor
        new["address"], new["size"], new["offset"] = zip(*transfers, strict=True)
        self._sqes[places] = new
        self._array[places] = places
        self._tail[0] += np.uint32(count)
        sent = 0
        while sent < count:
            wait = ctypes.c_uint(count - sent)
            sent += _call(
                "io_uring_enter", URING_ENTER, ctypes.c_uint(self._descriptor), wait, wait,
                ctypes.c_uint(ENTER_GETEVENTS), None, ctypes.c_size_t(0),
            )  # fmt: skip
        first = int(self._found_head[0])
        results = self._cqes["result"][(first + np.arange(count)) % len(self._cqes)]
        self._found_head[0] += np.uint32(count)
        return _sum(results)

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _sum(results: np.ndarray[tuple[int], np.dtype[np.signedinteger]]) -> int:
    if (results < 0).any():
        raise KvfuseError(f"an operation failed: {os.strerror(-int(results.min()))}")
    return int(results.sum())
