"""All namespaces of a volume, by number. The core has them; `tenancy.namespaces` changes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from kvfuse.volume.measures.gates import Gates
from kvfuse.volume.measures.limiter import Limiter
from kvfuse.volume.measures.measures import Measures
from kvfuse.volume.measures.uses import Uses, UsesElsewhere
from kvfuse.volume.namespaces.accounts import Accounts
from kvfuse.volume.namespaces.cache import Cache, forget_slabs
from kvfuse.volume.namespaces.clears import Cleared
from kvfuse.volume.namespaces.settings import ROOT, Settings
from kvfuse.volume.views.news import News


@dataclass
class Namespace:
    """One namespace."""

    number: int
    settings: Settings
    """in effect"""
    stored: Settings
    """the same without what the options of this mount say"""
    cache: Cache | None = None
    """its books, where it is one"""


class Namespaces:
    """The namespaces that the volume has. For the event loop alone, but for ``uses`` and each of ``measures``."""

    def __init__(
        self,
        settings: Mapping[int, Settings],
        clock: Callable[[], float],
        above: Mapping[int, int] | None = None,
        *,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        """``settings``: by number. The root is a namespace in any case. ``above``: number -> namespace that it is in.

        ``overrides``: settings of the root that hold for this mount alone. InvalidArgument, if they do not go together
        with those that are stored.
        """
        self._clock = clock
        self.overrides = overrides or {}
        self.all: dict[int, Namespace] = {}
        self.caches: dict[int, Cache] = {}
        """number -> books of those that are caches: what hot paths look at"""
        readers: dict[Measures, float] = {}
        self.measures: defaultdict[int, Measures] = defaultdict(partial(Measures, readers))
        """number -> what is measured of it"""
        self.gates = Gates()
        self.news = News()
        self.uses = Uses()
        self.elsewhere = UsesElsewhere()
        self.changed = trio.Event()
        """set when a block was stored, or a namespace changed: there may be something to evict"""
        self.cleared = Cleared()
        self.new_slabs: set[int] = set()
        """slabs with files that came from another host: the caches' books do not have their blocks yet"""
        self.accounts = Accounts()
        self._moved_borders: set[int] = set()
        for number, found in {ROOT: Settings(), **settings}.items():
            self.put(number, found, (above or {}).get(number, ROOT))

    def put(self, number: int, stored: Settings, above: int | None = None) -> Namespace:
        """Add a namespace, or change its settings. A cache that gets another policy begins with empty books.

        ``above``: the namespace that it is in, that of its folder's directory; None: as before.
        """
        settings = stored.changed(self.overrides) if number == ROOT else stored
        former = self.all.get(number)
        cache = former.cache if former is not None and _same_books(former.settings, settings) else None
        if settings.is_cache and cache is None:
            cache = Cache(settings, self._clock, self.news, number, self.elsewhere)
        found = self.all[number] = Namespace(number, settings, stored, cache)
        self.gates.put(number, above, settings.token, settings.descriptor)
        self.caches.pop(number, None)
        if cache is not None:
            self.caches[number] = cache
            self.changed.set()
        if number == ROOT:
            self.accounts.put_root(settings)
        else:
            self.accounts.put(number, above, settings)
        self._limit(number, (settings.bandwidth, settings.iops, settings.burst))
        if settings.weight != 1.0 or number in self.measures:
            self.measures[number].weight = settings.weight
        return found

    def _limit(self, number: int, limits: tuple[float, float, float]) -> None:
        """Let these hold at once."""
        former = self.accounts.limiters.get(number)
        if former is None and not any(limits[:2]):
            return
        if former is None or former.settings != limits:
            self.accounts.limiters.pop(number, None)
            if any(limits[:2]):
                self.accounts.limiters[number] = Limiter(*limits)
            self.share_limits()

    def share_limits(self) -> None:
        """Tell all measures which limits hold."""
        for number in self.all:
            numbers = [*self.accounts.chain(number), ROOT] if number != ROOT else [ROOT]
            found = tuple([self.accounts.limiters[one] for one in numbers if one in self.accounts.limiters])
            if found or number in self.measures:
                former, self.measures[number].limiters = self.measures[number].limiters, found
                if former and former != found:
                    former[0].change()
                if former != found:
                    self.gates.ask_again()

    def weight(self, number: int) -> float:
        """Of a namespace beside others that wait for the same."""
        found = self.all.get(number)
        return found.settings.weight if found is not None else 1.0

    def may_keep(self, number: int, tier: str) -> bool:
        """A tier of this host, "dram" or "disk", may get copies of the blocks of a namespace."""
        found = self.all.get(number)
        return found is None or found.settings.tiers in ("all", tier)

    def clear(self, number: int, bound: int) -> None:
        """All files of a cache with inode numbers below ``bound`` are gone from here on."""
        self.cleared[number] = bound
        self.gates.ask_again()
        if (cache := self.caches.get(number)) is not None:
            cache.clear()
        self.news.clear(number)
        self.changed.set()

    def add_slab(self, slab: int) -> None:
        """This host holds a slab from now on, with files in it."""
        if self.caches:
            self.new_slabs.add(slab)
            self.changed.set()

    def slabs_left(self, slabs: Collection[int]) -> None:
        """This host holds these slabs no more."""
        self.new_slabs.difference_update(slabs)
        for cache in self.caches.values() if slabs else ():
            forget_slabs(cache, slabs)

    @property
    def high_water(self) -> float:
        """Share of the volume from which the caches give up blocks."""
        return min([self.all[number].settings.high_water for number in self.caches], default=1.0)

    @property
    def low_water(self) -> float:
        """Share of the volume that is used then."""
        return min([self.all[number].settings.low_water for number in self.caches], default=1.0)

    def moves_border(self, directory: int) -> None:
        """Another host made an empty directory a namespace, or ended that."""
        self._moved_borders.add(directory)

    def take_moved_borders(self) -> set[int]:
        """These directories, once: what is about to be added to them here is of another namespace."""
        if not self._moved_borders:
            return set()
        taken, self._moved_borders = self._moved_borders, set()
        return taken

    def remove(self, number: int, *, at_once: bool = False) -> None:
        """Forget a namespace that has no files. The caller deletes its records (p and u).

        ``at_once``: what removed files of it still have counts nowhere.
        """
        self.all.pop(number, None)
        self.cleared.pop(number, None)
        self.caches.pop(number, None)
        if (measures := self.measures.pop(number, None)) is not None:
            measures.readers.pop(measures, None)
        self.accounts.limiters.pop(number, None)
        self.gates.remove(number)
        if at_once:
            self.accounts.drop(number)
        else:
            self.accounts.remove(number)


def _same_books(former: Settings, new: Settings) -> bool:
    return (former.kind, former.eviction, former.admission) == (new.kind, new.eviction, new.admission)
