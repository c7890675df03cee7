"""Maps a ring's memory, and implements both ends of its queues. Client and daemon use the same code.

**Ordering.** A producer writes entries, then publishes its tail; a consumer reads the tail, then the entries.

* x86-64 keeps stores in order and loads in order, and neither the interpreter nor numpy moves an access across
  the calls between them, so plain stores publish safely.
* aarch64 may reorder both. There the producer calls membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED) between the
  entries and the tail. It makes every running thread of every registered process pass a full barrier: a consumer
  that sees the new tail does so after its barrier, and so reads the entries after it, too. Both sides register.
* Going to sleep is a store (the sleep word) followed by a load (the other side's tail), publishing one the other
  way round. Every processor may swap these, so a full barrier stands between them on both sides: on x86-64 a lock
  that is taken and released (a locked instruction, 0.1 us), elsewhere the membarrier again.

Words are aligned and 8 bytes wide: reads and writes of one through a memoryview are single accesses.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfuse.errors import EngineError
from kvfuse.traceparent import SIZE, TRACES
from kvfuse.usrbio.protocol.wire import CQE, PARENTS_MAX, PARENTS_OFFSET, SQE, DaemonId, Layout, Word

Entries = npt.NDArray[np.void]

RING = (1).to_bytes(8, "little")
"""the bytes to write to a bell: 1, as an eventfd expects"""
RINGS_SIZE = 4096
"""bytes to read from a bell: at least all that it has, to avoid a spurious wake-up"""


def _membarrier() -> Callable[[], None]:
    """A barrier in all threads of all processes that registered, as this one does here. EngineError."""
    number = {"aarch64": 283, "x86_64": 324}.get(platform.machine())
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    global_expedited, register_global_expedited = 1 << 1, 1 << 2
    if number is None or syscall(number, register_global_expedited, 0, 0) != 0:
        raise EngineError(f"rings need membarrier(2), which this kernel lacks on {platform.machine()}")

    def barrier() -> None:
        syscall(number, global_expedited, 0, 0)

    return barrier


@cache
def fences() -> tuple[Callable[[], None] | None, Callable[[], None]]:
    """(between entries and tail, between an own store and a load of the other side's word); for the whole process."""
    if platform.machine() == "x86_64":
        lock = threading.local()

        def full() -> None:
            try:
                own = lock.own
            except AttributeError:
                own = lock.own = threading.Lock()
            with own:
                pass

        return None, full
    barrier = _membarrier()
    return barrier, barrier


class Queue:
    """One queue seen from one of its ends. ``entries``: the places, an array of SQE or CQE."""

    def __init__(self, words: memoryview, entries: Entries, head: Word, tail: Word) -> None:
        self._words = words
        self._entries = entries
        self._bytes = entries.view(np.uint8).data
        self._size = entries.itemsize
        self._head = int(head)
        self._tail = int(tail)
        self._mask = len(entries) - 1
        self._publish_fence, _ = fences()
        self.position = 0
        """entries that this end published, or took; its own copy, which the other side cannot change"""

    def __len__(self) -> int:
        return len(self._entries)

    # the producer's end

    @property
    def taken(self) -> int:
        """The consumer's count of entries taken, unchecked; valid from ``position - len`` to ``position``."""
        return self._words[self._head]

    def place(self, index: int) -> Any:
        """The place of the entry ``index``: write it before it is published."""
        return self._entries[index & self._mask]

    def write(self, rows: Entries, ahead: int = 0) -> None:
        """Write rows behind the published entries and ``ahead`` unpublished ones. The caller has checked for room."""
        self.write_packed(rows.tobytes(), ahead)

    def write_packed(self, packed: bytes, ahead: int = 0) -> None:
        """`write` of entries as bytes."""
        start = ((self.position + ahead) & self._mask) * self._size
        first = min(len(packed), len(self._bytes) - start)
        self._bytes[start : start + first] = packed[:first]
        if first < len(packed):
            self._bytes[: len(packed) - first] = packed[first:]

    def publish(self, count: int) -> None:
        """Give ``count`` written entries to the consumer."""
        if self._publish_fence is not None:
            self._publish_fence()
        self.position += count
        self._words[self._tail] = self.position

    # the consumer's end

    @property
    def given(self) -> int:
        """The producer's count of entries published, unchecked; valid from ``position`` to ``position + len``."""
        return self._words[self._tail]

    def read(self, count: int) -> Entries:
        """A copy of the next ``count`` entries."""
        return self.unpacked(self.read_packed(count))

    def read_packed(self, count: int) -> bytearray:
        """`read` as bytes."""
        start, size = (self.position & self._mask) * self._size, count * self._size
        packed = bytearray(self._bytes[start : start + size])
        if len(packed) < size:
            packed += self._bytes[: size - len(packed)]
        return packed

    def unpacked(self, packed: bytearray) -> Entries:
        """The entries that `read_packed` returned, as an array over them."""
        return np.frombuffer(packed, self._entries.dtype)

    def take(self, count: int) -> None:
        """Let the producer use the places of ``count`` entries that were read."""
        self.position += count
        self._words[self._head] = self.position


class Bell:
    """Wakes one side, rung only when that side says that it sleeps: an eventfd, or an end of a socket pair.

    A write to the other process must never wait for it. Whether it waits for room is a property of the open file, which
    all holders of an eventfd share. The ends of a pipe are two files, but they share a lock, which a reader holds as
    long as a page of its buffer takes to arrive. Ends of a socket pair share neither: so that is the client's bell.
    """

    def __init__(self, words: memoryview, sleeps: Word, descriptor: int) -> None:
        self.descriptor = descriptor
        self._words = words
        self._sleeps = int(sleeps)
        self._tail = int(Word.SQ_TAIL if sleeps == Word.DAEMON_SLEEPS else Word.CQ_TAIL)
        _, self._fence = fences()

    def ring(self) -> None:
        """Wake the sleeping side, if its tail is reached. The other side calls it, after it published."""
        self._fence()
        wanted = self._words[self._sleeps]
        if wanted and self._words[self._tail] >= wanted:
            try:
                os.write(self.descriptor, RING)
            except (BlockingIOError, BrokenPipeError):
                pass  # it is full of rings already, or closed

    def ring_always(self) -> None:
        """Wake the other side, whether it sleeps or not, where somebody may have published without ringing."""
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self.descriptor, RING)

    def going_to_sleep(self, until: int = 1) -> None:
        """Note that this side is about to sleep: it checks once more for work, and only then waits for the bell.

        ``until``: the tail at which to wake it; 1: at any entry published from here on.
        """
        self._words[self._sleeps] = until
        self._fence()

    def woken(self) -> None:
        """Clear the word and the bell, for the side that slept, or found work after `going_to_sleep`."""
        self.awake()
        try:
            os.read(self.descriptor, RINGS_SIZE)
        except BlockingIOError:
            pass

    def awake(self) -> None:
        """Clear the sleep word only: for a side that waits for edges of the descriptor, and need not read it."""
        self._words[self._sleeps] = 0


