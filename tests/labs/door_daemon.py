"""A daemon with a door of the tests' own: ``python door_daemon.py VOLUME POINT [-o WORD]...``.

Whoever connects to the control socket sends calls as JSON, one a message, and gets {"value"} back. A call is
a method of `Calls` and its arguments, or a method of the kernel's cache. The calls of a connection are made in order.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio
from mounting import PATIENCE_S, wait_until

from kvfuse.cli.logs import start_logging
from kvfuse.cli.volumes import ensure_volume
from kvfuse.fs.doors import Door
from kvfuse.fs.mount_session import serve_mount
from kvfuse.options.config import load
from kvfuse.volume.api import Caller, Changes
from kvfuse.volume.views.kernel_cache import KernelCache
from kvfuse.volume.volume import Volume

DOOR_DAEMON = (sys.executable, __file__)
"""command of a `KvfuseMount` with this door"""
CALLER = Caller(0, 0)


class Connection:
    """A client of the door: ``connection.write(ino, 0, "text")`` and so on, see `Calls` and `KernelCache`."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected

    def send(self, *call: Any) -> None:
        self.socket.send(json.dumps(call).encode())

    def receive(self) -> Any:
        message = self.socket.recv(65536)
        assert message, "the daemon closed the connection"
        return json.loads(message)["value"]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.send(name, *arguments)
            return self.receive()

        return call


@contextmanager
def connected(point: Path) -> Iterator[Connection]:
    """A connection to the door of the mount at ``point``, however long that path is."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(PATIENCE_S)
        folder = os.open(point / ".kvfuse", os.O_PATH)
        try:
            client.connect(f"/proc/self/fd/{folder}/control.sock")
        finally:
            os.close(folder)
        yield Connection(client)


def wait_for_door(point: Path) -> None:
    """A daemon in the foreground has mounted before its door is open."""

    def accepts() -> bool:
        try:
            with connected(point):
                return True
        except (FileNotFoundError, ConnectionRefusedError):  # not bound yet, not listening yet
            return False

    wait_until(accepts, "the control socket")


held: dict[str, Any] = {}
"""the method that `Calls.hold` holds"""


class Calls:
    """Changes that the kernel does not see. Names are text, content is ASCII."""

    def __init__(self, volume: Volume) -> None:
        self.volume = volume

    async def ino(self, parent: int, name: str) -> int:
        attributes = await self.volume.tree.lookup(parent, name.encode())
        self.volume.tree.forget(attributes.ino, 1)
        return attributes.ino

    async def write(self, ino: int, offset: int, data: str) -> None:
        handle = await self.volume.files.open(ino, os.O_WRONLY, CALLER)
        await self.volume.files.write(handle, offset, data.encode())
        await self.volume.files.release(handle)

    async def truncate(self, ino: int, size: int) -> None:
        await self.volume.inodes.set_attributes(ino, Changes(size=size), CALLER)

    async def create(self, parent: int, name: str, data: str) -> int:
        handle, attributes = await self.volume.tree.create(parent, name.encode(), 0o644, CALLER, os.O_WRONLY)
        await self.volume.files.write(handle, 0, data.encode())
        await self.volume.files.release(handle)
        self.volume.tree.forget(attributes.ino, 1)
        return attributes.ino

    async def rename(self, parent: int, name: str, new_name: str) -> None:
        await self.volume.tree.rename(parent, name.encode(), parent, new_name.encode(), 0)

    async def unlink(self, parent: int, name: str) -> None:
        await self.volume.tree.unlink(parent, name.encode())

    async def knows(self, ino: int) -> bool:
        return self.volume.is_known_to_kernel(ino)

    async def hold(self, method: str, when: str = "called") -> None:
        """Let calls of a method ("tree.lookup") wait for `let_go`; ``when``: or, its answers, "answered"."""
        owner, _, name = method.partition(".")
        part = getattr(self.volume, owner)
        original = getattr(part, name)
        held.clear()
        held.update(part=part, name=name, original=original, waiting=trio.Event(), gate=trio.Event())

        async def wait(*arguments: Any) -> Any:
            answer = await original(*arguments) if when == "answered" else None
            held["waiting"].set()
            await held["gate"].wait()
            return answer if when == "answered" else await original(*arguments)

        setattr(part, name, wait)
        if method == "tree.lookup":  # no lookup is answered without it
            part.look_up_at_once = lambda *_: None

    async def wait_for_held(self) -> None:
        """Return when a call waits."""
        await held["waiting"].wait()

    async def let_go(self) -> None:
        setattr(held["part"], held["name"], held["original"])
        vars(held["part"]).pop("look_up_at_once", None)
        held["gate"].set()


async def door(
    volume: Volume,
    listener: socket.socket,
    kernel: KernelCache,
    device: int,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    accepting = trio.socket.from_stdlib_socket(socket.socket(fileno=os.dup(listener.fileno())))
    with accepting:
        task_status.started()
        async with trio.open_nursery() as nursery:
            while True:
                connection, _ = await accepting.accept()
                nursery.start_soon(answer, connection, volume, kernel)


async def answer(connection: trio.socket.SocketType, volume: Volume, kernel: KernelCache) -> None:
    with connection:
        while message := await connection.recv(65536):
            name, *arguments = json.loads(message)
            if name == "fail":
                raise ZeroDivisionError("the door fails")
            await connection.send(json.dumps({"value": await call(volume, kernel, name, arguments)}).encode())


async def call(volume: Volume, kernel: KernelCache, name: str, arguments: list[Any]) -> Any:
    if name.startswith("drop_"):
        plain = [argument.encode() if isinstance(argument, str) else argument for argument in arguments]
        return await trio.to_thread.run_sync(getattr(kernel, name), *plain)
    return await getattr(Calls(volume), name)(*arguments)


def main(doors: Sequence[Door]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("volume", type=Path)
    parser.add_argument("point", type=Path)
    parser.add_argument("-o", dest="words", action="append", default=[])
    arguments = parser.parse_args()
    options = load(arguments.volume, words=arguments.words).options
    os.umask(0o077)
    ensure_volume(options)
    start_logging(options.log, None)
    trio.run(run, options, arguments.point, doors)


async def run(options: Any, point: Path, doors: Sequence[Door]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancel_on, signal.SIGTERM, nursery.cancel_scope)
        await serve_mount(options, point, on_ready=lambda: print(f"mounted on {point}", flush=True), doors=doors)
        nursery.cancel_scope.cancel()


async def cancel_on(number: int, scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(number) as signals:
        async for _ in signals:
            scope.cancel()
            return


if __name__ == "__main__":
    sys.exit(main([door]))
