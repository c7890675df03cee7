"""All memory of devices that is registered with one client."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from typing import Literal

from kvfuse.usrbio.client.gpu.device import Device
from kvfuse.usrbio.client.gpu.device_link import DeviceLink
from kvfuse.usrbio.client.gpu.gpu_memory import GpuIov, GpuRange
from kvfuse.usrbio.client.gpu.host_staging import StagingClient
from kvfuse.usrbio.client.gpu.interfaces import DeviceBytes, memory_of, stream_number
from kvfuse.usrbio.client.session import Session

Stream = object | Literal["producer"] | None
"""a handle, an object that has one, "producer": as the memory's library says, None: none has to be waited for"""


class Gpus:
    """Of one client, which owns it. For any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: dict[tuple[object, int], DeviceLink] = {}
        """by the device, or its number, and the size of its staging memory"""
        self._iovs: set[GpuIov] = set()
        self._places: tuple[tuple[int, GpuIov], ...] = ()
        """(address, iov), ordered; replaced, never changed"""

    def add(
        self, client: StagingClient, thing: object, device: Device | None, stream: Stream, staging_size: int
    ) -> GpuIov:  # fmt: skip
        """As `Client.iov_from_gpu`, of that client: nothing else here refers to it, so it goes when it is dropped."""
        memory = memory_of(thing)
        follow: Callable[[], int | None]
        if stream == "producer":
            follow = memory.stream
        else:
            number = None if stream is None else stream_number(stream)
            follow = lambda: number  # noqa: E731
        with self._lock:
            link = self._link(client, memory, device, staging_size)
            link.device.check(memory.address, memory.size)
            iov = GpuIov(memory, link, follow, self._forget)
            iov.register(client.session)
            self._iovs.add(iov)
            self._sort()
        return iov

    def locate(self, thing: object) -> GpuRange:
        """Where the memory of an object is. ValueError where it is not registered; as `memory_of`."""
        memory, places = memory_of(thing), self._places
        index = bisect_right(places, memory.address, key=lambda place: place[0]) - 1
        if index >= 0:
            start, iov = places[index]
            offset = memory.address - start
            if offset + memory.size <= iov.size:
                return GpuRange(iov, offset, memory.size)
        raise ValueError(
            f"the memory at {memory.address:#x} of a GPU is not registered: give it, or what it is a part of, to "
            "client.iov_from_gpu, once"
        )

    def register(self, session: Session) -> None:
        """Again, with the daemon of a new connection. Disconnected."""
        with self._lock:
            for iov in self._iovs:
                iov.register(session)

    def close(self) -> None:
        with self._lock:
            links, self._links = list(self._links.values()), {}
            iovs = list(self._iovs)
        for iov in iovs:
            iov.close()
        for link in links:
            link.close()

    def _link(self, client: StagingClient, memory: DeviceBytes, device: Device | None, staging_size: int) -> DeviceLink:
        """With the lock. DeviceError."""
        if device is not None:
            return self._link_to(client, (device, staging_size), lambda: device, owns_device=False)
        from kvfuse.usrbio.client.gpu import cuda  # only now: it needs a package that is optional

        number = cuda.ordinal_of(memory.address) if memory.ordinal is None else memory.ordinal
        return self._link_to(client, (number, staging_size), lambda: cuda.CudaDevice(number), owns_device=True)

    def _link_to(
        self, client: StagingClient, key: tuple[object, int], open_device: Callable[[], Device], *, owns_device: bool
    ) -> DeviceLink:
        link = self._links.get(key)
        if link is None:
            link = self._links[key] = DeviceLink(client, open_device(), key[1], owns_device=owns_device)
        return link

    def _forget(self, iov: GpuIov) -> None:
        with self._lock:
            self._iovs.discard(iov)
            self._sort()

    def _sort(self) -> None:
        located = sorted(self._iovs, key=lambda iov: (iov.address, iov.size))
        self._places = tuple((iov.address, iov) for iov in located)
