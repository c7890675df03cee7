"""Changes of a directory count for those below it that somebody uses, and for no others."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass

from kvfuse.volume.views.ancestors import UNUSED_MAX, Ancestors, AncestorTable


@dataclass
class Inode:
    ino: int
    parent: int
    uid: int = 0
    gid: int = 0
    mode: int = 0o40755


class Tree:
    """Directories, the root of which is 1."""

    def __init__(self) -> None:
        self.inodes = {1: Inode(1, 0)}
        self.table = AncestorTable()

    def add(self, ino: int, parent: int) -> None:
        self.inodes[ino] = Inode(ino, parent)

    def path(self, ino: int) -> list[Inode]:
        nodes = [self.inodes[ino]]
        while nodes[-1].parent:
            nodes.append(self.inodes[nodes[-1].parent])
        return nodes

    def use(self, ino: int) -> Ancestors:
        found = self.table.of(ino)
        if not found.are_known:
            self.table.settle(found, self.path(ino))
        return found


def test_a_change_above_counts_until_the_directory_is_looked_at_again() -> None:
    tree = Tree()
    for ino, parent in ((2, 1), (3, 2), (4, 3), (5, 2)):
        tree.add(ino, parent)
    used, other = tree.use(4), tree.use(5)
    assert tree.use(4) is used
    assert tree.table.change(3) == [4]
    assert (used.changes, other.changes) == (1, 0)
    assert not used.are_known
    assert tree.table.change(3) == [], "whoever had it has been told"
    assert tree.use(4) is used
    assert sorted(tree.table.change(1)) == [4, 5]
    assert tree.table.change(99) == []


def test_who_has_moved_is_looked_at_again() -> None:
    tree = Tree()
    for ino, parent in ((2, 1), (3, 1), (4, 2), (5, 4)):
        tree.add(ino, parent)
    used = tree.use(5)
    tree.inodes[4].parent = 3
    assert not used.are_known, "also where nobody told"
    tree.use(5)
    assert tree.table.change(3) == [5]
    tree.use(5)
    assert tree.table.change(2) == [5], "it was so once: one look more than needed"


def test_inodes_stay_in_memory_while_somebody_uses_a_directory() -> None:
    tree = Tree()
    tree.add(2, 1)
    tree.add(3, 2)
    used = tree.use(3)
    assert tree.table.inodes() == {1, 2, 3}
    del used
    gc.collect()
    assert tree.table.inodes() == set()
    assert tree.table.change(2) == []


def test_the_table_forgets_what_nobody_uses() -> None:
    tree = Tree()
    for ino in range(2, 5 * UNUSED_MAX):
        tree.add(ino, 1)
        tree.use(ino)
    assert len(tree.table._below) <= UNUSED_MAX + 2


def test_changes_are_those_of_a_plain_search(seed: int) -> None:
    rng = random.Random(seed)
    tree = Tree()
    for ino in range(2, 60):
        tree.add(ino, rng.randrange(1, ino))
    used: dict[int, Ancestors] = {}
    for _ in range(3000):
        ino = rng.randrange(1, 60)
        choice = rng.random()
        if choice < 0.5:
            used[ino] = tree.use(ino)
        elif choice < 0.6:
            used.pop(ino, None)
        else:
            below = {one for one in used if ino in [node.ino for node in tree.path(one)]}
            known = {one for one in below if used[one].are_known}
            before = {one: ancestors.changes for one, ancestors in used.items()}
            assert known <= set(tree.table.change(ino))
            assert all(used[one].changes > before[one] for one in known)
            free = [one for one in range(1, 60) if ino not in [node.ino for node in tree.path(one)]]
            if ino > 1 and choice < 0.8:
                tree.inodes[ino].parent = rng.choice(free)
