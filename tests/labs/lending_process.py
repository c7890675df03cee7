"""A host in a process of its own, that lends an arena by RDMA until it is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import trio
from lent_memory import shared_memory
from peer_hosts import VOLUME_ID, PeerHost, peer_hosts

from kvfuse.checksum import granule_checksums
from kvfuse.volume.store.peer_records import PeerRecord
from kvfuse.volume.views.neighbours import Wanted

SECRET = bytes(range(32))
OPTIONS = {"transport": "rdma", "rdma_devices": ("rxe0",), "deadline": 20.0, "connections": 1}
SIZE = 64 << 10


def block(ino: int) -> bytes:
    return np.random.default_rng(ino).bytes(SIZE)


def wanted(ino: int) -> Wanted:
    return Wanted(ino, 0, ino, 1, 0, SIZE, granule_checksums(memoryview(block(ino))))


@dataclass
class Lender:
    pid: int
    port: int
    is_killed: bool = False

    @property
    def place(self) -> PeerRecord:
        return PeerRecord((f"127.0.0.1:{self.port}",), ("tcp", "rdma"))

    def kill(self) -> None:
        if not self.is_killed:
            self.is_killed = True
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


@contextmanager
def lending(count: int) -> Iterator[Lender]:
    """Host 1, which has blocks 1 to ``count``. A fork of this process, which has no device open."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            trio.run(_lend, count, writer)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        lender = Lender(pid, int(pipe.readline() or 0))
    try:
        yield lender
    finally:
        lender.kill()


async def _lend(count: int, report: int) -> None:
    async with peer_hosts(1, secret=SECRET, **OPTIONS) as (host,):
        arena = shared_memory(count * SIZE)
        for ino in range(1, count + 1):
            arena[(ino - 1) * SIZE : ino * SIZE] = np.frombuffer(block(ino), np.uint8)
            host.neighbourhood.blocks[ino] = arena[(ino - 1) * SIZE : ino * SIZE].data
        os.write(report, b"%d\n" % host.port)
        await trio.sleep_forever()


def meet(reader: PeerHost, lender: Lender, count: int) -> None:
    """The reader's volume says where host 1 answers now."""
    assert reader.neighbourhood.volume_id == VOLUME_ID
    reader.neighbourhood.places = {1: lender.place}
    reader.neighbourhood.holders = dict.fromkeys(range(1, count + 1), 1)
    reader.neighbourhood.change()
