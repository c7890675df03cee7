"""Decides which changed inodes a commit leaves out, and which ones may not be committed without each other.

A changed inode that is open for writing, and that no caller waits for, is *set aside* (`Aside`): commits skip it
and its names, so the cost of a commit depends on the changes, not on the open files. Inodes tied to it are aside, and
so are changes of names that mean one of them, or that one of them left. Invariants, while no commit is being built:

* A changed inode is either a candidate of the next commit (`Pending.dirty`) or aside (``node.aside``), never both.
* A change of a name is a candidate (`Pending.names`), or in flight (``change.sent``), or aside with its ``holders``.
* One function sets inodes aside, when a commit is built and they are open (`Pending._set_aside`). One function makes
  them candidates again (`Pending.reconsider`), with all that depends on them: at the last close; when one is forced
  (fsync, link, rename, attributes) or removed; and when a name changes that it has, had, or takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from kvfuse.volume.inodes.node import Node


Late: TypeAlias = set["Node"]
"""Inodes, other than those aside, that a commit leaves out."""


def settlers(node: Node | None) -> Iterator[Node]:
    """The inode, and while it has no names its heir, the heir's heir and so on: their commits settle its state.

    Until the last of them is stored, the name may still mean the inode in the store.
    """
    while node is not None:
        yield node
        node = node.heir if node.nlink == 0 else None


def is_late(node: Node | None, late: Late) -> bool:
    return node is not None and (node.aside or node in late)


def is_held(moved: Node | None, late: Late) -> bool:
    """The store may still have ``moved`` under the name that it left: it, or one of its heirs, is late."""
    while moved is not None:  # as `settlers`
        if moved.aside or moved in late:
            return True
        moved = moved.heir if moved.nlink == 0 else None
    return False


class Waiting(Protocol):
    """A change of a name that may wait for inodes that are aside."""

    holders: tuple[Node, ...]


Change = TypeVar("Change", bound=Waiting)


class Aside(Generic[Change]):
    """Inodes that are aside, and the changes of names that wait for them. `Pending` owns it."""

    def __init__(self) -> None:
        self.nodes: dict[Node, int] = {}
        """inode -> serial number of its change"""
        self._names: dict[Node, list[Change]] = {}

    def put(self, node: Node, serial: int) -> None:
        node.aside = True
        self.nodes[node] = serial

    def hold(self, change: Change, holders: tuple[Node, ...]) -> None:
        """Have a change of a name wait for inodes that are aside."""
        change.holders = holders
        for holder in holders:
            self._names.setdefault(holder, []).append(change)

    def take(self, node: Node) -> tuple[int, list[Change]]:
        """Remove an inode. Returns its serial number, and the changes of names that waited for it."""
        node.aside = False
        return self.nodes.pop(node), self._names.pop(node, [])


class Ties:
    """Pairs of inodes of which one took the other's name, and both stay: neither may be committed without the other."""

    def __init__(self) -> None:
        self.others: dict[Node, dict[Node, None]] = {}
        """inode -> inodes tied to it"""
        self._count = 0

    def add(self, first: Node, second: Node) -> None:
        others = self.others.setdefault(first, {})
        self._count += second not in others
        others[second] = None
        self.others.setdefault(second, {})[first] = None

    def drop(self, node: Node) -> list[Node]:
        """Undo all ties of an inode. Returns the inodes that it was tied to."""
        others = list(self.others.pop(node, ()))
        self._count -= len(others)
        for other in others:
            rest = self.others[other]
            rest.pop(node, None)
            if not rest:
                del self.others[other]
        return others

    def find_closure(self, nodes: Iterable[Node]) -> set[Node]:
        """These, and all inodes tied to them, directly or not."""
        whole = set(nodes)
        if self.others:
            work = list(whole)
            while work:
                new = [other for other in self.others.get(work.pop(), ()) if other not in whole]
                whole.update(new)
                work += new
        return whole

    def __len__(self) -> int:
        """Number of pairs."""
        return self._count
