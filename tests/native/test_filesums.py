"""Checksums of a file's granules: the compiled ways and their twins agree, and say what the file does not have."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from errno import EBADF
from pathlib import Path

import pytest

from kvfuse.checksum import GRANULE_SIZE, granule_checksums
from kvfuse.native.filesums import fill_and_sum, python_fill_and_sum, python_sum_file, sum_file
from kvfuse.native.rowreceiver import ENDED, IS_NATIVE

Sum = Callable[[int, int, int], tuple[bytes, int]]
WAYS: list[Sum] = [python_sum_file] + [sum_file] * IS_NATIVE
Fill = Callable[[int, memoryview, int, int], tuple[bytes, int]]
FILLS: list[Fill] = [python_fill_and_sum] + [fill_and_sum] * IS_NATIVE


@pytest.mark.parametrize("sum_", WAYS)
def test_any_range_is_summed(sum_: Sum, tmp_path: Path, rng: random.Random) -> None:
    data = rng.randbytes(3 * GRANULE_SIZE + 12_345)
    (tmp_path / "file").write_bytes(data)
    with open(tmp_path / "file", "rb") as file:
        for _ in range(20):
            offset = rng.choice([0, 1, 4096, GRANULE_SIZE])
            length = rng.choice([1, 4095, GRANULE_SIZE, GRANULE_SIZE + 1, len(data) - offset])
            assert sum_(file.fileno(), offset, length) == (granule_checksums(data[offset : offset + length]), 0)


@pytest.mark.parametrize("sum_", WAYS)
def test_what_the_file_does_not_have_is_an_error(sum_: Sum, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(GRANULE_SIZE + 5))
    with open(tmp_path / "file", "rb") as file:
        assert sum_(file.fileno(), 10, 2 * GRANULE_SIZE)[1] == ENDED
        closed = os.dup(file.fileno())
    os.close(closed)
    assert sum_(closed, 0, 10)[1] == EBADF


@pytest.mark.parametrize("fill", FILLS)
def test_memory_is_filled_and_summed(fill: Fill, tmp_path: Path, rng: random.Random) -> None:
    data = rng.randbytes(3 * GRANULE_SIZE + 12_345)
    (tmp_path / "file").write_bytes(data)
    with open(tmp_path / "file", "rb") as file:
        for _ in range(20):
            offset = rng.choice([0, 1, 4096, GRANULE_SIZE])
            length = rng.choice([0, 1, 4095, GRANULE_SIZE, GRANULE_SIZE + 1, len(data) - offset])
            target = memoryview(bytearray(length + rng.choice([0, 1, 5000])))
            assert fill(file.fileno(), target, offset, length) == (granule_checksums(data[offset : offset + length]), 0)
            assert target[:length] == data[offset : offset + length]
        with pytest.raises(ValueError, match="fewer bytes"):
            fill(file.fileno(), target, 0, len(target) + 1)
        assert fill(file.fileno(), memoryview(bytearray(2 * len(data))), 10, len(data))[1] == ENDED
        closed = os.dup(file.fileno())
    os.close(closed)
    assert fill(closed, memoryview(bytearray(1)), 0, 1)[1] == EBADF
