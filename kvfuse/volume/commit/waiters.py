"""Callers that wait for a commit, and which of them a batch serves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from kvfuse.errors import EngineError, KvfuseError
from kvfuse.volume.commit.late import is_held, settlers

if TYPE_CHECKING:
    from kvfuse.volume.commit.batch import Batch
    from kvfuse.volume.commit.pending import Pending
    from kvfuse.volume.inodes.node import Node


@dataclass(eq=False, slots=True)
class Waiter:
    """One caller that waits for a commit."""

    nodes: tuple[Node, ...]
    durable: bool
    serial: int
    """of the last change before it came"""
    done: trio.Event = field(default_factory=trio.Event)
    error: KvfuseError | None = None


class Waiters:
    """All of them. The journal owns it."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self._all: list[Waiter] = []
        self._has_stopped = False

    def __len__(self) -> int:
        return len(self._all)

    def all(self) -> list[Waiter]:
        return list(self._all)

    def nodes(self) -> set[Node]:
        """Inodes that somebody waits for, and what is tied to them."""
        return self._pending.ties.closure([node for waiter in self._all for node in waiter.nodes])

    def add(self, nodes: tuple[Node, ...], durable: bool) -> Waiter:
        """One more, who gets a commit at once. EngineError where none will come."""
        self._force(nodes)
        if self._has_stopped:
            raise EngineError("nothing is committed any more")
        waiter = Waiter(nodes, durable, self._pending.serial)
        self._all.append(waiter)
        self._pending.load.hurry()
        return waiter

    def force(self, waiters: Iterable[Waiter]) -> None:
        """Have what they wait for in the next commit."""
        self._force([node for waiter in waiters for node in waiter.nodes])

    def _force(self, nodes: Iterable[Node]) -> None:
        """Have these, and what is tied to them, in the next commit even while they are being written."""
        for member in self._pending.ties.closure([settler for node in nodes for settler in settlers(node)]):
            if member.changed:
                member.forced = True
                self._pending.reconsider(member)

    def served_by(self, batch: Batch, early: list[Waiter]) -> list[Waiter]:
        """Those whose changes are in the batch; it was built a moment ago. All others get the next one at once.

        ``early``: those who came before the bytes were written. Later ones are served if they have none. What the
        others wait for may be in the batch as it was before, or tied to more since: it is forced anew.
        """
        served = [
            waiter
            for waiter in self._all
            if (waiter in early or not any(node.staged_count and node.nlink for node in waiter.nodes))
            and _is_served(waiter, batch)
        ]
        if len(served) < len(self._all):
            self.force([waiter for waiter in self._all if waiter not in served])
            self._pending.load.hurry()
        return served

    def release(self, waiters: list[Waiter], error: KvfuseError | None = None) -> None:
        """These wait no longer."""
        released = set(waiters)
        self._all = [waiter for waiter in self._all if waiter not in released]
        for waiter in waiters:
            waiter.error = error
            waiter.done.set()

    def stop(self) -> None:
        """No commit will come any more."""
        self._has_stopped = True
        self.release(self._all, EngineError("nothing is committed any more"))


def _is_served(waiter: Waiter, batch: Batch) -> bool:
    """The batch has what the waiter waits for, as far as it is not open for writing.

    An inode without names is gone from the store only when the one that took its name is there.
    """
    if not waiter.nodes:
        return batch.left_serial is None or waiter.serial < batch.left_serial
    return not any(is_held(node, batch.late) for node in waiter.nodes)
