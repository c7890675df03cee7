"""Runs the other doors of a mounted volume (rings), and its services, and closes them before the unmount."""

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
    """Serves ``volume`` to clients of ``listener`` until cancelled. ``device``: st_dev of the mount.

    A door calls ``task_status.started()`` when it is ready, and invalidates in ``kernel`` what it changes. It closes
    all accepted sockets before it returns; its caller closes ``listener``.
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
    """The task of a `Service`."""

    async def __call__(
        self, volume: Volume, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None: ...


class Service(NamedTuple):
    """A task that publishes what a mounted volume reports, until cancelled. `failing` restarts it after an error."""

    name: str
    serve: DoorService
    """calls ``task_status.started()`` at each start"""


@asynccontextmanager
async def run_services(services: Sequence[Service], volume: Volume, *, must_begin: bool) -> AsyncIterator[None]:
    """Run services beside the body.

    ``must_begin``: raise the error of a service that cannot start, before the body. Else the service is retried.
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
    """The doors of one mount: `run_doors` once it answers, `close_doors` before the unmount.

    ``admit``: see `open_control_socket`. Without a socket the mount runs without doors, and the log says so.
    A door is vital (`failing`): its failure ends the daemon; where no next daemon follows, the door stays closed.
    """

    doors: Sequence[Door]
    volume: Volume
    kernel: KernelCache
    mountpoint: Path
    admit: Callable[[bytes], None]
    keeper: Keeper = NO_KEEPER
    leaving: trio.Event | None = None
    """once set, doors hand their state over to the next daemon and end"""

    def __post_init__(self) -> None:
        self._scope = trio.CancelScope()
        self._running = trio.Lock()
        self.opened = trio.Event()
        """every door is ready or has failed"""

    def __bool__(self) -> bool:
        return bool(self.doors)

    async def run_doors(self, device: int) -> None:
        """Keep the doors open until `close_doors`, or until ``device`` (st_dev) is unmounted."""
        async with self._running:
            try:
                with self._scope:
                    async with open_control_socket(self.mountpoint, self.admit, self.keeper) as listener:
                        with failing.vital():
                            await self._serve_doors(listener, device)
            except* (MountError, OSError) as group:
                log.warning("the mount has no rings: %s", innermost(group))
            finally:
                self.opened.set()

    async def close_doors(self) -> None:
        """Close the doors, and return once none of their sockets holds the mount."""
        self._scope.cancel()
        async with self._running:
            pass

    async def leave_doors(self, seconds: float) -> None:
        """As `close_doors`, after ``leaving`` was set: doors have ``seconds`` to hand their state over."""
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
                self.keeper.seal()  # the listener stays for clients
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
