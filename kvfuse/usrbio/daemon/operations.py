"""The operations of rings: how each is checked, what the ring's thread does to the end, and what the event loop does.

Entries that are alike go together through `in_thread`: one that is alone is a batch of one. What is left of them is
given to the event loop `together`, where that can do so; then entry by entry, as a call that `check` makes of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from kvfuse.usrbio.daemon.batches import InThread, Together
from kvfuse.usrbio.daemon.block_calls import BlockCalls
from kvfuse.usrbio.daemon.call import Call, Completion, Entry
from kvfuse.usrbio.daemon.columns import ColumnReads
from kvfuse.usrbio.daemon.entry_checks import EntryChecks
from kvfuse.usrbio.daemon.file_calls import FileCalls
from kvfuse.usrbio.daemon.row_keys import RowKeys
from kvfuse.usrbio.daemon.row_ops import RowOps
from kvfuse.usrbio.daemon.write_finder import WriteFinder
from kvfuse.usrbio.protocol.wire import Op

KEYS_WEIGHT_MAX = 32
EXISTS_WEIGHT_MAX = 128
KEYS_PER_WEIGHT = 64


class InRing(Protocol):
    """What a ring's thread has for batches of one ring."""

    @property
    def reads(self) -> ColumnReads: ...
    @property
    def rows(self) -> RowOps: ...
    @property
    def row_keys(self) -> RowKeys: ...
    @property
    def writes(self) -> WriteFinder: ...


class InLoop(Protocol):
    """What the event loop has for calls of one connection."""

    @property
    def files(self) -> FileCalls: ...
    @property
    def blocks(self) -> BlockCalls: ...


class Operation(NamedTuple):
    """``check``: see `EntryChecks`. ``in_loop``: None: its check does all."""

    check: Callable[[EntryChecks, Entry, float], Call | Completion | None]
    in_loop: Callable[[InLoop], Callable[[Call], Awaitable[None]]] | None = None
    in_thread: Callable[[InRing], InThread] | None = None
    together: Callable[[InRing], Together] | None = None
    weight: Callable[[Call], int] = lambda call: 1
    """About how many tasks of a call may continue at once in the event loop. 0: it does not wait there, or briefly."""


def _weigh_put(call: Call) -> int:
    return 2 if call.namespace is not None and call.namespace.waits else 1


def _weigh_keys(call: Call) -> int:
    return min(max(1, call.entry.length), KEYS_WEIGHT_MAX)


def _weigh_exists(call: Call) -> int:
    return min(1 + call.entry.length // KEYS_PER_WEIGHT, EXISTS_WEIGHT_MAX)


OPERATIONS: dict[int, Operation] = {
    int(op): operation  # plain numbers: those of an enumeration are slow to look up
    for op, operation in {
        Op.READ: Operation(EntryChecks.check_read, lambda of: of.files.read, lambda of: of.reads.serve),
        Op.WRITE: Operation(EntryChecks.check_write, lambda of: of.files.write, together=lambda of: of.writes.start),
        Op.FSYNC: Operation(EntryChecks.check_fsync, lambda of: of.files.fsync, weight=lambda call: 4),
        Op.GET: Operation(EntryChecks.check_get, lambda of: of.blocks.get, lambda of: of.rows.get),
        Op.PUT: Operation(EntryChecks.check_put, lambda of: of.blocks.put, lambda of: of.rows.put, weight=_weigh_put),
        Op.EXISTS: Operation(
            EntryChecks.check_keys, lambda of: of.blocks.exists, lambda of: of.row_keys.exists, weight=_weigh_exists
        ),
        Op.DELETE: Operation(
            EntryChecks.check_keys, lambda of: of.blocks.delete, lambda of: of.row_keys.delete, weight=_weigh_keys
        ),
        Op.PREFETCH: Operation(
            EntryChecks.check_keys, lambda of: of.blocks.prefetch, lambda of: of.row_keys.prefetch, weight=_weigh_keys
        ),
        Op.CANCEL: Operation(EntryChecks.check_cancel, weight=lambda call: 0),
        Op.RELEASE: Operation(EntryChecks.release),
    }.items()
}  # fmt: skip
UNMASKED = frozenset({int(Op.CANCEL), int(Op.RELEASE)})
"""every ring has these"""


def weigh(call: Call) -> int:
    """A call's part of its user's calls in flight: see `call_memory.UnderWay`."""
    return OPERATIONS[call.entry.op].weight(call)
