"""`HashSet` against a set, and what `KnownNames` claims of directories."""

from __future__ import annotations

import random
import time

import numpy as np

from kvfuse.volume.inodes import known_names
from kvfuse.volume.inodes.known_names import HashSet, KnownNames
from kvfuse.volume.store import schema


def test_a_hash_set_is_a_set(rng: random.Random) -> None:
    numbers, model = HashSet(), set()
    population = [rng.randrange(-1 << 63, 1 << 63) for _ in range(30_000)]
    for step in range(100_000):
        value = rng.choice(population)
        if rng.random() < 0.6:
            numbers.add(value)
            model.add(value)
        else:
            numbers.discard(value)
            model.discard(value)
        assert (value in numbers) is (value in model)
        if step % 5000 == 0:
            assert len(numbers) == len(model)
            assert all((value in numbers) is (value in model) for value in population)
            assert numbers.contain(population) == [value in model for value in population]


def test_a_large_set_is_not_sorted_anew_for_a_few_changes(rng: random.Random) -> None:
    """A folder of many blocks: whoever stores the next ones must not stop the daemon. Beside Python's set."""
    values = np.frombuffer(rng.randbytes(3_200_000), np.int64).tolist()
    numbers: HashSet | set[int]
    seconds = []
    for numbers in (set(), HashSet()):
        started = time.perf_counter()
        for value in values:
            numbers.add(value)
        for value in values[::10]:
            numbers.discard(value)
        seconds.append(time.perf_counter() - started)
        assert len(numbers) == 360_000
    assert seconds[1] < 40 * seconds[0], f"{seconds[1]:.2f} s, where a set takes {seconds[0]:.2f} s"


def test_a_new_directory_is_known_wholly() -> None:
    names = KnownNames()
    names.made(7)
    assert names.is_absent(7, b"block")
    names.settle(7, b"block", True)
    assert not names.is_absent(7, b"block")
    names.settle(7, b"block", False)
    assert names.is_absent(7, b"block")
    names.removed(7)
    assert not names.is_absent(7, b"block")


def test_an_old_directory_is_known_when_it_was_read_to_the_end() -> None:
    names = KnownNames()
    keys = sorted(schema.entry_key(3, b"%d" % number) for number in range(10))
    assert names.next_page(3) == b""
    names.learn(3, keys[:6], last=False)
    assert not names.is_absent(3, b"other"), "half a directory says nothing of absent names"
    assert names.next_page(3) == keys[5]
    _, _, first = schema.split_entry_key(keys[0])
    names.settle(3, first, False)
    names.settle(3, b"new", True)
    names.learn(3, keys[6:], last=True)
    assert names.next_page(3) is None
    assert names.is_absent(3, b"other")
    assert names.is_absent(3, first), "removed while the rest was being read"
    assert not names.is_absent(3, b"new"), "made while the rest was being read"


def test_memory_is_bounded() -> None:
    names = KnownNames()
    for number in range(known_names.INODES_MAX + 10):
        names.note(1, b"%d" % number, number)
    assert names.inode(1, b"%d" % (known_names.INODES_MAX + 9)) == known_names.INODES_MAX + 9
    for number in range(known_names.DIRECTORIES_MAX + 10):
        names.made(number)
    assert not names.is_absent(0, b"other"), "the oldest went"
    assert names.is_absent(known_names.DIRECTORIES_MAX + 9, b"other")


def test_a_name_that_went_keeps_the_version_that_took_it_away() -> None:
    """An answer of the store that is older, and comes later, is known by it."""
    known_names = KnownNames()
    known_names.note(1, b"name", 7, 3)
    known_names.drop(1, b"name", 4)
    assert known_names.inode(1, b"name") is None
    assert known_names.version(1, b"name") == 4
    known_names.drop(1, b"name")
    assert known_names.version(1, b"name") == 0


def test_of_too_many_names_the_oldest_are_forgotten() -> None:
    """Also where it is another host that removes many."""
    names = KnownNames()
    for number in range(known_names.INODES_MAX):
        names.note(7, b"%d" % number, 100 + number, version=5)
    names.note(7, b"new", 99, version=6)
    assert (names.inode(7, b"0"), names.version(7, b"0")) == (None, 0)
    last = known_names.INODES_MAX - 1
    for number in range(known_names.INODES_MAX // 2):
        names.drop(7, b"removed %d" % number, version=7)
        assert (names.inode(7, b"removed %d" % number), names.version(7, b"removed %d" % number)) == (None, 7)
    assert (names.inode(7, b"%d" % last), names.version(7, b"%d" % last)) == (100 + last, 5)
    assert (names.inode(7, b"new"), names.version(7, b"new")) == (99, 6)
