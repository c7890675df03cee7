"""Changes of a few records that somebody waits for: all of them happen, if the records are as expected, or none.

Who changes names where others change them too reads the records, decides, and hands a `Transaction` to the journal
(`Journal.transact`). Many that wait share one commit, with each other and with the journal's batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from kvfuse.volume.store.schema import Counts


def _nothing(*version: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Transaction:
    """Keys of ``puts`` and ``deletes`` are disjoint. A transaction that only expects something is a question."""

    expect: Mapping[bytes, int]
    """key -> version it must have; `ABSENT` for a key that must not be there"""
    puts: Mapping[bytes, bytes] = field(default_factory=dict)
    deletes: Collection[bytes] = ()
    applied: Callable[[int], None] = _nothing
    """is called with the version of the puts, in the step in which it is known that they are in the store: before
    anything else runs. Also when who waited for it was cancelled, or was told that the outcome is unknown"""
    files: int = 0
    """inodes that it makes, less those that it removes"""
    size: int = 0
    """bytes that names, inodes and attributes weigh more after it"""
    uses: Mapping[int, Counts] = field(default_factory=dict)
    """namespace -> how it changes this client's use of it"""
    refused: Callable[[], None] = _nothing
    """is called instead of ``applied``, when it is known that it will never happen"""

    @property
    def changes(self) -> set[bytes]:
        """Keys that it puts or deletes."""
        return {*self.puts, *self.deletes}

    @property
    def operation_count(self) -> int:
        return len(self.expect) + len(self.puts) + len(self.deletes)

    @property
    def byte_count(self) -> int:
        """Bytes of keys and values, as limits of commits count them."""
        return sum(map(len, [*self.expect, *self.puts, *self.puts.values(), *self.deletes]))
