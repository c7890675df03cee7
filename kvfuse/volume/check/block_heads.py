"""What the heads of a lent slab say, to who has no block store: fsck and a rebuild.

It is what the core makes of them at a mount (`load_slab`, `load_head`): heads count if the slab's own head is sound and
of this loan, and if they repeat its incarnation. All else is older: heads of files, of earlier loans and uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvfuse.checksum import crc32c
from kvfuse.native import blockforms as forms
from kvfuse.slab import layout
from kvfuse.slab.layout import PAGE_SIZE, Geometry
from kvfuse.volume.blocks.head_tables import plan_slab

HEAD_SIZE = forms.HEAD.itemsize
HEAD_VERSION = 1
VERSIONS = HEAD_VERSION, forms.PACKED_VERSION
"""of a block's head"""
SEQUENCE_MAX = 1 << 62
SECTOR = 512
"""what a medium writes wholly, or not at all"""


class SlabHeads(NamedTuple):
    """Of one slab. ``slot_size`` 0: nothing is in it, as far as heads tell."""

    slab: int
    slot_size: int = 0
    token: int = 0
    incarnation: int = 0
    is_damaged: bool = False
    """its own head is, so nobody knows what is in it"""
    heads: npt.NDArray[np.void] = np.zeros(0, forms.HEAD)
    """of blocks: sound, and of this use of the slab"""
    slots: npt.NDArray[np.int64] = np.zeros(0, np.int64)
    """of these"""
    damaged: tuple[int, ...] = ()
    """slots whose heads are of this use, and do not match their checksums"""
    torn: tuple[int, ...] = ()
    """the same, of heads that lie in two sectors: a loss of power leaves such"""


def is_sound(head: bytes) -> bool:
    return crc32c(head[:-4]) == int.from_bytes(head[-4:], "little")


def parse_heads(geometry: Geometry, slab: int, table: bytes, token: int | None) -> SlabHeads:
    """``table``: the slab's heads, as `HeadTables.read_heads` has them. ``token``: of its loan; None: of any."""
    rows = np.frombuffer(table, forms.HEAD, len(table) // HEAD_SIZE)
    first, image = rows[0], table[:HEAD_SIZE]
    if not is_sound(image) or first["magic"] != forms.HEAD_MAGIC or first["version"] != HEAD_VERSION:
        return SlabHeads(slab, is_damaged=_was_head(image))
    slot_size, found = int(first["slot_size"]), int(first["token"])
    is_ours = first["state"] == forms.SLAB_HEAD and token in (None, found)
    if not is_ours or slot_size % PAGE_SIZE or not 0 < slot_size <= geometry.slab_size:
        return SlabHeads(slab)
    count, _ = plan_slab(geometry.slab_size, slot_size)
    rows = rows[1 : count + 1]
    of_this_use = (rows["magic"] == forms.HEAD_MAGIC) & (rows["incarnation"] == first["incarnation"])
    live, damaged, torn = list[int](), list[int](), list[int]()
    for slot in np.flatnonzero(of_this_use).tolist():
        offset = HEAD_SIZE * (slot + 1)
        if not is_sound(table[offset : offset + HEAD_SIZE]):
            is_within = offset // SECTOR == (offset + HEAD_SIZE - 1) // SECTOR
            (damaged if is_within else torn).append(slot)
        elif rows["state"][slot] == forms.BLOCK_HEAD and rows["version"][slot] in VERSIONS:
            live.append(slot)
    slots = np.array(live, np.int64)
    incarnation = int(first["incarnation"])
    return SlabHeads(slab, slot_size, found, incarnation, False, rows[slots], slots, tuple(damaged), tuple(torn))


def _was_head(image: bytes) -> bool:
    """What is no sound head of a slab was one: neither nothing, nor a head of a file, which is older, stands there."""
    _, valid = layout.parse_headers(image[: layout.HEADER_SIZE], layout.HEADER_SIZE, 1)
    return any(image) and not valid[0]


def stored_sizes(heads: npt.NDArray[np.void]) -> npt.NDArray[np.uint32]:
    """Bytes in the slot of each block."""
    return np.where(heads["version"] == forms.PACKED_VERSION, heads["token"], heads["length"])


def is_possible(heads: npt.NDArray[np.void], slot_size: int, slab_size: int) -> npt.NDArray[np.bool_]:
    """Which heads describe a block that can be in such a slab."""
    sizes = stored_sizes(heads).astype(np.int64)
    is_smaller = -(-sizes // PAGE_SIZE) < -(-heads["length"].astype(np.int64) // PAGE_SIZE)
    possible: npt.NDArray[np.bool_] = (
        (heads["length"] > 0)
        & (heads["length"] <= slab_size)
        & (sizes > 0)
        & (sizes <= slot_size)
        & (is_smaller | (heads["version"] == HEAD_VERSION))
        & (heads["slot_size"] == slot_size)
        & (heads["name_length"] > 0)
        & (heads["sequence"] > 0)
        & (heads["sequence"] < SEQUENCE_MAX)
    )
    return possible


def batches(lengths: npt.NDArray[np.uint32], size_max: int) -> Iterator[tuple[int, int]]:
    """Of neighbours that are read together: at most so many bytes, or one block."""
    start = size = 0
    for at, length in enumerate(lengths.tolist()):
        if at > start and size + length > size_max:
            yield start, at
            start, size = at, 0
        size += length
    if start < len(lengths):
        yield start, len(lengths)
