"""A daemon that never answers a lookup of the name "stuck": ``python stuck_daemon.py VOLUME POINT [-o WORD]...``.

Who asks for it has the folder locked meanwhile, in the kernel. "asked for stuck" is printed then. It has rings, and
when it is told to end, it gives up soon.
"""

from __future__ import annotations

import socket
import sys

import trio
from door_daemon import main

from kvfuse.fs import mount_session
from kvfuse.usrbio.daemon.listener import serve_rings
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.views.kernel_cache import KernelCache
from kvfuse.volume.volume import Volume

STUCK_DAEMON = (sys.executable, __file__)
"""command of a `KvfuseMount` of this daemon"""
NAME = "stuck"


async def never_answer(
    volume: Volume,
    listener: socket.socket,
    kernel: KernelCache,
    device: int,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """A door that nobody comes through."""
    lookup = volume.tree.lookup

    async def lookup_or_not(parent: int, name: bytes) -> Node:
        if name == NAME.encode():
            print(f"asked for {NAME}", flush=True)
            await trio.sleep_forever()
        return await lookup(parent, name)

    volume.tree.lookup = lookup_or_not
    volume.tree.look_up_at_once = lambda *_: None
    task_status.started()
    await trio.sleep_forever()


if __name__ == "__main__":
    mount_session.END_SECONDS = 1.0
    main([never_answer, serve_rings])
