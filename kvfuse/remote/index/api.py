"""The index of a shared volume's blocks: it says hosts that do not hold a slab which of its slots has a block.

This file is the whole contract; every engine passes the one conformance suite in ``tests/remote/index``.

* A key is 16 bytes. It has one entry or none: a *sequence*, by which a later one is known, and a value of bytes.
* ``find``, ``put``, ``replace`` and ``drop`` take any number of keys, each once (else ValueError). Each key is changed
  atomically; keys have nothing to do with each other, and are not ordered. One call is one round trip, or several side
  by side where a server bounds its messages; a change is two where the server cannot say what it changed.
* ``put`` replaces an entry with the same or a lower sequence, and leaves one with a higher sequence. It answers the
  entries that were there. ``drop`` removes an entry if it still has the sequence that is given.
* Within one engine object calls may run concurrently; what a finished ``put``, ``replace`` or ``drop`` did every later
  ``find`` of any host sees, unless a later one changed it.
* ``replace`` puts an entry in the place of one of the expected sequence, whatever its own is, and nowhere else.
* An engine whose request was not answered may send it again. So a call may be done twice: a put may then answer what it
  put itself. A ``replace`` that comes late or again changes nothing, unless the expected entry is there still.
* An ``EngineError`` means that nothing is known of any key of the call: each may have been changed, and may be later.
  Every call has a deadline.
* An index may lose entries, wholly or in part, and stale ones may stay: slots say what is in them. So nothing here is
  durable beyond what the engine gives anyway, and nothing is counted as a volume's room.
* Nobody watches an index.
* ``clear`` removes all entries, and whatever else the engine keeps for them, while no host uses the index. One that
  failed, or was cancelled, has removed a part: it is called again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

KEY_SIZE = 16
"""bytes of a key"""
VALUE_SIZE_MAX = 512
"""bytes of a value, at most"""
SEQUENCE_MAX = (1 << 64) - 1


class Entry(NamedTuple):
    """What is known of one key."""

    key: bytes
    sequence: int
    """0 .. `SEQUENCE_MAX`"""
    value: bytes


class Replacement(NamedTuple):
    """An entry that is to take the place of another one."""

    expected: int
    """sequence of the entry that is there"""
    entry: Entry


@dataclass
class IndexCounters:
    """Calls of an engine, for the metric "round trips per 1,000 blocks"."""

    finds: int = 0
    """calls, as are these"""
    puts: int = 0
    replaces: int = 0
    drops: int = 0
    found: int = 0
    """entries"""
    errors: int = 0
    """calls that raised EngineError"""


class BlockIndex(ABC):
    """An engine; see above. ``aclose`` ends it."""

    def __init__(self) -> None:
        self.counters = IndexCounters()

    @abstractmethod
    async def find(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """The entries of these keys, in their order. EngineError."""

    @abstractmethod
    async def put(self, entries: Sequence[Entry]) -> list[Entry | None]:
        """Put entries, of different keys. Returns what each key had before, in their order. EngineError."""

    @abstractmethod
    async def replace(self, changes: Sequence[Replacement]) -> list[bool]:
        """Put entries in the places of those that are expected. Which of them are there then. EngineError."""

    @abstractmethod
    async def drop(self, entries: Sequence[tuple[bytes, int]]) -> None:
        """Remove the entries of these keys that have these sequences. EngineError."""

    @abstractmethod
    async def clear(self) -> None:
        """Remove all entries of this index, and none of others. It takes as long as it takes. EngineError."""

    @abstractmethod
    async def aclose(self) -> None:
        """End it; calls in flight fail."""
