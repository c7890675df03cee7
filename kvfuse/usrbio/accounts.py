"""What each user has registered, through all its connections, and how much of it that may be.

Users are who the kernel says is connected. Root with its capabilities, and the user that runs the daemon, could end it
anyway: only the limits of a connection, and those of all clients together, hold for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal
from weakref import WeakValueDictionary

from msgspec.structs import replace

from kvfuse.config import UsrbioOptions
from kvfuse.errors import QuotaExceeded
from kvfuse.usrbio.machine_memory import memory_size
from kvfuse.usrbio.peer import Peer

Limit = Literal["user_connections", "user_rings", "user_files", "user_iov_size"]
"""the option that says how much"""
ADDRESSES = 128
"""times the memory that the daemon may have: so much of clients' memory takes a quarter of it for page tables"""


class _User:
    """What one user has. It is there as long as one of its connections."""

    def __init__(self) -> None:
        self.held: Counter[Limit] = Counter()


class Account:
    """What one connection has of what its user may have. Event loop only."""

    def __init__(self, peer: Peer, user: _User, options: UsrbioOptions) -> None:
        self._peer = peer
        self._user = user
        self._options = options
        self._held: Counter[Limit] = Counter()

    def take(self, limit: Limit, amount: int = 1) -> None:
        """QuotaExceeded, and nothing is taken, where that is more than the user may have."""
        held, allowed = self._user.held[limit], getattr(self._options, limit)
        if not self._peer.is_unlimited and held + amount > allowed:
            raise QuotaExceeded(
                f"user {self._peer.uid} asks for {amount} more than the {held} it has, and usrbio.{limit} is {allowed}"
            )
        self._user.held[limit] += amount
        self._held[limit] += amount

    def give(self, limit: Limit, amount: int = 1) -> None:
        self._user.held[limit] -= amount
        self._held[limit] -= amount

    @contextmanager
    def taking(self, limit: Limit, amount: int = 1) -> Iterator[None]:
        """As `take`; given back where the body fails."""
        self.take(limit, amount)
        try:
            yield
        except BaseException:
            self.give(limit, amount)
            raise

    def close(self) -> None:
        """The connection has ended: what it had goes back."""
        for limit, amount in list(self._held.items()):
            self.give(limit, amount)


class Accounts:
    """Of all users. ``options``: the limits."""

    def __init__(self, options: UsrbioOptions) -> None:
        self._options = replace(options, user_iov_size=options.user_iov_size or ADDRESSES * memory_size())
        self._users: WeakValueDictionary[tuple[int, bool], _User] = WeakValueDictionary()

    def open(self, peer: Peer) -> Account:
        """For one more connection of a user."""
        key = (peer.uid, peer.is_unlimited)  # a container's root does not pay for what the machine's root has
        user = self._users.get(key)
        if user is None:
            user = self._users[key] = _User()
        return Account(peer, user, self._options)
