"""Threads that send and receive blocks of a store that changes: bytes are those that were wanted, or are found out.

As a program: ``peers_lab.py SEED ROUNDS``.
"""

from __future__ import annotations

import random
import select
import socket
import struct
import sys

import numpy as np
from lent_blocks import LentBlocks

from kvfuse.native._peers import Reader, Server, Spread
from kvfuse.peer.peer_wire import BLOCK_ANSWER, FINAL
from kvfuse.traceparent import SIZE
from kvfuse.volume.views.neighbours import Answer

SIZES = (1, 4096, 70_000, 300_000, 1 << 20)
NAMES, AT_ONCE = 40, 12
MEMORY = AT_ONCE << 20
PATIENCE_MS = 60_000


def content(number: int, version: int) -> bytes:
    rng = np.random.default_rng(number << 32 | version)
    return rng.integers(0, 256, SIZES[(number + version) % len(SIZES)], np.uint8).tobytes()


class PeersLab:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.lent = LentBlocks(arenas=3, arenas_lent=self.rng.choice((0, 1, 4)))
        self.spread = Spread()
        self.spread.set_clients(np.array([1, 2], np.uint64))
        self.server = Server(self.spread, 64 << 20)
        if self.rng.random() < 0.5:
            self.server.trace()
        self.versions = dict.fromkeys(range(NAMES), 0)
        self.lent.put({number: content(number, 0) for number in self.versions})
        self.counts = dict.fromkeys(["right", "absent", "wrong", "abandoned", "cut", "noise"], 0)
        self.connect()

    def connect(self) -> None:
        here, self.there = socket.socketpair()
        self.server.serve(here.detach(), 1, self.lent.lender)
        self.reader = Reader(self.there.detach())

    def round(self) -> None:
        numbers = self.rng.sample(list(self.versions), self.rng.randint(1, AT_ONCE))
        memory = np.full(MEMORY, 0xA5, np.uint8)
        wanted = self.lent.wanted(numbers, memory)
        data = [content(number, self.versions[number]) for number in numbers]
        is_wrong = self.rng.random() < 0.1
        wanted.checksums[0] ^= is_wrong
        _, *columns = wanted
        count, flags = len(numbers), self.rng.choice((0, FINAL))
        parent = self.rng.choice((b"", self.rng.randbytes(SIZE)))
        assert len(self.server.take_spans()) % (SIZE + 40) == 0
        number = self.reader.ask(*columns, np.zeros(count, np.uint32), np.arange(count), flags, 0, None, 0, parent)
        if self.rng.random() < 0.3:
            self.change()
        match self.rng.randrange(12):
            case 0:
                self.reader.abandon(number)
                memory[:] = 0xA5
                self.counts["abandoned"] += 1
                self.renew()
                assert (memory == 0xA5).all()
                return
            case 1:
                self.counts["cut"] += 1
                self.renew()
                return
        results = self.results(number, count)
        for place, (start, block) in enumerate(zip(wanted.targets - np.uint64(memory.ctypes.data), data, strict=True)):
            is_here = results[place] == Answer.HERE
            assert not (is_here and is_wrong and place == 0)
            if is_here:
                assert memory[int(start) : int(start) + len(block)].tobytes() == block
            self.counts["right"] += is_here
            self.counts["wrong"] += results[place] == -1
            self.counts["absent"] += results[place] in (Answer.ABSENT, Answer.ELSEWHERE)

    def results(self, number: int, count: int) -> np.ndarray:
        found, left = np.zeros(count, np.int32), count
        while left:
            assert select.select([self.reader.bell()], [], [], PATIENCE_MS / 1e3)[0], "no answer"
            told, at = self.reader.take(), 0
            while at < len(told):
                one, left, row_count = struct.unpack_from("<QII", told, at)
                rows = np.frombuffer(told, BLOCK_ANSWER, row_count, at + 16)
                at += 16 + rows.nbytes
                assert one == number
                found[rows["row"]] = rows["answer"]
        return found

    def change(self) -> None:
        """Blocks are replaced, or dropped and stored again."""
        for number in self.rng.sample(list(self.versions), 3):
            if self.rng.random() < 0.5:
                self.lent.drop(number)
            self.versions[number] += 1
            self.lent.put({number: content(number, self.versions[number])})
        self.lent.write_all()

    def renew(self) -> None:
        self.reader.close()
        self.server.reap()
        self.connect()

    def noise(self) -> None:
        """Who says anything, in either place, ends a connection and nothing else."""
        here, there = socket.socketpair()
        self.server.serve(here.detach(), 2, self.lent.lender)
        there.sendall(self.rng.randbytes(self.rng.randint(1, 200)))
        there.close()
        here, there = socket.socketpair()
        reader = Reader(here.detach())
        memory = np.zeros(4096, np.uint8)
        word, half, target = np.zeros(1, np.uint64), np.zeros(1, np.uint32), np.array([memory.ctypes.data], np.uint64)
        reader.ask(word, word, half + np.uint32(4096), half, target, half, np.zeros(1, np.int64), 0, 0, None, 0)
        head = struct.pack("<IIQQQ", 0x4350564B, self.rng.choice((1, 1, 2, 1 << 31)), self.rng.choice((1, 2)), 0, 0)
        row = struct.pack("<II24x", self.rng.choice((1, 1, 2, 99)), self.rng.choice((0, 0, 1)))
        there.sendall(head + row + self.rng.randbytes(self.rng.randint(0, 9000)))
        there.close()
        while not reader.facts()[3]:
            select.select([reader.bell()], [], [], 1)
            reader.take()
        reader.close()
        self.counts["noise"] += 1

    def end(self) -> None:
        self.reader.close()
        self.server.close()
        assert self.lent.pins() == 0
        assert self.spread.add_load(0) == 0


def main() -> None:
    seed, rounds = map(int, sys.argv[1:])
    lab = PeersLab(seed)
    for _ in range(rounds):
        lab.round()
        if lab.rng.random() < 0.2:
            lab.noise()
    lab.end()
    print(lab.counts)


if __name__ == "__main__":
    main()
