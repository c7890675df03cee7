"""How two hosts prove to each other that they may read the records of the same volume, when one connects to the other.

    caller   -> listener   HELLO   magic, version, kind, the volume's id, the caller's number, 32 random bytes
    listener -> caller     WELCOME the same with the listener's number, and a proof
    caller   -> listener   a proof, and the place of its queue pair (`queue_pair.PLACE`; zeros: it has none)
    listener -> caller     the place of its own, or zeros; nothing where the caller has none

A connection is of one kind: of `GRANULES`, for questions that Python answers; or of `BLOCKS`, for those that threads
without the interpreter do (native/peerserver.h).

A proof is the HMAC-SHA256 of the role, HELLO and WELCOME by the secret of the volume, so it is good for this connection
alone. What follows is neither encrypted nor signed: it is for networks whose wires are trusted, as engines' traffic is.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import NamedTuple

from kvfuse.peer.peer_wire import VERSION, WireError
from kvfuse.peer.queue_pair import NO_PLACE, PLACE_SIZE
from kvfuse.peer.stream import PeerStream

MAGIC = b"KVFPEER\n"
NONCE_SIZE = PROOF_SIZE = 32
_HELLO = struct.Struct("<8s I I 16s Q 32s")
GRANULES, BLOCKS = 0, 1
"""kinds of connections"""


class HostIdentity(NamedTuple):
    """Of a host, towards the others of its volume."""

    volume_id: bytes
    client: int
    secret: bytes


class Greeted(NamedTuple):
    """``place``: of its queue pair, which is to be answered."""

    client: int
    kind: int
    place: bytes


def _hello(own: HostIdentity, kind: int) -> bytes:
    return _HELLO.pack(MAGIC, VERSION, kind, own.volume_id, own.client, secrets.token_bytes(NONCE_SIZE))


def _client_of(hello: bytes, own: HostIdentity) -> tuple[int, int]:
    """(client, kind of the connection)"""
    magic, version, kind, volume_id, client, _ = _HELLO.unpack(hello)
    if magic != MAGIC:
        raise WireError("the other side does not greet as a host of kvfuse does")
    if version != VERSION:
        raise WireError(f"the other host speaks version {version}, this one {VERSION}")
    if volume_id != own.volume_id:
        raise WireError("the other host is of another volume")
    if kind not in (GRANULES, BLOCKS):
        raise WireError(f"a connection is of kind {kind}, which this host does not know")
    return int(client), int(kind)


def _proof(own: HostIdentity, role: bytes, hello: bytes, welcome: bytes) -> bytes:
    return hmac.digest(own.secret, role + hello + welcome, "sha256")


def _check(found: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(found, expected):
        raise WireError("the other host does not know the volume's secret")


async def greet(
    stream: PeerStream, own: HostIdentity, client: int, place: bytes = NO_PLACE, kind: int = GRANULES
) -> bytes:
    """By who connected to that client, with the place of a queue pair; the other side's. WireError, OSError."""
    hello = _hello(own, kind)
    await stream.send([memoryview(hello)])
    answer = await stream.receive(_HELLO.size + PROOF_SIZE)
    welcome, proof = answer[: _HELLO.size], answer[_HELLO.size :]
    found, _ = _client_of(welcome, own)
    _check(proof, _proof(own, b"listener", hello, welcome))
    if found != client:
        raise WireError(f"client {found:x} answers where client {client:x} did")
    await stream.send([memoryview(_proof(own, b"caller", hello, welcome) + place)])
    return NO_PLACE if place == NO_PLACE else await stream.receive(PLACE_SIZE)


async def welcome(stream: PeerStream, own: HostIdentity) -> Greeted:
    """By who was connected to. WireError, OSError."""
    hello = await stream.receive(_HELLO.size)
    client, kind = _client_of(hello, own)
    answer = _hello(own, kind)
    await stream.send([memoryview(answer), memoryview(_proof(own, b"listener", hello, answer))])
    _check(await stream.receive(PROOF_SIZE), _proof(own, b"caller", hello, answer))
    return Greeted(client, kind, await stream.receive(PLACE_SIZE))
