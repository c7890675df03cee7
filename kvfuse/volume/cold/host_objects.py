"""Objects of the cold tier of a shared volume: each host puts its own, and any host reads and deletes all of them.

The names have the client that put an object, and the microsecond in which it began to, which is its number. Whether a
block of an object counts only the index says (`cold_entries`). So an object whose end nobody saw, or of a host that is
gone, is no danger: nothing names it, and it is deleted by its owner, or by the owner's heir.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvfuse.native import blockforms as forms
from kvfuse.remote.bucket import Bucket, NoObject, Range
from kvfuse.remote.index.api import BlockIndex
from kvfuse.volume.cold import cold_format as layout
from kvfuse.volume.cold.cold_entries import ColdEntry, decode

FOLDER = "hosts/"
KEYS_AT_ONCE = 4096
"""of one call to the index"""

Heads = npt.NDArray[np.void]


class ObjectPlace(NamedTuple):
    """Which object. Older ones have lower numbers, whoever put them."""

    number: int
    client: int

    @property
    def name(self) -> str:
        return f"{FOLDER}{self.client:016x}/{self.number:016d}"


@dataclass
class HostObject:
    """One that is in the bucket."""

    place: ObjectPlace
    size: int
    blocks: int = 0
    """that the index named when it was asked last, and their bytes"""
    block_bytes: int = 0
    looked_at: float = 0.0
    """in trio's time"""


def place_of(name: str) -> ObjectPlace | None:
    """None: it is the name of no such object."""
    folder, _, rest = name.partition("/")
    client, _, number = rest.partition("/")
    is_ours = f"{folder}/" == FOLDER and len(client) == 16 and len(number) == 16 and number.isdecimal()
    try:
        return ObjectPlace(int(number), int(client, 16)) if is_ours else None
    except ValueError:
        return None


async def list_objects(bucket: Bucket) -> dict[ObjectPlace, int]:
    """The bytes of all objects of all hosts. EngineError."""
    found = [(place_of(one.name), one.size) for one in await bucket.list(FOLDER)]
    return {place: size for place, size in found if place is not None}


async def read_object_heads(bucket: Bucket, place: ObjectPlace, size: int, volume_id: bytes) -> Heads | None:
    """None: it is damaged, or not of this volume, or has another length. NoObject, EngineError."""
    data = bytearray(min(size, layout.FIRST_READ))
    await bucket.read(place.name, [Range(0, memoryview(data))])
    facts = layout.read_header(bytes(data), volume_id, place.number)
    if facts is None or facts.size != size:
        return None
    if facts.data_start > len(data):
        data = bytearray(facts.data_start)
        await bucket.read(place.name, [Range(0, memoryview(data))])
    return layout.read_heads(bytes(data), facts)


async def named_blocks(index: BlockIndex, place: ObjectPlace, heads: Heads) -> list[ColdEntry]:
    """The blocks of an object that the index names. EngineError."""
    own = heads[heads["state"] == forms.BLOCK_HEAD]
    pairs = np.stack([own["low"], own["high"]], axis=1).astype("<u8").tobytes()
    keys = list(dict.fromkeys([pairs[at : at + 16] for at in range(0, len(pairs), 16)]))
    found: list[ColdEntry] = []
    for start in range(0, len(keys), KEYS_AT_ONCE):
        for entry in await index.find(keys[start : start + KEYS_AT_ONCE]):
            cold = decode(entry) if entry is not None else None
            if cold is not None and (cold.number, cold.client) == place:
                found.append(cold)
    return found


async def remove_object(bucket: Bucket, index: BlockIndex, place: ObjectPlace, size: int, volume_id: bytes) -> None:
    """Delete an object, and before that what the index says of it. EngineError."""
    try:
        heads = await read_object_heads(bucket, place, size, volume_id)
    except NoObject:
        return
    if heads is not None:
        await forget_blocks(index, await named_blocks(index, place, heads))
    await bucket.delete([place.name])


async def forget_blocks(index: BlockIndex, blocks: Sequence[ColdEntry]) -> None:
    """The index names these blocks no more. EngineError."""
    for start in range(0, len(blocks), KEYS_AT_ONCE):
        await index.drop([(one.key, one.sequence) for one in blocks[start : start + KEYS_AT_ONCE]])
