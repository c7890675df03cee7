"""How two hosts prove to each other that they may read the records of the same volume, when one connects to the other.

    caller   -> listener   HELLO   magic, version, the volume's id, the caller's number, 32 random bytes
    listener -> caller     WELCOME magic, version, the volume's id, the listener's number, 32 random bytes, and a proof
    caller   -> listener   a proof, and the place of its queue pair (`queue_pair.PLACE`; zeros: it has none)
    listener -> caller     the place of its own, or zeros; nothing where the caller has none

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
_HELLO = struct.Struct("<8s I 4x 16s Q 32s")


class HostIdentity(NamedTuple):
    """Of a host, towards the others of its volume."""

    volume_id: bytes
    client: int
    secret: bytes


def _hello(own: HostIdentity) -> bytes:
    return _HELLO.pack(MAGIC, VERSION, own.volume_id, own.client, secrets.token_bytes(NONCE_SIZE))


def _client_of(hello: bytes, own: HostIdentity) -> int:
    magic, version, volume_id, client, _ = _HELLO.unpack(hello)
    if magic != MAGIC:
        raise WireError("the other side does not greet as a host of kvfuse does")
    if version != VERSION:
        raise WireError(f"the other host speaks version {version}, this one {VERSION}")
    if volume_id != own.volume_id:
        raise WireError("the other host is of another volume")
    return int(client)


def _proof(own: HostIdentity, role: bytes, hello: bytes, welcome: bytes) -> bytes:
    return hmac.digest(own.secret, role + hello + welcome, "sha256")


def _check(found: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(found, expected):
        raise WireError("the other host does not know the volume's secret")


async def greet(stream: PeerStream, own: HostIdentity, client: int, place: bytes = NO_PLACE) -> bytes:
    """By who connected to that client, with the place of a queue pair; the other side's. WireError, OSError."""
    hello = _hello(own)
    await stream.send([memoryview(hello)])
    answer = await stream.receive(_HELLO.size + PROOF_SIZE)
    welcome, proof = answer[: _HELLO.size], answer[_HELLO.size :]
    found = _client_of(welcome, own)
    _check(proof, _proof(own, b"listener", hello, welcome))
    if found != client:
        raise WireError(f"client {found:x} answers where client {client:x} did")
    await stream.send([memoryview(_proof(own, b"caller", hello, welcome) + place)])
    return NO_PLACE if place == NO_PLACE else await stream.receive(PLACE_SIZE)


async def welcome(stream: PeerStream, own: HostIdentity) -> tuple[int, bytes]:
    """By who was connected to: the caller's number, and its place, which is to be answered. WireError, OSError."""
    hello = await stream.receive(_HELLO.size)
    client, answer = _client_of(hello, own), _hello(own)
    await stream.send([memoryview(answer), memoryview(_proof(own, b"listener", hello, answer))])
    _check(await stream.receive(PROOF_SIZE), _proof(own, b"caller", hello, answer))
    return client, await stream.receive(PLACE_SIZE)
