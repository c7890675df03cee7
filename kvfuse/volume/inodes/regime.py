"""Who may use a directory, as a few bytes: where these are the same later, nobody may who could not before."""

from __future__ import annotations

import hashlib
from typing import Protocol

from kvfuse.volume.namespaces.namespace_registry import Namespaces
from kvfuse.volume.tier.arena_pool import REGIME_SIZE


class Directory(Protocol):
    """A node, or its record."""

    @property
    def uid(self) -> int: ...
    @property
    def gid(self) -> int: ...
    @property
    def mode(self) -> int: ...
    @property
    def namespace(self) -> int: ...


def regime_of(directory: Directory, namespaces: Namespaces) -> bytes:
    """Its owner and mode, its namespace, and the token that holds there.

    Not those above: nobody writes to an arena that a client of the daemon before this one may have mapped.
    """
    gate = namespaces.gates.all.get(directory.namespace)
    token = (gate.folder, gate.lock) if gate is not None else (0, "")
    facts = directory.uid, directory.gid, directory.mode, directory.namespace, token
    return hashlib.blake2b(repr(facts).encode(), digest_size=REGIME_SIZE, person=b"kvfuse regime").digest()
