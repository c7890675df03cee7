"""Copies with checksums: in C as in Python."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from kvfuse.checksum import GRANULE_SIZE, granule_checksums
from kvfuse.native import rowcopier

EDGES = [1, 7, 8, 9, 767, 768, 769, 4096, 24575, 24576, 24577, GRANULE_SIZE - 1, GRANULE_SIZE, GRANULE_SIZE + 1]


@pytest.mark.parametrize("copy_rows", [rowcopier.copy_rows, rowcopier.python_copy_rows], ids=["native", "python"])
def test_copies_and_their_checksums(copy_rows: Callable[[rowcopier.Numbers], bytes]) -> None:
    rng = random.Random(5)
    lengths = EDGES + [rng.randrange(1, 3 * GRANULE_SIZE) for _ in range(20)]
    source = np.frombuffer(rng.randbytes(3 * GRANULE_SIZE + 64), np.uint8)
    target = np.zeros(sum(lengths) + 64, np.uint8)
    rows, pieces, end = [], [], rng.randrange(8)
    for length in lengths:
        start = rng.randrange(len(source) - length)
        rows.append((source.ctypes.data + start, target.ctypes.data + end, length))
        pieces.append(source[start : start + length].tobytes())
        end += length
    checksums = copy_rows(np.array(rows, np.int64))
    assert checksums == b"".join(granule_checksums(piece) for piece in pieces)
    assert target[end - sum(lengths) : end].tobytes() == b"".join(pieces)
    assert not target[end:].any()
    assert copy_rows(np.empty((0, 3), np.int64)) == b""
