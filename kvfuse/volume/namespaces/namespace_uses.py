"""What records say of the use of namespaces: this client's `u` records, and those of other hosts.

A record counts a namespace without those in it: files, and bytes of slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from kvfuse.slab.allocator import Slot
from kvfuse.volume.store import schema
from kvfuse.volume.store.schema import Counts

NOTHING = Counts(0, 0)


class NamespaceUse(NamedTuple):
    """Of a namespace and those in it."""

    size: int
    """bytes of slots"""
    files: int


NO_USE = NamespaceUse(0, 0)


def changes_of(born: Iterable[Slot], dead: Iterable[Slot], files: Mapping[int, int]) -> dict[int, Counts]:
    """Namespace -> how a commit changes its use, in which slots become durable or are freed.

    ``files``: namespace -> files that it adds, less those that it removes.
    """
    changes = {number: Counts(count, 0) for number, count in files.items() if number}
    for slots, sign in ((born, 1), (dead, -1)):
        for _, size, owner in slots:
            if owner:
                changes[owner] = changes.get(owner, NOTHING).add(Counts(0, sign * size))
    return {number: change for number, change in changes.items() if change != NOTHING}


class OwnUses:
    """This client's records. ``is_there``: a namespace has records."""

    def __init__(self, is_there: Callable[[int], bool]) -> None:
        self._is_there = is_there
        self._stored: dict[int, Counts] = {}

    def load(self, number: int, counts: Counts) -> None:
        self._stored[number] = counts

    def forget(self, number: int) -> None:
        self._stored.pop(number, None)

    def __contains__(self, number: int) -> bool:
        """There is a record of this namespace."""
        return number in self._stored

    def spaces(self) -> list[int]:
        """Namespaces that have records."""
        return list(self._stored)

    def values(self, changes: Mapping[int, Counts]) -> dict[int, bytes]:
        """Namespace -> value of its record after these changes. Of one that is gone there is none."""
        return {number: schema.encode_counts(*counts) for number, counts in self._after(changes).items()}

    def stored(self, changes: Mapping[int, Counts]) -> None:
        """The commit of these changes is in the store."""
        self._stored.update(self._after(changes))

    def _after(self, changes: Mapping[int, Counts]) -> dict[int, Counts]:
        there = filter(self._is_there, changes)
        return {number: self._stored.get(number, NOTHING).add(changes[number]) for number in there}


class NamespaceUsesElsewhere:
    """Those of other clients, as this one has heard. Client 0 stands for all that are gone."""

    def __init__(self) -> None:
        self._stored: dict[int, dict[int, Counts]] = {}
        """namespace -> client -> its use"""

    def put(self, number: int, client: int, counts: Counts | None) -> NamespaceUse:
        """A record was put, or removed (None). Returns how much more it says."""
        clients = self._stored.setdefault(number, {})
        before, after = clients.pop(client, NOTHING), counts or NOTHING
        if counts is not None:
            clients[client] = counts
        elif not clients:
            del self._stored[number]
        return NamespaceUse((after.size or 0) - (before.size or 0), after.inodes - before.inodes)

    def forget(self, number: int) -> None:
        self._stored.pop(number, None)

    def use(self, number: int) -> NamespaceUse:
        """What all have of a namespace, without those in it."""
        clients = self._stored.get(number, {}).values()
        return NamespaceUse(sum([counts.size or 0 for counts in clients]), sum([counts.inodes for counts in clients]))

    def of(self, number: int) -> dict[int, Counts]:
        """Client -> its use of a namespace, without those in it."""
        return self._stored.get(number, {})

    def spaces(self, client: int) -> list[int]:
        """Namespaces of which a client has records."""
        return [number for number, clients in self._stored.items() if client in clients]

    def clients(self) -> set[int]:
        """Clients that have records, but for 0."""
        return {client for clients in self._stored.values() for client in clients if client}
