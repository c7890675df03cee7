"""Garbage for the core of the block store, from where garbage can come: the medium, clients, a mapped table.

As a program: ``blocks_fuzz.py SEED ROUNDS``. That nothing was read or written outside is for a sanitizer to see.
"""

from __future__ import annotations

import random
import sys
import threading

import google_crc32c
import numpy as np
from blocks_lab import (
    HEAD_TABLE,
    MULTIPLIERS,
    PLACES,
    SIZES,
    SLAB,
    SLABS,
    TOKEN,
    BlocksLab,
    find,
    get,
    put,
    read_shared,
    shared,
)

from kvfuse.native import _blocks
from kvfuse.native import blockforms as blocks
from kvfuse.native.blockforms import HEAD, PAGE, name_columns


def seal(head: np.ndarray) -> None:
    """``head``: 96 bytes."""
    head[92:96] = np.frombuffer(np.uint32(google_crc32c.value(head[:92].tobytes())).tobytes(), np.uint8)


def random_head(rng: random.Random, incarnation: int, slot_size: int) -> np.ndarray:
    """Nearly one that is right."""
    bytes_of_head = np.zeros(96, np.uint8)
    head = bytes_of_head.view(HEAD)[0]
    space, directory, *_ = PLACES[rng.choice(list(PLACES))]
    head["magic"], head["version"], head["state"] = blocks.HEAD_MAGIC, 1, rng.choice([0, 1, 1, 1, 1, 1, 2])
    head["length"] = rng.choice([0, 1, PAGE, slot_size, slot_size + 1, 2**32 - 1, rng.randrange(1, 1 << 18)])
    head["low"], head["high"] = rng.randrange(1 << 64), rng.choice([0, 1, rng.randrange(1 << 64)])
    head["sequence"] = rng.choice([0, 1, 5, 2**62, 2**64 - 1, rng.randrange(1 << 62)])
    head["directory"], head["name_space"] = directory, space + 70
    head["epoch"], head["incarnation"] = rng.choice([1, 1, 1, 1, 0, 2]), incarnation
    head["uid"], head["gid"], head["mode"] = 1, 2, 0o444
    head["expires"] = rng.choice([0, 0, 1, 2**32 - 1])
    head["name_length"], head["slot_size"] = rng.randrange(256), rng.choice([slot_size] * 8 + [PAGE, 0])
    if rng.random() < 0.1:
        bytes_of_head[rng.randrange(96)] ^= 1 << rng.randrange(8)
    if rng.random() < 0.95:
        seal(bytes_of_head)
    return bytes_of_head


def random_slab(rng: random.Random) -> np.ndarray:
    if rng.random() < 0.1:
        return np.frombuffer(rng.randbytes(rng.randrange(1, HEAD_TABLE)), np.uint8)
    slot_size = rng.choice([*SIZES, *SIZES, 5 * PAGE, 63 * PAGE, 0, 1, PAGE - 1, SLAB + PAGE, 2**32 - PAGE])
    incarnation = rng.randrange(1 << 32)
    first = np.zeros(96, np.uint8)
    head = first.view(HEAD)[0]
    head["magic"], head["version"], head["state"] = blocks.HEAD_MAGIC, 1, 2
    head["incarnation"], head["slot_size"] = incarnation, slot_size
    seal(first)
    heads = [random_head(rng, incarnation, slot_size) for _ in range(rng.choice([0, 1, 70]))]
    return np.concatenate([first, *heads])[: rng.choice([10**6, 10**6, rng.randrange(1, 97 + 96 * len(heads))])]


