"""Compression of copies in the tier, by zstd: off by default, as the blocks of many models save nothing.

A granule is stored compressed only where it then takes a smaller slot. While hardly any does, only one of some is
tried: so data that cannot be compressed costs next to no processor time, and data that can be is noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvfuse.errors import ConfigError

if TYPE_CHECKING:
    import zstandard

LEVEL = 1
"""Higher levels save no more of such data, and take twice the time."""
WORTHWHILE = 0.05
"""Share of granules that must get smaller slots for all of them to be tried."""
TRIED_ONE_OF = 16
"""Otherwise"""
_WEIGHT = 0.02
"""of one granule in the moving share"""


class Codec:
    """zstd. `pack` is for one thread at a time, `unpack` for any number."""

    def __init__(self) -> None:
        """ImportError where the library is not installed."""
        import zstandard

        self._zstd = zstandard
        self._compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False, write_content_size=False)

    def pack(self, granules: Sequence[memoryview]) -> list[bytes]:
        """Each of them compressed."""
        return [self._compressor.compress(data) for data in granules]

    def unpack(self, packed: Sequence[tuple[memoryview, memoryview]]) -> None:
        """Fill the second of each pair from the first; with anything where that is damaged: checksums tell."""
        decompressor = self._zstd.ZstdDecompressor()
        for source, target in packed:
            data = self._unpacked(decompressor, source, len(target))
            target[: len(data)] = data

    def _unpacked(self, decompressor: zstandard.ZstdDecompressor, source: memoryview, length: int) -> bytes:
        """At most ``length`` bytes, whatever a damaged frame says of its size."""
        try:
            if self._zstd.frame_content_size(source) != -1:
                return b""
            return decompressor.decompress(source, max_output_size=length)
        except self._zstd.ZstdError:
            return b""


def find_codec(*, is_needed: bool) -> Codec | None:
    """None where the library is not installed. ConfigError where it is needed."""
    try:
        return Codec()
    except ImportError:
        if is_needed:
            raise ConfigError(
                "cache.disk_compression: the Python package 'zstandard' is not installed: pip install zstandard"
            ) from None
        return None


class Trials:
    """Which granules are worth the attempt, as those before them show."""

    def __init__(self) -> None:
        self.tried = self.tried_bytes = self.packed_bytes = 0
        """granules, their bytes, and what came of these"""
        self._share = 1.0
        """of the granules tried lately that got a smaller slot"""
        self._count = 0

    def is_due(self) -> bool:
        """The next granule is to be tried."""
        self._count += 1
        return self._share > WORTHWHILE or self._count % TRIED_ONE_OF == 0

    def note(self, length: int, packed_length: int, *, is_smaller: bool) -> None:
        """One was tried; ``is_smaller``: it gets a smaller slot."""
        self.tried += 1
        self.tried_bytes += length
        self.packed_bytes += packed_length
        self._share += _WEIGHT * (is_smaller - self._share)
