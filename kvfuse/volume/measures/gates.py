"""Who may use which folders, for the event loop and the threads of rings: tokens, descriptors, owners and modes.

A *token* is a secret. Whoever has shown it may use its namespace, and those in it that have no token of their own, as
if all modes allowed it; without it only those may whom the mode of the folder that has the token lets in, which never
is everybody. Tokens are not stored: a *lock* is, a salted hash that says whether a token fits. A token has at least 16
characters, and should be random, so a fast hash does: who steals a lock has to try as many as there are.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from typing import NamedTuple

from kvfuse.volume.views.ancestors import AncestorTable

TOKEN_SIZE_MIN = 16
TOKEN_SIZE_MAX = 256
"""bytes"""
ENDED = -1
"""the epoch of gates in whose place there are others"""
_SALT_SIZE = 16
_FORM = "b1"
"""of a lock: this, the salt and the hash, in hex, with a dot between them"""


def is_token(token: str) -> bool:
    """A token may be called so: printable ASCII without spaces, not too short and not too long."""
    return (
        token.isascii() and token.isprintable() and " " not in token and TOKEN_SIZE_MIN <= len(token) <= TOKEN_SIZE_MAX
    )


def make_lock(token: str, salt: bytes | None = None) -> str:
    """The lock of a token; ``salt`` None: a random one."""
    salt = os.urandom(_SALT_SIZE) if salt is None else salt
    found = hashlib.blake2b(token.encode(), key=salt, digest_size=32, person=b"kvfuse token")
    return f"{_FORM}.{salt.hex()}.{found.hexdigest()}"


def is_lock(text: str) -> bool:
    """The text is a lock that `fits` can compare."""
    form, _, rest = text.partition(".")
    salt, _, found = rest.partition(".")
    return form == _FORM and len(salt) == 2 * _SALT_SIZE and len(found) == 64 and _is_hex(salt + found)


def _is_hex(text: str) -> bool:
    return not text.strip("0123456789abcdef")


def fits(lock: str, token: str) -> bool:
    """A token is that of the lock. Takes as long if it is not."""
    return hmac.compare_digest(make_lock(token, bytes.fromhex(lock.split(".")[1])), lock)


class Gate(NamedTuple):
    """What a namespace asks of those who want to use it."""

    folder: int
    """inode of the folder whose token holds: its own, or the nearest above; 0: none has one"""
    lock: str
    """of that token"""
    descriptor: str = ""
    """what its blocks are, if that is known"""


class _Own(NamedTuple):
    above: int
    lock: str
    descriptor: str


class Gates:
    """The gates of a volume's namespaces. The event loop changes them; any thread may read ``epoch``."""

    def __init__(self) -> None:
        self.all: dict[int, Gate] = {}
        """number -> gate, of those namespaces that have one"""
        self.epoch = 0
        """grows before anybody is let in, or kept out, who was not before: what was found earlier holds no more"""
        self.ancestors = AncestorTable()
        """whose owners, modes and places decide beside the tokens"""
        self._own: dict[int, _Own] = {}
        self.on_change: Callable[[], None] = lambda: None
        """called when ``epoch`` has changed"""

    def put(self, number: int, above: int | None, lock: str, descriptor: str = "") -> None:
        """A namespace is there, or is another. ``above``: the number of the one that it is in; None: as before."""
        if above is None:
            above = self._own[number].above if number in self._own else 0
        self._own[number] = _Own(above, lock, descriptor)
        self._build()

    def remove(self, number: int) -> None:
        if self._own.pop(number, None) is not None:
            self._build()

    def end(self) -> None:
        """These hold no more: others take their place."""
        self.epoch = ENDED
        self.on_change()

    def ask_again(self) -> None:
        """Whatever was found out of namespaces holds no more."""
        self.epoch += 1
        self.on_change()

    def _build(self) -> None:
        if not self.all and not any(own.lock or own.descriptor for own in self._own.values()):
            return
        built = {number: self._gate(number) for number in self._own}
        gates = {number: gate for number, gate in built.items() if gate is not None}
        if gates != self.all:
            self.ask_again()
            self.all = gates

    def _gate(self, number: int) -> Gate | None:
        seen, descriptor = set[int](), self._own[number].descriptor
        while (own := self._own.get(number)) is not None and number not in seen:
            if own.lock:
                return Gate(number, own.lock, descriptor)
            seen.add(number)  # records that are damaged may lead in a circle
            number = own.above
        return Gate(0, "", descriptor) if descriptor else None
