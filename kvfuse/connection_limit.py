"""Limits how many connections a small server has open, and chooses which one goes. Pure; for one event loop.

A slow client cannot keep a scraper out, not even one of its own address. A newcomer takes the place of the connection
that has waited longest for its client, of the address that has the most. A client whose request is complete is answered
before its place goes to another client of its own address.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class HttpClient:
    """The client of one connection."""

    address: str
    end: Callable[[], None]
    """ends the connection, at once or soon"""
    waits_for_us: bool = False
    """its request is complete, and the answer is not sent yet"""


class ConnectionLimit:
    """At most ``count`` connections."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._clients: dict[HttpClient, None] = {}
        """those that have a place, by arrival"""

    def enter(self, client: HttpClient) -> bool:
        """Give ``client`` a place; False: all are taken by requests of its own address that are being answered."""
        if len(self._clients) >= self._count:
            leaver = self._choose_leaver(client)
            if leaver is None:
                return False
            del self._clients[leaver]
            leaver.end()
        self._clients[client] = None
        return True

    def leave(self, client: HttpClient) -> None:
        """Its connection has ended. It may have lost its place before."""
        self._clients.pop(client, None)

    def _choose_leaver(self, newcomer: HttpClient) -> HttpClient | None:
        shares = Counter(client.address for client in self._clients)
        shares[newcomer.address] += 1
        largest = max(shares.values())
        crowd = [client for client in self._clients if shares[client.address] == largest]
        slow = [client for client in crowd if not client.waits_for_us]
        if slow:
            return slow[0]
        return next((client for client in crowd if client.address != newcomer.address), None)
