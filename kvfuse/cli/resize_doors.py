"""How `kvfuse resize` reaches a volume: by its mount, or opened by the command, as a mount would do it."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import trio

from kvfuse.cli import Failure
from kvfuse.cli.console import Bars, bars, note
from kvfuse.cli.mounts import read_virtual, within
from kvfuse.errors import EngineTimeout, KvfuseError, MountError
from kvfuse.mounttable import Mounted
from kvfuse.options.config import Options

if TYPE_CHECKING:
    from kvfuse.volume.inodes.device_changes import DeviceChanges
    from kvfuse.volume.volume import Volume

CAPACITY = "user.kvfuse.capacity"
"""extended attribute of a mount's root: bytes that the volume has, or is to have"""
DEVICES = "user.kvfuse.devices"
"""the same of the devices that it has, or what of these is to change"""
ANSWER_SECONDS = 30.0
"""for which a daemon is waited for: its record store may be slow"""
CHANGE_SECONDS = 600.0
"""for one that may write zeros to places which its devices had free"""
LOOK_SECONDS = 0.3


class VolumeDoor(ABC):
    """A volume, mounted or opened by this command."""

    @abstractmethod
    async def get(self, name: str) -> bytes: ...

    @abstractmethod
    async def set(self, name: str, value: bytes) -> None:
        """Failure, with the reason as far as it is known."""

    @abstractmethod
    def stats(self) -> Mapping[str, Any]: ...

    async def finish(self, title: str) -> None:
        """Return when nothing is left to be emptied or moved. Failure: it cannot be, for now."""
        try:
            with bars() as shown:
                while True:
                    await trio.sleep(LOOK_SECONDS)
                    if _show(shown, title, self.stats().get("drain")):
                        break
        except KeyboardInterrupt:
            note("it goes on by itself: 'kvfuse stats' has \"drain\", and the same command shows this again")
            raise


class MountedDoor(VolumeDoor):
    def __init__(self, row: Mounted) -> None:
        self._point = row.point

    async def get(self, name: str) -> bytes:
        try:
            return within(ANSWER_SECONDS, os.getxattr, self._point, name)
        except OSError as error:
            raise MountError(f"{self._point}: its daemon cannot do that, 'kvfuse upgrade': {error.strerror}") from None

    async def set(self, name: str, value: bytes) -> None:
        """MountError: it is of a former version, or does not answer."""
        await self.get(name)
        try:
            within(CHANGE_SECONDS, os.setxattr, self._point, name, value)
        except EngineTimeout as error:
            raise MountError(f"the daemon of {self._point} does not answer: {error}") from None
        except OSError as error:
            refused = "its files do not fit, its devices have no room, or a host is of before (its log says which)"
            reason = refused if error.errno == errno.EINVAL else error.strerror
            raise Failure(f"{self._point}: the volume stays as it is: {reason}") from None

    def stats(self) -> Mapping[str, Any]:
        return read_virtual(self._point, "stats")


class OpenedDoor(VolumeDoor):
    def __init__(self, volume: Volume) -> None:
        from kvfuse.volume.api import ROOT_INODE

        self._volume, self._root = volume, ROOT_INODE

    async def get(self, name: str) -> bytes:
        return await self._volume.inodes.get_xattr(self._root, name.encode())

    async def set(self, name: str, value: bytes) -> None:
        try:
            await self._volume.inodes.set_xattr(self._root, name.encode(), value)
        except KvfuseError as error:
            raise Failure(f"the volume stays as it is: {error}") from None

    def stats(self) -> Mapping[str, Any]:
        return self._volume.stats()


class HeldDoor(VolumeDoor):
    """Of a shared volume that nobody else has: its devices alone can be changed."""

    def __init__(self, changes: DeviceChanges) -> None:
        self._changes = changes

    async def get(self, name: str) -> bytes:
        return self._changes.describe() if name == DEVICES else b"%d" % self._changes.core.geometry.capacity

    async def set(self, name: str, value: bytes) -> None:
        try:
            await (self._changes.resize(int(value)) if name == CAPACITY else self._changes.change(value))
        except KvfuseError as error:
            raise Failure(f"the volume stays as it is: {error}") from None

    def stats(self) -> Mapping[str, Any]:
        return {}

    async def finish(self, title: str) -> None:
        """Killed or interrupted, it is gone on with by the same command."""
        count = self._changes.left_count
        with bars() as shown:
            while await self._changes.move_off():
                shown.show("segments moved", count - self._changes.left_count, count or 1)


def has_devices(options: Options, mounted: Mounted | None) -> bool:
    """The volume is on block devices. Of a mount its daemon knows best: 'kvfuse mount -o' may have said so."""
    if mounted is not None:
        with suppress(OSError):  # it has none, or is of a former version
            return bool(within(ANSWER_SECONDS, os.getxattr, mounted.point, DEVICES))
    return options.has_devices


@asynccontextmanager
async def opened_door(options: Options, mounted: Mounted | None, *, alone: bool = False) -> AsyncIterator[VolumeDoor]:
    """Of a volume that is mounted here, or is opened for the body. ``alone``: nobody else may have it. VolumeBusy."""
    from kvfuse.volume.opening.held_devices import held_devices
    from kvfuse.volume.running import open_volume

    if mounted is not None:
        yield MountedDoor(mounted)
    elif alone and options.is_shared:
        async with held_devices(options) as changes:
            yield HeldDoor(changes)
    else:
        async with open_volume(options) as volume:
            yield OpenedDoor(volume)


def _show(shown: Bars, title: str, drain: object) -> bool:
    """Whether it is done. Failure: files do not fit, or are damaged; MountError."""
    if not isinstance(drain, Mapping):
        raise MountError("the daemon does not say how far it is: ask as root, or as the user who mounted the volume")
    if drain["failure"]:
        raise Failure(f"{title} is not smaller yet, and tries it again by itself: {drain['failure']}")
    leaving = drain.get("leaving", 0)  # a daemon of before has no devices that leave
    if drain["target"] or not leaving:
        shown.show("slabs emptied", drain["slabs"] - drain["left"], drain["slabs"] or 1)
    else:
        shown.show("segments moved", drain["segments"] - drain["segments_left"], drain["segments"] or 1)
    return not drain["target"] and not leaving
