"""Compression by zstd: of copies in the disk tier, and of chunks in their slots. Off by default: the blocks of many
models save nothing.

A granule, or a chunk, is stored compressed only where it then takes a smaller slot. While hardly any does, only one of
some is tried: so data that cannot be compressed costs next to no processor time, and data that can be is noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from kvfuse.checksum import GRANULE_SIZE
from kvfuse.volume.store.extents import make_packing

LEVEL = 1
"""Higher levels save no more of such data, and take twice the time."""
WORTHWHILE = 0.05
"""Share of those that must get smaller slots for all of them to be tried."""
TRIED_ONE_OF = 16
"""Otherwise"""
_WEIGHT = 0.02
"""of one granule in the moving share"""


class Codec:
    """zstd. `pack` is for one thread at a time, `unpack` for any number."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False, write_content_size=False)

    def pack(self, granules: Sequence[memoryview]) -> list[bytes]:
        """Each of them compressed."""
        return [self._compressor.compress(data) for data in granules]

    def unpack(self, packed: Sequence[tuple[memoryview, memoryview]]) -> None:
        """Fill the second of each pair from the first; with anything where that is damaged: checksums tell."""
        decompressor = zstandard.ZstdDecompressor()
        for source, target in packed:
            data = _unpacked(decompressor, source, len(target))
            target[: len(data)] = data


def _unpacked(decompressor: zstandard.ZstdDecompressor, frame: memoryview, length: int) -> bytes:
    """At most ``length`` bytes, whatever a damaged frame says of its size."""
    try:
        if zstandard.frame_content_size(frame) != -1:
            return b""
        return decompressor.decompress(frame, max_output_size=length)
    except zstandard.ZstdError:
        return b""


def unpack_one(frame: memoryview, length: int) -> bytes:
    """At most ``length`` bytes of a frame, whatever is behind it; fewer, or none, where it is damaged."""
    return _unpacked(zstandard.ZstdDecompressor(), frame, length)


def unpack_all(frames: Sequence[memoryview], plain: memoryview) -> bool:
    """Fill ``plain`` from frames of a granule each; the last may hold more. False: they do not hold so much."""
    decompressor, position = zstandard.ZstdDecompressor(), 0
    for frame in frames:
        size = min(GRANULE_SIZE, len(plain) - position)
        data = _unpacked(decompressor, frame, GRANULE_SIZE)
        if len(data) < size:
            return False
        plain[position : position + size] = data[:size]
        position += size
    return position == len(plain)


def find_packing(data: memoryview) -> bytes:
    """What the frames in a slot hold, by themselves; empty: they are none."""
    frames, length = [], 0
    while data:
        decompressor = zstandard.ZstdDecompressor().decompressobj()
        try:
            length += len(decompressor.decompress(data))
        except zstandard.ZstdError:
            return b""
        if not decompressor.eof:
            return b""
        rest = len(decompressor.unused_data)
        frames.append(len(data) - rest)
        data = data[len(data) - rest :]
    return make_packing(length, frames) if frames else b""


class Trials:
    """Which granules, or chunks, are worth the attempt, as those before them show."""

    def __init__(self) -> None:
        self.tried = self.tried_bytes = self.packed_bytes = 0
        """granules or chunks, their bytes, and what came of these; nothing where that was given up"""
        self.smaller = self.saved_bytes = 0
        """those that got smaller slots, and bytes of slots that this saved"""
        self._share = 1.0
        """of the granules tried lately that got a smaller slot"""
        self._count = 0

    def is_due(self) -> bool:
        """The next granule is to be tried."""
        self._count += 1
        return self._share > WORTHWHILE or self._count % TRIED_ONE_OF == 0

    def choose(self, count: int) -> npt.NDArray[np.bool_]:
        """Which of the next ones are to be tried."""
        numbers = np.arange(self._count + 1, self._count + 1 + count)
        self._count += count
        chosen: npt.NDArray[np.bool_] = numbers % (1 if self._share > WORTHWHILE else TRIED_ONE_OF) == 0
        return chosen

    def note(self, length: int, packed_length: int, *, is_smaller: bool, saved: int = 0) -> None:
        """One was tried; ``is_smaller``: it gets a smaller slot, by ``saved`` bytes."""
        self.tried += 1
        self.tried_bytes += length
        self.packed_bytes += packed_length
        self.smaller += is_smaller
        self.saved_bytes += saved
        self._share += _WEIGHT * (is_smaller - self._share)

    def statistics(self) -> dict[str, Any]:
        return {
            "tried": self.tried,
            "tried_bytes": self.tried_bytes,
            "packed_bytes": self.packed_bytes,
            "smaller": self.smaller,
            "saved_bytes": self.saved_bytes,
        }
