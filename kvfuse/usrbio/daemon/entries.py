"""Serves submissions in a ring's thread, as the table of `operations` says."""

from __future__ import annotations

import errno
import time
from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from kvfuse.traceparent import RING_CLIENT, TRACES
from kvfuse.usrbio.daemon.batches import LEFT, Batch, InThread, Together
from kvfuse.usrbio.daemon.call import Call, Completion, Entry, RefusedEntry, ServedRing, Short
from kvfuse.usrbio.daemon.client_registry import ClientRegistry
from kvfuse.usrbio.daemon.columns import (
    COLUMNS_MIN,
    LOW_HALF,
    ColumnReads,
    are_equal,
    as_words,
    find_overlaps,
    may_overlap,
)
from kvfuse.usrbio.daemon.entry_checks import EntryChecks
from kvfuse.usrbio.daemon.lines import Lines
from kvfuse.usrbio.daemon.operations import OPERATIONS, UNMASKED, weigh
from kvfuse.usrbio.daemon.penalty import MALFORMED
from kvfuse.usrbio.daemon.row_keys import RowKeys
from kvfuse.usrbio.daemon.row_ops import RowOps
from kvfuse.usrbio.daemon.write_finder import WriteFinder
from kvfuse.usrbio.protocol.queues import Entries
from kvfuse.usrbio.protocol.wire import PARENTS_MAX, SQE, SQE_STRUCT, Op, Priority
from kvfuse.volume.measures.measures import Histogram
from kvfuse.volume.measures.profiling import PROFILE

LARGE = 256 << 10
"""Bytes of an operation from which it does not wait for those behind it."""
KEPT_SIZE = 4 << 20
"""Bytes of operations from which they do not wait for those behind them."""
WRITE = int(Op.WRITE)
READERS = (int(Op.READ), int(Op.GET))
"""they write into the client's memory"""


def _is_late(entry: Entry, taken_at: float) -> bool:
    return entry.timeout_us != 0 and time.monotonic() > taken_at + entry.timeout_us / 1e6


def _measure(served: dict[Histogram, int], seconds: float) -> None:
    """Count operations of a batch that took ``seconds``, and clear them."""
    for times, count in served.items():
        times.counts[bisect_left(times.bounds, seconds)] += count
        times.sum += count * seconds
    served.clear()