def fuzz_slabs(rng: random.Random) -> None:
    """What is found of garbage lies in its slab, and is no trouble later."""
    lab = BlocksLab(rng.randrange(1 << 32))
    lab.abandon()
    lab.begin_memory()
    lab.begin_core()
    lab.core.set_loading(True)
    for slab in range(lab.slabs):
        lab.core.load_slab(slab, TOKEN, random_slab(rng))
        if rng.random() < 0.3:
            table = rng.choice(list(lab.tables.values()))
            live = np.flatnonzero(table.rows["version"] & np.uint64(1)).astype(np.int64)[:2]
            sizes = np.zeros(2, np.int64)
            lab.core.drop_rows(table.place, live, table.rows["sequence"][live].copy(), sizes)
    lab.core.set_loading(False)
    sizes = lab.slot_sizes()
    slots = set()
    for table in lab.tables.values():
        for row in table.live():
            slot = int(row["slab"]), int(row["slot"])
            assert slot not in slots
            slots.add(slot)
            assert 0 < row["length"] <= sizes[slot[0]]
            lab.core.slot_places(*slot)
            assert not row["arena"]
        rows, _ = lab.core.list_rows(table.place, table.directory, -1, 1000, 0)
        names = [bytes([65 + number % 26]) * 20 for number in range(len(rows))]
        columns = [np.array([row[index] for row in rows], np.uint64) for index in (0, 1)]
        places, lengths = np.zeros(len(rows), np.uint64), np.zeros(len(rows), np.int64)
        outs = np.zeros(len(rows), np.uint32), np.zeros(len(rows), np.uint64)
        landing = lab.core.reserve(
            table.place, *name_columns(names), columns[0].astype(np.int64), columns[1], places, lengths, *outs
        )
        assert not places.any(), "a name that no fingerprint has"
        landing.land(np.ones(len(rows), np.uint8), np.zeros(len(rows), np.int64))
        put(lab.core, table.place, table.directory, [(b"%d" % n, b"x" * 900) for n in range(20)])
        for row in rows:
            sizes_of = np.zeros(1, np.int64)
            lab.core.drop_rows(table.place, np.array([row[0]]), np.array([row[1]], np.uint64), sizes_of)
            assert sizes_of[0]
        find(lab.core.drop, table.place, table.directory, [b"%d" % n for n in range(20)])
    while not isinstance(batch := lab.core.take_dirty(1 << 60, 1 << 60), int):
        lab.medium.write(batch.runs()[0], True)
        lab.medium.write(batch.runs()[1], False)
        batch.end()
    live_rows = sum(len(table.live()) for table in lab.tables.values())
    assert live_rows == lab.core.statistics()["blocks"]
    lab.abandon()


def fuzz_names(rng: random.Random, calls: int) -> None:
    """A client changes names, where they are and how long they are, while the core reads them."""
    lab = BlocksLab(rng.randrange(1 << 32))
    table = lab.tables[1]
    memory = shared(1 << 16)
    count = 50
    text, offsets, lengths = memory[: 1 << 14], memory[1 << 14 :][: 8 * count + 3], memory[1 << 15 :][: 4 * count + 1]
    offsets, lengths = offsets[3:], lengths[1:]  # at any address
    stop = threading.Event()
    maker = np.random.default_rng(rng.randrange(1 << 32))

    def change() -> None:
        while not stop.is_set():
            offsets[:] = maker.integers(0, [1 << 14, 1 << 62][maker.integers(2)], count, dtype=np.uint64).view(np.uint8)
            lengths[:] = maker.integers(0, [256, 1 << 31][maker.integers(2)], count, dtype=np.uint32).view(np.uint8)
            text[:] = maker.integers(0, 256, len(text), dtype=np.uint8)

    thread = threading.Thread(target=change)
    thread.start()
    data = np.zeros(PAGE, np.uint8)
    addresses, sizes = np.full(count, data.ctypes.data, np.uint64), np.full(count, 100, np.int64)
    rows, results = np.zeros(count, np.int64), np.zeros(count, np.int64)
    sequences = np.zeros(count, np.uint64)
    columns = (table.place, table.directory, text, offsets, lengths, False)
    try:
        for _ in range(calls):
            lab.core.put(*columns, addresses, sizes, 1, 0, 0, 7, results, sequences)
            lab.core.get(*columns, addresses, sizes, 0, rows, results)
            lab.core.find(*columns, 0, rows, sequences)
            lab.core.drop(*columns, 0, rows, sequences)
            lab.core.take_dirty(1 << 60, 1 << 60)
    finally:
        stop.set()
        thread.join()
        lab.abandon()


