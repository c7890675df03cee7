"""Removes the files of namespaces of a shared volume that were cleared: one host does it, the next one if that dies.

Of the clients that are alive the one with the smallest number begins at once. Each of the others waits longer, in their
order, since it has heard of a removal: the first may be a mount that only reads, or a command. Two that sweep at the
same time do no harm: each commit expects the records as they were read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import trio

from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.eviction.shared_clearing import SharedClearing
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.names.cleared_files import ClearedFiles
from kvfuse.volume.store import schema
from kvfuse.volume.store.transaction import Transaction

TURN_SECONDS = 5.0
"""without progress, after which the next client sweeps"""


@dataclass
class SharedSweeper:
    """Sweeps where it is this host's turn. One of each membership. ``members``: clients that are alive."""

    core: Core
    journal: Journal
    files: ClearedFiles
    clearing: SharedClearing
    members: Callable[[], Collection[int]]

    async def sweep(self, number: int) -> None:
        """Remove all files of a namespace that were cleared, and mark its e record. EngineError: some may be left."""
        cleared = self.core.namespaces.cleared
        if number not in cleared or not self._is_turn():
            return
        bound, version = cleared[number], cleared.versions[number]
        left = await self.files.remove_in(None)
        if left or cleared.get(number) != bound:
            return
        key, value = schema.cleared_key(number), schema.encode_cleared(bound, is_swept=True)
        heard = partial(cleared.hear, number, value)
        await self.journal.transact(Transaction({key: version}, {key: value}, applied=heard))

    def _is_turn(self) -> bool:
        order = sorted({*self.members(), self.core.client})
        turn = order.index(self.core.client)
        return trio.current_time() >= self.clearing.progress_at + turn * TURN_SECONDS
