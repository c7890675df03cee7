"""What the last requests said about blocks that the cache does not have: their place in a chain, and its past."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvfuse.policy.pace import Pace
from kvfuse.policy.seen import NEVER, SeenKeys

NOTES_MAX = 65_536
"""absent blocks that were asked for and may be stored soon; beyond them the oldest half is forgotten"""


class Note(NamedTuple):
    """An absent block in the chain of the last request that asked for it."""

    parent: int | None
    """key of the block before it; None for the first of a batch"""
    is_root: bool
    """first of several"""
    was_seen: bool
    """asked for before that request"""
    follows: bool
    """its chain was begun by an earlier request: more than a first block in common, which all prompts may share"""


UNKNOWN = Note(None, False, False, False)


def judge(known: int, length: int, last_gap: int, pace: Pace) -> bool:
    """Whether a chain follows an earlier one: of ``length`` blocks the first ``known`` were asked for before.

    ``last_gap``: seconds since the last of these was. ``pace`` learns of it.
    """
    follows = known > 1 or (known == length == 1)
    if follows:
        pace.add(last_gap)
    return follows


class Chains:
    """Notes of absent blocks, and the keys that were ever asked for."""

    def __init__(self, seen: SeenKeys | None, pace: Pace, notes_max: int = NOTES_MAX) -> None:
        """Without ``seen``, which is for those that need it alone, no chain follows another."""
        self._seen = seen
        self._pace = pace
        self._young: dict[int, Note] = {}
        self._old: dict[int, Note] = {}
        self._generation_max = max(1, notes_max // 2)

    def ask(self, keys: Sequence[int], now: float, present: Container[int]) -> bool:
        """Note the absent ones of a chain; whether the chain follows an earlier one."""
        gaps = self._seen.ask(keys, now) if self._seen and keys else [NEVER] * len(keys)
        known = gaps.index(NEVER) if NEVER in gaps else len(gaps)
        follows = judge(known, len(keys), gaps[known - 1] if known else NEVER, self._pace)
        for depth, key in enumerate(keys):
            if key not in present:
                parent = keys[depth - 1] if depth else None
                self._put(key, Note(parent, not depth and len(keys) > 1, gaps[depth] != NEVER, follows))
        return follows

    def notes(self, keys: Sequence[int], now: float, present: Container[int]) -> list[Note]:
        """Of each key; keys that nobody asked for are noted as a chain of their own."""
        if any(key not in self._young and key not in self._old for key in keys):
            self.ask([key for key in keys if self._get(key) is None], now, present)
        return [self._get(key) or UNKNOWN for key in keys]

    def take(self, key: int) -> Note:
        """The note of a key that is stored now."""
        old = self._old.pop(key, UNKNOWN)
        return self._young.pop(key, old)

    def _get(self, key: int) -> Note | None:
        return self._young.get(key) or self._old.get(key)

    def _put(self, key: int, note: Note) -> None:
        if len(self._young) >= self._generation_max and key not in self._young:
            self._old, self._young = self._young, {}
        self._young[key] = note


FOLLOWS, IS_ROOT, WAS_SEEN = 1, 2, 4
"""bits of a word of `WordNotes`"""
MOMENT_SHIFT = 3


class WordNotes:
    """What `Chains` knows, for columns of keys: each note is a word, of three bits and the *moment* of the request.

    A moment is a number that the caller gives the first block of a chain; each block after it has the one before. The
    word 0 is no note.
    """

    def __init__(self, seen: SeenKeys | None, pace: Pace, notes_max: int = NOTES_MAX) -> None:
        """Without ``seen``, which is for those that need it alone, no chain follows another."""
        self._seen = seen
        self._pace = pace
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._generation_max = max(1, notes_max // 2)

    def ask(self, keys: NDArray[np.uint64], absent: NDArray[np.intp], moment: int, now: float) -> bool:
        """Note the ``absent`` places of a chain; whether the chain follows an earlier one."""
        count = len(keys)
        was_seen, follows = np.zeros(count, dtype=np.bool_), False
        if self._seen is not None and count:
            gaps = self._seen.ask_column(keys, now)
            was_seen = gaps != NEVER
            known = count if was_seen.all() else int(was_seen.argmin())
            follows = judge(known, count, int(gaps[known - 1]) if known else NEVER, self._pace)
        if len(absent):
            words = ((moment - absent) << MOMENT_SHIFT) | (was_seen[absent] * WAS_SEEN | follows)
            if absent[0] == 0 and count > 1:
                words[0] |= IS_ROOT
            self._put(dict(zip(keys[absent].tolist(), words.tolist(), strict=True)))
        return follows

    def ask_one(self, key: int, is_absent: bool, moment: int, now: float) -> bool:
        """``ask`` for a chain of one key."""
        gap = self._seen.ask_one(key, now) if self._seen is not None else NEVER
        follows = gap != NEVER
        if follows:
            self._pace.add(gap)
        if is_absent:
            self._put({key: moment << MOMENT_SHIFT | (WAS_SEEN | FOLLOWS if follows else 0)})
        return follows

    def words(self, keys: NDArray[np.uint64], moment: int, now: float) -> NDArray[np.int64]:
        """The note of each key; keys that nobody asked for are noted as a chain of their own."""
        found = self._get(keys)
        if unknown := found.count(0):
            places = np.flatnonzero(np.array(found, dtype=np.int64) == 0)
            self.ask(keys[places], np.arange(unknown), moment, now)
            found = self._get(keys)
        return np.array(found, dtype=np.int64)

    def take(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The note of each key, which is stored now; 0: there is none."""
        numbers = keys.tolist()
        words = np.array(list(map(self._young.pop, numbers, repeat(0))), dtype=np.int64)
        if self._old:
            old = np.array(list(map(self._old.pop, numbers, repeat(0))), dtype=np.int64)
            words = np.where(words, words, old)
        return words

    def take_one(self, key: int) -> int:
        old = self._old.pop(key, 0)
        return self._young.pop(key, old)

    def _get(self, keys: NDArray[np.uint64]) -> list[int]:
        young, old = self._young, self._old
        return [young.get(key) or old.get(key, 0) for key in keys.tolist()]

    def _put(self, words: dict[int, int]) -> None:
        if len(self._young) + len(words) > self._generation_max:
            self._old, self._young = self._young, {}
        self._young.update(words)
