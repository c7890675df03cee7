"""Memory of devices that a connection has registered: how it comes, and how it goes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import trio

from kvfuse import errors
from kvfuse.usrbio.daemon.device_memory import DeviceMemories, DeviceMemory
from kvfuse.usrbio.daemon.passing import Usher
from kvfuse.usrbio.daemon.registry import Table
from kvfuse.usrbio.protocol.wire import IOV_SIZE_MAX

MEMORIES_MAX = 1024
"""of one connection: each takes a queue pair of the adapter"""


@dataclass(eq=False)
class DeviceIov:
    """Registered memory of a device, of ``size`` bytes."""

    memory: DeviceMemory
    size: int
    idle: trio.Event = field(default_factory=trio.Event)
    """nothing of it is being filled"""

    def __post_init__(self) -> None:
        self.idle.set()


async def add(memories: DeviceMemories, table: Table[DeviceIov], usher: Usher, offset: int, size: int) -> int:
    """Register the memory whose descriptor comes with the next message: its handle. KvfuseError, OSError."""
    if not 0 < size <= IOV_SIZE_MAX or offset > IOV_SIZE_MAX:
        raise errors.InvalidArgument(f"{size} bytes at {offset} of memory of a device")
    if lacks := memories.lacks:
        raise errors.Unsupported(lacks)
    with table.taking(size):
        descriptor = await usher.memory(memories.check)
        with trio.CancelScope(shield=True):  # else what is registered would be nobody's
            try:
                memory = await memories.add(descriptor, offset, size)
            finally:
                await usher.run(os.close, descriptor)
            iov = table.add(DeviceIov(memory, size))
    return iov


async def let_go(*iovs: DeviceIov) -> None:
    """Of memory that entries do not find any more. Nothing is written to it from then on."""
    with trio.CancelScope(shield=True):
        for iov in iovs:
            await iov.memory.aclose()
            await iov.idle.wait()
