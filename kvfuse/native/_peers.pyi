"""Blocks that hosts read from each other's memory, without the interpreter. Event loop only."""

from typing import Any

class Spread:
    """Who has copies of this host's blocks, and how many bytes hosts have still to send (peercopies.h)."""

    def __init__(self) -> None: ...
    def set_clients(self, clients: Any) -> None:
        """``clients``: u64, all hosts that others can ask."""
    def tell_load(self, client: int, load: int) -> None: ...
    def forget(self, address: int, generation: int, client: int) -> None:
        """The client does not have that block."""
    def choose(self, address: int, generation: int, caller: int, is_here: bool, is_final: bool) -> list[int]:
        """Whom a caller is to ask; empty: this host, if it has it. The caller has it a moment later."""
    def add_load(self, by: int) -> int:
        """Bytes that this host has still to send, with those that are added, or sent if negative."""

class Server:
    """Answers questions for blocks, each connection by a thread."""

    def __init__(self, spread: Spread, in_flight: int) -> None:
        """``in_flight``: bytes that one host may have on their way to it."""
    def serve(self, descriptor: int, client: int, lender: object) -> None:
        """A connection, whose descriptor is closed here. ``lender``: of `_blocks.Core.lender`. MemoryError."""
    def reap(self) -> list[int]:
        """Clients of connections that have ended since the last call."""
    def end(self, lender: object | None) -> None:
        """End connections that are not served from that lender."""
    def close(self) -> list[int]:
        """End all, and return when nothing is sent any more: the clients, as of `reap`."""
    def set_disk(self, whether: bool) -> None:
        """What is not in memory may be on disk."""
    def set_patience(self, seconds: float) -> None:
        """For a message, beside those for its bytes: then its reader is given up."""
    def trace(self) -> int:
        """Note questions that name a parent from here on: a descriptor that is readable when there are some. OSError,
        MemoryError."""
    def take_spans(self) -> bytes:
        """Those since the last call, the first few: `served_spans.SERVED_SPAN`."""
    def statistics(self) -> dict[str, int]: ...
    def callers(self) -> dict[int, tuple[int, int]]:
        """client -> (bytes that it got, connections)"""

class Reader:
    """A thread that receives what was asked by one connection, whose descriptor is closed here."""

    def __init__(self, descriptor: int) -> None: ...
    def bell(self) -> int:
        """A descriptor that is readable when there is something to `take`, or the connection has ended."""
    def ask(
        self,
        addresses: Any,
        generations: Any,
        lengths: Any,
        checksums: Any,
        targets: Any,
        places: Any,
        chosen: Any,
        flags: int,
        without: int,
        landing: object | None,
        load: int,
        parent: bytes = b"",
    ) -> int:
        """Ask for some blocks of columns: ``chosen``, i64. The number of the question.

        Columns are u32, but addresses, generations and targets u64. Flags, ``without``: as of a `BLOCK_QUESTION`.
        ``parent``: the packed span that they belong to, which is sent before them; empty: none is sent.

        Targets are written to until all rows have results, or the question is abandoned, or this is closed. A landing,
        of `_blocks.Landing.way`, lives as long. ValueError where columns are too short.
        """
    def take(self) -> bytes:
        """Results since the last call: of each question its number u64, how many rows still have none u32, how many
        rows follow u32, and these: `peer_wire.BLOCK_ANSWER`, `HERE` if its bytes are right, -1 if they are not."""
    def abandon(self, number: int) -> None:
        """Nothing is written to the targets of a question from now on."""
    def facts(self) -> tuple[int, int, float, int, int]:
        """Bytes that are to come; bytes that the other side has still to send; seconds since something came, while some
        are to come; whether the connection has ended; whether by what nobody may send."""
    def close(self) -> None: ...
