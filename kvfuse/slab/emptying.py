"""Which slabs a cache empties for an extent that needs a whole one: pure decisions."""

from __future__ import annotations

from collections.abc import Mapping

from kvfuse.slab.allocator import PIECES_MAX


def needs_slabs(length: int, free_bytes: int, slab_size: int, block_size: float) -> bool:
    """Whether an extent that found no slots is helped by whole slabs alone, not by the slots of single blocks.

    ``free_bytes``: of slots which it did not fit. ``block_size``: mean size of the blocks that may go.
    """
    return length > PIECES_MAX * block_size or (length > 0 and free_bytes >= slab_size)


def choose_slabs(blocks: Mapping[int, tuple[int, float]], used: Mapping[int, int], count: int) -> list[int]:
    """Up to ``count`` slabs in which all used slots are blocks, those first whose loss costs least.

    ``blocks``: slab -> (bytes of the blocks that begin in it, when they were used last); ``used``: slab -> bytes of
    used slots. A block is worth the more the later it was used: few and old ones go.
    """
    newest = max([time for _, time in blocks.values()], default=0.0)
    whole = [slab for slab, (size, _) in blocks.items() if size >= used[slab] > 0]
    return sorted(whole, key=lambda slab: used[slab] / (newest - blocks[slab][1] + 1.0))[:count]
