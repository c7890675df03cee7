"""What the last requests said about blocks that the cache does not have: their place in a chain, and its past."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

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
        follows = known > 1 or (known == len(keys) == 1)
        if follows:
            self._pace.add(gaps[known - 1])
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
