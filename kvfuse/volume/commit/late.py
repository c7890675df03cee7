"""Which changed inodes a commit leaves out, and which inodes may not be committed without each other.

A changed inode that is open for writing, and that nobody asks for, is *set aside* (`Aside`): no commit looks at it or
at its names, so that a commit costs what changed, not what is open. Inodes that are tied to it stand aside with it, and
so do names that mean one of them, or that one of them left. The invariant, whenever no commit is being built:

* A changed inode is either a candidate of the next commit (`Pending.dirty`) or aside (``node.aside``), never both.
* A change of a name is a candidate (`Pending.names`), or under way (``change.sent``), or aside with its ``holders``.
* Inodes go aside in one place, when a commit is built and finds them open (`Pending._set_aside`). They are candidates
  again in one place (`Pending.reconsider`), with all that depends on them: at the last close; where one is forced
  (fsync, link, rename, attributes) or removed; and where a name changes that it has, had, or takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from kvfuse.volume.inodes.node import Node


class Late:
    """Inodes that a commit leaves out: those that are aside, and some more."""

    __slots__ = ("_nodes",)

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self._nodes = set(nodes)

    def __contains__(self, node: Node | None) -> bool:
        return node is not None and (node.aside or node in self._nodes)

    def add(self, nodes: Iterable[Node]) -> None:
        self._nodes.update(nodes)

    def copy(self) -> Late:
        return Late(self._nodes)


def settlers(node: Node | None) -> Iterator[Node]:
    """Whoever settles what the inode has: itself, and where it has no names any more, who took its name.

    Until the last of them is in the store, the name may mean the inode there.
    """
    while node is not None:
        yield node
        node = node.heir if node.nlink == 0 else None


def is_held(moved: Node | None, late: Late) -> bool:
    """An inode that left its name is not yet in the store elsewhere; or what it had is freed by a later heir."""
    return moved is not None and any(node in late for node in settlers(moved))


class Waiting(Protocol):
    """A change of a name that may wait for inodes that are aside."""

    holders: tuple[Node, ...]


Change = TypeVar("Change", bound=Waiting)


class Aside(Generic[Change]):
    """Inodes that are aside, and the changes of names that wait for them. `Pending` owns it."""

    def __init__(self) -> None:
        self._nodes: dict[Node, int] = {}
        self._names: dict[Node, list[Change]] = {}

    def put(self, node: Node, serial: int) -> None:
        node.aside = True
        self._nodes[node] = serial

    def hold(self, change: Change, holders: tuple[Node, ...]) -> None:
        """A change of a name waits for inodes that are aside."""
        change.holders = holders
        for holder in holders:
            self._names.setdefault(holder, []).append(change)

    def take(self, node: Node) -> tuple[int, list[Change]]:
        """(serial number, changes of names that waited for it): it is not aside any more."""
        node.aside = False
        return self._nodes.pop(node), self._names.pop(node, [])

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def __bool__(self) -> bool:
        return bool(self._nodes)


class Ties:
    """Pairs of inodes of which one took the other's name, and both stay: neither may be committed without the other."""

    def __init__(self) -> None:
        self._others: dict[Node, dict[Node, None]] = {}
        self._count = 0

    def add(self, first: Node, second: Node) -> None:
        others = self._others.setdefault(first, {})
        self._count += second not in others
        others[second] = None
        self._others.setdefault(second, {})[first] = None

    def of(self, node: Node) -> Iterable[Node]:
        """All that are tied to this one."""
        return self._others.get(node, ())

    def drop(self, node: Node) -> list[Node]:
        """Undo all ties of an inode: whom it was tied to."""
        others = list(self._others.pop(node, ()))
        self._count -= len(others)
        for other in others:
            rest = self._others[other]
            rest.pop(node, None)
            if not rest:
                del self._others[other]
        return others

    def closure(self, nodes: Iterable[Node]) -> set[Node]:
        """These, and all that may not be committed without them."""
        whole = set(nodes)
        if self._others:
            work = list(whole)
            while work:
                new = [other for other in self.of(work.pop()) if other not in whole]
                whole.update(new)
                work += new
        return whole

    def __iter__(self) -> Iterator[Node]:
        """All that are tied to something."""
        return iter(self._others)

    def __len__(self) -> int:
        """Pairs."""
        return self._count
