"""One client of the rings, in this process: the connection is a daemon's, and the caller drives the ring's thread.

So a step of that thread happens when the caller wants it, and nothing else runs beside it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any, NamedTuple

import numpy as np
import trio
import trio.testing
from worker_lab import IOV, entries, shared

from kvfuse.access.client_process import ClientProcess
from kvfuse.access.namespace_handle import Group, NamespaceHandle
from kvfuse.options.options import UsrbioOptions
from kvfuse.usrbio.daemon.bell_watcher import BellWatcher
from kvfuse.usrbio.daemon.call_memory import Share
from kvfuse.usrbio.daemon.client_memory import MappedIov, seal_memory
from kvfuse.usrbio.daemon.connection import Connection
from kvfuse.usrbio.daemon.interpreter import Interpreter
from kvfuse.usrbio.daemon.limits import Limits
from kvfuse.usrbio.daemon.ring_journal import RingJournal
from kvfuse.usrbio.daemon.ring_thread import RingThread
from kvfuse.usrbio.protocol.queues import RingMemory
from kvfuse.usrbio.protocol.wire import Layout, Op
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.volume import Volume

NAMESPACE = 1


class SilentKernel:
    """Nothing is mounted: nobody has to hear of a change."""

    def drop_name(self, *_: object) -> None: ...

    def drop_attributes(self, *_: object) -> None: ...


class RingClient(NamedTuple):
    """The client's end of a ring, and the ring's thread as an object."""

    ring: RingMemory
    thread: RingThread

    def submit(self, op: Op, name: bytes, length: int) -> None:
        """Of a block in the root directory, from or to the start of the client's memory."""
        self.ring.aux[: len(name)] = np.frombuffer(name, np.uint8)
        self.ring.sq.write(entries(1, op=op, handle=NAMESPACE, length=length, key_length=len(name)))
        self.ring.sq.publish(1)

    async def result(self) -> int:
        """Of the operation that is under way: the event loop and the ring's thread work by turns until it is there."""
        cq = self.ring.cq
        while cq.given == cq.position:
            await trio.testing.wait_all_tasks_blocked()
            self.thread.step()
        (row,) = cq.read(1)
        cq.take(1)
        return int(row["result"])


@asynccontextmanager
async def ring_client(volume: Volume, size: int) -> AsyncIterator[RingClient]:
    """``size``: bytes of the client's memory."""
    kernel: Any = SilentKernel()
    nobody: Any = None
    peer = ClientProcess(os.getpid(), 0, 0, frozenset())
    with BellWatcher(Interpreter()) as bell_watcher:
        limits = Limits(volume, kernel, 0, bell_watcher, UsrbioOptions())
        account = limits.accounts.open(peer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(limits.call_queue.run)
            share = Share(limits.pool, account.key, limits.under_way)
            connection = Connection(limits, nobody, peer, account, nobody, nobody, nursery, share)
            connection.registered.namespaces[NAMESPACE] = NamespaceHandle(ROOT_INODE, 0o644, Group(0))
            descriptor = shared(size, sealed=True)
            seal_memory(descriptor)
            connection.registered.iovs[IOV] = MappedIov(descriptor, size, limits.charges.get_charge(peer))
            with _ring(connection) as client:
                yield client
            connection.registered.iovs[IOV].close()
            nursery.cancel_scope.cancel()


@contextmanager
def _ring(connection: Connection) -> Iterator[RingClient]:
    memory, descriptor = RingMemory.create(Layout.of(64, 4096))
    with ExitStack() as undo:
        undo.callback(os.close, descriptor)
        bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
        for bell in bells:
            undo.callback(os.close, bell)
        journal, journal_descriptor = RingJournal.create(64)
        undo.callback(os.close, journal_descriptor)
        thread = RingThread(connection.registered, memory, *bells, -1, journal)
        undo.callback(thread.close)
        undo.callback(thread.stop)
        yield RingClient(RingMemory.attach(descriptor), thread)
