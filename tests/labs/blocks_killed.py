"""Daemons of the block store's core, one after the other over the same memory, each killed between two instructions.

As a program: ``blocks_killed.py SEED ROUNDS``. It forks, and so has no other threads.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import time
from typing import Any

import numpy as np
from blocks_lab import (
    HEAD_TABLE,
    MULTIPLIERS,
    SIZES,
    SLAB,
    SLABS,
    TOKEN,
    Medium,
    content,
    copy_in,
    find,
    get,
    pack,
    put,
    shared,
)

from kvfuse.native import _blocks
from kvfuse.native import blockforms as blocks
from kvfuse.native.blockforms import PAGE, name_columns

NAMES = [b"%d" % number + b"n" * (number % 90) for number in range(150)]
DIRECTORY = 9
BUCKETS, ROWS = 32, 260
ARENA = 30 * PAGE
LIBC = ctypes.CDLL(None)
LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
TRACE_ME, SINGLE_STEP = 0, 9


def size_of(version: int) -> int:
    return 1 + version * 7919 % (3 * PAGE)


def code_of(number: int, version: int) -> int:
    """Of a version of a name's bytes, which may have another name by now."""
    return number << 40 | version


def data_of(code: int) -> bytes:
    number, version = code >> 40, code & (1 << 40) - 1
    return content((0, NAMES[number]), version, size_of(version))


