"""All namespaces of a volume, by number. The core has them; `tenancy.namespaces` changes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from kvfuse.volume.measures.gates import Gates
from kvfuse.volume.measures.limiter import Limiter
from kvfuse.volume.measures.measures import Measures
from kvfuse.volume.namespaces.accounts import Accounts
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


class Namespaces:
    """The namespaces that the volume has. For the event loop alone, but for each of ``measures``."""

    def __init__(
        self,
        settings: Mapping[int, Settings],
        above: Mapping[int, int] | None = None,
        *,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        """``settings``: by number. The root is a namespace in any case. ``above``: number -> namespace that it is in.

        ``overrides``: settings of the root that hold for this mount alone. InvalidArgument, if they do not go together
        with those that are stored.
        """
        self.overrides = overrides or {}
        self.all: dict[int, Namespace] = {}
        readers: dict[Measures, float] = {}
        self.measures: defaultdict[int, Measures] = defaultdict(partial(Measures, readers))
        """number -> what is measured of it"""
        self.gates = Gates()
        self.news = News()
        self.accounts = Accounts()
        self._moved_borders: set[int] = set()
        for number, found in {ROOT: Settings(), **settings}.items():
            self.put(number, found, (above or {}).get(number, ROOT))

    def put(self, number: int, stored: Settings, above: int | None = None) -> Namespace:
        """Add a namespace, or change its settings.

        ``above``: the namespace that it is in, that of its folder's directory; None: as before.
        """
        if stored.kind == "cache":  # what of it was not converted stays an ordinary file
            stored = msgspec.structs.replace(stored, kind="blocks")
        settings = stored.changed(self.overrides) if number == ROOT else stored
        found = self.all[number] = Namespace(number, settings, stored)
        self.gates.put(number, above, settings.token, settings.descriptor)
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
        if (measures := self.measures.pop(number, None)) is not None:
            measures.readers.pop(measures, None)
        self.accounts.limiters.pop(number, None)
        self.gates.remove(number)
        if at_once:
            self.accounts.drop(number)
        else:
            self.accounts.remove(number)
