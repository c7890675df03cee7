"""Encodes answers of an EXISTS with COSTS: one byte has the tier of a block, and when its bytes are expected.

Bits 0 and 1 are the tier, 0 for no such block. The other six are a number n: the bytes are expected ``BASE_MS * FACTOR
** n`` milliseconds after the request, from 10 microseconds to 13 seconds.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BASE_MS = 0.01
FACTOR = 1.25
STEPS = 64


class Tier(IntEnum):
    """The place of a block's bytes."""

    NONE = 0
    """no such block, or it is not worth reading"""
    DRAM = 1
    """memory of the daemon's host"""
    DISK = 2
    """the disk tier of that host"""
    REMOTE = 3
    """the volume's segments, or its cold tier"""


class Costs(NamedTuple):
    """Costs of many blocks, in the order of the request."""

    tiers: npt.NDArray[np.uint8]
    """see `Tier`"""
    milliseconds: npt.NDArray[np.float32]
    """time until the block's bytes are expected, if it and all before it are requested now; infinite for no such
    block"""


def encode_costs(tiers: npt.NDArray[np.uint8], seconds: npt.NDArray[np.float32]) -> bytes:
    """One byte for each block. A tier behind the last one is shown as that: its time says how far it is."""
    steps = np.log(np.maximum(seconds * (1000 / BASE_MS), 1.0)) / np.log(FACTOR)
    numbers = np.minimum(np.ceil(steps - 1e-3), STEPS - 1).astype(np.uint8)
    return np.where(tiers == Tier.NONE, 0, numbers << 2 | np.minimum(tiers, Tier.REMOTE)).astype(np.uint8).tobytes()


def decode_costs(answers: npt.NDArray[np.uint8]) -> Costs:
    """Decode what `encode_costs` encoded, rounded up to the next step."""
    tiers = answers & np.uint8(3)
    milliseconds = np.where(tiers == Tier.NONE, np.inf, BASE_MS * FACTOR ** (answers >> 2).astype(np.float32))
    return Costs(tiers, milliseconds.astype(np.float32))
