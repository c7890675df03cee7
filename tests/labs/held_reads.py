"""Reads of a volume's segments that a test holds up."""

from __future__ import annotations

from collections.abc import Sequence

import inside
import pytest
import trio

from kvfuse import errors
from kvfuse.remote.segments.api import Transfer
from kvfuse.slab.layout import SUPERBLOCK_SIZE
from kvfuse.volume.volume import Volume


class HeldReads:
    """Reads of a volume's segment engine: they wait for ``gate``, and fail if they are to."""

    def __init__(self, volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[tuple[int, int]] = []
        """(offset, bytes) of each transfer"""
        self.cancelled = 0
        self.gate = trio.Event()
        self.gates: dict[int, trio.Event] = {}
        """of transfers with a gate of their own, by number"""
        self.failing: set[int] = set()
        """numbers of transfers that fail"""
        self._read = inside.segments(volume).read
        monkeypatch.setattr(inside.segments(volume), "read", self.read)

    async def read(self, batch: Sequence[Transfer]) -> None:
        if any(transfer.offset < SUPERBLOCK_SIZE for transfer in batch):  # the header of a segment: no bytes of a file
            await self._read(batch)
            return
        number = len(self.begun)
        self.begun += [(transfer.offset, len(transfer.buffer)) for transfer in batch]
        try:
            await self.gates.get(number, self.gate).wait()
        except trio.Cancelled:
            self.cancelled += 1
            raise
        if number in self.failing:
            raise errors.EngineError("injected: a read")
        await self._read(batch)
