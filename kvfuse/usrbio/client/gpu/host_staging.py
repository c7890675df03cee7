"""Memory of the host that lies between the daemon and a device: the daemon fills it, and the device copies it, or back.

A connection has one such memory of each device, given out in *parts*. It is bounded, so a caller that finds no room
reaps completions first. A part that the daemon, or a copy, may still write is not given out again: it comes back by
`StagingPart.release` alone, and another connection gets other memory.
"""

from __future__ import annotations

import threading
import weakref
from bisect import insort
from collections.abc import Callable
from contextlib import suppress
from errno import EAGAIN
from time import monotonic
from typing import Protocol

from kvfuse.errors import DeviceError
from kvfuse.usrbio.client.gpu.device import Device
from kvfuse.usrbio.client.iov import Iov, address_of
from kvfuse.usrbio.client.session import Bytes, Session

STAGING_SIZE = 64 << 20
"""bytes; a block that has more gets memory of its own for a while, one such block at a time"""
ALIGNMENT = 256


class StagingClient(Protocol):
    """A client."""

    session: Session

    def iov(self, size: int) -> Iov: ...


class StagingPart:
    """``size`` bytes of staging memory, as the daemon (``iov``, ``offset``) and copies (``address``) name them."""

    def __init__(
        self, memory: _PinnedIov, offset: int, size: int, release: Callable[[_PinnedIov, int, int], None]
    ) -> None:
        self.iov = memory.iov
        self.offset = offset
        self.address = address_of(memory.array) + offset
        self._size = size
        self._memory: _PinnedIov | None = memory
        self._release = release

    def release(self) -> None:
        """Neither the daemon nor a copy uses it any more."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self._release(memory, self.offset, self._size)


class _PinnedIov:
    """An iov, its holes, and its pinning, which ends with the last part of it."""

    def __init__(self, client: StagingClient, size: int, device: Device, *, is_pinned: bool) -> None:
        """OSError, Disconnected. ``is_pinned``: if it can be."""
        self.session = client.session
        self.iov = client.iov(size)
        self.array = self.iov.array
        self.holes = [(0, size)]
        """(offset, size), ordered; no two of them touch"""
        if is_pinned:
            with suppress(DeviceError):  # the machine may have no memory to pin left: the driver copies it once more
                device.pin(address_of(self.array), size, read_only=False)
                weakref.finalize(self, _unpin, device, self.array)

    def take(self, size: int) -> int | None:
        """The offset of a hole's first ``size`` bytes, which are none of it any more."""
        for index, (offset, length) in enumerate(self.holes):
            if length >= size:
                self.holes[index : index + 1] = [(offset + size, length - size)] if length > size else []
                return offset
        return None

    def give_back(self, offset: int, size: int) -> None:
        insort(self.holes, (offset, size))
        joined: list[tuple[int, int]] = []
        for start, length in self.holes:
            if joined and joined[-1][0] + joined[-1][1] == start:
                joined[-1] = joined[-1][0], joined[-1][1] + length
            else:
                joined.append((start, length))
        self.holes = joined


def _unpin(device: Device, array: Bytes) -> None:
    with suppress(DeviceError):  # the device may be closed by now
        device.unpin(address_of(array))


class HostStaging:
    """The staging memory of one client for one device. For any number of threads."""

    def __init__(self, client: StagingClient, device: Device, size: int, *, is_pinned: bool) -> None:
        self.size = size
        self._client = client
        self._device = device
        self._is_pinned = is_pinned
        self._memory: _PinnedIov | None = None
        self._large: _PinnedIov | None = None
        """of one block that has more than ``size`` bytes"""
        self._changed = threading.Condition()

    def take(self, size: int) -> StagingPart:
        """BlockingIOError while others have it; OSError, Disconnected."""
        size = max(-(-size // ALIGNMENT) * ALIGNMENT, ALIGNMENT)
        with self._changed:
            memory = self._present(size)
            offset = memory.take(size) if memory is not None else None
        if memory is None or offset is None:
            raise BlockingIOError(EAGAIN, f"no {size} of the {self.size} bytes of staging memory are free: reap first")
        return StagingPart(memory, offset, size, self._give_back)

    def wait(self, give_up: float) -> bool:
        """Return when some was given back, or at the time ``give_up`` (False)."""
        with self._changed:
            return self._changed.wait(max(give_up - monotonic(), 0))

    def close(self) -> None:
        """Parts that are out stay true."""
        with self._changed:
            memories, self._memory, self._large = (self._memory, self._large), None, None
        for memory in memories:
            if memory is not None:
                memory.iov.close()

    def _present(self, size: int) -> _PinnedIov | None:
        """Memory of the present connection where so many bytes may be found."""
        session = self._client.session
        if size > self.size:
            if self._large is not None and self._large.session is session:
                return None
            self._large = _PinnedIov(self._client, size, self._device, is_pinned=False)
            return self._large
        if self._memory is None or self._memory.session is not session:
            old, self._memory = self._memory, None
            if old is not None:
                old.iov.close()
            self._memory = _PinnedIov(self._client, self.size, self._device, is_pinned=self._is_pinned)
        return self._memory

    def _give_back(self, memory: _PinnedIov, offset: int, size: int) -> None:
        with self._changed:
            is_large = memory is self._large
            if is_large:
                self._large = None
            else:
                memory.give_back(offset, size)
            self._changed.notify_all()
        if is_large:
            memory.iov.close()
