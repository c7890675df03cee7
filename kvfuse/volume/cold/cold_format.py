"""Objects of the cold tier: a header, heads of blocks as slabs have them, and the blocks' bytes.

An object describes itself: a mount reads header and heads alone. `docs/internals/formats.md` has the layout.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvfuse.checksum import crc32c
from kvfuse.native import blockforms as forms

HEADER = struct.Struct("<8s16sQIIQI12x")
"""magic, volume, number of the object, heads, bytes before the first block, bytes of the object, checksum of all heads
and of the header up to here"""
MAGIC = b"KVCOLD01"
STEP = 64
"""blocks begin at multiples of this"""
FIRST_READ = 64 << 10
"""bytes of an object that a mount reads first"""
COUNT_MAX = 1 << 20

Heads = npt.NDArray[np.void]


class ObjectFacts(NamedTuple):
    """What a header says."""

    number: int
    head_count: int
    data_start: int
    size: int


def object_name(number: int) -> str:
    """Of an object: later ones have higher names."""
    return f"blocks/{number:012d}"


def object_number(name: str) -> int | None:
    """None: it is none of these objects."""
    folder, _, number = name.rpartition("/")
    return int(number) if folder == "blocks" and number.isdecimal() and len(number) == 12 else None


def data_start(count: int) -> int:
    """Bytes before the first block."""
    return _padded(HEADER.size + forms.HEAD.itemsize * count)


def offsets_of(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where blocks of these lengths begin in their object, and behind them where it ends."""
    padded = -(-lengths // STEP) * STEP
    return data_start(len(lengths)) + np.concatenate([[0], np.cumsum(padded)]).astype(np.int64)


def write_heads(target: memoryview, volume_id: bytes, number: int, heads: Heads, size: int) -> None:
    """Fill the part of an object of ``size`` bytes that is before its blocks."""
    facts = volume_id, number, len(heads), data_start(len(heads)), size
    table = heads.tobytes()
    without_sum = HEADER.pack(MAGIC, *facts, 0)
    target[: HEADER.size] = HEADER.pack(MAGIC, *facts, _sum_of(without_sum, table))
    target[HEADER.size : HEADER.size + len(table)] = table


def read_header(data: bytes, volume_id: bytes, number: int) -> ObjectFacts | None:
    """None: this is no object of that number of this volume."""
    if len(data) < HEADER.size:
        return None
    magic, volume, own, count, start, size, _ = HEADER.unpack_from(data)
    is_ours = magic == MAGIC and volume == volume_id and own == number
    if not is_ours or not 0 < count <= COUNT_MAX or start != data_start(count) or size < start:
        return None
    return ObjectFacts(own, count, start, size)


def read_heads(data: bytes, facts: ObjectFacts) -> Heads | None:
    """``data``: what is before the blocks. None: it is damaged."""
    end = HEADER.size + forms.HEAD.itemsize * facts.head_count
    if len(data) < end:
        return None
    *fields, found = HEADER.unpack_from(data)
    table = bytes(data[HEADER.size : end])
    if found != _sum_of(HEADER.pack(*fields, 0), table):
        return None
    return np.frombuffer(table, forms.HEAD)


def _sum_of(header: bytes, table: bytes) -> int:
    return crc32c(header + table)


def _padded(size: int) -> int:
    return -(-size // STEP) * STEP
