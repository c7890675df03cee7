"""Who is charged with slots."""

from __future__ import annotations

from typing import Protocol


class Ledger(Protocol):
    """The accounts of owners."""

    def check(self, owner: int, size: int, /) -> None:
        """NoSpace, where the owner may not have so many bytes more."""

    def charge(self, owner: int, size: int, /) -> None:
        """The owner has so many bytes more; below 0: fewer."""
