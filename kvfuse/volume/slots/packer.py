"""Compresses staged chunks before they are written, where their namespace wants it and a smaller slot holds them then.

Whole chunks alone: full ones, and those of files that nobody has open for writing. Each namespace has trials of its
own, so one whose blocks save nothing hardly costs any processor time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import trio

from kvfuse.checksum import GRANULE_SIZE
from kvfuse.slab.layout import FEATURE_PACKED, PAGE_SIZE
from kvfuse.volume.inodes.chunk import Staged
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store.codec import Codec, Trials
from kvfuse.volume.store.extents import make_packing


class Packed(NamedTuple):
    """The compressed bytes of a chunk."""

    data: bytes
    packing: bytes


@dataclass
class Packer:
    """Has one codec, so one call of `pack` at a time. `Flusher` has it."""

    core: Core

    def __post_init__(self) -> None:
        self._codec = Codec()
        self._trials: defaultdict[int, Trials] = defaultdict(Trials)
        """namespace -> those of its chunks"""

    def wants(self, node: Node, staged: Staged) -> bool:
        """This chunk, of such a namespace, is to be tried."""
        is_whole = staged.length == node.chunk_size or not node.writers
        if not is_whole or staged.capacity == PAGE_SIZE:
            return False
        return bool(self.core.superblock.features & FEATURE_PACKED) and self._trials[node.namespace].is_due()

    async def pack(self, chunks: Sequence[tuple[int, Staged]]) -> list[Packed | None]:
        """Of (namespace, staged bytes), which do not change meanwhile: None where a smaller slot would not hold them.

        A thread does it.
        """
        class_for = self.core.slabs.classes.class_for
        work = [(staged.pieces, staged.capacity) for _, staged in chunks]
        found = await trio.to_thread.run_sync(partial(self._pack_all, work))
        packed: list[Packed | None] = []
        for (number, staged), one in zip(chunks, found, strict=True):
            length = len(one.data) if one is not None else staged.length
            saved = staged.capacity - class_for(length) if one is not None else 0
            self._trials[number].note(staged.length, length, is_smaller=saved > 0, saved=max(saved, 0))
            packed.append(one if saved > 0 else None)
        return packed

    def _pack_all(self, work: Sequence[tuple[Sequence[bytes | bytearray | memoryview], int]]) -> list[Packed | None]:
        return [self._pack(pieces, capacity) for pieces, capacity in work]

    def _pack(self, pieces: Sequence[bytes | bytearray | memoryview], capacity: int) -> Packed | None:
        """None where that does not save a page, or a part in sixteen: given up as soon as that is known."""
        limit = capacity - max(capacity // 16, PAGE_SIZE)
        with memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces)) as data:
            frames: list[bytes] = []
            size = 0
            for start in range(0, len(data), GRANULE_SIZE):
                with data[start : start + GRANULE_SIZE] as granule:
                    (frame,) = self._codec.pack([granule])
                size += len(frame)
                if size > limit:
                    return None
                frames.append(frame)
            return Packed(b"".join(frames), make_packing(len(data), [len(frame) for frame in frames]))

    def statistics(self, number: int) -> dict[str, Any]:
        """Of one namespace, since the mount."""
        return self._trials[number].statistics() if number in self._trials else Trials().statistics()
