"""Which of equally large things a small, fast tier keeps: those that are used again and again, as in S3-FIFO.

What is new is on probation, in a tenth of the tier. There it stays, if it was used more than once before it would go;
else its key is remembered for a while, and if it is added again in that time, it stays, too. So things that are used
once, however many, take the places of each other alone. One that stays gets another round for each use, up to three.

Whoever uses a thing only raises ``uses`` of it, in any thread: one that is lost among threads does no harm.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
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


class KeyQueue(Generic[T]):
    """Things by key, in an order. First come *former* ones, which are made when they are asked for: there may be a
    million of them, and most are never asked for."""

    __slots__ = ("_former", "_former_keys", "_make", "things")

    def __init__(self) -> None:
        self.things: OrderedDict[int, T] = OrderedDict()
        """those that are no former ones; what is put here comes last, and was not in the queue"""
        self._former: set[int] = set()
        self._former_keys: list[int] = []
        """in the order in which they go, the last one first; some are not there any more"""
        self._make: Callable[[int], T]

    def begin_with(self, keys: Sequence[int], make: Callable[[int], T]) -> None:
        """Nothing is in it, or was. ``make``: a thing by its key, for as long as that is there."""
        self._former_keys = list(reversed(keys))
        self._former = set(keys)
        self._make = make

    def __len__(self) -> int:
        return len(self._former) + len(self.things)

    def __contains__(self, key: int) -> bool:
        return key in self.things or key in self._former

    def __iter__(self) -> Iterator[int]:
        yield from filter(self._former.__contains__, reversed(self._former_keys))
        yield from self.things

    def first(self) -> tuple[int, T] | None:
        while self._former_keys:
            key = self._former_keys[-1]
            if key in self._former:
                return key, self._make(key)
            self._former_keys.pop()
        return next(iter(self.things.items()), None)

    def replace(self, key: int, thing: T) -> None:
        """The key is there, and stays in its place. What is former is replaced by ``make``."""
        if key in self.things:
            self.things[key] = thing

    def remove(self, key: int) -> bool:
        """False: it is not there."""
        if self.things.pop(key, None) is not None:
            return True
        if key not in self._former:
            return False
        self._former.discard(key)
        return True


class HotOrder(Generic[T]):
    """Things by key, in the order in which they go. ``recent``: keys that are not on probation when they are added."""

    def __init__(self, recent: Recent) -> None:
        self._recent = recent
        self._new = KeyQueue[T]()
        self._proven = KeyQueue[T]()

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
            self._proven.things[key] = thing
            return True
        self._new.things[key] = thing
        return False

    def begin_with(self, new: Sequence[int], proven: Sequence[int], make: Callable[[int], T]) -> None:
        """The keys of an order before this one, on probation and not, each in their order. Nothing was added yet.

        ``make``: the thing of a key, whatever it means by then.
        """
        self._new.begin_with(new, make)
        self._proven.begin_with(proven, make)

    def __contains__(self, key: int) -> bool:
        return key in self._new or key in self._proven

    def is_proven(self, key: int) -> bool:
        """It is not on probation."""
        return key in self._proven

    def replace(self, key: int, thing: T) -> None:
        """The key is there; from now on it means this."""
        (self._new if key in self._new else self._proven).replace(key, thing)

    def remove(self, key: int) -> None:
        """The key is there."""
        if not self._new.remove(key) and not self._proven.remove(key):
            raise KeyError(key)

    def next_to_go(self) -> int | None:
        """The key of what goes next, which is still there; None: nothing is there."""
        for _ in range(LOOKS_MAX):
            if len(self._new) and (not len(self._proven) or len(self._new) > PROBATION_SHARE * len(self)):
                first = self._new.first()
                assert first is not None
                key, thing = first
                if thing.uses <= 1:
                    return key
                self._new.remove(key)
                self._proven.things[key] = thing
                thing.uses = 0
            elif (first := self._proven.first()) is not None:
                key, thing = first
                if not thing.uses:
                    return key
                self._proven.remove(key)
                self._proven.things[key] = thing
                thing.uses -= 1
        return next(iter(self._proven), None) if len(self._proven) else next(iter(self._new), None)
