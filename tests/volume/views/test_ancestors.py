"""Changes of a directory count for those below it that somebody uses, and for no others."""

from __future__ import annotations

import gc
import random

from kvfuse.volume.views.ancestors import UNUSED_MAX, Ancestors, AncestorTable


class Tree:
    """Directories, the root of which is 1."""

    def __init__(self, *places: tuple[int, int]) -> None:
        """``places``: (directory, the one that it is in)"""
        self.parents = dict(places)
        self.table = AncestorTable()

    def above(self, ino: int) -> list[int]:
        found: list[int] = []
        while ino in self.parents:
            ino = self.parents[ino]
            found.append(ino)
        return found

    def use(self, ino: int) -> Ancestors:
        return self.table.settle(ino, self.above(ino))

    def look(self, ino: int) -> tuple[Ancestors, int]:
        """As `use`, with the present count of changes."""
        found = self.use(ino)
        return found, found.changes


def test_a_change_above_counts_until_the_directory_is_looked_at_again() -> None:
    tree = Tree((2, 1), (3, 2), (4, 3), (5, 2))
    used, other = tree.use(4), tree.use(5)
    assert tree.use(4) is used
    assert tree.table.change(3) == [4]
    assert (used.changes, other.changes) == (1, 0)
    assert tree.table.change(3) == [], "whoever had it has been told"
    assert tree.use(4) is used
    assert sorted(tree.table.change(1)) == [4, 5]
    assert tree.table.change(4) == [4], "of itself always"
    assert tree.table.change(99) == []


def test_who_has_moved_hears_of_both_places() -> None:
    tree = Tree((2, 1), (3, 1), (4, 2), (5, 4))
    used = [tree.use(5)]
    tree.parents[4] = 3
    used.append(tree.use(5))
    assert tree.table.change(3) == [5]
    assert tree.table.change(2) == [5], "it was so once: one look more than needed"


def test_what_nobody_uses_is_not_counted() -> None:
    tree = Tree((2, 1), (3, 2))
    used = tree.use(3)
    assert tree.table.inodes() == {1, 2, 3}
    del used
    gc.collect()
    assert tree.table.change(2) == []


def test_the_table_forgets_what_nobody_uses() -> None:
    tree = Tree(*[(ino, 1) for ino in range(2, 5 * UNUSED_MAX)])
    kept = tree.use(2)
    for ino in range(3, 5 * UNUSED_MAX):
        tree.use(ino)
    assert len(tree.table._below[1]) <= 3 * UNUSED_MAX
    assert tree.table.change(1) == [2]
    assert kept.changes == 1


def test_changes_are_those_of_a_plain_search(seed: int) -> None:
    rng = random.Random(seed)
    tree = Tree(*[(ino, rng.randrange(1, ino)) for ino in range(2, 60)])
    used: dict[int, tuple[Ancestors, int]] = {}
    """directory -> (its, the changes when it was looked at)"""
    for _ in range(3000):
        ino, choice = rng.randrange(1, 60), rng.random()
        if choice < 0.5:
            used[ino] = tree.look(ino)
        elif choice < 0.6:
            used.pop(ino, None)
        else:
            sure = {one for one, (own, seen) in used.items() if own.changes == seen}
            told = set(tree.table.change(ino))
            assert {one for one in sure if ino in (one, *tree.above(one))} <= told <= used.keys()
            assert all(own.changes != seen for one, (own, seen) in used.items() if one in told)
            free = [one for one in range(1, 60) if ino not in (one, *tree.above(one))]
            if ino > 1 and choice < 0.8:
                tree.parents[ino] = rng.choice(free)
