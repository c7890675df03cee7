"""The records by which hosts of a shared volume find and trust each other (key ``w`` of `schema`, and one counter)."""

from __future__ import annotations

import struct

import msgspec

from kvfuse.volume.store.schema import Malformed

PREFIX = b"w"
SECRET = b"npeersecret"
"""random bytes that hosts prove to each other to know"""
SECRET_SIZE = 32
TRACES = "traces"
_KEY = struct.Struct(">cQ")


class PeerRecord(msgspec.Struct, array_like=True, frozen=True):
    """Where a client answers other hosts."""

    addresses: tuple[str, ...]
    """HOST:PORT each, all of this one host; names are resolved by who connects"""
    transports: tuple[str, ...] = ("tcp",)
    """that it can answer by"""
    gids: tuple[str, ...] = ()
    """of its RDMA devices: 32 hexadecimal digits each"""
    abilities: tuple[str, ...] = ()
    """what it also understands, and other versions may not: `TRACES`"""

    @property
    def is_traced(self) -> bool:
        """It takes the spans that questions belong to."""
        return TRACES in self.abilities


def key_of(client: int) -> bytes:
    return _KEY.pack(PREFIX, client)


def encode(place: PeerRecord) -> bytes:
    return msgspec.msgpack.encode(place)


def decode(value: bytes) -> PeerRecord:
    """Malformed."""
    try:
        return msgspec.msgpack.decode(value, type=PeerRecord)
    except msgspec.DecodeError as error:
        raise Malformed(f"a record of where a host answers: {error}") from error
