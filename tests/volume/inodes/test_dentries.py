"""`HashSet` against a set, and what `Dentries` claims of names and directories."""

from __future__ import annotations

import random
import time

import numpy as np

from kvfuse.volume.inodes.dentries import ABSENT, DIRECTORIES_MAX, UNKNOWN, Dentries, NameChange, settle_all
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.inodes.stored_names import HashSet
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


def lacks(dentries: Dentries, directory: int, name: bytes) -> bool:
    return dentries.find(directory, name) is ABSENT


def test_a_new_directory_is_known_wholly() -> None:
    dentries = Dentries()
    dentries.directory_made(7)
    assert lacks(dentries, 7, b"block")
    dentries.note_stored(7, b"block", True)
    assert not lacks(dentries, 7, b"block")
    dentries.note_stored(7, b"block", False)
    assert lacks(dentries, 7, b"block")
    dentries.directory_removed(7)
    assert not lacks(dentries, 7, b"block")


def test_an_old_directory_is_known_when_it_was_read_to_the_end() -> None:
    dentries = Dentries()
    keys = sorted(schema.entry_key(3, b"%d" % number) for number in range(10))
    stored = dentries.stored_in(3)
    assert (stored.after, stored.complete) == (b"", False)
    stored.learn(keys[:6], 0, last=False)
    assert not lacks(dentries, 3, b"other"), "half a directory says nothing of absent names"
    assert stored.after == keys[5]
    _, _, first = schema.split_entry_key(keys[0])
    dentries.note_stored(3, first, False)
    dentries.note_stored(3, b"new", True)
    stored.learn(keys[6:], 0, last=True)
    assert dentries.stored_in(3).complete
    assert lacks(dentries, 3, b"other")
    assert lacks(dentries, 3, first), "removed while the rest was being read"
    assert not lacks(dentries, 3, b"new"), "made while the rest was being read"


def test_memory_is_bounded() -> None:
    dentries = Dentries(names_max=20_000)
    for number in range(1, 20_011):
        dentries.note(1, b"%d" % number, number)
    assert dentries.get(1, b"20010").ino == 20_010
    assert dentries.get(1, b"1").ino == 0, "the oldest went"
    for number in range(DIRECTORIES_MAX + 10):
        dentries.directory_made(number)
    assert not lacks(dentries, 0, b"other"), "the oldest went"
    assert lacks(dentries, DIRECTORIES_MAX + 9, b"other")


def test_a_name_that_went_keeps_the_version_that_took_it_away() -> None:
    """An answer of the store that is older, and comes later, is known by it."""
    dentries = Dentries()
    dentries.note(1, b"name", 7, 3)
    dentries.note(1, b"name", 0, 4)
    assert (dentries.get(1, b"name").ino, dentries.get(1, b"name").version) == (0, 4)
    dentries.forget(1, b"name")
    assert dentries.get(1, b"name") is UNKNOWN


def test_of_too_many_names_the_oldest_are_forgotten() -> None:
    """Also where it is another host that removes many."""
    dentries = Dentries(names_max=20_000)

    def known(name: bytes) -> tuple[int, int]:
        dentry = dentries.get(7, name)
        return dentry.ino, dentry.version

    for number in range(20_000):
        dentries.note(7, b"%d" % number, 100 + number, version=5)
    dentries.note(7, b"new", 99, version=6)
    assert known(b"0") == (0, 0)
    for number in range(10_000):
        dentries.note(7, b"removed %d" % number, 0, version=7)
        assert known(b"removed %d" % number) == (0, 7)
    assert known(b"19999") == (20_099, 5)
    assert known(b"new") == (99, 6)


def change(name: bytes, node: Node | None) -> NameChange:
    return NameChange(7, name, node, stored=False, moved=None, vacated=node is None, version=0)


def test_what_is_pending_is_never_forgotten() -> None:
    dentries = Dentries(names_max=100)
    changes = [change(b"%d" % number, Node(number + 1, 0o100644, 0, 0, 4096)) for number in range(300)]
    for one in changes:
        assert dentries.put_change(one) is None
        dentries.note(7, b"known " + one.name, 5)
    assert [dentries.get(7, one.name).change for one in changes] == changes
    dentries.clear()
    assert dict(dentries.changes_in(7)) == {one.name: one for one in changes}
    for one in changes:
        dentries.settle(one, 9, puts=True)
    assert not dentries.changes
    for number in range(700):
        dentries.note(7, b"next %d" % number, 5)
    held = [one for one in changes if dentries.get(7, one.name) is not UNKNOWN]
    assert not held, "what was pending is forgotten like others when it is stored"


def test_a_change_that_followed_another_stays_pending_when_that_one_is_stored() -> None:
    dentries = Dentries()
    first, second = change(b"name", Node(5, 0o100644, 0, 0, 4096)), change(b"name", None)
    assert dentries.put_change(first) is None
    assert dentries.put_change(second) is first
    dentries.settle(first, 3, puts=True)
    assert dentries.get(7, b"name").change is second
    assert (second.stored, second.version) == (True, 3)
    dentries.settle(second, 4, puts=True)
    dentry = dentries.get(7, b"name")
    assert (dentry.change, dentry.ino, dentry.version) == (None, 0, 4)


def test_changes_in_the_order_of_cookies(rng: random.Random) -> None:
    """Whatever was put and settled since a directory was listed first."""
    dentries, names = Dentries(), [b"%d" % number for number in range(60)]
    cookies = sorted(map(schema.name_hash, names))
    for _ in range(3000):
        parent, name = rng.randrange(2), rng.choice(names)
        step = rng.random()
        if step < 0.5:
            node = Node(rng.randrange(2, 99), 0o100644, 0, 0, 4096) if rng.random() < 0.7 else None
            dentries.put_change(NameChange(parent, name, node, False, None, node is None, 0))
        elif step < 0.9 and (changes := dentries.changes_in(parent)):
            change = changes[rng.choice(list(changes))]
            if rng.random() < 0.7:
                settle_all(dentries, [change], 0, set())
            else:
                dentries.give_up(parent, change.name)
        else:
            after, last = rng.choice([0, *cookies]), rng.choice([*cookies, (1 << 63) - 1])
            present = dentries.changes_in(parent).values()
            expected = [change for change in present if after < schema.name_hash(change.name) <= last]
            expected.sort(key=lambda change: schema.name_hash(change.name))
            limit = rng.randrange(1, 70)
            found, reach = dentries.changes_between(parent, after, last, limit)
            assert found == expected[:limit]
            assert reach == (schema.name_hash(found[-1].name) if limit < len(expected) else last)
