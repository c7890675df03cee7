"""Fills memory of clients' devices with an adapter of this host: the interface, and its refusal on a host without one.

The daemon does not map that memory, and cannot read it. An adapter reads the daemon's own memory, where bytes are
verified before, and writes them there. `peer/device_memory` does it by RDMA.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NamedTuple, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.errors import Unsupported

Bytes = npt.NDArray[np.uint8]


STAGING_PART = 1 << 20
STAGING_PARTS = 32
"""parts for all clients: the first entry that needs one allocates them"""


class DevicePiece(NamedTuple):
    """Bytes of the daemon's memory, and their target. Sizes and offsets in bytes."""

    memory: Bytes
    """all of an arena, or of staging memory: the same object each time, as it is registered as a whole, once"""
    start: int
    """first byte in ``memory``"""
    size: int
    offset: int
    """first byte in the device's memory"""


class DeviceMemory(Protocol):
    """Registered memory of a device. Event loop only."""

    async def fill(self, pieces: Sequence[DevicePiece], seconds: float) -> bool:
        """Copy all pieces, in one list. False: some failed; their targets have any bytes.

        They are within the memory, and each has a byte at least. It takes ``seconds`` at most. When it has returned, or
        raised, it writes nothing more.
        """

    async def aclose(self) -> None:
        """Drop the memory; a `fill` in flight ends, and is False. Runs to its end, also when cancelled."""


class DeviceMemories(Protocol):
    """Device memory of one daemon. Event loop only, but for `check`."""

    @property
    def lacks(self) -> str:
        """The reason why no memory can be added, "" where it may be possible. It opens nothing."""

    def check(self, descriptor: int) -> None:
        """OSError unless it may be memory of a device, for which this process may do what its owner may. Any thread."""

    async def add(self, descriptor: int, offset: int, size: int) -> DeviceMemory:
        """Register ``size`` bytes at ``offset`` of a checked descriptor, which stays the caller's.

        Unsupported, with one line that says what is missing; InvalidArgument for a range that is not in it.
        """

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Memory can be added meanwhile. At the end all of it has been closed."""


class NoDeviceMemories:
    """`DeviceMemories` of a daemon that has no adapter."""

    lacks = "this daemon uses no RDMA device for memory of GPUs"

    def check(self, descriptor: int) -> None:
        raise Unsupported(self.lacks)

    async def add(self, descriptor: int, offset: int, size: int) -> NoReturn:
        raise Unsupported(self.lacks)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield


class DeviceStaging:
    """The daemon's memory for bytes that are not in shared memory. Event loop only."""

    def __init__(self) -> None:
        self._memory: Bytes | None = None
        self._free = list(range(STAGING_PARTS))
        self._turns = trio.Semaphore(STAGING_PARTS)

    @asynccontextmanager
    async def take_part(self) -> AsyncIterator[tuple[Bytes, int]]:
        """Lend a part for the body: (memory, where the part begins in it)."""
        async with self._turns:
            if self._memory is None:
                self._memory = np.zeros(STAGING_PARTS * STAGING_PART, np.uint8)
            number = self._free.pop()
            try:
                yield self._memory, number * STAGING_PART
            finally:
                self._free.append(number)
