"""MNT/.kvfuse/control.sock: the listener of the daemon's other doors, inside its own mount.

The listener keeps the file system alive but not the mount busy (see `binder`). So an unmount succeeds while clients
are connected, and nobody tells the daemon: it follows the mount table, and once its file system is not in there any
more, it closes the listener and so lets the kernel end the file system. The table is that of the daemon's own mount
namespace: a container that still has the mount keeps its files, but its connections end.

Whoever closes the last socket that holds the file system waits until the kernel has written everything back, which
the event loop has to answer. So the listener, closed last, is closed by a worker thread.
"""

from __future__ import annotations

import os
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
from kvfuse.fs.virtual import FOLDER_NAME, SOCKET_NAME
from kvfuse.kept.keeper import Keeper

SO_PASSRIGHTS = 83
"""off, so that an accepted socket begins with it off, too: the kernel refuses messages with descriptors"""
BIND_SECONDS = 60.0
"""Starting Python takes that long on no machine that is of use, but ten seconds on one that is far too busy."""
KEPT = "fuse/control"
"""with the listener; see `keeper`"""
BACKLOG = 32
"""clients that may wait to be accepted"""


@asynccontextmanager
async def open_control_socket(
    mountpoint: Path, admit: Callable[[int], None], keeper: Keeper
) -> AsyncIterator[socket.socket]:
    """The listener, SOCK_SEQPACKET and non-blocking, from when the mount answers. MountError where it cannot be had.

    ``admit`` is told the process (as FUSE requests show it) that binds, before its mknod comes. ``keeper``: has the
    listener of a daemon before this one, in whose backlog clients wait since.
    """
    left = keeper.take(KEPT)
    if left is not None:
        listener = socket.socket(fileno=left.descriptors[0])
    else:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        if left is None:
            await trio.to_thread.run_sync(bind_control_socket, listener, mountpoint, admit)
            with suppress(OSError):  # Linux before 6.16
                listener.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
            listener.listen(BACKLOG)
            keeper.keep(KEPT, descriptors=[listener.fileno()])
        yield listener
    finally:
        keeper.drop(KEPT)
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(listener.close)


def bind_control_socket(listener: socket.socket, mountpoint: Path, admit: Callable[[int], None]) -> None:
    """Bind ``listener`` through a copy of the mount. Not for the event loop's thread: it answers the bind."""
    folder = os.path.join(os.path.abspath(mountpoint), os.fsdecode(FOLDER_NAME))
    descriptor = listener.fileno()
    command = [sys.executable, "-I", "-S", binder.__file__, str(descriptor), folder, os.fsdecode(SOCKET_NAME)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stderr=pipe, pass_fds=[descriptor]) as process:
        admit(process.pid)
        try:
            _, complaint = process.communicate(timeout=BIND_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise MountError(f"{folder}: no socket could be bound within {BIND_SECONDS:g} s") from None
    if process.returncode != 0:
        raise MountError(f"{folder}: no socket can be bound: {os.fsdecode(complaint).strip()}")


async def wait_until_unmounted(device: int) -> None:
    """Return when no mount of file system ``device`` (st_dev) is left in this mount namespace."""
    stop = os.eventfd(0)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call_when_cancelled, partial(os.eventfd_write, stop, 1))
            await trio.to_thread.run_sync(_follow_mounts, device, stop)
            nursery.cancel_scope.cancel()
    finally:
        os.close(stop)


async def call_when_cancelled(action: Callable[[], object]) -> None:
    """Wait to be cancelled, then do this."""
    try:
        await trio.sleep_forever()
    finally:
        action()


def _follow_mounts(device: int, stop: int) -> None:
    """Poll in a thread: an epoll in an epoll, as under the event loop, loses changes of this file."""
    number = f"{os.major(device)}:{os.minor(device)}".encode()
    with open("/proc/self/mountinfo", "rb", buffering=0) as table:  # a buffer would show again what it has
        poll = select.poll()
        poll.register(table, select.POLLPRI)
        poll.register(stop, select.POLLIN)
        while any(row.split(b" ", 3)[2] == number for row in table.readall().split(b"\n") if row):
            if any(descriptor == stop for descriptor, _ in poll.poll()):
                return
            table.seek(0)
