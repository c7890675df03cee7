"""CRC32C, the checksum of format version 1: of buffers, of granules, and of concatenations.

A checksum is an int, 0..2**32-1, of the usual CRC32C (Castagnoli, reflected, inverted before and after).
The hardware library does the work; crcmod stands in where no wheel of it exists.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias

import numpy as np

Buffer: TypeAlias = bytes | bytearray | memoryview

ALGORITHM = "crc32c"
"""The name in the superblock."""

GRANULE_SIZE = 256 * 1024
"""Bytes of an extent that share one checksum; an extent's last granule may be shorter."""

CHECKSUM_SIZE = 4
"""Bytes of one stored checksum, little endian."""

_POLYNOMIAL = 0x82F63B78
Extend: TypeAlias = Callable[[int, bytes | np.ndarray], int]


def _find_extend() -> Extend:
    """The hardware library, if it has its code in C; crcmod, which is installed where that has no wheel."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # it warns where it has no C code
            import google_crc32c
        if google_crc32c.implementation == "c":
            found: Extend = google_crc32c.extend
            return found
    except ImportError:
        pass
    import crcmod.predefined

    of_crcmod = crcmod.predefined.mkPredefinedCrcFun("crc-32c")
    return lambda value, data: int(of_crcmod(bytes(data), value))


extend: Extend = _find_extend()
"""`crc32c` of bytes, with the arguments the other way round: for values so short that a call of Python counts."""

RESIDUE = 0x48674BC7
"""Checksum of bytes that end with their own checksum, little endian."""


def crc32c(buffer: Buffer, value: int = 0) -> int:
    """Checksum of ``buffer`` (C-contiguous) as the continuation of bytes whose checksum is ``value``."""
    # The C function takes bytes and arrays but refuses bytearray and memoryview: show it an array of those.
    return extend(value, buffer if isinstance(buffer, bytes) else np.frombuffer(buffer, np.uint8))


def granule_checksums(*buffers: Buffer) -> bytes:
    """The checksums of every started granule of buffers that follow each other: 4 bytes each, little endian."""
    checksums, room = [0], GRANULE_SIZE
    for buffer in buffers:
        data, start = np.frombuffer(buffer, np.uint8), 0
        while start < len(data):
            if not room:
                checksums.append(0)
                room = GRANULE_SIZE
            part = data[start : start + room]
            checksums[-1] = extend(checksums[-1], part)
            start += len(part)
            room -= len(part)
    if len(checksums) == 1 and room == GRANULE_SIZE:
        return b""
    return b"".join([checksum.to_bytes(CHECKSUM_SIZE, "little") for checksum in checksums])


def extent_checksum(granules: bytes, length: int) -> int:
    """The checksum of a whole extent of ``length`` bytes, from its ``granule_checksums`` alone."""
    if len(granules) == CHECKSUM_SIZE:
        return int.from_bytes(granules, "little")
    checksum = 0
    rest = length
    for granule in np.frombuffer(granules, "<u4").tolist():
        checksum = combine(checksum, granule, min(rest, GRANULE_SIZE))
        rest -= GRANULE_SIZE
    return checksum


def combine(first: int, second: int, second_length: int) -> int:
    """The checksum of a concatenation, from its two parts' checksums and the second one's length in bytes."""
    if second_length == GRANULE_SIZE:
        low, middle, high, top = _GRANULE_SHIFT
        shifted = low[first & 255] ^ middle[first >> 8 & 255] ^ high[first >> 16 & 255] ^ top[first >> 24]
    else:
        shifted = _multiply(_shift_by(second_length), first)
    return shifted ^ second


# A checksum is a polynomial over GF(2) modulo the CRC's, bit 31 the constant term. Appending n zero
# bytes multiplies it by x**(8n); the two inversions cancel out, so concatenation is "shift, then xor".


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials modulo the CRC's."""
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


_SQUARES = [0x40000000]
"""x**(2**k) for k = 0..66: enough for the length of any buffer in bits"""
while len(_SQUARES) <= sys.maxsize.bit_length() + 3:
    _SQUARES.append(_multiply(_SQUARES[-1], _SQUARES[-1]))


@lru_cache(maxsize=4096)
def _shift_by(length: int) -> int:
    """x**(8 * length)."""
    factor = 0x80000000
    for bit in range(length.bit_length()):
        if length >> bit & 1:
            factor = _multiply(_SQUARES[bit + 3], factor)
    return factor


def _shift_table(length: int, byte: int) -> list[int]:
    """What each value of one byte (0: the lowest) of a checksum becomes when ``length`` zero bytes follow."""
    table = [0] * 256
    for value in range(1, 256):
        lowest = value & -value
        # The shift is linear: all but single bits come from two smaller values.
        table[value] = (
            _multiply(_shift_by(length), value << 8 * byte)
            if value == lowest
            else table[lowest] ^ table[value ^ lowest]
        )
    return table


_GRANULE_SHIFT = tuple(_shift_table(GRANULE_SIZE, byte) for byte in range(4))