def fuzz_table(rng: random.Random) -> None:
    """A client has mapped something else, or a table that changes in any way."""
    lab = BlocksLab(rng.randrange(1 << 32))
    table = lab.tables[1]
    names = [b"%d" % number for number in range(60)]
    put(lab.core, table.place, table.directory, [(name, name * 30) for name in names])
    mapped = np.array([(n, m.ctypes.data, len(m)) for n, m in lab.arenas.values()], blocks.ARENA)
    copy = shared(len(table.memory))
    for _ in range(40):
        copy[:] = table.memory
        start = rng.choice([72, 104, PAGE, PAGE, PAGE + blocks.BUCKET_SIZE * table.buckets_max])
        for _ in range(rng.choice([1, 30, 3000])):
            copy[rng.randrange(start, len(copy))] = rng.randrange(256)
        if rng.random() < 0.1:
            copy[: rng.randrange(PAGE)] = np.frombuffer(rng.randbytes(1), np.uint8)[0]
        try:
            results, _ = read_shared(copy, table.directory, names, mapped, 3000)
        except ValueError:
            continue
        assert max(results) <= 3000
    for wrong in (copy[:100], copy[: len(copy) - 96], copy[1:]):
        try:
            read_shared(wrong, table.directory, names, mapped, 3000)
        except ValueError:
            continue
        raise AssertionError("it was taken for a table")
    assert get(lab.core, table.place, table.directory, names[:1], [900])[0] == [30]
    lab.abandon()


def fuzz_arguments() -> None:
    lab = BlocksLab(1)
    memory = shared(8 * PAGE)
    for call in (
        lambda: lab.core.add_arena(9, 99, memory.ctypes.data, len(memory), 1),  # no arena that somebody left
        lambda: lab.core.add_arena(9, 1, memory.ctypes.data, len(memory), -1),  # there is one of this number
        lambda: lab.core.add_arena(5000, 99, memory.ctypes.data, len(memory), -1),
        lambda: lab.core.add_table(9, 0, memory.ctypes.data, len(memory)),
        lambda: lab.core.add_table(0, 0, lab.tables[0].memory.ctypes.data, len(lab.tables[0].memory)),
        lambda: lab.core.put_space(5, 1, 4, 1, 1, 1),
        lambda: lab.core.load_slab(0, TOKEN, memory),
        lambda: lab.core.load_slab(SLABS, TOKEN, memory),
        lambda: lab.core.slab_rows(SLABS),
        lambda: lab.core.slot_places(0, 0),
        lambda: lab.core.list_rows(77, 1, -1, 10, 0),
        lambda: find(lab.core.find, 77, 1, [b"a"]),
        lambda: lab.core.find(1, 6, b"a", np.zeros(1, np.uint64), np.ones(2, np.uint32), False, 0, memory, memory),
        lambda: _blocks.Core(0, 1, SLAB + 1, HEAD_TABLE, np.array([PAGE], np.uint32)),
        lambda: _blocks.Core(0, 1, SLAB, HEAD_TABLE, np.array([2 * PAGE, PAGE], np.uint32)),
        lambda: _blocks.begin_table(memory, MULTIPLIERS, 16, 100, 1, 1, 1, 1, 1, 1),
    ):
        try:
            call()
        except ValueError:
            continue
        raise AssertionError("it was taken")
    assert lab.core.list_rows(1, 6, 2**62, 2**32 - 1, 0) == ([], -1)
    assert not lab.core.pin_arena(12345, 1)
    lab.abandon()


def main(seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    fuzz_arguments()
    for _ in range(rounds):
        fuzz_slabs(rng)
        fuzz_table(rng)
    fuzz_names(rng, 20 * rounds)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
