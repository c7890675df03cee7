"""Places: where bytes that were asked for lie in the registered memory of who has them. Who asked reads them by RDMA.

A row that is `Answer.HERE` may have places instead of bytes: one for each piece of registered memory in which its bytes
lie, in their order. Nobody keeps the bytes there until they are read: who reads them verifies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvfuse.peer.peer_wire import GRANULES_BYTES_MAX, Rows, WireError
from kvfuse.peer.queue_pair import READ, Reads, join
from kvfuse.peer.verbs import MemoryPart
from kvfuse.volume.views.neighbours import Answer

PLACE = np.dtype([("address", "<u8"), ("length", "<u4"), ("rkey", "<u4")])
PLACES_MAX = 32
"""of a row: a piece of registered memory is larger than a part of this of what a row may want"""

Places = npt.NDArray[np.void]

assert PLACE.itemsize == 16
assert PLACES_MAX > GRANULES_BYTES_MAX // (4 << 20)


class ReadPlan(NamedTuple):
    """READs of several rows: those of each row follow each other."""

    reads: Reads
    ends: list[int]
    """for each row how many READs there are up to its last one"""


def places_of(parts: Sequence[MemoryPart]) -> Places:
    """Of parts of memory that others may read, to be sent."""
    places = np.empty(len(parts), PLACE)
    for row, part in enumerate(parts):
        places[row] = (part.address, part.size, part.rkey)
    return places


def check_counts(rows: Rows, *, are_welcome: bool) -> list[int]:
    """How many places each row of an answer has. WireError."""
    counts: list[int] = rows["places"].tolist()
    if any(counts) and not are_welcome:
        raise WireError("an answer has places that were not asked for")
    if max(counts) > PLACES_MAX or any(rows["answer"][np.flatnonzero(counts)] != Answer.HERE):
        raise WireError("an answer has places that no answer may have")
    return counts


def split_places(places: Places, counts: Sequence[int], sizes: Sequence[int]) -> list[Places]:
    """The places of each row; empty: its bytes follow. WireError where they are not those of ``sizes`` bytes."""
    found, start = [], 0
    for count, size in zip(counts, sizes, strict=True):
        own = places[start : start + count]
        start += count
        if count and (int(own["length"].sum(dtype=np.uint64)) != size or not own["length"].all()):
            raise WireError(f"an answer has places of another size than the {size} bytes that were asked for")
        found.append(own)
    return found


def plan(pairs: Sequence[tuple[Places, Sequence[MemoryPart]]]) -> ReadPlan:
    """READs of places into own memory, of as many bytes: one for what is in one piece on both sides."""
    rows: list[tuple[int, int, int, int, int]] = []
    ends = []
    for places, parts in pairs:
        rows += join(places.tolist(), [(part.address, part.size, part.lkey) for part in parts])
        ends.append(len(rows))
    return ReadPlan(np.array(rows, READ), ends)