class Killed:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.medium = Medium()
        self.states = shared(blocks.SLAB_STATE_SIZE * SLABS)
        self.table = shared(blocks.table_size(BUCKETS, ROWS))
        _blocks.begin_table(self.table, MULTIPLIERS, BUCKETS, ROWS, DIRECTORY, 70, 1, 2, 0o444, 99)
        self.arenas = [shared(ARENA) for _ in range(5)]
        self.numbers = shared(PAGE).view(np.int64)
        """of arenas; the last one that was given; the last version; whether the daemon runs"""
        self.numbers[:6] = [1, 2, 3, 4, 5, 5]
        self.acked, self.pending = shared(PAGE).view(np.int64), shared(PAGE).view(np.int64)
        """of each name: code of what is there; 0: nothing"""
        self.renamed = shared(PAGE).view(np.int64)
        """names of a block that just gets another one, + 1"""
        self.steps = 0
        self.begin()
        self.core.add_slabs(np.arange(SLABS, dtype=np.uint32), TOKEN)
        self.abandon()

    def begin(self) -> None:
        self.core = _blocks.Core(self.states.ctypes.data, SLABS, SLAB, HEAD_TABLE, np.array(SIZES, np.uint32))
        self.core.put_space(0, 70, -1, 1, 1 << 40, 1 << 40)
        self.core.set_packing(0, True)
        self.core.add_table(0, 0, self.table.ctypes.data, len(self.table))
        for place, memory in enumerate(self.arenas):
            has_table = int(memory[-64:].view(np.uint64)[1]) == 99
            self.core.add_arena(place, int(self.numbers[place]), memory.ctypes.data, ARENA, 0 if has_table else -1)
        self.core.restore()

    def abandon(self) -> None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.core))

    def number(self, place: int) -> int:
        self.numbers[place] += 1
        return int(self.numbers[place])

    # -- the daemon

    def serve(self, seed: int) -> None:
        rng = random.Random(seed)
        self.begin()
        batches: list[Any] = []
        if rng.random() < 0.6:
            self.put_fast(rng)
        self.numbers[8] = 1
        while True:
            kind = rng.random()
            if kind < 0.5:
                self.put(rng.sample(range(len(NAMES)), rng.choice([1, 8, 40])))
            elif kind < 0.56:
                self.rename(*rng.sample(range(len(NAMES)), 2))
            elif kind < 0.62:
                self.drop(rng.sample(range(len(NAMES)), rng.choice([1, 5])))
            elif kind < 0.7:
                picked = rng.sample(NAMES, 40)
                get(self.core, 0, DIRECTORY, picked, [SLAB] * 40)
            elif kind < 0.85:
                batch = self.core.take_dirty(1 << 60, 1 << 60)
                if not isinstance(batch, int):
                    batches.append(batch)
                while batches and rng.random() < 0.8:
                    self.write(batches.pop(0))
            elif kind < 0.95:
                for number in rng.sample(range(len(NAMES)), 5):
                    self.land(number)
            else:
                place = rng.randrange(len(self.arenas))
                if self.core.remove_arena(place):
                    self.numbers[place] = self.number(5)
                    self.core.add_arena(place, int(self.numbers[place]), self.arenas[place].ctypes.data, ARENA, -1)

    def put_fast(self, rng: random.Random) -> None:
        """Replace blocks again and again, with little but the core's own code between: kills shall meet that."""
        batches = []
        for _ in range(12):
            numbers = rng.sample(range(len(NAMES)), 100)
            versions = np.array([code_of(number, self.number(6)) for number in numbers])
            data = [np.frombuffer(data_of(code), np.uint8) for code in versions.tolist()]
            sources = np.array([one.ctypes.data for one in data], np.uint64)
            sizes = np.array([min(len(one), 900) for one in data], np.int64)
            names = name_columns([NAMES[number] for number in numbers])
            batches.append((np.array(numbers), versions, names, sources, sizes, data))
        results, sequences = np.zeros(100, np.int64), np.zeros(100, np.uint64)
        rows = np.zeros(100, np.int64)
        self.numbers[8] = 1
        while True:
            numbers_of, versions, names, sources, sizes, _ = rng.choice(batches)
            self.pending[numbers_of] = versions
            self.core.put(0, DIRECTORY, *names, False, sources, sizes, 1, 0, 0, 7, results, sequences)
            self.acked[numbers_of] = np.where(results >= 0, versions, self.acked[numbers_of])
            self.pending[numbers_of] = self.acked[numbers_of]
            if rng.random() < 0.1:
                self.pending[numbers_of] = 0
                self.core.drop(0, DIRECTORY, *names, False, 0, rows, sequences)
                self.acked[numbers_of] = 0
            if (results < 0).any():
                while not isinstance(batch := self.core.take_dirty(1 << 60, 1 << 60), int):
                    self.write(batch)

    def put(self, numbers: list[int]) -> None:
        items = []
        for number in numbers:
            code = code_of(number, self.number(6))
            items.append((NAMES[number], data_of(code)))
            self.pending[number] = code
        results, _ = put(self.core, 0, DIRECTORY, items)
        for number, result in zip(numbers, results, strict=True):
            if result >= 0:
                self.acked[number] = self.pending[number]
            else:
                self.pending[number] = self.acked[number]

    def rename(self, number: int, other: int) -> None:
        (row,), (sequence,) = find(self.core.find, 0, DIRECTORY, [NAMES[number]])
        if row < 0:
            return
        self.pending[other], self.pending[number] = self.acked[number], 0
        self.renamed[:2] = number + 1, other + 1
        made, _ = self.core.rename_row(0, row, sequence, NAMES[other], 1)
        for one in (number, other):
            self.acked[one] = self.pending[one] = self.pending[one] if made >= 0 else self.acked[one]
        self.renamed[:2] = 0

    def drop(self, numbers: list[int]) -> None:
        self.pending[numbers] = 0
        find(self.core.drop, 0, DIRECTORY, [NAMES[number] for number in numbers])
        self.acked[numbers] = 0

    def write(self, batch: Any) -> None:
        pack(batch)
        data, heads = batch.runs()
        self.medium.write(data, True)
        self.medium.write(heads, False)
        self.medium.writes.clear()
        batch.end()

    def land(self, number: int) -> bool:
        (row,), (sequence,) = find(self.core.find, 0, DIRECTORY, [NAMES[number]])
        if row < 0:
            return False
        places, sizes = np.zeros(1, np.uint64), np.zeros(1, np.int64)
        slabs, offsets, packed = np.zeros(1, np.uint32), np.zeros(1, np.uint64), np.zeros(1, np.int64)
        columns = name_columns([NAMES[number]])
        rows, sequences = np.array([row], np.int64), np.array([sequence], np.uint64)
        landing = self.core.reserve(0, *columns, rows, sequences, places, sizes, slabs, offsets, packed)
        if places[0]:
            start = HEAD_TABLE + int(offsets[0])
            copy_in(int(places[0]), int(sizes[0]), self.medium.slabs[int(slabs[0])][start:], int(packed[0]))
        results = np.zeros(1, np.int64)
        landing.land(np.ones(1, np.uint8), results)
        return bool(results[0] == 1)

    # -- who looks after it

    def round(self) -> None:
        self.numbers[8] = 0
        child = os.fork()
        if not child:
            try:
                self.serve(self.rng.randrange(1 << 32))
            finally:
                os._exit(1)
        while not self.numbers[8]:
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
            time.sleep(0.0005)  # it shares memory only, and tells nobody
        time.sleep(self.rng.random() * 0.01)  # the kill comes at any instant
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        self.rng.random()
        self.begin()
        self.check()
        self.abandon()

    def stepped_round(self) -> bool:
        """The next one is killed within a change that needs many instructions. False: nobody may trace here."""
        self.numbers[8] = 0
        kind = self.rng.choice(["move", "replace", "rename"])
        seed = self.rng.randrange(1 << 32)
        child = os.fork()
        if not child:
            try:
                self.serve_stepped(random.Random(seed), kind)
            finally:
                os._exit(1)
        if os.WIFEXITED(os.waitpid(child, 0)[1]):
            return False
        words = self.table[120:160].view(np.uint32)
        word = {"move": 0, "replace": 1, "rename": 8}[kind]
        """see TableHeader: what is moving, what is replacing, what is renaming"""
        steps, more = 0, self.rng.randrange(90)
        while steps < more:
            LIBC.ptrace(SINGLE_STEP, child, None, None)
            if os.WIFEXITED(os.waitpid(child, 0)[1]):
                break
            steps += bool(words[word] or steps)
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self.steps += steps
        self.begin()
        self.check()
        self.abandon()
        return True

    def serve_stepped(self, rng: random.Random, kind: str) -> None:
        self.begin()
        numbers = rng.sample(range(len(NAMES)), 3)
        self.put(numbers)
        if kind == "move":
            while not isinstance(batch := self.core.take_dirty(1 << 60, 1 << 60), int):
                self.write(batch)
        codes = [code_of(number, self.number(6)) for number in numbers]
        data = [np.frombuffer(data_of(code)[:9], np.uint8) for code in codes]
        names = name_columns([NAMES[number] for number in numbers])
        addresses, sizes = np.array([one.ctypes.data for one in data], np.uint64), np.full(3, 9, np.int64)
        results, sequences = np.zeros(3, np.int64), np.zeros(3, np.uint64)
        (row, *_), (sequence, *_) = find(self.core.find, 0, DIRECTORY, [NAMES[number] for number in numbers])
        if kind == "replace":
            self.pending[numbers] = codes
        elif kind == "rename" and row >= 0:
            self.pending[numbers[:2]] = 0, self.acked[numbers[0]]
            self.renamed[:2] = numbers[0] + 1, numbers[1] + 1
        if LIBC.ptrace(TRACE_ME, 0, None, None):
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "move":
            for place in range(len(self.arenas)):
                self.core.remove_arena(place)
        elif kind == "rename":
            self.core.rename_row(0, max(row, 0), sequence, NAMES[numbers[1]], 1)
        else:
            self.core.put(0, DIRECTORY, *names, False, addresses, sizes, 1, 0, 0, 7, results, sequences)
        os._exit(0)

    def check(self) -> None:
        rows = blocks.rows_of(self.table, BUCKETS)
        live = rows[rows["version"] & np.uint64(1) == 1]
        slots = set(zip(live["slab"].tolist(), live["slot"].tolist(), strict=True))
        assert len(slots) == len(live)
        sizes = self.states.view(np.uint32).reshape(-1, 4)[:, 0]
        assert self.core.space_use(0) == (int(sizes[live["slab"]].sum()), len(live))
        found, before = 0, self.acked.copy()
        for number in range(len(NAMES)):
            allowed = {int(self.acked[number]), int(self.pending[number])}
            version = self.version_of(number, allowed)
            assert version in allowed, f"{NAMES[number]!r} is {version}, and may be {allowed}"
            self.acked[number] = self.pending[number] = version
            found += version != 0
        if self.renamed[0]:
            one, other = (self.renamed[:2] - 1).tolist()
            after = int(self.acked[one]), int(self.acked[other])
            assert after in ((before[one], before[other]), (0, before[one])), "half of a name's change"
            self.renamed[:2] = 0
        assert found == self.core.statistics()["blocks"] == len(live), "a row of no name"
        if self.rng.random() < 0.1:
            self.drop(list(range(len(NAMES))))
            while not isinstance(batch := self.core.take_dirty(1 << 60, 1 << 60), int):
                self.write(batch)
            facts = self.core.statistics()
            assert (facts["free_slabs"], facts["dirty_bytes"], facts["resident"]) == (SLABS, 0, 0)

    def version_of(self, number: int, allowed: set[int]) -> int:
        """0: it is not there; -1: its bytes are none of these."""
        (result,), (data,) = get(self.core, 0, DIRECTORY, [NAMES[number]], [SLAB])
        if result == blocks.NOT_RESIDENT:
            if not self.land(number):
                while not isinstance(batch := self.core.take_dirty(1 << 60, 1 << 60), int):
                    self.write(batch)
                assert self.land(number), "the medium does not have it"
            (result,), (data,) = get(self.core, 0, DIRECTORY, [NAMES[number]], [SLAB])
        if result == blocks.ABSENT:
            return 0
        return next((version for version in allowed if version and data_of(version).startswith(data)), -1)


def main(seed: int, rounds: int) -> None:
    lab = Killed(seed)
    for number in range(rounds):
        lab.round()
        if number % 4 == 0:
            lab.stepped_round()
    facts = lab.core.statistics()
    print(f"{rounds} daemons, the last one had {facts['blocks']} blocks, {int(lab.numbers[6])} puts, {lab.steps} steps")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
