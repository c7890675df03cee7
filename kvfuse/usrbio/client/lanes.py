"""Rings of a block store, and how a batch goes through one. See `Lanes`.

The daemon ends each entry at its deadline. One that is stopped, dead or very busy does not: after a grace the caller
gets ETIMEDOUT and goes on, but the entry is still under way. Then its lane is *late*. It takes no other call before
the ring has settled (`AttachedRing.settle`): until then the daemon, or the next one, may write into the call's buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import ETIMEDOUT
from functools import partial
from time import monotonic
from typing import NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from kvfuse.usrbio.client.client import Client
from kvfuse.usrbio.client.files import Namespace
from kvfuse.usrbio.client.iov import Iov
from kvfuse.usrbio.client.ring import Ring
from kvfuse.usrbio.client.session import Bytes
from kvfuse.usrbio.protocol.queues import Entries
from kvfuse.usrbio.protocol.wire import CQE, NO_HINTS, Op, Priority, PutHints

Sizes = npt.NDArray[np.int64]

GRACE_S = 1.0
"""what the daemon may take beyond a deadline to say that it passed"""
SCRATCH_SIZE_MAX = 64 << 20
"""bytes that are bounced in one submission, unless a single block has more"""
SCRATCH_ALIGNMENT = 64


class EntryTerms(TypedDict):
    """Keyword arguments of every entry."""

    priority: Priority
    timeout: float


class _BufferPart(NamedTuple):
    """Where the bytes of one buffer are, for the daemon."""

    iov: Iov
    offset: int
    array: Bytes
    is_bounced: bool


class Lane:
    """A ring, and memory for buffers that the daemon cannot map. One caller has it at a time."""

    def __init__(self, client: Client, entries: int, grace: float) -> None:
        self.ring: Ring = client.ring(entries, ops=(Op.GET, Op.PUT, Op.EXISTS, Op.DELETE, Op.PREFETCH))
        self._client = client
        self._entries = entries
        self._grace = grace
        self._scratch: Iov | None = None

    def close(self) -> None:
        self.ring.close()
        if self._scratch is not None:
            self._scratch.close()

    @property
    def is_late(self) -> bool:
        """Between two submissions of a call: the daemon left some of the first unanswered."""
        return self.ring.in_flight > 0

    def finish(self, count: int, deadline: float) -> Entries:
        """Submit, and the completions of all ``count`` entries by their number. Disconnected.

        Those that the daemon has not answered in time have the result -ETIMEDOUT, and the lane is late: the call ends.
        """
        ring = self.ring
        assert ring.in_flight == count, "numbers of a submission are its own"
        ring.submit()
        completions = np.zeros(count, CQE)
        completions["result"] = -ETIMEDOUT
        missing = count
        give_up = monotonic() + deadline + self._grace
        while missing and len(rows := ring.wait(missing, max(give_up - monotonic(), 0))):
            completions[rows["user_data"]] = rows
            missing -= len(rows)
        return completions

    def reap(self, deadline: float) -> Entries:
        """Some completions of what was submitted; none where the daemon is late. Disconnected."""
        return self.ring.wait(1, deadline + self._grace)

    def move_at(
        self, op: Op, namespace: Namespace, keys: Sequence[bytes], iov: Iov, offsets: npt.ArrayLike,
        sizes: npt.ArrayLike, terms: EntryTerms, hints: PutHints = NO_HINTS,
    ) -> Sizes:  # fmt: skip
        """Put or get blocks of one iov, as many as the ring has entries at most. Results as of the completions."""
        prepare = self.ring.prep_gets if op is Op.GET else partial(self.ring.prep_puts, hints=hints)
        prepare(iov, offsets, namespace, keys, sizes, np.arange(len(keys)), **terms)
        results: Sizes = self.finish(len(keys), terms["timeout"])["result"]
        return results

    def put_one(self, namespace: Namespace, key: bytes, array: Bytes, terms: EntryTerms, hints: PutHints) -> int:
        """Put one block. The result as of its completion."""
        place = self._client.locate(array)
        iov, offset = place if place is not None else (self._scratch_of(len(array)), 0)
        if place is None:
            iov.array[: len(array)] = array
        self.ring.prep_put(iov, offset, namespace, key, len(array), hints=hints, **terms)
        self.ring.submit()
        rows = self.reap(terms["timeout"])
        return int(rows["result"][0]) if len(rows) else -ETIMEDOUT

    def move(
        self, op: Op, namespace: Namespace, keys: list[bytes], arrays: list[Bytes], terms: EntryTerms,
        hints: PutHints = NO_HINTS,
    ) -> Sizes:  # fmt: skip
        """Put or get, as many at a time as the ring and the scratch memory hold. Results as of the completions."""
        if len(keys) != len(arrays):
            raise ValueError(f"{len(keys)} keys and {len(arrays)} buffers")
        if op is Op.GET and not all(array.flags.writeable for array in arrays):
            raise ValueError("a block cannot be got into a read-only buffer")
        results: Sizes = np.full(len(keys), -ETIMEDOUT, np.int64)
        start = 0
        while start < len(keys) and not self.is_late:
            parts = self._plan(arrays[start : start + self._entries])
            end = start + len(parts)
            results[start:end] = self._move_parts(op, namespace, keys[start:end], parts, terms, hints)
            start = end
        return results

    def _plan(self, arrays: list[Bytes]) -> list[_BufferPart]:
        """Where the first of the arrays are, or their stand-ins: as many as may be bounced at once, at least one."""
        located = [self._client.locate(array) for array in arrays]
        offsets: list[int] = []
        end = 0
        for array, place in zip(arrays, located, strict=True):
            size = 0 if place is not None else -(-len(array) // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
            if offsets and end + size > SCRATCH_SIZE_MAX:
                break
            offsets.append(end)
            end += size
        parts = list[_BufferPart]()
        for array, place, offset in zip(arrays, located, offsets, strict=False):
            if place is not None:
                parts.append(_BufferPart(*place, array, False))
            else:
                parts.append(_BufferPart(self._scratch_of(end), offset, array, True))
        return parts

    def _scratch_of(self, size: int) -> Iov:
        """At least ``size`` bytes."""
        if self._scratch is None or self._scratch.size < size:
            old, self._scratch = self._scratch, None  # the larger one may be refused
            if old is not None:
                old.close()
            self._scratch = self._client.iov(1 << max(size - 1, 4095).bit_length())
        return self._scratch

    def _move_parts(
        self, op: Op, namespace: Namespace, keys: list[bytes], parts: list[_BufferPart], terms: EntryTerms,
        hints: PutHints,
    ) -> Sizes:  # fmt: skip
        iovs = [part.iov for part in parts]
        offsets = [part.offset for part in parts]
        sizes = [len(part.array) for part in parts]
        if op is Op.PUT:
            for part in parts:
                if part.is_bounced:
                    part.iov.array[part.offset : part.offset + len(part.array)] = part.array
        prepare = self.ring.prep_gets if op is Op.GET else partial(self.ring.prep_puts, hints=hints)
        prepare(iovs, offsets, namespace, keys, sizes, np.arange(len(keys)), **terms)
        results: Sizes = self.finish(len(keys), terms["timeout"])["result"]
        if op is Op.GET:
            for part, size in zip(parts, results.tolist(), strict=True):
                if part.is_bounced and size > 0:
                    part.array[:size] = part.iov.array[part.offset : part.offset + size]
        return results


class Lanes:
    """The lanes of one store: those that are idle or late, and those that callers have. For any number of threads."""

    def __init__(self, client: Client, entries: int, grace: float) -> None:
        self._client = client
        self._entries = entries
        self._grace = grace
        self.idle: list[Lane] = []
        self._late: list[Lane] = []
        self._lock = threading.Lock()
        self._closed = False
        self.late_calls = 0
        """calls that the daemon left unanswered beyond their deadline"""

    @contextmanager
    def take(self) -> Iterator[Lane]:
        """An idle lane, or a new one; late afterwards if it has something under way. TimeoutError, Disconnected."""
        self.settle()
        try:
            lane = self.idle.pop()
        except IndexError:
            lane = self._new()
        try:
            yield lane
        finally:
            if lane.is_late:
                lane.ring.attached.retract()
                with self._lock:
                    self._late.append(lane)
                    self.late_calls += 1
            else:
                self._give_back(lane)

    def _new(self) -> Lane:
        try:
            return Lane(self._client, self._entries, self._grace)
        except TimeoutError:
            self.late_calls += 1
            raise

    def _give_back(self, lane: Lane) -> None:
        """A lane of which nothing is under way."""
        with self._lock:
            is_usable = not self._closed
            if is_usable:
                self.idle.append(lane)
        if not is_usable:
            lane.close()

    def settle(self) -> bool:
        """Drop completions that came late. True: nobody touches buffers any more on account of calls that are over."""
        if not self._late:
            return True
        with self._lock:
            settled = [lane for lane in self._late if lane.ring.attached.settle()]
            self._late = [lane for lane in self._late if lane not in settled]
        for lane in settled:
            if lane.is_late:  # its ring has ended
                with suppress(OSError):
                    lane.close()
            else:
                self._give_back(lane)
        return not self._late

    def close(self) -> None:
        """Give back rings and memory. Late lanes of a connection that has ended stay late, until nobody serves them."""
        with self._lock:
            self._closed = True
            idle, self.idle = self.idle, []
            late = [] if self._client.session.has_ended else list(self._late)
        for lane in idle + late:
            lane.close()
        with self._lock:
            self._late = [lane for lane in self._late if lane not in late]