class EntryServer:
    """Serves the entries of one ring, whose thread owns it. ``op_mask``: bit n allows operation n."""

    def __init__(self, ring: ServedRing, registered: ClientRegistry, aux: npt.NDArray[np.uint8], op_mask: int) -> None:
        self._ring = ring
        self._registered = registered
        self._op_mask = op_mask
        self._turns = ring.turns
        self._completions = ring.completions
        self.lines = Lines(self.serve)
        """entries that were taken and wait"""
        self.reads = ColumnReads(ring, registered)
        self.rows = RowOps(ring, registered, aux)
        self.row_keys = RowKeys(registered, aux, ring.completions)
        self.writes = WriteFinder(ring, registered)
        self._checks = EntryChecks(ring, registered, aux, self.lines, weigh)
        allowed = {op: operation for op, operation in OPERATIONS.items() if op_mask >> op & 1}
        self._in_thread: dict[int, InThread] = {
            op: operation.in_thread(self) for op, operation in allowed.items() if operation.in_thread is not None
        }
        self._together: dict[int, Together] = {
            op: operation.together(self) for op, operation in allowed.items() if operation.together is not None
        }
        self.count = 0
        """entries served since somebody set it to 0"""
        self.bad_count = 0
        """malformed ones among them"""

    def close(self) -> None:
        """Drop memory: the garbage collector frees the rest, as the ring's thread and this refer to each other."""
        self._in_thread, self._together = {}, {}
        for one in (self.rows, self.row_keys, self._checks):
            one.close()
        del self.reads, self.rows, self.row_keys, self.writes, self._checks

    # -- serving -------------------------------------------------------------------------------------

    def serve(self, rows: Entries, taken_at: float, *, in_place: bool = True) -> Entries:
        """Serve entries taken from the queue at ``taken_at`` (monotonic seconds). Return those that wait for memory.

        ``in_place``: writes may go straight to where the file's bytes are.
        """
        self.count += len(rows)
        if TRACES.is_on and rows["parent"].any():
            return self._serve_traced(rows, taken_at, in_place=in_place)
        rows = self._serve_together(rows, taken_at, in_place=in_place)
        return self._serve_apart(rows, taken_at) if len(rows) else rows

    def serve_one(self, packed: bytearray, taken_at: float) -> bool:
        """Take an entry that is alone in the queue, and serve it as `serve`. False: it has to wait for memory.

        Where it is answered at once, it gets no place.
        """
        entry = Entry._make(SQE_STRUCT.unpack(packed))
        if entry.op == Op.DELETE or (
            entry.parent and TRACES.is_on
        ):  # a DELETE notes at its place what it finds, before it removes it
            self._completions.take(packed, taken_at)
            return not len(self.serve(np.frombuffer(packed, SQE), taken_at))
        in_thread = self._in_thread.get(entry.op)
        results = in_thread(Batch(entry, np.frombuffer(packed, SQE), taken_at)) if in_thread is not None else None
        if results is not None and (result := int(results[0])) != LEFT:
            if PROFILE.is_on:
                self._profile(entry, result, taken_at)
            self._completions.take_lone(entry.user_data, Completion(result))
            self.count += 1
            return True
        if entry.op == WRITE:
            self._completions.take(packed, taken_at)
            return not len(self.serve(np.frombuffer(packed, SQE), taken_at))
        calls: list[Call] = []
        answer, is_short, self._checks.is_lone = None, False, True
        try:
            answer = self._answer(entry, taken_at, calls)
        except Short:
            is_short = True
        finally:
            self._checks.is_lone = False
        if is_short or calls:
            self._completions.take(packed, taken_at)
            if is_short:
                return False
            calls[0].entry = Entry._make(SQE_STRUCT.unpack(packed))
            self._registered.start(calls)
        else:
            if PROFILE.is_on and answer is not None:
                self._profile(entry, answer.result, taken_at)
            self._completions.take_lone(entry.user_data, answer)
        self.count += 1
        self._note(taken_at)
        return True

    def _profile(self, entry: Entry, result: int, taken_at: float) -> None:
        """Count an entry without a place."""
        if (profile := self._completions.profile) is not None:
            profile.note_one(entry.op, entry.handle, entry.length, result, taken_at)

    def _serve_traced(self, rows: Entries, taken_at: float, *, in_place: bool) -> Entries:
        """`serve` where some name parents: those of one parent together, as if they named none. Calls that become of
        them have spans of their own."""
        waiting = []
        for number in np.unique(rows["parent"]).tolist():
            own = rows[rows["parent"] == number]
            if number <= PARENTS_MAX:
                own["parent"], begin_ns = 0, time.time_ns()
                left = self._serve_together(own, taken_at, in_place=in_place)
                if number and len(left) < len(own):
                    self._note_span(number, begin_ns, int(own["op"][0]), len(own) - len(left))
                own = left.copy()
                own["parent"] = number
            waiting.append(self._serve_apart(own, taken_at) if len(own) else own)
        return np.concatenate(waiting)

    def _note_span(self, number: int, begin_ns: int, op: int, count: int) -> None:
        """Make a span of what this thread did at once."""
        parent = TRACES.parse(self._completions.read_parent(number), RING_CLIENT)
        if parent is not None:
            facts: dict[str, int | str] = {"kvfuse.items": count, "kvfuse.operation": f"ring {Op(op).name.lower()}"}
            TRACES.note("ring batch", parent, begin_ns, time.time_ns(), facts)

    # -- entries that are alike ----------------------------------------------------------------------

    def _serve_together(self, rows: Entries, taken_at: float, *, in_place: bool) -> Entries:
        """Serve entries that are alike together, as far as that is possible; returns the others, in their order."""
        words = as_words(rows)
        kinds = words[:, 0], words[:, 1] & LOW_HALF
        if len(rows) == 1 or (are_equal(kinds[0]) and are_equal(kinds[1])):
            if int(kinds[0][0]) & 0xFF in READERS:
                rows = self._refuse_overlaps(rows)
            left = self._serve_batch(rows, taken_at, in_place=in_place) if len(rows) else None
            return rows if left is None else rows[left]
        rows = self._refuse_overlaps(rows)
        words = as_words(rows)
        groups: dict[tuple[int, int], list[int]] = {}
        for number, kind in enumerate(zip(words[:, 0].tolist(), (words[:, 1] & LOW_HALF).tolist(), strict=True)):
            groups.setdefault(kind, []).append(number)
        are_left = np.ones(len(rows), np.bool_)
        for numbers in groups.values():
            left = self._serve_batch(rows[numbers], taken_at, in_place=in_place)
            if left is not None:
                are_left[numbers] = left
        return rows[are_left]

    def _serve_batch(self, rows: Entries, taken_at: float, *, in_place: bool) -> npt.NDArray[np.bool_] | None:
        """Serve entries of one operation, handle and iov. Which are left; None: all."""
        batch = Batch(Entry._make(SQE_STRUCT.unpack(rows[:1].tobytes())), rows, taken_at)
        op = batch.first.op
        in_thread, together = self._in_thread.get(op), self._together.get(op)
        results = in_thread(batch) if in_thread is not None else None
        left = None
        if results is not None:
            left = results == LEFT
            done, places = ~left, rows["user_data"]
            self._completions.post(places[done], results[done])
        if together is not None and in_place and together(batch):
            return np.zeros(len(rows), np.bool_)
        return left

    def _refuse_overlaps(self, rows: Entries) -> Entries:
        """Refuse entries whose target bytes overlap those of another entry of this batch."""
        if len(rows) < COLUMNS_MIN and not (len(rows) > 1 and may_overlap(rows)):
            return rows
        refused = find_overlaps(rows, self._registered.iovs)
        if not len(refused):
            return rows
        self.bad_count += len(refused)
        self._completions.post(rows["user_data"][refused], np.full(len(refused), -errno.EINVAL))
        return np.delete(rows, refused)

    # -- one by one ----------------------------------------------------------------------------------

    def _serve_apart(self, rows: Entries, taken_at: float) -> Entries:
        """Serve entries one by one; returns those that wait for memory."""
        calls: list[Call] = []
        done: list[tuple[int, Completion]] = []
        waiting: list[int] = []
        short: set[int] = set()
        """operations for which there is no room now"""
        kept_size = 0
        for number, fields in enumerate(SQE_STRUCT.iter_unpack(rows.tobytes())):
            entry = Entry._make(fields)
            try:
                if entry.op in short and not _is_late(entry, taken_at):
                    raise Short
                answer = self._answer(entry, taken_at, calls)
            except Short:
                short.add(entry.op)
                waiting.append(number)
                self.count -= 1
                continue
            if answer is not None:
                done.append((entry.user_data, answer))
            kept_size += entry.length
            is_wanted = self._turns.is_wanted(self._ring.seat)
            if is_wanted or entry.length >= LARGE or kept_size >= KEPT_SIZE:
                self._publish_and_start(done, calls)
                done, calls, kept_size = [], [], 0
            if is_wanted:
                self._turns.pause(self._ring.seat)
        self._publish_and_start(done, calls)
        self._note(taken_at)
        return rows[waiting] if waiting else rows[:0]

    def _publish_and_start(self, done: list[tuple[int, Completion]], calls: list[Call]) -> None:
        if done:
            self._completions.publish(done)
        if calls:
            self._registered.start(calls)

    def _note(self, taken_at: float) -> None:
        """Count what was served."""
        if self._checks.served:
            _measure(self._checks.served, time.monotonic() - taken_at)

    def _answer(self, entry: Entry, taken_at: float, calls: list[Call]) -> Completion | None:
        """The answer to an entry, or None: it is in ``calls``, or has no completion. Short."""
        try:
            made = self._check(entry, taken_at)
        except RefusedEntry as refusal:
            number = refusal.number
        except OSError as error:
            number = error.errno or errno.EIO
        else:
            if not isinstance(made, Call):
                return made
            calls.append(made)
            return None
        self.bad_count += number in MALFORMED
        return Completion(-number)

    def _check(self, entry: Entry, taken_at: float) -> Call | Completion | None:
        """As `EntryChecks` says."""
        operation = OPERATIONS.get(entry.op)
        if entry.op == Op.RELEASE:
            self._checks.release(entry, float("inf"))
            return None
        if operation is None or entry.parent > PARENTS_MAX or entry.priority > Priority.LOW:
            raise RefusedEntry(errno.EINVAL)
        if not self._op_mask >> entry.op & 1 and entry.op not in UNMASKED:
            raise RefusedEntry(errno.EPERM)
        deadline = float("inf")
        if entry.timeout_us:
            deadline = taken_at + entry.timeout_us / 1e6
            if _is_late(entry, taken_at):
                raise RefusedEntry(errno.ETIMEDOUT)
        return operation.check(self._checks, entry, deadline)
