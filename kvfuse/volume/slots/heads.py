"""Slot heads as bytes: the header of a slot, and behind it, or in the slot's unused end, what it says of the file.

The description of the file is path, owner, mode and size: a rebuild makes the file anew from it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from kvfuse.checksum import CHECKSUM_SIZE, crc32c, extent_checksum
from kvfuse.remote.segments.api import Transfer
from kvfuse.slab import layout
from kvfuse.slab.layout import Geometry, Superblock
from kvfuse.volume.store import schema


class Description(msgspec.Struct, array_like=True, frozen=True):
    """What a slot says of the file it belongs to; enough to make the file anew."""

    path: bytes
    mode: int
    uid: int
    gid: int
    size: int
    mtime: int
    chunk_size: int
    stored: int
    """bytes in slots, if they were known: a file of which fewer are found is not whole"""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Description).decode


def encode_description(description: Description) -> bytes:
    """With its checksum."""
    text = _encode(description)
    return text + crc32c(text).to_bytes(CHECKSUM_SIZE, "little")


def decode_description(text: bytes) -> Description | None:
    """None where it is damaged, or of another program version."""
    body, checksum = text[:-CHECKSUM_SIZE], int.from_bytes(text[-CHECKSUM_SIZE:], "little")
    if len(text) <= CHECKSUM_SIZE or crc32c(body) != checksum:
        return None
    try:
        return _decode(body)
    except ValueError:
        return None


class Head(NamedTuple):
    """What the head of a slot has to say."""

    addr: int
    slot_size: int
    length: int
    generation: int
    checksums: bytes
    """of the extent's granules; empty: unsealed"""
    ino: int
    chunk: int
    piece_offset: int
    state: int
    reach: int
    """bytes of the slot that no description may cover"""
    description: bytes = b""
    """with its checksum; empty: none"""

    @property
    def checksum(self) -> int:
        """Of all the extent's bytes; 0 where it is unsealed."""
        if len(self.checksums) == CHECKSUM_SIZE:
            return int.from_bytes(self.checksums, "little")
        return extent_checksum(self.checksums, self.length) if self.checksums else 0


def fingerprint(superblock: Superblock, ino: int, chunk: int) -> bytes:
    """128 bits that name a file's chunk in this volume."""
    return blake2b(schema.chunk_key(ino, chunk), digest_size=16, key=superblock.volume_id).digest()


def _place(head: Head, geometry: Geometry) -> int:
    """Where the description fits."""
    size = len(head.description)
    if not size:
        return layout.DESCRIPTOR_NONE
    if size <= geometry.header_stride(head.slot_size) - layout.HEADER_SIZE:
        return layout.DESCRIPTOR_BEHIND_HEADER
    # Not where the store may still name bytes, as before a cut that is not committed, nor where a write may go.
    if size <= head.slot_size - head.reach:
        return layout.DESCRIPTOR_AT_SLOT_END
    return layout.DESCRIPTOR_NONE


def transfers(superblock: Superblock, heads: Sequence[Head]) -> list[Transfer]:
    """Heads of a batch of slots, as ranges to be written."""
    if not heads:
        return []
    geometry = superblock.geometry
    _, slot_sizes, lengths, generations, _, inodes, chunks, piece_offsets, states, _, _ = zip(*heads, strict=True)
    places = [_place(head, geometry) for head in heads]
    table = layout.pack_headers(
        len(heads),
        state=states,
        length=lengths,
        slot_size=slot_sizes,
        generation=generations,
        fingerprints=b"".join([fingerprint(superblock, head.ino, head.chunk) for head in heads]),
        inode=inodes,
        chunk=chunks,
        piece_offset=piece_offsets,
        checksum=[head.checksum for head in heads],
        time=int(time.time()),
        descriptor_length=[len(head.description) if place else 0 for head, place in zip(heads, places, strict=True)],
        descriptor_place=places,
    ).tobytes()
    made = []
    for number, (head, place) in enumerate(zip(heads, places, strict=True)):
        header = table[number * layout.HEADER_SIZE : (number + 1) * layout.HEADER_SIZE]
        if place == layout.DESCRIPTOR_BEHIND_HEADER:  # up to the next one: those of neighbours are one write then
            header = (header + head.description).ljust(geometry.header_stride(head.slot_size), b"\0")
        elif place == layout.DESCRIPTOR_AT_SLOT_END:
            segment, offset = geometry.locate(head.addr)
            made.append(Transfer(segment, offset + head.slot_size - len(head.description), head.description))
        made.append(Transfer(*geometry.locate_header(head.addr, head.slot_size), header))
    return made
