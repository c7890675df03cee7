"""Takes messages of Protocol Buffers apart, one level at a time; the same in Python without a compiler."""

from __future__ import annotations

from typing import Any, TypeAlias

native: Any
try:
    from kvfuse.native import _native as native
except ImportError:  # it was built without a compiler
    native = None

Fields: TypeAlias = list[tuple[int, int | bytes]]
"""(number, value) in the order in which they stand; bytes of texts and of messages inside"""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_VARINT_SIZE_MAX = 10


class NoMessage(ValueError):
    """It is no such message."""


def fields(data: bytes) -> Fields:
    """All fields of a message, without those of fixed sizes. NoMessage."""
    if native is None:
        return python_fields(data)
    found: Fields | None = native.fields(data)
    if found is None:
        raise NoMessage("not a message of Protocol Buffers")
    return found


def python_fields(data: bytes) -> Fields:
    """As `fields`."""
    found: Fields = []
    place, end = 0, len(data)
    while place < end:
        key, place = _varint(data, place)
        kind = key & 7
        if kind == _VARINT:
            value, place = _varint(data, place)
            found.append((key >> 3, value))
        elif kind == _BYTES:
            size, place = _varint(data, place)
            found.append((key >> 3, data[place : place + size]))
            place += size
        elif kind in (_FIXED64, _FIXED32):
            place += 8 if kind == _FIXED64 else 4
        else:
            raise NoMessage("not a message of Protocol Buffers")
    if place != end:
        raise NoMessage("not a message of Protocol Buffers")
    return found


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """(value, where it ends)"""
    value = 0
    for count, byte in enumerate(data[place : place + _VARINT_SIZE_MAX]):
        value |= (byte & 127) << 7 * count
        if byte < 128:
            return value & (1 << 64) - 1, place + count + 1
    raise NoMessage("not a message of Protocol Buffers")
