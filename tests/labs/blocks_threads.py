"""Threads that use one core of the block store at once, and readers of its memory: nobody ever sees wrong bytes.

As a program: ``blocks_threads.py SEED PUTS``, of each writer.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable

import numpy as np
from blocks_lab import (
    HEAD_TABLE,
    MULTIPLIERS,
    SIZES,
    SLAB,
    SLABS,
    TOKEN,
    Medium,
    copy_in,
    find,
    get,
    pack,
    read_shared,
    shared,
)

from kvfuse.native import _blocks
from kvfuse.native import blockforms as blocks
from kvfuse.native.blockforms import PAGE, name_columns

DIRECTORY = 3
BUCKETS, ROWS = 64, 700
ROOM = 4 * PAGE
NAMES = [b"%03d-" % number + b"t" * (number % 60) for number in range(240)]
WRITERS = 3
"""each has the names of its own number, modulo; of each second one others may drop it, too"""


def data_of(number: int, version: int) -> bytes:
    """Each word depends on name, version and place."""
    words = 2 + (version * 97 + number) % (ROOM // 8 - 2)
    places = np.arange(words, dtype=np.uint64)
    data = (
        (places if version % 2 else places % np.uint64(16)) * np.uint64(2 * version + 1) * np.uint64(0x9E3779B97F4A7C15)
    )
    data ^= np.uint64(number << 40)
    data[0] = version
    return data.tobytes()


def check(number: int, data: bytes) -> int:
    """The version that the bytes are."""
    version = int.from_bytes(data[:8], "little")
    assert version < 1 << 40
    assert data == data_of(number, version), f"wrong bytes of {NAMES[number]!r}"
    return version


class Threads:
    def __init__(self, seed: int, puts: int) -> None:
        self.seed, self.puts = seed, puts
        self.medium = Medium()
        self.states = shared(blocks.SLAB_STATE_SIZE * SLABS)
        self.table = shared(blocks.table_size(BUCKETS, ROWS))
        _blocks.begin_table(self.table, MULTIPLIERS, BUCKETS, ROWS, DIRECTORY, 70, 1, 2, 0o444, 99)
        self.core = _blocks.Core(self.states.ctypes.data, SLABS, SLAB, HEAD_TABLE, np.array(SIZES, np.uint32))
        self.core.put_space(0, 70, -1, 1, 1 << 40, 1 << 40)
        self.core.set_packing(0, True)
        self.core.add_table(0, 0, self.table.ctypes.data, len(self.table))
        self.core.add_slabs(np.arange(SLABS, dtype=np.uint32), TOKEN)
        self.arenas = [shared(40 * PAGE) for _ in range(6)]
        for place, memory in enumerate(self.arenas):
            self.core.add_arena(place, place + 1, memory.ctypes.data, len(memory), -1)
        self.mapped = np.array([(n + 1, m.ctypes.data, len(m)) for n, m in enumerate(self.arenas)], blocks.ARENA)
        self.running = set(range(WRITERS))
        self.seen = dict.fromkeys(["read", "landed", "dropped"], 0)
        self.failures: list[BaseException] = []

    # -- what each thread does

    def write(self, mine: int, rng: random.Random) -> None:
        """Puts, and finds what it put: nobody else puts these names."""
        version = count = 0
        while count < self.puts and not self.failures:
            numbers = [n for n in rng.sample(range(len(NAMES)), 12) if n % WRITERS == mine]
            version += 1
            data = [np.frombuffer(data_of(number, version), np.uint8) for number in numbers]
            names = [NAMES[number] for number in numbers]
            results, sequences = np.zeros(len(data), np.int64), np.zeros(len(data), np.uint64)
            addresses = np.array([one.ctypes.data for one in data], np.uint64)
            sizes = np.array([len(one) for one in data], np.int64)
            columns = name_columns(names)
            self.core.put(0, DIRECTORY, *columns, True, addresses, sizes, version, 0, 0, 7, results, sequences)
            done = [number for number, result in zip(numbers, results.tolist(), strict=True) if result >= 0]
            count += len(done)
            if not done:
                os.sched_yield()  # until a batch is written
            got, found = get(self.core, 0, DIRECTORY, [NAMES[number] for number in done], [ROOM] * len(done))
            for number, result, one in zip(done, got, found, strict=True):
                if number % 2 and result == blocks.ABSENT:
                    continue
                assert result == blocks.NOT_RESIDENT or check(number, one) == version
        self.running.discard(mine)

    def drop(self, rng: random.Random) -> None:
        while self.running:
            names = [NAMES[number] for number in rng.sample(range(1, len(NAMES), 2), 3)]
            rows, _ = find(self.core.drop, 0, DIRECTORY, names)
            self.seen["dropped"] += sum(row >= 0 for row in rows)

    def flush(self, rng: random.Random) -> None:
        while self.running:
            batch = self.core.take_dirty(rng.choice([PAGE, 1 << 40]), rng.choice([1, 1000]))
            if isinstance(batch, int):
                continue
            if rng.random() < 0.1:
                batch.fail()
                continue
            pack(batch, rng, tried=rng.choice([0.5, 1.0]))
            data, heads = batch.runs()
            self.medium.write(data, True)
            self.medium.write(heads, False)
            self.medium.writes.clear()
            batch.end()

    def read(self, rng: random.Random) -> None:
        """As a client: what it maps may change at any time."""
        last: dict[int, int] = {}
        while self.running:
            numbers = rng.sample(range(len(NAMES)), 20)
            names = [NAMES[number] for number in numbers]
            results, found = read_shared(self.table, DIRECTORY, names, self.mapped, ROOM)
            for number, result, data in zip(numbers, results, found, strict=True):
                assert result > 0 or result in (blocks.ABSENT, blocks.NOT_RESIDENT)
                if result > 0:
                    version = check(number, data)
                    assert version >= last.get(number, 0), "an older version"
                    last[number] = version
                    self.seen["read"] += 1

    def land(self, rng: random.Random) -> None:
        while self.running:
            names = [NAMES[number] for number in rng.sample(range(len(NAMES)), 6)]
            rows, sequences = find(self.core.find, 0, DIRECTORY, names)
            places, sizes = np.zeros(6, np.uint64), np.zeros(6, np.int64)
            slabs, offsets, packed = np.zeros(6, np.uint32), np.zeros(6, np.uint64), np.zeros(6, np.int64)
            landing = self.core.reserve(
                0,
                *name_columns(names),
                np.array(rows, np.int64),
                np.array(sequences, np.uint64),
                places,
                sizes,
                slabs,
                offsets,
                packed,
            )
            columns = places, sizes, slabs, offsets, packed
            for place, size, slab, offset, stored in zip(*[column.tolist() for column in columns], strict=True):
                if place:
                    copy_in(place, size, self.medium.slabs[slab][HEAD_TABLE + offset :], stored)
            results = np.zeros(6, np.int64)
            landing.land(np.ones(6, np.uint8), results)
            wrong = (results == 0) & (places != 0)
            assert not wrong.any(), "the medium has other bytes than the row"
            self.seen["landed"] += int((results == 1).sum())

    def run(self) -> dict[str, int]:
        sys.setswitchinterval(1e-5)
        jobs: list[Callable[[random.Random], None]] = [
            *(lambda rng, mine=mine: self.write(mine, rng) for mine in range(WRITERS)),
            *[self.drop, self.flush, self.read, self.read, self.land],
        ]
        threads = [threading.Thread(target=self.guard, args=(job, number)) for number, job in enumerate(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]
        self.check_end()
        return self.seen

    def guard(self, job: Callable[[random.Random], None], number: int) -> None:
        try:
            job(random.Random(f"{self.seed} {number}"))
        except BaseException as error:
            self.failures.append(error)
            self.running.clear()

    def check_end(self) -> None:
        find(self.core.drop, 0, DIRECTORY, NAMES)
        while not isinstance(batch := self.core.take_dirty(1 << 60, 1 << 60), int):
            batch.end()
        facts = self.core.statistics()
        assert (facts["blocks"], facts["resident"], facts["dirty_bytes"]) == (0, 0, 0)
        assert facts["free_slabs"] == SLABS
        assert self.core.space_use(0) == (0, 0)
        assert all(self.core.remove_arena(place) for place in range(len(self.arenas)))


if __name__ == "__main__":
    print(Threads(int(sys.argv[1]), int(sys.argv[2])).run())
