"""EXISTS, DELETE and PREFETCH of blocks that are rows: what a ring's thread answers, and what it leaves alone."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from killed_lines import Killed, killed_at

from kvfuse.access.namespace_handle import NO_GROUP, BlockDoor, NamespaceHandle
from kvfuse.keys import file_name
from kvfuse.usrbio.daemon import call, ring_journal, row_keys
from kvfuse.usrbio.daemon.batches import LEFT, Batch
from kvfuse.usrbio.daemon.call import Completions, Entry
from kvfuse.usrbio.daemon.ring_journal import RingJournal
from kvfuse.usrbio.daemon.row_keys import KEYS_AT_ONCE, RowKeys
from kvfuse.usrbio.protocol import queues
from kvfuse.usrbio.protocol.queues import RingMemory
from kvfuse.usrbio.protocol.wire import PARENTS_MAX, SQE, SQE_STRUCT, Flag, Layout, Op, pack_keys
from kvfuse.volume.api import NameColumns

AUX = 1 << 16
HANDLE, DIRECTORY = 7, 5
SERVING = {__file__, *(module.__file__ for module in (call, ring_journal, row_keys, queues))}
KEYS = [*(b"key-%d" % number for number in range(30)), b"a/b", b".", b"%", b"x" * 255]


class _Store:
    """Blocks by name; ``resident``: those that are in memory."""

    def __init__(self, rng: random.Random) -> None:
        self.names = {file_name(key) for key in KEYS if rng.random() < 0.5}
        self.resident = {name for name in self.names if rng.random() < 0.8}
        self.knows_all = True
        self.is_shared = self.has_ended = False
        self.with_files: set[int] = set()
        self.rows: npt.NDArray[np.void] = np.zeros(len(KEYS), [("arena", np.uint32)])
        self.readers = None
        self.namespace = 1
        self.tables: tuple[Any, ...] = (self,)

    def tables_of(self, directory: int) -> tuple[Any, ...]:
        return self.tables

    def now(self, namespace: int) -> int:
        return 0

    def find(self, names: list[bytes], now: int) -> tuple[npt.NDArray[np.int64], None]:
        order = sorted(self.names)
        self.rows["arena"][: len(order)] = [name in self.resident for name in order]
        return np.array([order.index(name) if name in self.names else -1 for name in names], np.int64), None

    def find_cold(self, directory: int, columns: NameColumns) -> None:
        """There is no cold tier."""

    def try_look_up(self, directory: int, namespace: int, columns: NameColumns) -> npt.NDArray[np.bool_] | None:
        assert directory == DIRECTORY
        text, offsets, lengths = columns
        names = [text[int(start) : int(start) + int(length)] for start, length in zip(offsets, lengths, strict=True)]
        found = np.array([name in self.names for name in names])
        return found if self.knows_all or found.all() else None

    def drop(self, directory: int, names: list[bytes]) -> list[bool]:
        found = []
        for name in names:
            found.append(name in self.names)
            self.names.discard(name)
        return found


class _Completions:
    """Of entries that no daemon served before."""

    def begin_known_answers(self, entry: Entry, found: npt.NDArray[np.bool_]) -> bytes:
        return bytes(len(found))


def make(store: _Store) -> tuple[RowKeys, NamespaceHandle, npt.NDArray[np.uint8]]:
    door = BlockDoor(
        cast(Any, store), DIRECTORY, 1, None, store.tables, store.tables, has_files=False, reads_all=True
    )  # fmt: skip
    namespace = NamespaceHandle(DIRECTORY, 0o644, NO_GROUP, blocks=door)
    namespace.epoch = namespace.gates.epoch
    aux = np.zeros(AUX, np.uint8)
    registered = SimpleNamespace(namespaces={HANDLE: namespace})
    return RowKeys(cast(Any, registered), aux, cast(Any, _Completions())), namespace, aux


def make_entry(op: Op, keys: list[bytes], aux: npt.NDArray[np.uint8], **fields: int) -> npt.NDArray[np.void]:
    packed = pack_keys(keys)
    aux[64 : 64 + len(packed)] = np.frombuffer(packed, np.uint8)
    entry = np.zeros(1, SQE)
    values = {
        "op": op, "handle": HANDLE, "offset": 64 + len(packed), "length": len(keys), "key_offset": 64,
        "key_length": len(packed), **fields,
    }  # fmt: skip
    for name, value in values.items():
        entry[name] = value
    return entry


def serve(server: RowKeys, entry: npt.NDArray[np.void]) -> int:
    batch = Batch(Entry._make(SQE_STRUCT.unpack(entry.tobytes())), entry, 1e9)
    results = {Op.EXISTS: server.exists, Op.DELETE: server.delete, Op.PREFETCH: server.prefetch}[
        Op(int(entry["op"][0]))
    ](batch)
    return LEFT if results is None else int(results[0])


def test_as_a_dictionary(rng: random.Random) -> None:
    store = _Store(rng)
    server, _, aux = make(store)
    for _ in range(300):
        keys = [rng.choice(KEYS) for _ in range(rng.randint(1, 12))]
        names = [file_name(key) for key in keys]
        op = rng.choice([Op.EXISTS, Op.DELETE, Op.PREFETCH])
        is_prefix = op == Op.EXISTS and rng.random() < 0.5
        there = [name in store.names for name in names]
        if op == Op.DELETE:
            there = [one and name not in names[:n] for n, (one, name) in enumerate(zip(there, names, strict=True))]
        if is_prefix and False in there:
            there = [n < there.index(False) for n in range(len(there))]
        is_left = op == Op.PREFETCH and any(name in store.names - store.resident for name in names)
        entry = make_entry(op, keys, aux, flags=Flag.PREFIX if is_prefix else 0)
        answers = int(entry["offset"][0])
        aux[answers : answers + len(keys)] = 77
        result = serve(server, entry)
        assert result == (LEFT if is_left else sum(there))
        assert aux[answers : answers + len(keys)].tolist() == ([77] * len(keys) if is_left else there)
        assert not aux[answers + len(keys) :].any()
        aux[:] = 0
        if rng.random() < 0.3:
            store.names.add(file_name(rng.choice(KEYS)))


@pytest.mark.parametrize(
    "fields",
    [
        {"flags": Flag.COSTS},
        {"op": Op.PREFETCH, "flags": Flag.NEAR},
        {"handle": 99},
        {"parent": PARENTS_MAX + 1},
        {"priority": 3},
        {"length": 0},
        {"length": 1},
        {"length": KEYS_AT_ONCE + 1},
        {"length": (1 << 64) - 1},
        {"offset": AUX - 1},
        {"offset": (1 << 64) - 1},
        {"offset": 63},
        {"key_offset": AUX},
        {"key_offset": (1 << 64) - 8},
        {"key_length": (1 << 32) - 1},
    ],
    ids=str,
)
def test_what_is_odd_is_left_to_who_refuses_it(rng: random.Random, fields: dict[str, int]) -> None:
    fields = dict(fields)
    server, _, aux = make(_Store(rng))
    entry = make_entry(Op(fields.pop("op", Op.EXISTS)), [b"key-1", b"key-2"], aux, **fields)
    before = aux.copy()
    assert serve(server, entry) == LEFT
    assert (aux == before).all()


def test_nothing_is_done_without_the_right_to(rng: random.Random) -> None:
    """Whenever something is not known to be as it was, the event loop looks."""
    for field, value in (
        ("is_absent", True), ("is_cut_off", True), ("epoch", -5), ("blocks", None), ("read_only", True),
        ("may_put", False), ("waits", True),
    ):  # fmt: skip
        store = _Store(rng)
        store.names.add(b"key-1")
        server, namespace, aux = make(store)
        setattr(namespace, field, value)
        assert serve(server, make_entry(Op.DELETE, [b"key-1"], aux)) == LEFT
        assert b"key-1" in store.names
        is_search = field in ("read_only", "may_put", "waits")
        assert serve(server, make_entry(Op.EXISTS, [b"key-1"], aux)) == (1 if is_search else LEFT)
    store = _Store(rng)
    store.names, store.resident = {b"key-1"}, {b"key-1"}
    server, _, aux = make(store)
    store.knows_all = False
    assert serve(server, make_entry(Op.EXISTS, [b"key-1", b"key-2"], aux)) == LEFT
    assert serve(server, make_entry(Op.EXISTS, [b"key-1"], aux)) == 1
    store.knows_all = store.is_shared = True
    assert serve(server, make_entry(Op.DELETE, [b"key-1"], aux)) == LEFT, "another host may have it"
    assert serve(server, make_entry(Op.EXISTS, [b"key-1", b"key-2"], aux)) == 1
    store.with_files.add(DIRECTORY)
    assert serve(server, make_entry(Op.EXISTS, [b"key-1"], aux)) == LEFT


def test_a_delete_answers_once_whichever_line_its_daemon_is_killed_at(rng: random.Random) -> None:
    """The next daemon finds no block where the former one removed it, and answers what that one found."""
    layout, bell, line = Layout.of(16, AUX), os.eventfd(0, os.EFD_NONBLOCK), 0
    is_killed = True
    while is_killed:
        line, is_killed = line + 1, False
        store = _Store(rng)
        keys = rng.sample(KEYS, 12)
        expected = [file_name(key) in store.names for key in keys]
        memory, descriptor = RingMemory.create(layout)
        _, journal_descriptor = RingJournal.create(layout.entries)
        entry = make_entry(Op.DELETE, keys, memory.aux)
        memory.sq.write(entry)
        memory.sq.publish(1)
        try:
            with killed_at(line, SERVING):
                run(store, descriptor, journal_descriptor, bell)
        except Killed:
            is_killed = True
        run(store, descriptor, journal_descriptor, bell)
        answers = int(entry["offset"][0])
        assert memory.aux[answers : answers + len(keys)].tolist() == expected, line
        assert memory.cq.given == 1
        assert memory.cq.read(1)["result"] == sum(expected), line
        assert store.names.isdisjoint(map(file_name, keys))
        for number in (descriptor, journal_descriptor):
            os.close(number)
    os.close(bell)
    assert line > 20


def run(store: _Store, descriptor: int, journal_descriptor: int, bell: int) -> None:
    """A daemon: go on with what is in flight, or take the entry; serve it, and end."""
    memory = RingMemory.attach(descriptor)
    completions = Completions(memory, bell, lambda pin: None, RingJournal(journal_descriptor, memory.layout.entries))
    rows, _ = completions.restore()
    if not len(rows) and memory.sq.given != memory.sq.position:
        packed = memory.sq.read_packed(1)
        completions.take(packed, 1e9)
        rows = memory.sq.unpacked(packed)
    if len(rows):
        server = make(store)[0]
        server._aux, server._completions = memory.aux, completions
        completions.post(rows["user_data"], [serve(server, rows)])
