"""Opens MNT/.kvfuse/control.sock, the listener of the daemon's other doors inside its own mount, and closes it.

The listener keeps the file system alive but not the mount busy (see `binder`). So an unmount succeeds while clients
are connected, without notice to the daemon. The daemon therefore follows the mount table; once its file system has no
row there, it closes the listener and so lets the kernel end the file system. The table is that of the daemon's own
mount namespace: a container that still has the mount keeps its files, but its connections end.

The close of the last socket that holds the file system waits until the kernel has written everything back, which
the event loop has to answer. So a worker thread closes the listener, as the last socket.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import trio

from kvfuse.errors import MountError
from kvfuse.fs import binder
from kvfuse.fs.virtual import FOLDER_NAME
from kvfuse.kept.keeper import Keeper

SO_PASSRIGHTS = 83
"""set to 0; accepted sockets inherit it: the kernel refuses messages with descriptors"""
BIND_SECONDS = 60.0
"""timeout of the binder: a far too busy machine needs ten seconds to start Python"""
KEPT = "fuse/control"
"""keeper entry: the listener; see `keeper`"""
BACKLOG = 32
"""connections that wait for accept, at most"""


@asynccontextmanager
async def open_control_socket(
    mountpoint: Path, admit: Callable[[bytes], None], keeper: Keeper
) -> AsyncIterator[socket.socket]:
    """Open the listener, SOCK_SEQPACKET and non-blocking, once the mount answers; close it afterwards. MountError.

    ``admit`` gets the one-time name that the binder makes, before its mknod arrives. ``keeper`` may have the listener
    of the former daemon, with clients in its backlog; it binds the socket where this process may not.
    """
    left = keeper.take(KEPT)
    if left is not None:
        listener = socket.socket(fileno=left.descriptors[0])
    else:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        if left is None:
            name = b"%s.sock" % secrets.token_hex(16).encode()
            admit(name)
            bind = bind_control_socket if keeper.binder is None else keeper.binder
            await trio.to_thread.run_sync(bind, listener, mountpoint / os.fsdecode(FOLDER_NAME), name)
            with suppress(OSError):  # Linux before 6.16
                listener.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
            listener.listen(BACKLOG)
            keeper.keep(KEPT, descriptors=[listener.fileno()])
        yield listener
    finally:
        keeper.drop(KEPT)
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(listener.close)


def bind_control_socket(listener: socket.socket, folder: Path, name: bytes) -> None:
    """Bind ``listener`` through a copy of the mount. Never in the event loop's thread, which answers the bind."""
    descriptor = listener.fileno()
    command = [sys.executable, "-I", "-S", binder.__file__, str(descriptor), os.path.abspath(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=[descriptor]) as process:
        try:
            _, complaint = process.communicate(name, timeout=BIND_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise MountError(f"{folder}: no socket could be bound within {BIND_SECONDS:g} s") from None
    if process.returncode != 0:
        raise MountError(f"{folder}: no socket can be bound: {os.fsdecode(complaint).strip()}")


async def wait_until_unmounted(device: int) -> None:
    """Return once this mount namespace has no mount of file system ``device`` (st_dev)."""
    stop = os.eventfd(0)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call_when_cancelled, partial(os.eventfd_write, stop, 1))
            await trio.to_thread.run_sync(_follow_mounts, device, stop)
            nursery.cancel_scope.cancel()
    finally:
        os.close(stop)


async def call_when_cancelled(action: Callable[[], object]) -> None:
    """Wait for cancellation, then call ``action``."""
    try:
        await trio.sleep_forever()
    finally:
        action()


def _follow_mounts(device: int, stop: int) -> None:
    """Poll the mount table in a thread: the event loop's epoll in an epoll would lose changes of this file."""
    number = f"{os.major(device)}:{os.minor(device)}".encode()
    with open("/proc/self/mountinfo", "rb", buffering=0) as table:  # a buffer would repeat stale rows
        poll = select.poll()
        poll.register(table, select.POLLPRI)
        poll.register(stop, select.POLLIN)
        while any(row.split(b" ", 3)[2] == number for row in table.readall().split(b"\n") if row):
            if any(descriptor == stop for descriptor, _ in poll.poll()):
                return
            table.seek(0)
