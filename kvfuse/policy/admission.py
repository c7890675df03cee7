"""Admission: which absent blocks a full cache stores. Strategies, each of which goes with any eviction."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvfuse.policy.chains import Note

ADMIT_AGE = 240.0
"""seconds: chains that begin are stored while victims have not been used for longer than this on the average"""

_AGE_WEIGHT = 0.002


class VictimAge:
    """Moving mean of the seconds between a victim's last use and its eviction; infinite before the first."""

    def __init__(self) -> None:
        self.mean = float("inf")

    def add(self, age: float) -> None:
        known = self.mean != float("inf")
        self.mean = self.mean + _AGE_WEIGHT * (age - self.mean) if known else age


class Admission(ABC):
    """Decides for one block at a time. Where there is room without a victim nobody asks it."""

    needs_seen: bool
    """uses ``Note.was_seen`` or ``Note.follows``"""

    @abstractmethod
    def admits(self, note: Note) -> bool:
        """Whether the block is worth a victim."""


class AdmitAll(Admission):
    """Every block is stored."""

    needs_seen = False

    def __init__(self, age: VictimAge) -> None:
        pass

    def admits(self, note: Note) -> bool:
        return True


class AdmitSecondTouch(Admission):
    """A block is stored when it is asked for the second time: most writes are saved, and some hits lost."""

    needs_seen = True

    def __init__(self, age: VictimAge) -> None:
        pass

    def admits(self, note: Note) -> bool:
        return note.was_seen


class AdmitAdaptive(Admission):
    """Chains that go on are stored; chains that begin only while the cache is large enough to keep them until they do.

    The mean age of victims measures that: below ``admit_age`` seconds most chains that begin would be evicted before
    their second request, and evict others. Their first block is stored anyway: all prompts may share it.
    """

    needs_seen = True

    def __init__(self, age: VictimAge, admit_age: float = ADMIT_AGE) -> None:
        self._age = age
        self._admit_age = admit_age

    def admits(self, note: Note) -> bool:
        return note.follows or note.was_seen or note.is_root or self._age.mean > self._admit_age
