"""Admission: which absent blocks a full cache stores. Strategies, each of which goes with any eviction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvfuse.policy.pace import Pace

_AGE_WEIGHT = 0.002

Flag = TypeVar("Flag", bool, NDArray[np.bool_])
"""of one block, or of each of a column of blocks"""


class VictimAge:
    """Moving mean of the seconds between a victim's last use and its eviction; infinite before the first."""

    def __init__(self) -> None:
        self.mean = float("inf")

    def add(self, age: float) -> None:
        known = self.mean != float("inf")
        self.mean = self.mean + _AGE_WEIGHT * (age - self.mean) if known else age

    def add_column(self, ages: NDArray[np.float64]) -> None:
        """As if each were added, in their order."""
        if not len(ages):
            return
        before = self.mean if self.mean != float("inf") else float(ages[0])
        left = (1 - _AGE_WEIGHT) ** np.arange(len(ages), -1, -1.0)
        self.mean = float(left[0] * before + _AGE_WEIGHT * np.dot(left[1:], ages))


class Admission(ABC):
    """Decides for a block, or for a column of them. Where there is room without a victim nobody asks it.

    It goes by what a `chains.Note` says: whether a block is the first of its chain, was asked for before, and whether
    the chain follows an earlier one.
    """

    needs_seen: bool
    """uses ``was_seen`` or ``follows``"""

    @abstractmethod
    def admits(self, is_root: Flag, was_seen: Flag, follows: Flag) -> Flag:
        """Whether the block is worth a victim."""


class AdmitAll(Admission):
    """Every block is stored."""

    needs_seen = False

    def __init__(self, age: VictimAge, pace: Pace) -> None:
        pass

    def admits(self, is_root: Flag, was_seen: Flag, follows: Flag) -> Flag:
        return was_seen | True


class AdmitSecondTouch(Admission):
    """A block is stored when it is asked for the second time: most writes are saved, and some hits lost."""

    needs_seen = True

    def __init__(self, age: VictimAge, pace: Pace) -> None:
        pass

    def admits(self, is_root: Flag, was_seen: Flag, follows: Flag) -> Flag:
        return was_seen


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

    def admits(self, is_root: Flag, was_seen: Flag, follows: Flag) -> Flag:
        goes_on, begins = self._age.mean > self._pace.continue_age, self._age.mean > self._pace.begin_age
        return was_seen | is_root | (follows & goes_on) | ((follows ^ True) & begins)
