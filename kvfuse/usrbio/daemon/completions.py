"""What a ring's client hears: each operation ends once, and one completion says so.

Whoever ends an operation posts its completion, under a lock: the queue has one producer at a time.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvfuse.usrbio.daemon.call import Call
from kvfuse.usrbio.protocol.queues import Bell, RingMemory
from kvfuse.usrbio.protocol.wire import CQE, CQE_STRUCT, Word


class Completions:
    """The completion queue of one ring, whose thread owns it. Any thread. ``unpin``: lets go of a pin."""

    def __init__(self, memory: RingMemory, bell: int, unpin: Callable[[int], None]) -> None:
        self._queue = memory.cq
        self._aux = memory.aux
        self._bell = Bell(memory.words, Word.CLIENT_SLEEPS, bell)
        self._unpin = unpin
        self._lock = threading.Lock()
        self._under_way = 0
        """entries taken and not completed"""
        self.stopped = False

    def stop(self) -> None:
        """Post nothing any more."""
        with self._lock:
            self.stopped = True

    def close(self) -> None:
        """After `stop`: let go of the ring's memory, and of pins that the client did not hear of."""
        with self._lock:  # later callers find the ring stopped, and touch nothing
            queue = self._queue
            unread = min(max(queue.position - queue.taken, 0), len(queue))
            self._drop_pins([queue.place(queue.position - number - 1) for number in range(unread)])
            del self._queue, self._aux, self._bell

    def _drop_pins(self, rows: Iterable[np.void]) -> None:
        """Of completions that nobody will read."""
        for row in rows:
            if row["pin"]:
                self._unpin(int(row["pin"]))

    # -- entries -------------------------------------------------------------------------------------

    def claims(self) -> tuple[int, int]:
        """Places of the queue that are not free: (unread, of entries under way), both of one moment."""
        with self._lock:  # what another thread posts goes from one to the other
            return self._queue.position - self._queue.taken, self._under_way

    def expect(self, count: int) -> None:
        """So many entries were taken; -1: one of them has no completion."""
        with self._lock:
            self._under_way += count

    def post(self, user_data: npt.ArrayLike, results: npt.ArrayLike) -> None:
        """Post many completions: their numbers, and their results."""
        results = np.asarray(results, np.int64)
        words = np.zeros((len(results), 4), np.uint64)
        words[:, 0] = user_data
        words[:, 1] = results.view(np.uint64)
        self.publish(words.tobytes(), len(words))

    def publish(self, packed: bytes, count: int) -> None:
        """Post completions that are packed already."""
        with self._lock:
            if not self.stopped:
                self._publish(packed, count)
            else:
                self._drop_pins(np.frombuffer(packed, CQE))

    def _publish(self, packed: bytes, count: int) -> None:
        """Under the lock: give completions to the client, and wake it if it sleeps."""
        self._queue.write_packed(packed)
        self._queue.publish(count)
        self._under_way -= count
        self._bell.ring()

    # -- calls of the event loop ---------------------------------------------------------------------

    def complete(self, call: Call, result: int, offset: int = 0, arena: int = 0, pin: int = 0) -> bool:
        """End a call, once. False when it had ended before: the client does not hear of what was done."""
        with self._lock:
            if call.ended or self.stopped:
                return False
            call.ended = True
            self._publish(CQE_STRUCT.pack(call.entry.user_data, result, offset, arena, pin), 1)
            return True

    def complete_many(self, rows: list[tuple[Call, int]]) -> None:
        """End those calls that have not ended before."""
        with self._lock:
            rows = [row for row in rows if not row[0].ended]
            if not rows or self.stopped:
                return
            for call, _ in rows:
                call.ended = True
            packed = b"".join([CQE_STRUCT.pack(call.entry.user_data, result, 0, 0, 0) for call, result in rows])
            self._publish(packed, len(rows))

    def give_up(self, call: Call, number: int, then: Callable[[], object] = lambda: None) -> None:
        """End a call with an errno before it is done - once the ring's thread is not at it - and call ``then``."""
        with self._lock:
            if call.busy:
                call.doom = lambda: self.give_up(call, number, then)
                return
        self.complete(call, -number)
        then()

    def answer_keys(self, call: Call, found: Sequence[bool]) -> None:
        """Write a result byte for each key into the client's memory, and end the call, unless it had ended before."""
        start, results = call.entry.offset, np.asarray(found, np.uint8)
        with self._lock:
            if call.ended or self.stopped:
                return
            self._aux[start : start + len(results)] = results
            call.ended = True
            self._publish(CQE_STRUCT.pack(call.entry.user_data, int(results.sum()), 0, 0, 0), 1)

    def attempt(self, call: Call, attempt: Callable[[], bool]) -> bool:
        """Keep others from ending the call meanwhile. True when it has ended, or nobody waits for it any more."""
        with self._lock:
            if call.ended or self.stopped:
                return True
            call.busy = True
        try:
            return attempt()
        except OSError as error:
            self.complete(call, -(error.errno or errno.EIO))
            return True
        finally:
            with self._lock:
                call.busy = False
                doom, call.doom = call.doom, None
            if doom is not None:
                doom()
