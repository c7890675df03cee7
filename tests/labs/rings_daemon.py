"""A daemon whose rings are served by one door after the other: ``python rings_daemon.py VOLUME POINT [-o WORD]...``.

SIGUSR1: the door leaves everything as it is, at once, as if the daemon had been killed, and the next one goes on;
SIGUSR2: as for an upgrade. Each door that is open appends a line to the file ``VOLUME.doors``.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path

import trio
from door_daemon import main
from mounting import KvfuseMount, wait_until

from kvfuse.kept.keeper import Keeper, MemoryKeeper
from kvfuse.usrbio.daemon import listener as rings
from kvfuse.volume.views.kernel_cache import KernelCache
from kvfuse.volume.volume import Volume

RINGS_DAEMON = (sys.executable, __file__)
"""command of a `KvfuseMount` with this door"""


class RingsDaemon:
    """What a test does with it."""

    def __init__(self, mount: KvfuseMount) -> None:
        self._mount = mount

    def _doors(self) -> int:
        path = Path(f"{self._mount.volume}.doors")
        return len(path.read_text().splitlines()) if path.exists() else 0

    def change(self, number: signal.Signals) -> None:
        """SIGUSR1, SIGUSR2. Returns when the next door is open."""
        before = self._doors()
        os.kill(self._mount.pid, number)
        wait_until(lambda: self._doors() > before, "the next door")


async def door(
    volume: Volume,
    listener: socket.socket,
    kernel: KernelCache,
    device: int,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    keeper: Keeper = MemoryKeeper()
    patience = rings.HAND_OVER_SECONDS
    with trio.open_signal_receiver(signal.SIGUSR1, signal.SIGUSR2) as signals:
        task_status.started()
        while True:
            handing_over = trio.Event()
            async with trio.open_nursery() as nursery:
                serve = partial(rings.serve_rings, keeper=keeper, handing_over=handing_over)
                await nursery.start(serve, volume, listener, kernel, device)
                with open(f"{sys.argv[1]}.doors", "a") as file:
                    file.write("open\n")
                number = await anext(aiter(signals))
                rings.HAND_OVER_SECONDS = 0 if number == signal.SIGUSR1 else patience
                handing_over.set()


if __name__ == "__main__":
    sys.exit(main([door]))
