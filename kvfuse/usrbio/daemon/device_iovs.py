"""Registers memory of devices for a connection, and drops it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import trio

from kvfuse import errors
from kvfuse.usrbio.daemon.descriptor_receiver import DescriptorReceiver
from kvfuse.usrbio.daemon.device_memory import DeviceMemories, DeviceMemory
from kvfuse.usrbio.daemon.registered_things import HandleMap
from kvfuse.usrbio.protocol.wire import IOV_SIZE_MAX

MEMORIES_MAX = 1024
"""memories of one connection: each takes a queue pair of the adapter"""


@dataclass(eq=False)
class DeviceIov:
    """Registered memory of a device, of ``size`` bytes from ``offset`` on."""

    memory: DeviceMemory
    size: int
    offset: int = 0
    descriptor: int = -1
    """the dma-buf, during the registration"""
    idle: trio.Event = field(default_factory=trio.Event)
    """the adapter fills none of it"""

    def __post_init__(self) -> None:
        self.idle.set()


async def add_iov(
    memories: DeviceMemories, table: HandleMap[DeviceIov], receiver: DescriptorReceiver, offset: int, size: int
) -> int:
    """Register the memory whose descriptor the next message carries; returns its handle. KvfuseError, OSError."""
    if not 0 < size <= IOV_SIZE_MAX or offset > IOV_SIZE_MAX:
        raise errors.InvalidArgument(f"{size} bytes at {offset} of memory of a device")
    if lacks := memories.lacks:
        raise errors.Unsupported(lacks)
    with table.taking(size):
        descriptor = await receiver.take_memory(memories.check)
        with trio.CancelScope(shield=True):  # else the registration would leak
            try:
                iov = DeviceIov(await memories.add(descriptor, offset, size), size, offset, descriptor)
                handle = table.add(iov)
            finally:
                await receiver.run(os.close, descriptor)
    return handle


async def close_iovs(*iovs: DeviceIov) -> None:
    """Close memory that entries do not find any more. Nothing writes to it afterwards."""
    with trio.CancelScope(shield=True):
        for iov in iovs:
            await iov.memory.aclose()
            await iov.idle.wait()
