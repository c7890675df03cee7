"""The contract of a policy: what a cache of blocks asks it, and tells it.

A policy keeps *books* of the blocks that the cache has, and never touches a block. A key is an int of 64 bits, the
fingerprint of a block's name; a size is in bytes; a time is in seconds of any clock that the caller reads, and never
runs backwards. Nothing here waits, reads a clock or does I/O; no call is safe beside another in a second thread.

A *chain* is a prompt cut into blocks, its root first. A block is of use only where all blocks before it in its chain
are there, so of blocks that were used together the deepest goes first. Batches are chains, or the part of one that the
caller knows: give as much of it in one call as there is, since the policy learns from it which block follows which.

The life of a block::

    used (asked for) -> admits -> added -> used* -> victims -> gone
                                    |                 |-> keep (it is open) -> on the books again
                                    '-> removed

An answer of ``victims`` takes the blocks off the books. For each of them the caller either removes the block, and says
nothing more, or calls ``keep``. A key that is kept is not offered again for ``HOLD_SECONDS``, so a caller that repeats
``victims`` until it has enough comes to an end, also where every block is open.

Each block has a *tag*, a number of 64 bits by which the caller finds it: the policy gives it back with the victim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple

HOLD_SECONDS = 2.0
"""``victims`` does not offer a block again so soon after the caller refused to remove it"""


class Victim(NamedTuple):
    """A block that goes."""

    key: int
    size: int
    tag: int
    age: float
    """seconds since its last use"""
    born: float
    """when it was stored"""


class Policy(ABC):
    """The books of one cache: see the module for the life of a block."""

    @abstractmethod
    def admits(self, keys: Sequence[int], now: float, has_room: bool) -> list[bool]:
        """Which of these absent blocks are worth storing now: one answer for each key, in their order.

        ``has_room``: the cache can store them without a victim. Changes no books: the caller may store fewer blocks,
        or others. Keys that nobody asked for count as asked for now. Good answers need a call of ``used`` with the
        whole chain before.
        """

    @abstractmethod
    def added(self, key: int, size: int, now: float, tag: int = 0, born: float | None = None) -> None:
        """The cache has stored a block. For a key that is on the books already: its size is ``size`` from now on.

        ``now``: of its last use. ``born``: when it was stored, if that is longer ago.

        ValueError if ``size`` is not positive.
        """

    @abstractmethod
    def used(self, keys: Sequence[int], now: float) -> None:
        """A caller read or looked for the blocks of a chain; keys that the cache does not have belong in it, too."""

    @abstractmethod
    def removed(self, key: int) -> None:
        """The cache has lost a block otherwise than by ``victims``. A key that is not on the books is ignored."""

    @abstractmethod
    def victims(self, size: int, now: float) -> list[Victim]:
        """The blocks that go next, at least ``size`` bytes of them together, or all that may go; off the books.

        No key is in two answers, unless it was kept or added in between.
        """

    @abstractmethod
    def expired(self, before: float, now: float) -> list[Victim]:
        """The blocks that were stored before that time, in no order; off the books, as ``victims`` are."""

    @abstractmethod
    def by_tag(self, mask: int) -> dict[int, tuple[int, float]]:
        """These bits of tags -> (bytes, mean time of the last use) of the blocks that have them."""

    @abstractmethod
    def tagged(self, mask: int, values: Collection[int], now: float) -> list[Victim]:
        """The blocks of whose tags these bits are one of ``values``, in no order; off the books, as ``victims`` are."""

    @abstractmethod
    def keep(self, victim: Victim, now: float) -> None:
        """The caller could not remove a victim (open, being written): it is on the books again, as just used.

        No answer of ``victims`` has it before ``HOLD_SECONDS`` have passed. The policy learns nothing from it.
        """

    @abstractmethod
    def last_use(self, key: int) -> float | None:
        """When a block was last used or stored; None where it is not on the books."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes of all blocks on the books."""

    @abstractmethod
    def __len__(self) -> int:
        """Blocks on the books."""

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether the block is on the books."""
