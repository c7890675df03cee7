"""CRC32C of buffers, granules and concatenations, against crcmod and the check value of the standard."""

import random
import sys
from itertools import pairwise
from types import SimpleNamespace

import crcmod.predefined
import numpy as np
import pytest

from kvfuse import checksum
from kvfuse.checksum import GRANULE_SIZE, combine, crc32c, extent_checksum, granule_checksums

reference = crcmod.predefined.mkPredefinedCrcFun("crc-32c")
DATA = random.Random(20).randbytes(3 * GRANULE_SIZE + 77)
LENGTHS = [0, 1, 3, 4, 63, 4096, GRANULE_SIZE - 1, GRANULE_SIZE, GRANULE_SIZE + 1, 2 * GRANULE_SIZE, len(DATA)]


def test_check_value_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"") == 0


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_equals_the_reference_for_every_kind_of_buffer(kind: type, length: int) -> None:
    assert crc32c(kind(DATA[:length])) == reference(DATA[:length])


@pytest.mark.parametrize("instead", [None, SimpleNamespace(implementation="python")])
def test_portable_code_equals_hardware_code(monkeypatch: pytest.MonkeyPatch, instead: object) -> None:
    """Where the hardware library is absent, or has no code in C, crcmod takes its place."""
    monkeypatch.setitem(sys.modules, "google_crc32c", instead)
    portable = checksum._find_extend()
    assert portable is not checksum.extend
    for length in LENGTHS:
        data = np.frombuffer(DATA[:length], np.uint8)
        assert portable(7, data) == checksum.extend(7, data)


def test_continues_a_value() -> None:
    assert crc32c(DATA[100:], crc32c(DATA[:100])) == reference(DATA)


@pytest.mark.parametrize("second_length", LENGTHS)
def test_combine_is_the_checksum_of_the_concatenation(second_length: int) -> None:
    for first_length in (0, 1, 1000, GRANULE_SIZE):
        first, second = DATA[:first_length], DATA[:second_length]
        assert combine(reference(first), reference(second), second_length) == reference(first + second)


@pytest.mark.parametrize("length", LENGTHS)
def test_granules_and_the_extent_from_them(length: int) -> None:
    granules = granule_checksums(memoryview(DATA)[:length])
    starts = range(0, length, GRANULE_SIZE)
    expected = [reference(DATA[start : min(start + GRANULE_SIZE, length)]) for start in starts]
    assert granules == b"".join(value.to_bytes(4, "little") for value in expected)
    cuts = [0, *sorted(random.Random(length).choices(range(length + 1), k=5)), length]
    assert granule_checksums(*[DATA[low:high] for low, high in pairwise(cuts)]) == granules
    assert extent_checksum(granules, length) == reference(DATA[:length])


def test_combine_knows_lengths_beyond_memory() -> None:
    """Shifting by a sum is shifting twice."""
    huge = (1 << 40) + 12345
    once = combine(0xDEADBEEF, 0, 2 * huge)
    assert combine(combine(0xDEADBEEF, 0, huge), 0, huge) == once
