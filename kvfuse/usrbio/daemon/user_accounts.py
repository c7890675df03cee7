"""Counts what each user has registered, through all its connections, against its limits.

The kernel says whose a connection is. Root with its capabilities, and the user that runs the daemon, could end it
anyway: only the limits of a connection, and those of all clients together, hold for them.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Literal
from weakref import WeakValueDictionary

from msgspec.structs import replace

from kvfuse.access.client_process import ClientProcess
from kvfuse.errors import InvalidArgument, QuotaExceeded
from kvfuse.machine_memory import memory_size
from kvfuse.options.options import UsrbioOptions
from kvfuse.usrbio.daemon.call_memory import SharedPool

Limit = Literal[
    "user_connections",
    "user_rings",
    "user_ring_size",
    "user_files",
    "user_followers",
    "user_iovs",
    "user_iov_size",
    "user_indexes",
]
"""the option that limits it; none limits indexes: users share what the daemon has room for"""
CONNECTIONS_MAX = 1024
ALL_RINGS_MAX = 1024
ALL_INDEXES_MAX = 16384
"""a mapping of each, of 65,530 that a process has"""
DESCRIPTORS: dict[Limit, int] = {"user_connections": 1, "user_rings": 5, "user_iovs": 2, "user_indexes": 2}
"""descriptors of the daemon that one of these takes"""
ADDRESSES = 128
"""times the memory that the daemon may have: so much of clients' memory takes a quarter of it for page tables"""


class _UserCounts:
    """The counts of one user. It lives as long as one of its connections."""

    def __init__(self) -> None:
        self.held: Counter[Limit] = Counter()


class UserAccount:
    """One connection's part of its user's counts. Event loop only. ``key``: its user, where it has limits."""

    def __init__(self, peer: ClientProcess, user: _UserCounts, options: UsrbioOptions, pools: Pools) -> None:
        self._peer = peer
        self._user = user
        self._options = options
        self._pools = pools
        self._held: Counter[Limit] = Counter()
        self.key = None if peer.is_unlimited else peer.uid

    def take(self, limit: Limit, amount: int = 1) -> None:
        """Charge the user. QuotaExceeded, and nothing is taken: that is more than it may have."""
        held, allowed = self._user.held[limit], getattr(self._options, limit, inf)
        if not self._peer.is_unlimited and held + amount > allowed:
            raise QuotaExceeded(
                f"user {self._peer.uid} asks for {amount} more than the {held} it has, and usrbio.{limit} is {allowed}"
            )
        taken: list[tuple[SharedPool, int]] = []
        for pool, size in self._pools.list_pools(limit, amount):
            if not pool.take(size, self.key):
                for other, taken_size in taken:
                    other.give(taken_size, self.key)
                if self.key is None or size > pool.free:
                    raise InvalidArgument(f"this daemon has no room for more {limit[5:]}: close some of any client")
                raise QuotaExceeded(f"user {self._peer.uid} has its share of this daemon's {limit[5:]}: close some")
            taken.append((pool, size))
        self._user.held[limit] += amount
        self._held[limit] += amount

    def give(self, limit: Limit, amount: int = 1) -> None:
        for pool, size in self._pools.list_pools(limit, amount):
            pool.give(size, self.key)
        self._user.held[limit] -= amount
        self._held[limit] -= amount

    @contextmanager
    def taking(self, limit: Limit, amount: int = 1) -> Iterator[None]:
        """`take` for the body of a ``with``; given back if the body fails."""
        self.take(limit, amount)
        try:
            yield
        except BaseException:
            self.give(limit, amount)
            raise

    def close(self) -> None:
        """Give back all that the connection holds. It has ended."""
        for limit, amount in list(self._held.items()):
            self.give(limit, amount)


class Pools:
    """Limits of all clients together, by what the daemon can hold. It needs descriptors for its own work, too."""

    def __init__(self) -> None:
        self._descriptors = SharedPool(resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4)
        self._things: dict[Limit, SharedPool] = {
            "user_connections": SharedPool(CONNECTIONS_MAX),
            "user_rings": SharedPool(ALL_RINGS_MAX),
            "user_indexes": SharedPool(ALL_INDEXES_MAX),
        }

    def list_pools(self, limit: Limit, amount: int) -> list[tuple[SharedPool, int]]:
        """The pools from which ``amount`` of something is taken, and how much of each."""
        found = [(self._descriptors, DESCRIPTORS[limit] * amount)] if limit in DESCRIPTORS else []
        return [*found, (self._things[limit], amount)] if limit in self._things else found


class UserAccounts:
    """The accounts of all users. ``options``: the limits."""

    def __init__(self, options: UsrbioOptions) -> None:
        self._options = replace(options, user_iov_size=options.user_iov_size or ADDRESSES * memory_size())
        self._pools = Pools()
        self._users: WeakValueDictionary[tuple[int, bool], _UserCounts] = WeakValueDictionary()

    def open(self, peer: ClientProcess) -> UserAccount:
        """Open the account of one more connection of a user."""
        key = (peer.uid, peer.is_unlimited)  # a container's root does not pay for what the machine's root has
        return UserAccount(peer, self._users.setdefault(key, _UserCounts()), self._options, self._pools)

    def check_connections(self, uid: int) -> None:
        """QuotaExceeded where a user with limits has as many as it may."""
        user, allowed = self._users.get((uid, False)), self._options.user_connections
        if user is not None and user.held["user_connections"] >= allowed:
            raise QuotaExceeded(f"user {uid} has no connection left: usrbio.user_connections is {allowed}; close some")

    def statistics(self) -> dict[str, dict[str, int]]:
        """The counts of each user, by its number; "root": all that have no limits."""
        return {
            "root" if is_unlimited else str(uid): {limit[5:]: amount for limit, amount in user.held.items() if amount}
            for (uid, is_unlimited), user in list(self._users.items())
            if any(user.held.values())
        }

    def statistics_of(self, uid: int) -> dict[str, dict[str, int]]:
        """`statistics` of one user with limits alone."""
        return {name: held for name, held in self.statistics().items() if name == str(uid)}
