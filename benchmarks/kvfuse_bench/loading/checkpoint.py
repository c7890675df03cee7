"""A model of random weights in safetensors files, with tensors as a transformer has them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvfuse.sizes import MIB
from kvfuse_bench.loading.loaders import check_of

DTYPE, ITEM_SIZE = "BF16", 2
HIDDEN = 2048
MATRICES = {"q": HIDDEN, "k": HIDDEN // 4, "v": HIDDEN // 4, "o": HIDDEN, "gate": 4 * HIDDEN, "up": 4 * HIDDEN}
"""name -> rows, of one layer; each row has HIDDEN values"""
PIECE = 64 * MIB


class Checkpoint(NamedTuple):
    """Files of a model, and what proves that all of it was loaded."""

    paths: list[Path]
    size: int
    """bytes of all tensors"""
    checks: list[int]
    """`loaders.check_of` the tensors of each file"""


def write_checkpoint(folder: Path, size: int, shard_count: int, seed: int = 0) -> Checkpoint:
    """About ``size`` bytes in ``shard_count`` files, stored durably. OSError."""
    random, paths, checks, total = np.random.default_rng(seed), [], [], 0
    for number in range(shard_count):
        header, length = _header(number, size // shard_count)
        data = random.integers(0, 1 << 63, length // 8, np.int64).view(np.uint8)
        path = folder / f"model-{number + 1:05d}-of-{shard_count:05d}.safetensors"
        with open(path, "xb", buffering=0) as file:
            file.write(header)
            for start in range(0, length, PIECE):
                file.write(data[start : start + PIECE].data)
            os.fsync(file.fileno())
        if path.stat().st_size != len(header) + length:
            raise OSError(f"{path} took only a part of the bytes")
        paths.append(path)
        checks.append(check_of(data))
        total += length
    return Checkpoint(paths, total, checks)


def _header(shard: int, size_max: int) -> tuple[bytes, int]:
    """The first bytes of a file, and how many bytes of tensors follow: whole layers, one at least."""
    tensors: dict[str, object] = {"__metadata__": {"format": "pt"}}
    layer_size = sum(MATRICES.values()) * HIDDEN * ITEM_SIZE
    end = 0
    for layer in range(max(1, size_max // layer_size)):
        for name, rows in MATRICES.items():
            start, end = end, end + rows * HIDDEN * ITEM_SIZE
            tensors[f"shard.{shard}.layer.{layer}.{name}.weight"] = {
                "dtype": DTYPE,
                "shape": [rows, HIDDEN],
                "data_offsets": [start, end],
            }
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end
