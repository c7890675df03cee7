"""What is told of changes that the record store does not have yet, for the daemon after this one: see `kept_unstored`.

Whoever changes something in memory marks it here. Event loop only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from kvfuse.kept.keeper import Keeper


class Unstored(Protocol):
    """``node`` and ``directory`` are `Node`, which knows its own."""

    is_on: bool
    """what is marked is kept"""

    @property
    def size(self) -> int:
        """Bytes of files that are kept."""
        ...

    @property
    def used_share(self) -> float:
        """Part of the room for bytes of files that is in use: until they are in slots, and `seal` was called."""
        ...

    def begin(self, keeper: Keeper, name: str, content: bytes) -> None:
        """What is marked so far, and all from now on, is what the next daemon finds under this name."""

    def node(self, node: Any) -> None:
        """The inode changed."""

    def chunk(self, node: Any, index: int) -> None:
        """A chunk of the inode is about to change, or did."""

    def name(self, parent: int, name: bytes) -> None:
        """What the name means changed."""

    def times(self, directory: Any) -> None:
        """Times of a directory changed."""

    def attribute(self, key: bytes, value: bytes | None) -> None:
        """The record of an attribute is to have this value; None: to be deleted."""

    def no_attributes(self, keys: Iterable[bytes]) -> None:
        """Changes of these are not pending any more."""

    def seal(self) -> None:
        """Keep all that changed: before it is answered for, or committed."""

    def settled(
        self,
        nodes: Iterable[Any],
        names: Iterable[tuple[int, bytes]],
        times: Iterable[Any],
        attributes: Iterable[bytes],
    ) -> None:
        """A commit with these is in the store. Keeps what is marked, too."""

    def give_up(self) -> None:
        """Nothing is kept any more, which whoever has changed files open hears from a daemon after this one."""

    def close(self, *, is_stored: bool) -> None:
        """Keep nothing more; what is kept stays with the keeper. ``is_stored``: all but files without names."""
