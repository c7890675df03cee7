"""Who has copies of a host's blocks: so hot blocks spread, and their writer need not serve all who want them.

A host remembers who fetched what from it. Who asks for a block that others have is sent to the one of them - the host
itself is one, too - that has least to do; of those alike, to the one that was chosen least often.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection

BLOCKS_MAX = 1 << 16
"""blocks of which copies are remembered; those that nobody asked for longest are forgotten"""
HOLDERS_MAX = 16
"""hosts that are remembered for each"""
LOAD_STEP = 4 << 20
"""bytes that a host has still to send: hosts whose loads differ by less are alike"""


class CopyHolders:
    """Of one host. ``own``: its number, a holder of everything that it is asked about."""

    def __init__(self) -> None:
        self._chosen: OrderedDict[int, dict[int, int]] = OrderedDict()
        """address -> for each host that has a copy, how often it was chosen"""

    def note(self, addr: int, client: int) -> None:
        """The client fetched the block."""
        chosen = self._chosen.setdefault(addr, {})
        self._chosen.move_to_end(addr)
        if client not in chosen and len(chosen) < HOLDERS_MAX:
            chosen[client] = min(chosen.values(), default=0)
        if len(self._chosen) > BLOCKS_MAX:
            self._chosen.popitem(last=False)

    def forget(self, addr: int, client: int) -> None:
        """The client has it no more."""
        chosen = self._chosen.get(addr)
        if chosen is not None:
            chosen.pop(client, None)

    def choose(self, addr: int, own: int, load: Callable[[int], int], but: Collection[int] = ()) -> list[int]:
        """Hosts that have the block, ``own`` among them, in the order in which to ask; the first one is chosen."""
        chosen = self._chosen.get(addr)
        if not chosen:
            return [own]
        chosen.setdefault(own, 0)
        ranked = sorted(
            [client for client in chosen if client == own or client not in but],
            key=lambda client: (load(client) // LOAD_STEP, chosen[client]),
        )
        chosen[ranked[0]] += 1
        return ranked
