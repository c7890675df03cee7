"""On which devices the slabs of a volume are, for who chooses the next one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from kvfuse.remote.segments.api import DeviceControl
from kvfuse.slab.free_slabs import WHOLE, Spread, Stripe
from kvfuse.slab.layout import Geometry

ROUNDS = 2
"""times that each device has its turn among slabs that are looked at"""


@dataclass
class DeviceSpread(Spread):
    geometry: Geometry
    devices: DeviceControl

    def stripe(self, slab: int) -> Stripe:
        made, segment = self.devices.map, self.geometry.locate_head(slab)[0]
        if segment >= len(made.places):  # this host has not read the newest map yet
            return WHOLE
        row = made.rows[made.places[segment] >> 24]
        return Stripe(row.device_id, row.weight, row.domain)

    @property
    def window(self) -> int:
        count = len(self.devices.map.rows)
        return ROUNDS * count * self.geometry.segment_slabs if count > 1 else 1

    def window_of(self, slabs: Iterable[int], count: int) -> list[int]:
        """The first ``count`` of slabs, as many of each device."""
        stripes: dict[bytes, list[int]] = {}
        for slab in islice(slabs, max(self.window, count)):
            stripes.setdefault(self.stripe(slab).name, []).append(slab)
        each = -(-count // max(len(stripes), 1))
        return [slab for stripe in stripes.values() for slab in stripe[:each]]
