"""What several hosts did with names of one folder, and saw, judged: could one host have done all that, in some order?

Each call has a number at its begin and one at its end. The history is sound if the calls can be put in an order in
which each has its effect and its answer at one moment between both (Wing and Gong). A call that failed may have had its
effect at any moment after its begin, or never. Listings are no single step: they have each name that existed all the
time, and none that never did.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

Names = frozenset[tuple[bytes, int]]
"""name -> inode, of one moment"""


@dataclass(eq=False)
class Step:
    """One call. ``kind``, and its answer: make (inode; None: the name exists), look (inode, or None), unlink and rename
    (the name existed), list (names). That of one that failed is ``FAILED``."""

    host: int
    kind: str
    name: bytes
    to: bytes = b""
    began: int = 0
    ended: float = inf
    answer: Any = None


FAILED = object()


@dataclass
class History:
    """The calls, in the order in which they began."""

    steps: list[Step] = field(default_factory=list)
    _clock: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def begin(self, host: int, kind: str, name: bytes, to: bytes = b"") -> Step:
        step = Step(host, kind, name, to, next(self._clock), answer=FAILED)
        self.steps.append(step)
        return step

    def end(self, step: Step, answer: Any) -> None:
        step.ended, step.answer = next(self._clock), answer

    def is_sound(self, last: Mapping[bytes, int]) -> bool:
        """It can be put in an order that ends with these names."""
        return _find_order([step for step in self.steps if step.kind != "list"], frozenset(last.items()))

    def check_listings(self) -> None:
        changes = [step for step in self.steps if step.kind in ("make", "unlink", "rename")]
        for listing in self.steps:
            if listing.kind != "list" or listing.answer is FAILED:
                continue
            before = [step for step in changes if step.began < listing.ended]
            touched = {name for step in before for name in (step.name, step.to)}
            assert set(listing.answer) <= touched, "a name that nobody gave"
            for step in changes:
                made = step.kind == "make" and step.answer not in (None, FAILED)
                if made and step.ended < listing.began and not _is_touched(step.name, step, changes, listing.ended):
                    assert step.name in listing.answer, (step, listing)


def _is_touched(name: bytes, made: Step, changes: Iterable[Step], until: float) -> bool:
    return any(
        step is not made and name in (step.name, step.to) and step.ended > made.began and step.began < until
        for step in changes
    )


def _apply(step: Step, names: Names) -> Names | None:
    """The names after the call. None: its answer does not fit them."""
    there = dict(names)
    found = there.get(step.name)
    failed = step.answer is FAILED
    if step.kind == "make":
        if failed:
            return None if found is not None else names | {(step.name, -step.began)}
        if step.answer is None:
            return names if found is not None else None
        return None if found is not None else names | {(step.name, step.answer)}
    if step.kind == "look":
        return names if found == step.answer or (found is not None and found < 0 and step.answer) else None
    if not failed and step.answer != (found is not None):
        return None
    if found is None:
        return names
    del there[step.name]
    if step.kind == "rename":
        there[step.to] = found
    return frozenset(there.items())


def _find_order(steps: list[Step], last: Names) -> bool:
    """Depth first. Nobody knows the inodes of makes that failed: they have numbers below 0."""
    seen: set[tuple[frozenset[int], Names]] = set()
    work: list[tuple[frozenset[int], Names]] = [(frozenset(range(len(steps))), frozenset())]
    while work:
        left, names = work.pop()
        if all(steps[one].answer is FAILED for one in left) and _fits(names, last):
            return True
        if (left, names) in seen:
            continue
        seen.add((left, names))
        first_end = min((steps[one].ended for one in left), default=inf)
        for one in left:
            step = steps[one]
            if step.began > first_end or (step.kind == "look" and step.answer is FAILED):
                continue
            after = _apply(step, names)
            if after is not None:
                work.append((left - {one}, after))
    return False


def _fits(names: Names, last: Names) -> bool:
    there, wanted = dict(names), dict(last)
    return there.keys() == wanted.keys() and all(ino in (wanted[name],) or ino < 0 for name, ino in there.items())
