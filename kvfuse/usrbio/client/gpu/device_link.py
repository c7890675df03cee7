"""What a client has of one device: two streams, staging memory, pinned arenas."""

from __future__ import annotations

import logging
import threading
import weakref
from contextlib import suppress

from kvfuse.errors import DeviceError
from kvfuse.usrbio.client.gpu.device import Device
from kvfuse.usrbio.client.gpu.examine import capabilities_of
from kvfuse.usrbio.client.gpu.host_staging import HostStaging, StagingClient
from kvfuse.usrbio.client.gpu.ways import Choice, choose_way
from kvfuse.usrbio.client.iov import address_of
from kvfuse.usrbio.client.session import Bytes, Session

log = logging.getLogger(__name__)


class Arenas:
    """Pinned arenas of one connection. They are let go of with the last reference to this: a copy's, or the link's."""

    def __init__(self, device: Device, session: Session) -> None:
        self.session = session
        self._device = device
        self._tried: set[int] = set()
        self._pinned: list[Bytes] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _unpin_all, device, self._pinned)

    def pin(self, arena: Bytes) -> None:
        """Have copies out of it need no bounce, if the device can pin what this process cannot write."""
        address = address_of(arena)
        with self._lock:
            if address in self._tried:
                return
            self._tried.add(address)
            with suppress(DeviceError):  # then the driver copies it once more
                self._device.pin(address, len(arena), read_only=True)
                self._pinned.append(arena)


def _unpin_all(device: Device, pinned: list[Bytes]) -> None:
    for arena in pinned:
        with suppress(DeviceError):  # the device may be closed by now
            device.unpin(address_of(arena))
    pinned.clear()


class DeviceLink:
    """One client and one device. For any number of threads."""

    def __init__(self, client: StagingClient, device: Device, staging_size: int, *, owns_device: bool) -> None:
        """DeviceError."""
        self.device = device
        self.capabilities = capabilities_of(device, client.session.lacks_adapter)
        self.into = device.open_stream()
        """copies to the device"""
        self.out = device.open_stream()
        self._is_pinned = not self.capabilities.lacks_pinning
        self.staging = HostStaging(client, device, staging_size, is_pinned=self._is_pinned)
        self._client = client
        self._owns_device = owns_device
        self._arenas: Arenas | None = None
        self._has_told = False

    def arenas(self) -> Arenas | None:
        """Of the present connection; None where memory cannot be pinned. Keep it while arenas are copied."""
        if not self._is_pinned:
            return None
        session, arenas = self._client.session, self._arenas
        if arenas is None or arenas.session is not session:
            arenas = self._arenas = Arenas(self.device, session)
        return arenas

    def give_up(self, reason: str) -> Choice:
        """Some memory cannot be written by the daemon's adapter: which way is taken instead. It is logged once."""
        choice = choose_way(self.capabilities._replace(lacks_adapter=reason))
        if not self._has_told:
            self._has_told = True
            way = choice.way.value if choice.way is not None else "none"
            log.warning("%s: way %s is taken: %s", self.device.name, way, reason)
        return choice

    def close(self) -> None:
        """When copies that are under way have ended."""
        self.into.close()
        self.out.close()
        self._arenas = None
        self.staging.close()
        if self._owns_device:
            self.device.close()
