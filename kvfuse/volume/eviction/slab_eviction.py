"""Eviction by whole slab: for extents that need a slot size of which no slab has any, while no slab is free.

Eviction in the order of a policy frees slots here and there; a slab is free for another size when the last of its slots
is. So where such an extent found no room, the blocks of some slabs go, and these slabs with them. One in which others
than evictable blocks have slots is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from kvfuse.policy.api import HOLD_SECONDS
from kvfuse.slab.emptying import choose_slabs, needs_slabs
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.namespaces.cache import Cache, blocks_by_slab


@dataclass
class SlabChoice:
    """Chooses slabs to be emptied. `Evictor` has it, where one host has the volume."""

    core: Core
    _tried: dict[int, float] = field(default_factory=dict)
    """slabs that were chosen -> until when they are not chosen again: one of their files may be open"""

    def choose(self, size: int) -> list[int]:
        """Slabs of about ``size`` bytes. None, if the last call that found no room is helped by single blocks."""
        slabs, slab_size = self.core.slabs, self.core.geometry.slab_size
        caches = self._caches() if slabs.refused else []
        total, count = sum([cache.policy.size for cache in caches]), sum([len(cache.policy) for cache in caches])
        if not count or not needs_slabs(slabs.refused, slabs.free_bytes, slab_size, total / count):
            return []
        slabs.refused = 0
        now = trio.current_time()
        self._tried = {slab: until for slab, until in self._tried.items() if until > now}
        found = {slab: row for slab, row in blocks_by_slab(caches).items() if slab not in self._tried}
        chosen = choose_slabs(found, {slab: slabs.used_in(slab) for slab in found}, max(1, size // slab_size))
        self._tried.update(dict.fromkeys(chosen, now + HOLD_SECONDS))
        return chosen

    def _caches(self) -> list[Cache]:
        """Those that are not pinned."""
        namespaces = self.core.namespaces.all
        return [cache for number, cache in self.core.caches.items() if not namespaces[number].settings.soft_pin]
