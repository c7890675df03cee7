"""The index of cold blocks beside a dict, and what an object and the graves' file say of themselves."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from kvfuse.native import blockforms as forms
from kvfuse.volume.cold import cold_format as layout
from kvfuse.volume.cold.cold_index import ALIVE, DEAD, PENDING, ROW, ColdGroup, ColdIndex
from kvfuse.volume.cold.grave_log import BEGUN, GRAVE, GraveLog

VOLUME = b"volume" * 2 + b"1234"


def entries_of(index: ColdIndex, keys: list[int], sequence: int, state: int = ALIVE) -> np.ndarray:
    entries = np.zeros(len(keys), ROW)
    entries["low"], entries["high"] = keys, [key ^ 99 for key in keys]
    entries["sequence"], entries["length"], entries["state"] = sequence, sequence, state
    entries["group"] = index.number_of(ColdGroup(sequence % 3, 0, 0, 0, 0, 0))
    return entries


def halves(keys: list[int]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(keys, np.uint64), np.array([key ^ 99 for key in keys], np.uint64)


def test_it_finds_what_a_dict_does(rng: random.Random) -> None:
    index, known = ColdIndex(), dict[int, int]()
    objects: list[np.ndarray] = []
    names = [rng.randrange(1, 1 << 64) for _ in range(3000)]
    for sequence in range(1, 300):
        some = rng.sample(names, rng.randrange(1, 60))
        kind = rng.random()
        if kind < 0.6:
            rows = index.add(entries_of(index, some, sequence))
            assert (rows >= 0).all()
            objects.append(rows)
            known.update(dict.fromkeys(some, sequence))
        elif kind < 0.8:
            rows = index.find(*halves(some))
            index.end(rows[rows >= 0])
            for name in some:
                known.pop(name, None)
        elif objects:
            rows = objects.pop(rng.randrange(len(objects)))
            owners = index.rows[rows]
            is_own = [known.get(int(low)) == int(sequence) for low, sequence in owners[["low", "sequence"]].tolist()]
            for low in owners["low"][is_own].tolist():
                known.pop(low)
            index.forget(rows)
        found = index.alive(*halves(names), 0)
        here = {name: int(index.rows["sequence"][row]) for name, row in zip(names, found, strict=True) if row >= 0}
        assert here == known
        assert index.count == len(known)
        assert index.bytes == sum(known.values())
        for directory in range(3):
            assert index.has_directory(directory) == any(one % 3 == directory for one in known.values())


def test_a_newer_block_wins_whatever_comes_last() -> None:
    index = ColdIndex()
    (new,) = index.add(entries_of(index, [7], 10))
    assert index.add(entries_of(index, [7], 9)).tolist() == [-1]
    assert index.alive(*halves([7]), 0).tolist() == [new]
    index.add(entries_of(index, [7], 11))
    assert index.rows["state"][new] == DEAD


def test_two_names_of_one_key_are_not_mixed_up() -> None:
    index = ColdIndex()
    index.add(entries_of(index, [7], 10))
    other = entries_of(index, [7], 11)
    other["high"] = 1
    assert index.add(other).tolist() == [-1]
    assert index.find(np.array([7], np.uint64), np.array([1], np.uint64)).tolist() == [-1]


def test_what_is_pending_is_not_found_and_may_die() -> None:
    index = ColdIndex()
    rows = index.add(entries_of(index, [1, 2], 5, PENDING))
    assert index.alive(*halves([1, 2]), 0).tolist() == [-1, -1]
    index.end(rows[:1])
    index.show(rows)
    assert (index.alive(*halves([1, 2]), 0) >= 0).tolist() == [False, True]


def test_a_block_that_expired_is_absent() -> None:
    index = ColdIndex()
    entries = entries_of(index, [1], 5)
    entries["expires"] = 100
    index.add(entries)
    assert index.alive(*halves([1]), 99)[0] >= 0
    assert index.alive(*halves([1]), 100)[0] < 0


def test_an_object_says_what_it_is() -> None:
    heads = np.zeros(3, forms.HEAD)
    heads["length"] = [1, 64, 100]
    offsets = layout.offsets_of(heads["length"].astype(np.int64))
    data = bytearray(int(offsets[-1]))
    layout.write_heads(memoryview(data), VOLUME, 12, heads, len(data))
    facts = layout.read_header(bytes(data), VOLUME, 12)
    assert facts is not None
    assert (facts.head_count, facts.size) == (3, len(data))
    found = layout.read_heads(bytes(data[: facts.data_start]), facts)
    assert found is not None
    assert found.tobytes() == heads.tobytes()
    assert layout.read_header(bytes(data), VOLUME, 13) is None
    assert layout.read_header(bytes(data), b"another volume16", 12) is None
    for place in (20, 42, layout.HEADER.size + 5):
        damaged = bytearray(data)
        damaged[place] ^= 1
        facts = layout.read_header(bytes(damaged), VOLUME, 12)
        assert facts is None or layout.read_heads(bytes(damaged), facts) is None


@pytest.mark.parametrize("cut", [1, 31, 32, 40])
def test_graves_end_where_the_file_is_torn(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "graves"
    graves = GraveLog(path)
    assert graves.is_new
    graves.append(GRAVE, np.array([1, 2], np.uint64), np.array([3, 4], np.uint64), np.array([5, 6], np.uint64))
    graves.append(BEGUN, np.array([9], np.uint64))
    graves.sync()
    graves.close()
    path.write_bytes(path.read_bytes()[:-cut])
    graves = GraveLog(path)
    assert not graves.is_new
    whole = (96 - cut) // 32
    assert graves.records[["kind", "low", "sequence"]].tolist() == [(GRAVE, 1, 5), (GRAVE, 2, 6)][:whole]
    graves.append(BEGUN, np.array([10], np.uint64))
    graves.close()
    again = GraveLog(path)
    assert again.records["low"].tolist() == [*range(1, whole + 1), 10]
    again.replace(again.records[-1:])
    again.close()
    last = GraveLog(path)
    assert last.records["low"].tolist() == [10]
    last.close()
