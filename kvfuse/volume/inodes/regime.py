"""Who may use a directory, as a few bytes: where these are the same later, nobody may who could not before."""

from __future__ import annotations

import hashlib
from typing import Protocol

from kvfuse.volume.namespaces.registry import Namespaces
from kvfuse.volume.views.arena_pool import REGIME_SIZE


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
    """Its owner and mode, its namespace, and all tokens, as each holds for whichever directories are below."""
    tokens = sorted((number, one.stored.token) for number, one in namespaces.all.items())
    facts = directory.uid, directory.gid, directory.mode, directory.namespace, tokens
    return hashlib.blake2b(repr(facts).encode(), digest_size=REGIME_SIZE, person=b"kvfuse regime").digest()
