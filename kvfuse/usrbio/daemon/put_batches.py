"""Stores puts of a batch into one namespace, together: columns from the ring's entries to the volume, and back.

The ring's thread finds them (`put_finder`) and has copied their bytes. The event loop has the volume store those that
need no wait in one go, and the ring's thread posts their completions at once. Where too many changes wait for a commit,
the rest of a batch waits for one, together. Each of the others becomes a call of its own (`loop_calls`), as all do
where a deadline of the batch has passed.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
import trio

from kvfuse.errors import KvfuseError
from kvfuse.usrbio.daemon.block_calls import BlockCalls
from kvfuse.usrbio.daemon.call import Call, Entry
from kvfuse.usrbio.daemon.call_memory import Share
from kvfuse.usrbio.protocol.queues import Entries
from kvfuse.usrbio.protocol.wire import SQE_STRUCT

log = logging.getLogger(__name__)

PUTS_SECONDS = 1e-3
"""how long puts of one batch keep the event loop"""
PUTS_TOGETHER = 32
"""done in one go, which takes about as long"""
BESIDE_READERS = 4
"""so many fewer, and so much shorter, where callers of other namespaces read"""
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
    done: list[bool] = field(default_factory=list)
    """for each: whether it is completed, or about to be"""

    def __post_init__(self) -> None:
        self.done = [False] * len(self.rows)

    def list_left(self) -> list[int]:
        """Numbers of puts that are not done."""
        return [number for number, is_done in enumerate(self.done) if not is_done]

    def make_calls(self) -> list[Call]:
        """Those that are not done, as calls that take over their part of the memory."""
        found = []
        for number in self.list_left():
            entry = Entry._make(SQE_STRUCT.unpack(self.rows[number : number + 1].tobytes()))
            deadline = self.taken_at + entry.timeout_us / 1e6 if entry.timeout_us else float("inf")
            call = Call(self.ring, entry, deadline, namespace=self.namespace, names=(self.names[number],))
            call.data, call.size, call.is_alone = self.blocks[number], entry.length + CALL_SIZE, True
            self.size -= call.size
            found.append(call)
        return found


@dataclass
class PutBatches:
    """The batches of one connection, in the event loop. ``start_calls``: starts calls of the puts that have to wait.

    ``tell``: has the ring's thread complete puts: gets the batch and their numbers. ``nursery``: tasks of batches that
    wait for a commit run in it, and end with it.
    """

    blocks: BlockCalls
    share: Share
    nursery: trio.Nursery
    start_calls: Callable[[list[Call]], None]
    tell: Callable[[PutBatch, list[int]], None]
    _waiting: set[PutBatch] = field(default_factory=set)

    def start(self, batch: PutBatch) -> None:
        rest = self._put(batch, batch.list_left())
        if rest or self._may_wait(batch):
            self._waiting.add(batch)
            self.nursery.start_soon(self._put_rest, batch, rest)
        else:
            self._end_batch(batch)

    def cancel(self, call: Call) -> bool:
        """Have the put that ``call`` names cancelled, and the call completed. False: it is in no batch that waits."""
        for batch in self._waiting:
            for number in batch.list_left() if batch.ring is call.ring else ():
                if batch.rows["user_data"][number] == call.entry.offset:
                    batch.done[number] = True
                    batch.ring.completions.post([call.entry.offset], [-errno.ECANCELED])
                    batch.ring.completions.complete(call, 0)
                    return True
        return False

    def _put(self, batch: PutBatch, numbers: Sequence[int]) -> Sequence[int]:
        """Store those puts that need no wait, for a turn. Returns those for which no time was left."""
        assert batch.namespace is not None
        of = batch.namespace.measures
        part = BESIDE_READERS if len(of.readers) > (of in of.readers) and of.is_beside_readers() else 1
        end, found = time.perf_counter() + PUTS_SECONDS / part, list[int]()
        while numbers and not batch.ring.completions.stopped and time.monotonic() <= batch.deadline:
            some, numbers = numbers[: PUTS_TOGETHER // part], numbers[PUTS_TOGETHER // part :]
            found += self._put_some(batch, some)
            if time.perf_counter() > end:
                break
        for number in found:
            batch.done[number] = True
        if found:
            self.tell(batch, found)
        return numbers if time.monotonic() <= batch.deadline else ()

    def _put_some(self, batch: PutBatch, numbers: Sequence[int]) -> list[int]:
        """Store those puts that need no wait; returns which."""
        assert batch.namespace is not None
        try:
            rows = [(batch.names[number], batch.blocks[number]) for number in numbers]
            return list(compress(numbers, self.blocks.put_ready(batch.namespace, rows)))
        except Exception:  # calls do each alone, also those stored by now: again, with the same bytes
            log.exception("puts together failed")
            return []

    def _may_wait(self, batch: PutBatch) -> bool:
        """Whether some are left because too many changes of the user are pending; and they have the time to wait."""
        return batch.deadline == float("inf") and False in batch.done and self.blocks.is_crowded()

    async def _put_rest(self, batch: PutBatch, rest: Sequence[int]) -> None:
        """Store ``rest`` in turns, between which other tasks run; and after a commit those that had to wait for it."""
        try:
            before = -1
            while True:
                while rest and not batch.ring.completions.stopped:
                    await trio.lowlevel.checkpoint()
                    rest = self._put(batch, [number for number in rest if not batch.done[number]])
                if batch.done.count(True) == before or batch.ring.completions.stopped or not self._may_wait(batch):
                    break
                before = batch.done.count(True)
                await self.blocks.wait_for_commit()
                rest = batch.list_left()
        except KvfuseError as error:  # a call does each alone, and answers with its own result
            log.debug("puts do not wait for a commit together: %s", error)
        finally:
            self._waiting.discard(batch)
        self._end_batch(batch)

    def _end_batch(self, batch: PutBatch) -> None:
        """Make a call of each put that is not done."""
        if False in batch.done:
            self.start_calls(batch.make_calls())
        batch.blocks = []
        self.share.give(batch.size, batch.weight)


def complete(batch: PutBatch, numbers: list[int]) -> None:
    """Post the completions of puts that are done. For any thread."""
    rows = batch.rows if len(numbers) == len(batch.rows) else batch.rows[numbers]
    batch.ring.completions.post(rows["user_data"], rows["length"].astype(np.int64))
