"""A process that changes a tier is killed at any instruction: what its rows say is true for the process after it."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys

import pytest
from kept_memory import let_go

from kvfuse.kept.keeper import MemoryKeeper
from kvfuse.volume.tier.kept_arenas import find_left
from kvfuse.volume.tier.placement import ANYWHERE
from kvfuse.volume.tier.shared_tier import SharedTier

MIB = 1 << 20
VICTIM = """
import os, random, signal, socket, sys
from kvfuse.kept.keeper import MemoryKeeper
from kvfuse.volume.tier.shared_tier import ReadClass, SharedTier
from kvfuse.volume.tier.placement import ANYWHERE

channel, rng = socket.socket(fileno=int(sys.argv[1])), random.Random(sys.argv[2])

class Sender(MemoryKeeper):
    def keep(self, name, content=b"", descriptors=()):
        socket.send_fds(channel, [b"k" + name.encode() + b"\\0" + content], list(descriptors))
    def drop(self, name):
        channel.send(b"d" + name.encode())

tier = SharedTier(1 << 20, ANYWHERE, Sender())
held = []
for step in range(1 << 40):
    ino, choice = rng.randrange(1, 200), rng.random()
    if choice < 0.8:
        size = rng.choice([3000, 60000, 60001])
        block = tier.allocate(size, ReadClass(rng.randrange(2), 0, 0, 0o444))
        tier.tell_keeper(lambda _: bytes(16))
        if block is not None:
            block.buffer[:] = 255
            for start in range(0, size, 500):  # torn, for most of the time
                block.buffer[start : start + 500] = ino
            tier.keep(ino, block)
    elif choice < 0.9:
        tier.drop(ino)
    elif choice < 0.95:
        held = [*held[-2:], tier.find(ino)]
    elif choice < 0.951:
        tier.retire([rng.randrange(2)])
    if step == 100:  # the signal kills it, at any instruction
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.001, 0.1))
"""


def receive(channel: socket.socket, keeper: MemoryKeeper) -> bool:
    """One message; False: there are no more."""
    data, descriptors, _, _ = socket.recv_fds(channel, 1 << 16, 4)
    name, _, content = data[1:].partition(b"\0")
    if data[:1] == b"k":
        keeper.keep(name.decode(), content, descriptors)
    elif data:
        keeper.drop(name.decode())
    for descriptor in descriptors:
        os.close(descriptor)
    return bool(data)


@pytest.mark.parametrize("number", range(8))
def test_rows_are_true_whenever_the_process_is_killed(rng: random.Random, number: int) -> None:
    keeper = MemoryKeeper()
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        command = [sys.executable, "-c", VICTIM, str(there.fileno()), str(rng.random())]
        with subprocess.Popen(command, pass_fds=[there.fileno()]) as victim:
            there.close()
            here.settimeout(60)
            while receive(here, keeper):
                pass
        assert victim.returncode == -signal.SIGALRM
    tier = SharedTier(4 * MIB, ANYWHERE, keeper)
    tier.adopt(find_left(keeper, ANYWHERE), lambda *_: True)
    print(tier.statistics())
    for ino in list(tier.left):
        block = tier.look_at_left(ino)
        assert block is not None
        assert set(block.buffer.tolist()) == {ino}
    let_go(keeper)
