"""A ring's thread that the test drives itself, and the client's end of its ring."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvfuse.access.client_process import ClientProcess
from kvfuse.access.namespace_handle import NamespaceHandle
from kvfuse.checksum import GRANULE_SIZE, granule_checksums
from kvfuse.options.options import UsrbioOptions
from kvfuse.usrbio.daemon.bell_watcher import BellWatcher
from kvfuse.usrbio.daemon.call import Call
from kvfuse.usrbio.daemon.call_memory import Share, SharedPool
from kvfuse.usrbio.daemon.charges import Charge, Charges
from kvfuse.usrbio.daemon.client_memory import MappedIov, seal_memory
from kvfuse.usrbio.daemon.interpreter import Interpreter, User
from kvfuse.usrbio.daemon.pins import Pinned, Pins
from kvfuse.usrbio.daemon.registered_things import OpenFile
from kvfuse.usrbio.daemon.ring_journal import RingJournal
from kvfuse.usrbio.daemon.ring_thread import RingThread
from kvfuse.usrbio.daemon.write_batches import WriteBatch
from kvfuse.usrbio.protocol.queues import Entries, RingMemory
from kvfuse.usrbio.protocol.wire import SQE, Layout, Op
from kvfuse.volume.views.content_map import ContentMap, MappedSource, MapRow

MIB = 1 << 20
CHUNK = 4 * GRANULE_SIZE
FILE, HOLED, IOV = 1, 2, 3
IOV_SIZE = 2 * MIB


@dataclass
class Registered:
    """A connection with two files and an iov, and no event loop: calls are only noted."""

    files: dict[int, OpenFile] = field(default_factory=dict)
    iovs: dict[int, MappedIov] = field(default_factory=dict)
    devices: dict[int, Any] = field(default_factory=dict)
    namespaces: dict[int, NamespaceHandle] = field(default_factory=dict)
    share: Share = field(default_factory=lambda: Share(SharedPool(MIB)))
    pins: Pins = field(default_factory=lambda: Pins(0, Pinned(0)))
    bell_watcher: BellWatcher = field(default_factory=lambda: BellWatcher(Interpreter()))
    pid: int = 0
    user: User = field(default_factory=User)
    calls: list[Call] = field(default_factory=list)
    batches: list[WriteBatch] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    at_start: Callable[[], object] = lambda: None

    def start(self, calls: list[Call]) -> None:
        self.calls += calls
        self.at_start()

    def start_writes(self, batch: WriteBatch) -> None:
        self.batches.append(batch)

    def run_in_loop(self, function: Callable[[], object]) -> None:
        function()

    def cancel(self, call: Call) -> None:
        call.ring.completions.complete(call, -errno.ENOENT)

    def allocate(self, namespace: NamespaceHandle, size: int) -> Any:
        raise AssertionError("nothing is put here")

    def disconnect(self, reason: str) -> None:
        self.failures.append(reason)


@dataclass
class Lab:
    """A worker that the test drives itself, and the client's end of its ring."""

    worker: RingThread
    client: RingMemory
    registered: Registered
    content: bytes
    """of FILE; HOLED has the same, with zeros in its second chunk"""

    def submit(self, rows: Entries) -> None:
        self.client.sq.write(rows)
        self.client.sq.publish(len(rows))

    def results(self) -> list[tuple[int, int]]:
        """Completions that came, as (user_data, result)."""
        count = self.client.cq.given - self.client.cq.position
        rows = self.client.cq.read(count)
        self.client.cq.take(count)
        return [(int(row["user_data"]), int(row["result"])) for row in rows]

    def run(self, rows: Entries) -> list[tuple[int, int]]:
        self.submit(rows)
        while self.worker.step():
            pass
        return self.results()

    def iov_bytes(self, offset: int, length: int) -> bytes:
        return self.registered.iovs[IOV].bytes[offset : offset + length].tobytes()


def entries(count: int, **columns: Any) -> Entries:
    """SQEs, by default reads of FILE into neighbouring pages, numbered."""
    rows = np.zeros(count, SQE)
    rows["op"], rows["handle"], rows["iov"], rows["length"] = Op.READ, FILE, IOV, 4096
    rows["iov_offset"] = np.arange(count) * 4096
    rows["user_data"] = np.arange(count)
    for name, value in columns.items():
        rows[name] = value
    return rows


def shared(size: int, *, sealed: bool) -> int:
    """A memfd; one that may not be sealed is as a file in /dev/shm."""
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if sealed else 0))
    os.ftruncate(descriptor, size)
    return descriptor


def free_of_charge() -> Charge:
    """Of a user for whom only the limit of all holds."""
    charges = Charges(UsrbioOptions())
    charges.group = None  # it counts shared memory of all tests that run now
    return charges.get_charge(ClientProcess(1, os.geteuid(), 0, frozenset()))


@contextmanager
def worker_lab(rng: random.Random, *, sealed: bool) -> Iterator[Lab]:
    """``sealed``: the client's memory can be sealed against shrinking."""
    content = rng.randbytes(3 * CHUNK + 12345)
    descriptor = shared(len(content) + 4096, sealed=True)
    os.pwrite(descriptor, content, 4096)
    image = np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), np.uint8)
    source = MappedSource(descriptor, image)
    registered = Registered()
    for handle in (FILE, HOLED):
        shown = ContentMap(handle, CHUNK, len(content))
        for index in range(4):
            part = content[index * CHUNK : (index + 1) * CHUNK]
            sums = granule_checksums(memoryview(part))
            shown.rows[index] = MapRow(source, 4096 + index * CHUNK, len(part), sums)
        if handle == HOLED:
            shown.rows[1] = MapRow(None, 0, 0)
        registered.files[handle] = OpenFile(None, handle, True, False, shown)
    memory_descriptor = shared(IOV_SIZE, sealed=sealed)
    seal_memory(memory_descriptor)
    registered.iovs[IOV] = MappedIov(memory_descriptor, IOV_SIZE, free_of_charge())
    memory, ring_descriptor = RingMemory.create(Layout.of(64, 4096))
    bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
    journal, journal_descriptor = RingJournal.create(64)
    yield Lab(
        RingThread(registered, memory, *bells, -1, journal), RingMemory.attach(ring_descriptor), registered, content
    )
    for number in (descriptor, ring_descriptor, journal_descriptor, *bells):
        os.close(number)
