"""What callers of a volume under a random schedule write, and how it is known again.

Every byte is a function of the version that it belongs to, and a version is written once: so what one reads says who
wrote it, and when.
"""

from __future__ import annotations

import numpy as np

FOLDERS = ("strict", "relaxed")
BLOCKS = tuple(f"b{number}" for number in range(6))
"""names that everybody replaces, moves and removes"""
LINKS = ("l0", "l1")
"""second names of blocks; in the strict folder only: a relaxed writer loses against a file with two names"""
CHILDREN = ("d0", "d1")
"""folders that come and go"""
PAGES = {"few": 32, "many": 320}
"""files that are changed in place -> cells: rewritten as a whole, and in place"""
CELL = 4096
"""bytes that are written at once in place, or appended"""
SIZES = (100, 4096, 70_001, 300_000, 300_000, 1_500_000)
ACTORS = 1_000
OWNERS = 9
"""callers of a cluster: each has every ninth cell"""


def size_of(version: int) -> int:
    """Bytes of a block."""
    return SIZES[version // ACTORS % len(SIZES)]


def stream(version: int, size: int) -> bytes:
    """The bytes of a version: in any sixteen of them, aligned, it can be read, and where they belong."""
    words = np.empty((-(-size // 16), 2), np.uint64)
    words[:, 0] = version
    words[:, 1] = np.arange(len(words), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(version)
    return words.tobytes()[:size]


def version_of(data: bytes, size: int = 0) -> int | str:
    """The version whose bytes these are, ``size`` of them or as many as a block has; else what is wrong with them."""
    version = int.from_bytes(data[:8], "little")
    length = size or size_of(version)
    if data == stream(version, length):
        return version
    words = np.frombuffer(data[: len(data) // 16 * 16], np.uint64)[::2]
    return f"{len(data)} bytes of {length}, of versions {sorted({int(word) for word in words})[:5]}"


def cell_of(data: bytes) -> int | str | None:
    """The version that a cell is of; None for one that was never written."""
    return None if data == bytes(CELL) else version_of(data, CELL)