def daemon_of(words: memoryview) -> DaemonId:
    """The daemon that serves the ring with these words, or did last."""
    return DaemonId(words[Word.DAEMON_EPOCH], words[Word.DAEMON_PID], words[Word.DAEMON_NAMESPACE])


def heeds_parents(words: memoryview) -> bool:
    """The daemon that serves the ring makes spans; one of an older version would refuse entries that name parents."""
    return bool(words[Word.DAEMON_TRACES]) and words[Word.DAEMON_TRACES] == words[Word.DAEMON_EPOCH]


class RingMemory:
    """The mapping of a ring. ``sq`` and ``cq`` are queues, of each of which a side uses one end."""

    def __init__(self, descriptor: int, layout: Layout) -> None:
        self.layout = layout
        self._header = layout.header()
        self._mapping = mmap.mmap(descriptor, layout.size)
        words = memoryview(self._mapping)[: layout.sq_offset].cast("Q")
        self.words = words
        self.bytes = np.frombuffer(self._mapping, np.uint8)
        """the whole mapping"""
        self.aux = self.bytes[layout.aux_offset :]
        self.parents = self.bytes.data[PARENTS_OFFSET : PARENTS_OFFSET + PARENTS_MAX * SIZE]
        queues = self.bytes[layout.sq_offset : layout.aux_offset]
        sq_size, cq_size = layout.entries * SQE.itemsize, layout.entries * CQE.itemsize
        self.sq = Queue(words, queues[:sq_size].view(SQE), Word.SQ_HEAD, Word.SQ_TAIL)
        self.cq = Queue(words, queues[sq_size : sq_size + cq_size].view(CQE), Word.CQ_HEAD, Word.CQ_TAIL)

    @classmethod
    def create(cls, layout: Layout) -> tuple[RingMemory, int]:
        """(memory, descriptor) of a new ring, sealed against changes of its size. OSError."""
        descriptor = os.memfd_create("kvfuse-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, layout.size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            memory = cls(descriptor, layout)
            memory.bytes[: len(memory._header)] = np.frombuffer(memory._header, np.uint8)
        except BaseException:
            os.close(descriptor)
            raise
        return memory, descriptor

    @classmethod
    def attach(cls, descriptor: int) -> RingMemory:
        """Map a ring that the daemon made. ValueError: its header is not of this version, or wrong."""
        layout = Layout.parse(os.pread(descriptor, 64, 0))
        if os.fstat(descriptor).st_size != layout.size:
            raise ValueError("the ring's memory has another size than its header says")
        return cls(descriptor, layout)

    def sign(self, daemon: DaemonId) -> None:
        """Name this process as the one that serves the ring; the daemon does so before it takes an entry."""
        words = self.words
        words[Word.DAEMON_TRACES] = daemon.epoch if TRACES.is_on else 0
        words[Word.DAEMON_EPOCH], words[Word.DAEMON_PID], words[Word.DAEMON_NAMESPACE] = daemon

    def header_is_whole(self) -> bool:
        """Whether the header is as `create` wrote it."""
        return bytes(self.bytes[: len(self._header)]) == self._header
