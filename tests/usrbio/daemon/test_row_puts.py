"""Puts of blocks that are rows, in a ring's thread: what is stored, what waits for room, and what is left."""

from __future__ import annotations

import errno
import random
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvfuse.access.namespace_handle import NO_GROUP, BlockDoor, NamespaceHandle
from kvfuse.native import blockforms as forms
from kvfuse.usrbio.daemon.batches import LEFT, Batch
from kvfuse.usrbio.daemon.call import Entry
from kvfuse.usrbio.daemon.row_ops import RowOps
from kvfuse.usrbio.protocol.wire import SQE, SQE_STRUCT, Op
from kvfuse.volume.api import NameColumns

KEY_SIZE, SIZE = 8, 100
ODD, UNWANTED = b"%", b"!"
"""what keys begin with that need another name; and that are not admitted"""


class _Store:
    """``room``: blocks that it stores before it is full; ``gains``: what each wait brings, below 0: it fails."""

    def __init__(self, room: int, gains: list[int]) -> None:
        self.room, self.gains, self.waits = room, gains, list[tuple[int, int]]()
        self.names: list[bytes] = []
        self.noted: list[tuple[npt.NDArray[np.int64], list[int]]] = []
        self.with_files: set[int] = set()
        self.directories: dict[int, frozenset[bytes]] = {}
        self.has_ended = self.is_shared = False
        self.in_turn = True

    def tables_of(self, directory: int) -> tuple[Any, ...]:
        return TABLES

    def try_put(
        self, table: object, columns: NameColumns, sources: object, sizes: object, terms: object, *, plain_only: bool
    ) -> tuple[npt.NDArray[np.int64], None]:
        assert plain_only
        text, offsets, lengths = columns
        names = [
            bytes(text[start : start + size]) for start, size in zip(offsets.tolist(), lengths.tolist(), strict=True)
        ]
        rows, why = list[int](), 0
        for name in names:
            if name.startswith(UNWANTED):
                rows.append(forms.NOT_ADMITTED)
                continue
            if not why:
                why = forms.ODD_NAME if name.startswith(ODD) else forms.NO_QUOTA if not self.room else 0
                rows.append(why or len(self.names))
                if not why:
                    self.room -= 1
                    self.names.append(name)
            else:
                rows.append(forms.NOT_TRIED)
        results = np.array(rows, np.int64)
        self.noted.append((results, rows))
        return results, None

    def wait_for_room(self, why: int, table: object, size: int) -> bool:
        assert not self.in_turn, "others wait"
        self.waits.append((why, size))
        gain = self.gains.pop(0) if self.gains else -1
        self.room += max(gain, 0)
        return gain >= 0


TABLES = ()


class _Turns:
    def __init__(self, store: _Store) -> None:
        self._store = store

    def copying(self, seat: object) -> AbstractContextManager[None]:
        return nullcontext()

    def resting(self, seat: object) -> AbstractContextManager[None]:
        turns = self

        class _Resting:
            def __enter__(self) -> None:
                turns._store.in_turn = False

            def __exit__(self, *_: object) -> None:
                turns._store.in_turn = True

        return cast(Any, _Resting())


def put(store: _Store, keys: list[bytes]) -> list[int]:
    door = BlockDoor(cast(Any, store), 5, 1, cast(Any, object()), TABLES, (), has_files=False, reads_all=True)
    namespace = NamespaceHandle(5, 0o644, NO_GROUP, blocks=door)
    namespace.epoch = namespace.gates.epoch
    memory = np.zeros(SIZE * len(keys), np.uint8)
    iov = SimpleNamespace(
        is_sealed=True, is_present=lambda size: True, size=len(memory), address=memory.ctypes.data, bytes=memory
    )
    registered = SimpleNamespace(namespaces={7: namespace}, iovs={3: iov})
    ring = SimpleNamespace(turns=_Turns(store), seat=None)
    aux = np.frombuffer(b"".join(keys), np.uint8)
    server = RowOps(cast(Any, ring), cast(Any, registered), aux)
    rows = np.zeros(len(keys), SQE)
    rows["op"], rows["handle"], rows["iov"], rows["length"], rows["key_length"] = Op.PUT, 7, 3, SIZE, KEY_SIZE
    rows["iov_offset"] = np.arange(len(keys)) * SIZE
    rows["key_offset"] = np.arange(len(keys)) * KEY_SIZE
    results = server.put(Batch(Entry._make(SQE_STRUCT.unpack(rows[:1].tobytes())), rows, 1e9))
    assert results is not None
    for noted, before in store.noted:
        assert noted.tolist() == before, "it is the store's"
    return [int(result) for result in results]


def test_as_a_model(rng: random.Random) -> None:
    for _ in range(300):
        keys = [rng.choice([b"", b"", b"", ODD, UNWANTED]) + b"%08d" % number for number in range(rng.randint(1, 20))]
        keys = [key[:KEY_SIZE] if key[:1] in (ODD, UNWANTED) else key[-KEY_SIZE:] for key in keys]
        room, gains = rng.choice([0, 3, 100]), [rng.choice([0, 1, 5, 5, -1]) for _ in range(rng.randrange(6))]
        store = _Store(room, list(gains))
        left = list(gains)
        expected = []
        for key in keys:
            while not key.startswith((ODD, UNWANTED)) and room == 0 and left and left[0] >= 0:
                room += left.pop(0)
            if key.startswith(UNWANTED):
                expected.append(-errno.ECANCELED)
            elif key.startswith(ODD) or room == 0:
                expected.append(LEFT)
            else:
                expected.append(SIZE)
                room -= 1
        assert put(store, keys) == expected
        assert store.names == [key for key, result in zip(keys, expected, strict=True) if result == SIZE]
        assert all(wait == (forms.NO_QUOTA, SIZE) for wait in store.waits)


def test_a_batch_goes_on_when_there_is_room() -> None:
    store = _Store(4, [4, 4, 100])
    assert put(store, [b"%08d" % number for number in range(20)]) == [SIZE] * 20
    assert len(store.waits) == 3
