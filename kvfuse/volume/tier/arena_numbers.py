"""Numbers of arenas: each is given once, and nobody can guess which ones are in use.

They are the images of 1, 2, 3 ... under a secret permutation of all numbers of 32 bits, as completions and indexes
have no room for more. So none comes twice, though nobody remembers which ones were given. Where a keeper outlives the
daemon it has the permutation's key, and the number up to which images were *announced*: the next daemon goes on there.

Former versions gave 1, 2, 3 ... themselves, and an upgrade may lead back to one, and forth again. They read the first
word of what is kept, and go on above it. So that word is theirs alone, and the lower half of all numbers, too.
"""

from __future__ import annotations

import os
import struct
from hashlib import blake2b

from kvfuse.kept.keeper import Keeper

ANNOUNCED_AT_ONCE = 1024
NAME = "tier/numbers"
_FORM = struct.Struct("<QQ16s")
"""numbers up to this one were announced by a former version; up to where images are announced; the key"""
_FORMER_FORM = struct.Struct("<Q")
"""of versions that gave 1, 2, 3 ...: the last number that was announced"""
_ROUNDS = 8
_LOWER_HALF = (1 << 31) - 1


class ArenaNumbers:
    """Of one tier. `announce_more` is for the event loop alone."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._count = self._floor = 0
        self._key = os.urandom(16)
        self._next = 0
        """to be taken next; 0: not known yet"""
        self._end = (1 << 32) - 1
        if keeper.outlives:
            former = keeper.take(NAME)
            content = former.content if former is not None else b""
            if len(content) == _FORM.size:
                self._floor, self._count, self._key = _FORM.unpack(content)
            elif len(content) == _FORMER_FORM.size:
                (self._floor,) = _FORMER_FORM.unpack(content)
            self._announce()

    @property
    def has_more(self) -> bool:
        """There is a number to take. False: the event loop has to announce more first."""
        while not self._next and self._count < self._end:
            self._count += 1
            number = _permuted(self._count, self._key)
            self._next = number if number > max(self._floor, _LOWER_HALF) else 0
        return self._next != 0

    def take(self) -> int:
        """A number above 0 that was never given before. There is one (`has_more`)."""
        assert self.has_more
        number, self._next = self._next, 0
        return number

    def announce_more(self) -> None:
        """Tell the keeper, before those that it knows of run out."""
        if self._keeper.outlives and self._count + ANNOUNCED_AT_ONCE // 2 > self._end:
            self._announce()

    def _announce(self) -> None:
        self._end = min(self._count + ANNOUNCED_AT_ONCE, (1 << 32) - 1)
        self._keeper.keep(NAME, _FORM.pack(self._floor, self._end, self._key))


def _permuted(number: int, key: bytes) -> int:
    """The image of a number of 32 bits: a Feistel network, each round a keyed hash of one half."""
    left, right = number >> 16, number & 0xFFFF
    for turn in range(_ROUNDS):
        mixed = blake2b(right.to_bytes(2, "little"), key=key, digest_size=2, person=b"kvf arena %d" % turn)
        left, right = right, left ^ int.from_bytes(mixed.digest(), "little")
    return left << 16 | right
