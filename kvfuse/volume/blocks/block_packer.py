"""Compresses blocks when they are written, where their namespace wants that and a smaller slot holds them then.

In memory blocks are as they were put. `native/blockpack.h` says why they are compressed here and not at the put. What a
slot has is one zstd frame of the whole block, and zeros up to a page.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.errors import EngineError
from kvfuse.native import blockforms as forms
from kvfuse.native._blocks import Batch
from kvfuse.volume.blocks.block_slabs import BlockSlabs
from kvfuse.volume.blocks.slot_reads import memory_at
from kvfuse.volume.store.codec import Codec, Trials

SLABS_MAX = 64
"""that are lent for the compressed blocks of one batch"""


@dataclass
class BlockPacker:
    """One batch at a time. Event loop only."""

    slabs: BlockSlabs
    _codec: Codec = field(default_factory=Codec)
    _trials: defaultdict[int, Trials] = field(default_factory=lambda: defaultdict(Trials))
    """namespace -> those of its blocks"""

    async def pack(self, batch: Batch) -> None:
        """Compress those blocks of a batch that are worth the attempt. A thread does it."""
        found = np.frombuffer(batch.blocks(True), forms.STORED)
        if not len(found):
            return
        is_tried = found["must_pack"] != 0
        for namespace in np.unique(found["namespace"]).tolist():
            own = np.flatnonzero((found["namespace"] == namespace) & ~is_tried)
            is_tried[own] = self._trials[namespace].choose(len(own))
        tried = found[is_tried]
        packed, buffer = await trio.to_thread.run_sync(partial(self._pack_all, tried))
        await self._have_slabs(packed["size"])
        saved = np.zeros(len(tried), np.int64)
        batch.pack(packed, buffer, saved)
        for row, size, less in zip(tried.tolist(), packed["size"].tolist(), saved.tolist(), strict=True):
            _, namespace, _, _, _, length, _, _ = row
            self._trials[namespace].note(length, size or length, is_smaller=less > 0, saved=max(less, 0))

    async def _have_slabs(self, sizes: npt.NDArray[np.uint64]) -> None:
        """Have free slabs for compressed blocks: a block that finds no slot of its size now stays as it is."""
        pages = -(-sizes.astype(np.int64) // forms.PAGE)
        slabs = int(pages.sum()) * forms.PAGE // self.slabs.geometry.slab_size + len(np.unique(pages[pages > 0]))
        if slabs:
            with suppress(EngineError):
                await self.slabs.lend(min(slabs, SLABS_MAX))

    def _pack_all(self, tried: npt.NDArray[np.void]) -> tuple[npt.NDArray[np.void], npt.NDArray[np.uint8]]:
        packed = np.zeros(len(tried), forms.PACKED)
        frames, end = [], 0
        for place, (number, _, _, _, data, size, slot_size, must_pack) in enumerate(tried.tolist()):
            (frame,) = self._codec.pack([memory_at(data, size)])
            most = size if must_pack else slot_size - max(slot_size // 16, forms.PAGE)
            is_smaller = len(frame) <= most
            packed[place] = number, end, len(frame) if is_smaller else 0
            if is_smaller:
                frames.append((end, frame))
                end += -(-len(frame) // forms.PAGE) * forms.PAGE
        buffer = _aligned(end)
        for start, frame in frames:
            buffer[start : start + len(frame)] = np.frombuffer(frame, np.uint8)
        return packed, buffer

    def statistics(self, namespace: int) -> dict[str, Any]:
        """Of one namespace, since the mount."""
        return self._trials[namespace].statistics() if namespace in self._trials else Trials().statistics()


def _aligned(size: int) -> npt.NDArray[np.uint8]:
    """Zeros that begin at a page, as engines like it."""
    memory = np.zeros(size + forms.PAGE, np.uint8)
    start = -memory.ctypes.data % forms.PAGE
    return memory[start : start + size]
