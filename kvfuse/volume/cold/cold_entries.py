"""What the index of a shared volume says of a block in the bucket: its head, and in which object of which host it is.

The entry is the block's right to be served: a block of the bucket counts only while the index has its entry, and no
entry is ever made where it is absent. `docs/internals/formats.md` has the layout.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from kvfuse.checksum import crc32c
from kvfuse.native import blockforms as forms
from kvfuse.remote.index.api import KEY_SIZE, Entry
from kvfuse.volume.cold.cold_index import ColdGroup

PLACE = struct.Struct("<QQIIQ")
"""client, number of its object, where the block's bytes begin in it, in `cold_format.STEP`, version, zeros"""
VERSION = 1
VALUE_SIZE = forms.TOLD_SIZE + PLACE.size
"""bytes: an entry of a block in a slab has `forms.TOLD_SIZE`"""
FLOOR_KEY = b"\xff" * KEY_SIZE
"""of the entry whose sequence says: no block of the bucket up to it is to be served"""


class ColdEntry(NamedTuple):
    """A block of the bucket."""

    key: bytes
    sequence: int
    client: int
    number: int
    place: int
    length: int
    checksum: int
    expires: int
    """second, by the clock of the namespace; 0: never"""
    stored: int
    """second"""
    priority: int
    group: ColdGroup


def is_cold(entry: Entry | None) -> bool:
    """It is of a block in the bucket."""
    return entry is not None and len(entry.value) == VALUE_SIZE


def encode(head: np.void, client: int, number: int, place: int) -> Entry:
    """``head``: a row of `forms.HEAD`, without its checksum."""
    data = bytes(head.tobytes())[:-4]
    told = data + crc32c(data).to_bytes(4, "little") + bytes(forms.TOLD_SIZE - forms.HEAD.itemsize)
    key = int(head["low"]).to_bytes(8, "little") + int(head["high"]).to_bytes(8, "little")
    return Entry(key, int(head["sequence"]), told + PLACE.pack(client, number, place, VERSION, 0))


def decode(entry: Entry) -> ColdEntry | None:
    """None: it is of no block in the bucket, or damaged, or of a later program."""
    if not is_cold(entry):
        return None
    head: np.void = np.frombuffer(entry.value, forms.HEAD, 1)[0]
    client, number, place, version, _ = PLACE.unpack_from(entry.value, forms.TOLD_SIZE)
    key = int(head["low"]).to_bytes(8, "little") + int(head["high"]).to_bytes(8, "little")
    is_sound = int(head["crc"]) == crc32c(entry.value[: forms.HEAD.itemsize - 4]) and version == VERSION
    is_sound &= key == entry.key and int(head["sequence"]) == entry.sequence
    if not is_sound or head["state"] != forms.BLOCK_HEAD or not head["length"]:
        return None
    names = ("directory", "name_space", "epoch", "uid", "gid", "mode")
    group = ColdGroup(*[int(head[name]) for name in names])
    length, checksum, expires, stored, priority = (
        int(head[name]) for name in ("length", "checksum", "expires", "stored", "priority")
    )
    return ColdEntry(key, entry.sequence, client, number, place, length, checksum, expires, stored, priority, group)
