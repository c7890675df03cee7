"""Slots of a shared volume that are freed by clients who do not hold their slab.

A client that takes an extent out of an inode and does not hold its slab puts an *f record* in that very commit. The
slab's holder gets it from a watch, or finds it when it takes the slab; clears the slot in the slab's image and deletes
the f record in one commit; and reuses the slot, a grace later where somebody may be reading it. So an f record
always names a durable slot of just that generation; it is looked at afresh (`get`) before anything is done, and once: a
change that a watch brings late is never taken for one of the slot's next life.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import trio

from kvfuse.slab.image import LENT, SlabState
from kvfuse.volume.inodes.chunk import COMMITTED, RESTED, Extent
from kvfuse.volume.store import schema
from kvfuse.volume.store.schema import FreedSlot
from kvfuse.volume.store.sealed import get_sound, scan_page
from kvfuse.volume.store.transaction import Transaction

if TYPE_CHECKING:
    from kvfuse.volume.inodes.core import Core

SCAN_ROWS = 1000
SEEN_GRACES = 2
"""For so many graces it is remembered which f records were seen to."""


class JournalPart(Protocol):
    """The part of a `Journal` that this module calls."""

    def is_sending(self, slab: int) -> bool:
        """A batch was built with the slab's image, and it is not known yet that this is in the store."""

    def put(self, key: bytes, value: bytes | None) -> None:
        """Have a record changed by the next batch, and with it the images of slabs that changed by then."""

    async def transact(self, transaction: Transaction) -> bool:
        """Have a commit of its own, with the fence of this client; False when an expected version had moved."""


class FreedSlots:
    """The holder's side: f records of slots in slabs that this client holds."""

    def __init__(self, core: Core, journal: JournalPart) -> None:
        self.core = core
        self.journal = journal
        self._hints: dict[bytes, None] = {}
        """f records to look at"""
        self._seen_to: dict[bytes, float] = {}
        """those that were handed to the journal -> when; in that order"""
        self._batch = core.records.limits.commit_operations_max // 4
        """f records handed to the journal at once; with their slabs' records they fit into one commit"""

    def hint(self, keys: Iterable[bytes]) -> None:
        """Look at these f records soon. Each is seen to once: told of it again, its slot may be in its next life."""
        self._hints.update(dict.fromkeys(key for key in keys if key not in self._seen_to))

    def granted(self, keys: Iterable[bytes]) -> None:
        """These were found of a slab in which nobody has allocated since: look at them, whatever was before."""
        for key in keys:
            self._seen_to.pop(key, None)
            self._hints[key] = None

    @property
    def is_behind(self) -> bool:
        """There is something to look at."""
        return bool(self._hints)

    async def free(self) -> None:
        """Have a batch of hinted slots freed, unless the last one is still to be committed.

        Not while slabs are granted: what is hinted of a slab that is not is forgotten here, and found then (`find`).
        While the store is asked, a batch may be committed: what is to be done is decided afterwards, and done without
        waiting. An answer that took longer than half the grace is not believed: the slot might be in its next life.
        """
        if len(self.core.dead) >= self._batch:
            return
        keys = list(islice(self._hints, self._batch))
        asked = trio.current_time()
        rows = await get_sound(self.core.records, keys)
        if trio.current_time() - asked > self.core.grace.seconds / 2:
            return
        for key, row in zip(keys, rows, strict=True):
            self._hints.pop(key, None)
            freed = schema.split_freed_key(key)
            if row is not None and self.core.slabs.holds(freed.slab):
                self._free(key, freed, *schema.decode_freed(row.value))
        self._forget(trio.current_time() - SEEN_GRACES * self.core.grace.seconds)

    def _free(self, key: bytes, freed: FreedSlot, has_rested: bool, namespace: int) -> None:
        """The slot and its f record go with the journal's next batch; further calls for them change nothing."""
        if self.core.slabs.is_durable(freed.addr):
            slot_size = self.core.slabs.slot_size(freed.addr)
            state = RESTED if has_rested else COMMITTED
            self.core.dead.append(Extent(freed.addr, slot_size, slot_size, freed.generation, b"", state, namespace))
        self.journal.put(key, None)
        self._seen_to[key] = trio.current_time()

    def _forget(self, before: float) -> None:
        """No answer that is still to come is so old that it has these f records."""
        while self._seen_to and next(iter(self._seen_to.values())) < before:
            del self._seen_to[next(iter(self._seen_to))]

    # -- taking a slab -------------------------------------------------------------------------------

    async def find(self, slabs: Sequence[int]) -> dict[int, list[bytes]]:
        """The f records of slabs (ascending); slabs without any are left out. Few round trips where there are few."""
        found: dict[int, list[bytes]] = {slab: [] for slab in slabs}
        after = b""
        for slab in slabs:
            after = max(after, schema.freed_prefix(slab))
            while schema.key_slab(after) <= slab:
                rows, damaged = await scan_page(self.core.records, b"f", after, SCAN_ROWS)
                keys = sorted([row.key for row in rows] + damaged)
                for key in keys:
                    if schema.key_slab(key) in found:
                        found[schema.key_slab(key)].append(key)
                if len(keys) < SCAN_ROWS:
                    return {slab: keys for slab, keys in found.items() if keys}
                after = keys[-1]
        return {slab: keys for slab, keys in found.items() if keys}

    async def drop_stale(self, states: Sequence[SlabState], found: dict[int, list[bytes]]) -> None:
        """Delete f records of slots that are free: whoever gets such a slot next must not lose it to them.

        For slabs that this client holds and that were not granted yet: nobody else changes their images.
        """
        by_slab = {state.slab: state for state in states}
        stale = [key for slab, keys in found.items() for key in keys if not self._is_durable(by_slab[slab], key)]
        for start in range(0, len(stale), self._batch):
            await self.journal.transact(Transaction({}, deletes=stale[start : start + self._batch]))
        for key in stale:
            found[schema.key_slab(key)].remove(key)

    def _is_durable(self, state: SlabState, key: bytes) -> bool:
        if state.slot_size == LENT:
            return False
        offset = schema.split_freed_key(key).addr - state.slab * self.core.geometry.slab_size
        index, rest = divmod(offset, state.slot_size) if state.slot_size else (0, 1)
        in_image = not rest and 0 <= index < 8 * len(state.bitmap)
        return in_image and bool(state.bitmap[index >> 3] >> (index & 7) & 1)
