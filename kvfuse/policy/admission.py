"""Admission: which absent blocks a full cache stores. Strategies, each of which goes with any eviction."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvfuse.policy.chains import Note
from kvfuse.policy.pace import Pace

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

    def __init__(self, age: VictimAge, pace: Pace) -> None:
        pass

    def admits(self, note: Note) -> bool:
        return True


class AdmitSecondTouch(Admission):
    """A block is stored when it is asked for the second time: most writes are saved, and some hits lost."""

    needs_seen = True

    def __init__(self, age: VictimAge, pace: Pace) -> None:
        pass

    def admits(self, note: Note) -> bool:
        return note.was_seen


class AdmitAdaptive(Admission):
    """The fewer seconds a block stays, the more a chain must have shown before its blocks are stored.

    The mean age of victims says how long a block stays without use. Below ``Pace.begin_age`` most chains that begin
    would be evicted before their second request, and would evict others: chains that go on are stored alone. Below
    ``Pace.continue_age`` the same is true of what these append: blocks are stored when they are asked for again. The
    first block of a chain is always stored: all prompts may share it.
    """

    needs_seen = True

    def __init__(self, age: VictimAge, pace: Pace) -> None:
        self._age = age
        self._pace = pace

    def admits(self, note: Note) -> bool:
        if note.was_seen or note.is_root:
            return True
        return self._age.mean > (self._pace.continue_age if note.follows else self._pace.begin_age)
