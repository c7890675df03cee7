"""Executes writes of a batch that change bytes of one file in their slots: straight from the iov to the segment.

The ring's thread finds them (`write_finder`). The event loop says where their bytes belong, and keeps the places and
the file's lock until the ring's thread has written there (`WriteBatches`). The thread then has the kernel drop what it
cached of the file, and posts the completions. Writes that need more than that go back to the ring's thread, which
copies their bytes and makes a call of each. So do those whose batch waits when one of them is cancelled or late.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.errnos import errno_of
from kvfuse.native.rowwriter import write_rows
from kvfuse.usrbio.daemon.call import Call, ServedRing
from kvfuse.usrbio.daemon.call_memory import Share
from kvfuse.usrbio.daemon.client_memory import MappedIov
from kvfuse.usrbio.daemon.file_calls import FileCalls
from kvfuse.usrbio.protocol.queues import Entries
from kvfuse.volume.api import WritePlaces

log = logging.getLogger(__name__)

Numbers = npt.NDArray[np.int64]


@dataclass(eq=False, slots=True)
class WriteBatch(Call):
    """Writes of one file from one iov. ``entry``: the first, as long as all. ``deadline``: of the most urgent one."""

    rows: Entries = field(kw_only=True)
    taken_at: float = 0.0
    done: npt.NDArray[np.bool_] = field(kw_only=True)
    """for each: whether it is completed, or about to be. The ring's thread sets it while the event loop waits for it"""
    cancels: list[Call] = field(default_factory=list)
    """CANCELs of some of the writes"""

    def split_columns(self) -> tuple[Numbers, Numbers, Numbers]:
        """(offset in the file, offset in the iov, length) of each."""
        words = self.rows.view(np.int64).reshape(-1, 8)
        return words[:, 2].copy(), words[:, 3], words[:, 4].copy()


@dataclass
class WriteBatches:
    """The batches of one connection, in the event loop. ``drop_content``: has the kernel drop an inode's bytes, waits.

    ``nursery``: their tasks run in it, and end with it.
    """

    files: FileCalls
    nursery: trio.Nursery
    share: Share
    drop_content: Callable[[int], None]
    _under_way: set[WriteBatch] = field(default_factory=set)

    def start(self, batch: WriteBatch) -> None:
        if batch.ring.completions.stopped:
            self.share.give(batch.size, batch.weight)
        else:
            self._under_way.add(batch)
            self.nursery.start_soon(self._run, batch)

    def cancel(self, call: Call) -> bool:
        """Have the write that ``call`` names cancelled, and the call completed. False: it is in no batch."""
        for batch in self._under_way:
            if batch.ring is call.ring and ((batch.rows["user_data"] == call.entry.offset) & ~batch.done).any():
                batch.cancels.append(call)
                batch.cancel()
                return True
        return False

    def cancel_batches(self, ring: ServedRing, iov: MappedIov | None = None) -> None:
        """Cancel batches of a ring that did not begin to write, all or those from ``iov``."""
        for batch in self._under_way:
            if batch.ring is ring and (iov is None or batch.iov is iov):
                batch.cancel()

    async def _run(self, batch: WriteBatch) -> None:
        assert batch.scope is not None
        assert batch.file is not None
        if batch.deadline < float("inf"):
            batch.scope.deadline = trio.current_time() + batch.deadline - time.monotonic()
        offsets, _, lengths = batch.split_columns()
        try:
            with batch.scope:
                async with self.files.using(batch.file) as file:
                    source = partial(self._write, batch)
                    await self.files.volume.files.write_in_slots(file.handle, offsets, lengths, source)
        except Exception as error:
            _fail(batch, error)
        finally:
            self._under_way.discard(batch)
            self.share.give(batch.size, batch.weight)
            self._answer_cancels(batch)
        if not batch.done.all():
            batch.ring.jobs.run_in_turn(partial(batch.ring.serve_copied, batch.rows[~batch.done], batch.taken_at))

    def _answer_cancels(self, batch: WriteBatch) -> None:
        completions = batch.ring.completions
        for call in batch.cancels:
            found = np.flatnonzero((batch.rows["user_data"] == call.entry.offset) & ~batch.done)[:1]
            batch.done[found] = True
            if len(found):
                completions.post([call.entry.offset], [-errno.ECANCELED])
            completions.complete(call, 0 if len(found) else -errno.ENOENT)

    async def _write(self, batch: WriteBatch, places: WritePlaces) -> None:
        """Have the ring's thread write; it then tells the kernel and the client."""
        await trio.lowlevel.checkpoint_if_cancelled()  # from here on nobody can stop it
        with trio.CancelScope(shield=True):
            await batch.ring.jobs.ask_thread(partial(self._write_now, batch, places))

    def _write_now(self, batch: WriteBatch, places: WritePlaces) -> bool:
        """Write, in the ring's thread. It does nothing where the client punched out memory meanwhile."""
        ring, numbers = batch.ring, places.numbers
        results = batch.split_columns()[2][numbers]
        assert batch.iov is not None
        if not batch.iov.is_present(int(results.sum())):
            return False
        with ring.turns.copying(ring.seat):
            written, number = _write_rows(batch, places)
        for target in places.targets.values():
            target.wrote()
        if written < len(numbers):
            results[written:] = -number
        batch.done[numbers] = True
        return ring.jobs.run_here(partial(self._complete, batch, numbers, results))

    def _complete(self, batch: WriteBatch, numbers: Numbers, results: Numbers) -> None:
        """Complete writes, in the ring's thread, which may wait for the kernel; the event loop continues."""
        assert batch.file is not None
        self.drop_content(batch.file.ino)
        batch.ring.completions.post(batch.rows["user_data"][numbers], results)


def _write_rows(batch: WriteBatch, places: WritePlaces) -> tuple[int, int]:
    """Call `rowwriter.write_rows` for these places; returns the errno that clients get."""
    assert batch.iov is not None
    _, iov_offsets, lengths = batch.split_columns()
    targets = [places.targets[segment] for segment in places.segments.tolist()]
    starts = iov_offsets[places.numbers]
    rows = np.empty((len(targets), 7), np.int64)
    rows[:, 0] = [target.descriptor for target in targets]
    rows[:, 1] = places.offsets + [target.start for target in targets]
    rows[:, 2] = starts + batch.iov.bytes.ctypes.data
    rows[:, 3] = lengths[places.numbers]
    rows[:, 4], rows[:, 5] = batch.iov.descriptor, starts
    rows[:, 6] = [target.address for target in targets]
    rows[:, 6] += np.where(rows[:, 6] > 0, rows[:, 1], 0)
    written, number = write_rows(rows)
    if number:
        error = targets[written].error(OSError(number, os.strerror(number)), int(rows[written, 1]))
        log.warning("a ring's write failed: %s", error)
        return written, _errno_of(error)
    return written, 0


def _errno_of(error: Exception) -> int:
    number = error.errno if isinstance(error, OSError) else errno_of(error)
    return number or errno.EIO


def _fail(batch: WriteBatch, error: Exception) -> None:
    """Complete with the error the writes that are not completed."""
    if not isinstance(error, OSError) and errno_of(error) is None:
        log.error("a batch of writes failed", exc_info=error)
    assert batch.file is not None
    batch.file.measures.failed(error, is_read=False)
    left = batch.rows["user_data"][~batch.done]
    batch.done[:] = True
    batch.ring.completions.post(left, np.full(len(left), -_errno_of(error)))
