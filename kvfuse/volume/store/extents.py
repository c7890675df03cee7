"""Extents as records have them, and how the compressed bytes of a chunk stand in a slot.

These are one zstd frame for each started granule, one behind the other. The record of such an extent describes the
slot's bytes as they are: its length and checksums are those of the frames. Its *packing* says what they hold: numbers
of 4 bytes, little endian, the first how many bytes of the file, the others the length of each frame. So a part of a
chunk is read by the frames that it needs. Where a chunk was cut, it has fewer bytes than its last frames hold, and the
rest of these is nobody's.

An extent that is packed is all of its chunk, and sealed. Nothing is written into it: a chunk that changes is staged
as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np

from kvfuse.checksum import GRANULE_SIZE

_NUMBER = np.dtype("<u4")


class ExtentRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A run of bytes in one slot."""

    addr: int
    """volume address of the slot, in bytes"""
    length: int
    generation: int
    checksums: bytes
    """CRC32C of each started granule, 4 bytes little endian each; empty: unsealed"""
    packing: bytes = b""
    """where the bytes in the slot are compressed, what they hold (`extents`); empty: they are the file's own"""

    @property
    def span(self) -> int:
        """Bytes of the file that it has."""
        return length_of(self.packing) if self.packing else self.length


class Stretch(NamedTuple):
    """Frames that hold what is wanted."""

    low: int
    """where the first one begins in the slot"""
    frames: list[tuple[int, int]]
    """(start, end) of each behind there"""
    start: int
    """of what is wanted in the bytes that they hold together"""


def make_packing(length: int, frames: Sequence[int]) -> bytes:
    """Of ``length`` bytes of a file, in frames of these lengths."""
    return np.array([length, *frames], _NUMBER).tobytes()


def length_of(packing: bytes) -> int:
    """Bytes of the file."""
    return int.from_bytes(packing[:4], "little")


def find_frames(packing: bytes, start: int, end: int) -> Stretch:
    """What holds the file's bytes from ``start`` to ``end``, which is at most its length."""
    ends = list(accumulate(np.frombuffer(packing, _NUMBER)[1:].tolist(), initial=0))
    first, last = start // GRANULE_SIZE, (end - 1) // GRANULE_SIZE
    low = ends[first]
    frames = [(ends[number] - low, ends[number + 1] - low) for number in range(first, last + 1)]
    return Stretch(low, frames, start - first * GRANULE_SIZE)


def cut(packing: bytes, length: int) -> bytes:
    """The same, when only the first ``length`` bytes of the file are left."""
    return min(length, length_of(packing)).to_bytes(4, "little") + packing[4:]


def is_sound(packing: bytes, size: int) -> bool:
    """It can be that of ``size`` bytes in a slot."""
    if len(packing) < 8 or len(packing) % 4:
        return False
    length, *frames = np.frombuffer(packing, _NUMBER).tolist()
    return 0 < length <= len(frames) * GRANULE_SIZE and all(frames) and sum(frames) == size
