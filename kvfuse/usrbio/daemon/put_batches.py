"""Puts of a batch into one namespace, together: columns from the ring's entries to the volume, and back.

The ring's thread finds them (`put_finder`) and has copied their bytes. The event loop has the volume store those that
need no wait in one go, and the ring's thread posts their completions at once. Each of the others becomes a call of its
own (`loop_calls`), as all do where a deadline of the batch has passed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np

from kvfuse.usrbio.daemon.block_calls import BlockCalls
from kvfuse.usrbio.daemon.call import Call, Entry
from kvfuse.usrbio.daemon.call_memory import Share
from kvfuse.usrbio.protocol.queues import Entries
from kvfuse.usrbio.protocol.wire import SQE_STRUCT

log = logging.getLogger(__name__)

CALL_SIZE = 8 << 10
"""Bytes that the task of a call takes, about."""


@dataclass(eq=False, slots=True)
class PutBatch(Call):
    """Puts into one namespace. ``entry``: the first, as long as all; ``names``: of each; ``deadline``: of the most
    urgent one."""

    rows: Entries = field(kw_only=True)
    taken_at: float = 0.0
    blocks: list[Any] = field(kw_only=True)
    """a copy of the bytes of each"""

    def calls(self, is_done: list[bool]) -> list[Call]:
        """Those that are not done, as calls that take over their part of the memory."""
        found = []
        for number, fields in enumerate(SQE_STRUCT.iter_unpack(self.rows.tobytes())):
            if is_done[number]:
                continue
            entry = Entry._make(fields)
            deadline = self.taken_at + entry.timeout_us / 1e6 if entry.timeout_us else float("inf")
            call = Call(self.ring, entry, deadline, namespace=self.namespace, names=(self.names[number],))
            call.data, call.size, call.is_alone = self.blocks[number], entry.length + CALL_SIZE, True
            self.size -= call.size
            found.append(call)
        return found


@dataclass
class PutBatches:
    """The batches of one connection, in the event loop. ``start_calls``: starts calls of the puts that have to wait.

    ``tell``: has the ring's thread complete puts; told the batch and the numbers of those that are done.
    """

    blocks: BlockCalls
    share: Share
    start_calls: Callable[[list[Call]], None]
    tell: Callable[[PutBatch, list[int]], None]

    def start(self, batch: PutBatch) -> None:
        if not batch.ring.completions.stopped:
            done = self._put(batch) if time.monotonic() <= batch.deadline else [False] * len(batch.names)
            if True in done:
                self.tell(batch, list(compress(range(len(done)), done)))
            if False in done:
                self.start_calls(batch.calls(done))
        batch.blocks = []
        self.share.give(batch.size, batch.weight)

    def _put(self, batch: PutBatch) -> list[bool]:
        """Which of its puts are done; those that need a wait are not."""
        assert batch.namespace is not None
        try:
            return self.blocks.put_ready(batch.namespace, list(zip(batch.names, batch.blocks, strict=True)))
        except Exception:  # each is done alone then, also those that are stored by now: again, with the same bytes
            log.exception("puts together failed")
            return [False] * len(batch.names)


def complete(batch: PutBatch, numbers: list[int]) -> None:
    """Post the completions of puts that are done. For any thread."""
    rows = batch.rows if len(numbers) == len(batch.rows) else batch.rows[numbers]
    batch.ring.completions.post(rows["user_data"], rows["length"].astype(np.int64))
