"""Bytes that follow from a key, so that a wrong block is always noticed.

A block is its key's random pattern of 1,024 words, repeated, with a different multiple of an odd constant added to
each repetition. Bytes of another block, of another place in the same block, an older state, zeros: all
differ. Making and comparing run at memory speed, so what is measured is the storage.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_PATTERN_WORDS = 1024
_WORD_SIZE = 8
_STEP = np.uint64(0x9E3779B97F4A7C15)

KEY_SIZE = 16


def block_key(*parts: str | int) -> bytes:
    """The 16-byte key of the block that ``parts`` name."""
    return hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=KEY_SIZE).digest()


class BlockContent:
    """Makes and verifies blocks of ``block_size`` bytes. Holds two buffers of that size: one for each thread."""

    def __init__(self, block_size: int) -> None:
        if block_size < 2 * KEY_SIZE or block_size % _WORD_SIZE:
            raise ValueError(f"a block of {block_size} bytes: it takes a multiple of 8, and at least {2 * KEY_SIZE}")
        self.block_size = block_size
        repetitions = -(-block_size // (_PATTERN_WORDS * _WORD_SIZE))
        self._words: NDArray[np.uint64] = np.empty((repetitions, _PATTERN_WORDS), np.uint64)
        self._offsets: NDArray[np.uint64] = (np.arange(repetitions, dtype=np.uint64) * _STEP)[:, np.newaxis]
        self._expected = self._words.reshape(-1).view(np.uint8)[:block_size]
        # one byte more than a block has, so that a file that is too long is noticed by the same read
        self.buffer = memoryview(bytearray(block_size + 1))

    def fill(self, key: bytes) -> memoryview:
        """The content of ``key``, valid until the next call."""
        pattern = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(_PATTERN_WORDS)
        np.add(pattern, self._offsets, out=self._words)
        self._expected[:KEY_SIZE] = np.frombuffer(key, np.uint8)
        return self._expected.data.toreadonly()

    def difference(self, key: bytes, data: memoryview) -> str | None:
        """How ``data`` differs from the content of ``key``; None if it does not."""
        size = len(data)
        if size != self.block_size:
            return f"has {'at least ' if size > self.block_size else ''}{size} bytes, not {self.block_size}"
        self.fill(key)
        found = np.frombuffer(data, np.uint8)
        # compared as words: twice as fast as bytes
        if np.array_equal(found.view(np.uint64), self._expected.view(np.uint64)):
            return None
        return self._describe(found)

    def _describe(self, found: NDArray[np.uint8]) -> str:
        if not found.any():
            return "is all zeros"
        wrong = np.flatnonzero(found != self._expected)
        text = f"differs in {len(wrong)} bytes, the first at offset {wrong[0]}, the last at {wrong[-1]}"
        if wrong[0] < KEY_SIZE:
            text += f"; it starts like block {found[:KEY_SIZE].tobytes().hex()}"
        return text
