"""Further doors to a mounted volume, opened beside the mount and closed before it goes."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import trio

from kvfuse import failing
from kvfuse.errors import MountError, innermost
from kvfuse.fs.control import open_control_socket, wait_until_unmounted
from kvfuse.kept.keeper import NO_KEEPER, Keeper
from kvfuse.volume.views.kernel_cache import KernelCache
from kvfuse.volume.volume import Volume

log = logging.getLogger(__name__)


class Door(Protocol):
    """Serves ``volume`` to whoever connects to ``listener``, until it is cancelled. ``device``: st_dev of the mount.

    It calls ``task_status.started()`` when it is ready. What it changes in the volume it drops from ``kernel``.
    Before it returns, all that it accepted is closed; ``listener`` is not its own to close.
    """

    async def __call__(
        self,
        volume: Volume,
        listener: socket.socket,
        kernel: KernelCache,
        device: int,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None: ...


class DoorService(Protocol):
    """See `Service`."""

    async def __call__(
        self, volume: Volume, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None: ...


class Service(NamedTuple):
    """Tells others what a mounted volume says of itself, until it is cancelled: `failing` says what that means."""

    name: str
    serve: DoorService
    """calls ``task_status.started()`` each time that it begins"""


@asynccontextmanager
async def run_services(services: Sequence[Service], volume: Volume, *, must_begin: bool) -> AsyncIterator[None]:
    """Services run meanwhile.

    ``must_begin``: an error of one that cannot begin is raised, before the body. Else it is tried again beside it.
    """
    async with trio.open_nursery() as nursery:
        for name, serve in services:
            begun = failing.Begun()
            work = partial(serve, volume, task_status=begun)
            nursery.start_soon(failing.service, name, work, begun if must_begin else None)
            if must_begin:
                await begun.wait()
        yield
        nursery.cancel_scope.cancel()


@dataclass
class Doors:
    """The doors of one mount: `run` once it answers, `close` before it is taken away.

    ``admit``: see `control_socket`. Where no socket can be had, that is logged, and the mount goes on without doors.
    A door is of the core (`failing`): one that fails ends the daemon; where no next one follows, it stays closed.
    """

    doors: Sequence[Door]
    volume: Volume
    kernel: KernelCache
    mountpoint: Path
    admit: Callable[[int], None]
    keeper: Keeper = NO_KEEPER
    leaving: trio.Event | None = None
    """once it is set, doors may end by themselves: they leave what they have to the next daemon"""

    def __post_init__(self) -> None:
        self._scope = trio.CancelScope()
        self._running = trio.Lock()
        self.opened = trio.Event()
        """every door is ready, or will never be"""

    def __bool__(self) -> bool:
        return bool(self.doors)

    async def run_doors(self, device: int) -> None:
        """Keep the doors open until `close`, or until no mount of ``device`` (st_dev) is left."""
        async with self._running:
            try:
                with self._scope:
                    async with open_control_socket(self.mountpoint, self.admit, self.keeper) as listener:
                        with failing.vital():
                            await self._serve_doors(listener, device)
            except* (MountError, OSError) as group:
                log.warning("there are no rings: %s", innermost(group))
            finally:
                self.opened.set()

    async def close_doors(self) -> None:
        """Close the doors, and return when nothing of them holds the mount any more."""
        self._scope.cancel()
        async with self._running:
            pass

    async def leave_doors(self, seconds: float) -> None:
        """As `close`, after ``leaving`` was set: doors have some seconds to leave what they have."""
        with trio.move_on_after(seconds):
            async with self._running:
                pass
        self.keeper.seal()
        await self.close_doors()

    async def _serve_doors(self, listener: socket.socket, device: int) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(failing.vital_task, self._close_when_unmounted, device)
            async with trio.open_nursery() as doors:
                for door in self.doors:
                    ready = trio.Event()
                    doors.start_soon(self._serve_door, door, listener, device, ready)
                    with failing.vital():
                        await ready.wait()
                self.opened.set()
            if self.leaving is not None and self.leaving.is_set():
                self.keeper.seal()  # clients go on to find the listener
            nursery.cancel_scope.cancel()  # without a door that accepts, a connect would wait for ever

    async def _close_when_unmounted(self, device: int) -> None:
        await wait_until_unmounted(device)
        log.info("%s is unmounted: its doors are closed", self.mountpoint)
        self._scope.cancel()

    async def _serve_door(self, door: Door, listener: socket.socket, device: int, ready: trio.Event) -> None:
        try:
            async with trio.open_nursery() as nursery:
                with failing.vital():  # before the nursery ends the door
                    await nursery.start(failing.vital_task, door, self.volume, listener, self.kernel, device)
                ready.set()
        except* Exception as group:
            log.error("a door failed and stays closed", exc_info=group)
        finally:
            ready.set()
