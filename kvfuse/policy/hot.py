"""Which of equally large things a small, fast tier keeps: those that are used again and again, as in S3-FIFO.

What is new is on probation, in a tenth of the tier. There it stays, if it was used more than once before it would go;
else its key is remembered for a while, and if it is added again in that time, it stays, too. So things that are used
once, however many, take the places of each other alone. One that stays gets another round for each use, up to three.

Whoever uses a thing only raises ``uses`` of it, in any thread: one that is lost among threads does no harm.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar

PROBATION_SHARE = 0.1
USES_MAX = 3
LOOKS_MAX = 64
"""Things that are spared for one that goes: so no call takes long, whatever is used."""
RECENT_MIN = 1024


class Used(Protocol):
    """What is kept."""

    uses: int
    """since it was added, or got its last round; up to `USES_MAX`"""


class Recent:
    """Keys that were asked for lately, and are not kept; the oldest are forgotten first."""

    def __init__(self) -> None:
        self.keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, key: int, kept_count: int) -> None:
        """As many are remembered as there are things, and not less than `RECENT_MIN`."""
        self.keys[key] = None
        self.keys.move_to_end(key)
        while len(self.keys) > max(RECENT_MIN, kept_count):
            self.keys.popitem(last=False)

    def __contains__(self, key: int) -> bool:
        return key in self.keys


T = TypeVar("T", bound=Used)


class HotOrder(Generic[T]):
    """Things by key, in the order in which they go. ``recent``: keys that are not on probation when they are added."""

    def __init__(self, recent: Recent) -> None:
        self._recent = recent
        self._new: OrderedDict[int, T] = OrderedDict()
        self._proven: OrderedDict[int, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._new) + len(self._proven)

    def __iter__(self) -> Iterator[int]:
        yield from self._new
        yield from self._proven

    def add(self, key: int, thing: T) -> bool:
        """The key is not there. True: it is not on probation."""
        thing.uses = 0
        if key in self._recent.keys:
            del self._recent.keys[key]
            self._proven[key] = thing
            return True
        self._new[key] = thing
        return False

    def add_former(self, new: Mapping[int, T], proven: Mapping[int, T]) -> None:
        """Things of an order before this one, on probation and not, each in their order. The keys are not there."""
        self._new.update(new)
        self._proven.update(proven)

    def __contains__(self, key: int) -> bool:
        return key in self._new or key in self._proven

    def is_proven(self, key: int) -> bool:
        """It is not on probation."""
        return key in self._proven

    def replace(self, key: int, thing: T) -> None:
        """The key is there; from now on it means this."""
        (self._new if key in self._new else self._proven)[key] = thing

    def remove(self, key: int) -> None:
        """The key is there."""
        if self._new.pop(key, None) is None:
            del self._proven[key]

    def next_to_go(self) -> int | None:
        """The key of what goes next, which is still there; None: nothing is there."""
        for _ in range(LOOKS_MAX):
            if self._new and (not self._proven or len(self._new) > PROBATION_SHARE * len(self)):
                key, thing = next(iter(self._new.items()))
                if thing.uses <= 1:
                    return key
                del self._new[key]
                self._proven[key] = thing
                thing.uses = 0
            elif self._proven:
                key, thing = next(iter(self._proven.items()))
                if not thing.uses:
                    return key
                self._proven.move_to_end(key)
                thing.uses -= 1
        return next(iter(self._proven or self._new), None)
