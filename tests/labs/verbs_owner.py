"""Processes that lend their memory to a test by RDMA, and do with it what they are told.

They are forked by a process that has imported everything and opened no device: an emulated machine needs seconds to
import what they need, and devices do not outlive a fork.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import trio
from lent_memory import Bytes, shared_memory

from kvfuse.peer.queue_pair import QueuePair
from kvfuse.peer.verbs import Registration, open_device, pyverbs

pyverbs()  # before processes are forked
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])


def pattern(size: int, generation: int = 0) -> Bytes:
    """Bytes that differ from place to place, and from generation to generation."""
    words = (np.arange(size // 4, dtype=np.uint32) + generation) * np.uint32(2654435761)
    return words.view(np.uint8)


class Owner:
    """The test's end: one call, one answer."""

    def __init__(self, size: int) -> None:
        self._pipe, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=serve, args=(theirs, size), daemon=True)
        self.process.start()
        theirs.close()
        self.address, self.keys = self._pipe.recv()

    def ask(self, what: str, *arguments: Any) -> Any:
        self._pipe.send((what, *arguments))
        return self._pipe.recv()

    def tell(self, what: str, *arguments: Any) -> None:
        """It gives no answer, or a later one."""
        self._pipe.send((what, *arguments))

    def answer(self) -> Any:
        return self._pipe.recv()

    async def connect(self, pair: QueuePair) -> None:
        await pair.connect(self.ask("connect", pair.place))

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@contextmanager
def owner(size: int) -> Iterator[Owner]:
    one = Owner(size)
    try:
        yield one
    finally:
        one.kill()


def serve(pipe: Connection, size: int) -> None:
    trio.run(_serve, pipe, size)


async def _serve(pipe: Connection, size: int) -> None:
    memory = shared_memory(size)
    memory[:] = pattern(size)
    device = open_device()
    address = memory.ctypes.data
    registration: Registration = await device.register(address, size, memory, remote=True)
    pipe.send((address, registration.rkeys.tolist()))
    pairs = []
    while True:
        what, *arguments = await trio.to_thread.run_sync(pipe.recv)
        answer: Any = None
        if what == "connect":
            pairs.append(QueuePair(device))
            await pairs[-1].connect(arguments[0])
            answer = pairs[-1].place
        elif what == "revoke":
            registration.close()
        elif what == "register":
            registration = await device.register(address, size, memory, remote=True)
            answer = registration.rkeys.tolist()
        elif what == "write":
            start, length, generation = arguments
            memory[start : start + length] = pattern(length, generation)
        pipe.send(answer)
