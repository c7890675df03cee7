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
    pack,
    put,
    read_shared,
    shared,
)

from kvfuse.native import _blocks
from kvfuse.native import blockforms as blocks
from kvfuse.native.blockforms import HEAD, PAGE, name_columns
from kvfuse.usrbio.protocol.wire import SQE


def seal(head: np.ndarray) -> None:
    """``head``: 96 bytes."""
    head[92:96] = np.frombuffer(np.uint32(google_crc32c.value(head[:92].tobytes())).tobytes(), np.uint8)


def random_head(rng: random.Random, incarnation: int, slot_size: int) -> np.ndarray:
    """Nearly one that is right."""
    bytes_of_head = np.zeros(96, np.uint8)
    head = bytes_of_head.view(HEAD)[0]
    space, directory, *_ = PLACES[rng.choice(list(PLACES))]
    head["magic"], head["version"], head["state"] = (
        blocks.HEAD_MAGIC,
        rng.choice([1, 1, 2]),
        rng.choice([0, 1, 1, 1, 1, 1, 2]),
    )
    head["token"] = rng.choice([0, 1, PAGE, slot_size, slot_size + 1, 2**32 - 1, rng.randrange(1, 1 << 18)])
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
            assert row["length"]
            assert (row["packed"] * PAGE or row["length"]) <= sizes[slot[0]]
            lab.core.slot_places(*slot)
            assert not row["arena"]
        rows, _ = lab.core.list_rows(table.place, table.directory, -1, 1000, 0)
        names = [bytes([65 + number % 26]) * 20 for number in range(len(rows))]
        columns = [np.array([row[index] for row in rows], np.uint64) for index in (0, 1)]
        places, lengths = np.zeros(len(rows), np.uint64), np.zeros(len(rows), np.int64)
        outs = np.zeros(len(rows), np.uint32), np.zeros(len(rows), np.uint64), np.zeros(len(rows), np.int64)
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
        pack(batch)
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


LENGTH_MAX = 1 << 20


def entries_model(entries: np.ndarray, aux_size: int, iov_size: int, waited_us: int) -> int:
    """The bytes of all, where each is what a daemon may serve as it stands; else -1."""
    total = 0
    for *_, key_length, _, iov_offset, length, key_offset, _, timeout_us, parent in entries.tolist():
        is_plain = 1 <= length <= LENGTH_MAX and iov_offset + length <= iov_size and not parent
        if not (is_plain and 1 <= key_length <= 255 and key_offset + key_length <= aux_size):
            return -1
        if timeout_us and timeout_us < waited_us:
            return -1
        total += length
    return total


def random_entries(rng: random.Random, count: int, aux_size: int, iov_size: int) -> np.ndarray:
    """Of a client: plain ones, most often, and a few at, or far beyond, what is allowed."""
    entries = np.zeros(count, SQE)
    for entry in entries:
        length, key_length = rng.randint(1, min(3000, iov_size)), rng.randint(1, min(255, aux_size))
        entry["iov_offset"], entry["length"] = rng.randint(0, iov_size - length), length
        entry["key_offset"], entry["key_length"] = rng.randint(0, aux_size - key_length), key_length
        entry["user_data"], entry["timeout_us"] = rng.randrange(1 << 64), rng.choice([0, 0, 100, 2**32 - 1])
    if rng.random() < 0.5:
        entry = rng.choice(list(entries))
        field = rng.choice(["iov_offset", "length", "key_offset", "key_length", "timeout_us", "parent"])
        limit = 1 << 8 * SQE[field].itemsize
        edges = [0, 1, 255, 256, aux_size, iov_size, LENGTH_MAX, LENGTH_MAX + 1, limit - 1, limit // 2]
        entry[field] = min(limit - 1, max(0, rng.choice(edges) + rng.choice([-1, 0, 1])))
    return entries


def fuzz_entries(rng: random.Random, calls: int) -> None:
    for _ in range(calls):
        aux_size, iov_size = rng.choice([1, 300, 1 << 16]), rng.choice([1, 5000, 1 << 21])
        count, waited_us = rng.choice([1, 1, 2, 30]), rng.choice([0, 100, 101])
        entries = random_entries(rng, count, aux_size, iov_size)
        columns = np.full((4, count), 2**64 - 1, np.uint64)
        total = _blocks.entry_columns(entries, aux_size, 7000, iov_size, LENGTH_MAX, waited_us, columns)
        assert total == entries_model(entries, aux_size, iov_size, waited_us)
        if total >= 0:
            named = [entries["key_offset"], entries["iov_offset"] + 7000, entries["length"]]
            assert (columns[:3] == np.array(named, np.uint64)).all()
            assert (columns[3].view(np.uint32)[:count] == entries["key_length"]).all()


def fuzz_buffers(rng: random.Random, calls: int) -> None:
    """What has no bytes in a row, or not those that are wanted, ends the plain ones."""
    array = np.zeros(64, np.uint8)
    fixed = array[8:24]
    fixed.flags.writeable = False
    plain = [(array, 0, 64), (array[9:30].data, 9, 21), (array[16:32].view(np.float32), 16, 16)]
    read_only = [(fixed, 8, 16), (fixed.data, 8, 16)]
    odd = [array[::2], None, 7, object(), "text"]
    for _ in range(calls):
        writes = rng.random() < 0.5
        some = [rng.choice([*plain, *plain, *read_only]) for _ in range(rng.randrange(9))]
        buffers = [one[0] for one in some]
        if rng.random() < 0.3:
            buffers.insert(rng.randrange(len(buffers) + 1), rng.choice(odd))
        good = 0
        for buffer in buffers:
            if any(buffer is one for one in odd) or (writes and any(buffer is one[0] for one in read_only)):
                break
            good += 1
        addresses, sizes = np.zeros(len(buffers), np.uint64), np.zeros(len(buffers), np.int64)
        assert _blocks.buffer_spans(buffers, writes, addresses, sizes) == good
        for number, (_, offset, size) in enumerate(some[:good]):
            assert (addresses[number] - np.uint64(array.ctypes.data), sizes[number]) == (offset, size)


def fuzz_keys(rng: random.Random, calls: int) -> None:
    """Keys are columns of names, unless one needs another name, or is none."""
    plain = ["a", b"b" * 255, "ключ", b"\xff%", "..x", b"." * 3, "x" * 200]
    odd = ["", b"", b"a/b", "%a", b"\0", ".", b"..", "x" * 256, "ы" * 128, 7, None, "\ud800", bytearray(b"a")]
    for _ in range(calls):
        keys = [rng.choice(plain) for _ in range(rng.randrange(9))]
        if is_odd := rng.random() < 0.4:
            keys.insert(rng.randrange(len(keys) + 1), rng.choice(odd))
        found = _blocks.plain_names(keys)
        assert (found is None) == is_odd
        if found is not None:
            names = [key.encode() if isinstance(key, str) else key for key in keys]
            assert found == tuple(bytes(column) for column in name_columns(names))


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
        lambda: _blocks.entry_columns(bytes(128), 9, 0, 9, 9, 0, np.zeros(7, np.uint64)),
        lambda: _blocks.buffer_spans([memory, memory], False, np.zeros(2, np.uint64), np.zeros(1, np.int64)),
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
    fuzz_entries(rng, 50 * rounds)
    fuzz_buffers(rng, 50 * rounds)
    fuzz_keys(rng, 50 * rounds)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
