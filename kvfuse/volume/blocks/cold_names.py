"""What a host of a shared volume knows, for a second, of blocks that the index says are in the bucket.

``over``: a block that was put or removed here hides older ones in the bucket, until the index knows that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvfuse.remote.index.api import Entry
from kvfuse.volume.cold.cold_entries import FLOOR_KEY, ColdEntry, decode

FRESH_SECONDS = 1.0
"""for which an answer of the index counts"""
KNOWN_MAX = 1 << 16


@dataclass
class ColdNames:
    """Event loop only. Times are trio's."""

    are_announced: Callable[[], bool] = lambda: False
    """some host of the volume has blocks go to a bucket"""
    is_served: bool = False
    """this host reads such blocks"""
    floor: int = 0
    """sequence up to which none of them is served"""
    over: dict[bytes, int] = field(default_factory=dict)
    """key -> up to which sequence blocks in the bucket are dead, and the index does not know it yet"""
    kept: dict[bytes, int] = field(default_factory=dict)
    """key -> sequence of a block that has left its slot, and whose entry stays"""
    _known: dict[bytes, tuple[ColdEntry, float]] = field(default_factory=dict)

    @property
    def is_used(self) -> bool:
        """The index may have such entries."""
        return self.is_served or self.are_announced()

    @property
    def asked_beside(self) -> list[bytes]:
        """Keys that are asked for with any others: see `take_floor`."""
        return [FLOOR_KEY] if self.is_served else []

    def take_floor(self, found: list[Entry | None]) -> None:
        """``found``: answers of the index, of which those to `asked_beside` are the last; they are removed."""
        if self.is_served:
            entry = found.pop()
            self.floor = max(self.floor, entry.sequence) if entry is not None else self.floor

    def learn(self, entry: Entry, asked: float) -> None:
        """An entry of a block in the bucket is there, as the index said when it was asked."""
        cold = decode(entry)
        if cold is None:
            self.forget(entry.key)
            return
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        self._known[entry.key] = cold, asked

    def forget(self, key: bytes) -> None:
        self._known.pop(key, None)

    def is_fresh(self, key: bytes, now: float) -> bool:
        """The index was asked for the key lately, and had such a block."""
        found = self._known.get(key)
        return found is not None and found[1] > now - FRESH_SECONDS

    def find(self, key: bytes, now: float) -> ColdEntry | None:
        """The block of a key that the index had just now; None: none that counts."""
        found = self._known.get(key)
        if found is None or found[1] <= now - FRESH_SECONDS:
            return None
        return found[0] if self.counts(found[0]) else None

    def counts(self, cold: ColdEntry) -> bool:
        """Nothing newer is known to be in its place."""
        return cold.sequence > max(self.floor, self.over.get(cold.key, 0))

    def hide(self, key: bytes, sequence: int) -> None:
        """Blocks in the bucket are dead, up to a sequence. The index is to be told of that."""
        self.over[key] = max(self.over.get(key, 0), sequence)

    def told(self, pairs: Sequence[tuple[bytes, int]]) -> None:
        """The index has no block in the bucket of these keys up to these sequences."""
        for key, sequence in pairs:
            if self.over.get(key, sequence + 1) <= sequence:
                del self.over[key]
