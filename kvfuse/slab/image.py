"""The durable image of a slab: what is recorded of it, and what a restart or another holder needs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvfuse.errors import VolumeError
from kvfuse.slab.layout import PAGE_SIZE, Geometry

LENT = 1
"""the slot size of a slab that is lent to the block store, whose slots are described by heads in the slab itself; its
bitmap is a *token* of 4 bytes, which these heads repeat: those of an earlier loan do not count"""
TOKEN_SIZE = 4


class SlabState(NamedTuple):
    """The durable image of one slab.

    ``slot_size`` 0: free, or nothing in it is durable; `LENT`: the bitmap is a token.
    """

    slab: int
    slot_size: int
    bitmap: bytes
    """slot i is durable: bit i % 8 of byte i // 8"""


def durable_slots(state: SlabState, geometry: Geometry) -> npt.NDArray[np.uint8]:
    """A 1 for each durable slot of a slab that has a slot size, in order. VolumeError where the image is wrong."""
    slab, slot_size, bitmap = state
    if slot_size % PAGE_SIZE or not 0 < slot_size <= geometry.slab_size:
        raise VolumeError(f"slab {slab} is recorded with slots of {slot_size} bytes")
    slot_count = geometry.slots_per_slab(slot_size)
    durable = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
    if len(bitmap) != -(-slot_count // 8) or durable[slot_count:].any():
        raise VolumeError(f"slab {slab} is recorded with a bitmap that does not fit {slot_count} slots")
    return durable[:slot_count]
