"""How soon chains are continued: the measure of how long blocks have to stay to be of use.

What is short for people who read answers is long for an agent's tool calls. So the seconds that the default policy
compares the age of victims with are quantiles of the gaps that are measured: those between a request and the one whose
chain it continues.
"""

from __future__ import annotations

import numpy as np

GAPS_KEPT = 1024
GAPS_NEEDED = 256
"""before the first of the three is measured, it is as in an hour of a public chat service"""
GAP_MIN = 1
"""seconds: an engine that asks sooner again asks for the same request"""

_UPDATE_EVERY = 64
_QUANTILES = (0.5, 0.63, 0.72)


class Pace:
    """Three times in seconds, which follow the last ``GAPS_KEPT`` gaps."""

    def __init__(self, follows_gaps: bool = True) -> None:
        self.continue_age = 120.0
        """the median: ``AdmitAdaptive`` stores the new blocks of chains that go on while victims are older"""
        self.bonus = 180.0
        """63 %: ``Chain`` keeps the blocks of chains that went on longer by this"""
        self.begin_age = 240.0
        """72 %: ``AdmitAdaptive`` stores chains that begin while victims are older"""
        self._follows_gaps = follows_gaps
        self._gaps = np.zeros(GAPS_KEPT)
        self._count = 0

    def add(self, gap: float) -> None:
        """A chain was continued after ``gap`` seconds."""
        if gap < GAP_MIN or not self._follows_gaps:
            return
        self._gaps[self._count % GAPS_KEPT] = gap
        self._count += 1
        if self._count >= GAPS_NEEDED and self._count % _UPDATE_EVERY == 0:
            ranked = np.sort(self._gaps[: self._count]).tolist()
            self.continue_age, self.bonus, self.begin_age = (_quantile(ranked, share) for share in _QUANTILES)


def _quantile(ranked: list[float], share: float) -> float:
    """``np.quantile`` takes ten times as long."""
    place, part = divmod(share * (len(ranked) - 1), 1)
    low = ranked[int(place)]
    return low + part * (ranked[int(place) + 1] - low)
