"""What one client has registered, as the threads of its rings and its calls in the event loop find it."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import socket
from collections.abc import Callable, Hashable
from contextlib import ExitStack, suppress

import trio

from kvfuse.usrbio.daemon.accounts import Account
from kvfuse.usrbio.daemon.call import Call, Tables
from kvfuse.usrbio.daemon.call_memory import Share
from kvfuse.usrbio.daemon.client_memory import Iov
from kvfuse.usrbio.daemon.limits import Limits
from kvfuse.usrbio.daemon.loop_calls import Calls
from kvfuse.usrbio.daemon.peer import Peer
from kvfuse.usrbio.daemon.pins import Pins
from kvfuse.usrbio.daemon.registry import Namespace, OpenFile, Table
from kvfuse.usrbio.daemon.ring_thread import RingThread
from kvfuse.usrbio.protocol.queues import RingMemory
from kvfuse.usrbio.protocol.wire import Layout
from kvfuse.volume.views.tier import ReadClass, TierBlock

log = logging.getLogger(__name__)

THINGS_MAX = 65536
"""files, iovs, namespaces and pins of one connection"""
RINGS_MAX = 256
"""rings of one connection: each has a thread"""
TIER_PART = 0.5
"""of the tier's capacity: what calls of one user that are under way may hold"""


class Ring:
    """A ring of a connection, and its thread. ``shown``: the client's descriptors, to be closed once they are sent."""

    def __init__(self, tables: Tables[RingThread], layout: Layout, op_mask: int, shown: list[int]) -> None:
        self.size = layout.size
        with ExitStack() as undo:
            memory, descriptor = RingMemory.create(layout)
            shown.append(descriptor)
            own_bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, own_bell)
            shown.append(os.dup(own_bell))
            client_bell = _make_client_bell(shown)
            undo.callback(os.close, client_bell)
            self.loop = RingThread(tables, memory, own_bell, client_bell, op_mask)
            undo.callback(self.loop.close)
            try:
                self.loop.thread.start()
            except RuntimeError as error:
                raise OSError(errno.EAGAIN, str(error)) from error
            self._descriptors = undo.pop_all()

    def close(self) -> None:
        """After its thread has ended."""
        self._descriptors.close()


def _make_client_bell(shown: list[int]) -> int:
    """The daemon's end of a socket pair; the client's one goes to ``shown``.

    Nothing can be sent to the daemon's end, where it would lie until the daemon closes it.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    ours.shutdown(socket.SHUT_RD)
    shown.append(theirs.detach())
    return ours.detach()


class Registered:
    """The `call.Tables` of a client's rings; its connection owns it. ``fail``: ends the connection."""

    def __init__(
        self, limits: Limits, peer: Peer, account: Account, share: Share, calls: Calls, fail: Callable[[], None]
    ) -> None:
        handles = itertools.count(1)
        self.files = Table[OpenFile]("file", THINGS_MAX, handles, account, "user_files")
        self.iovs = Table[Iov]("iov", THINGS_MAX, handles, account, "user_iovs", "user_iov_size")
        self.namespaces = Table[Namespace]("namespace", THINGS_MAX, handles, account, "user_files")
        self.rings = Table[Ring]("ring", RINGS_MAX, handles, account, "user_rings", "user_ring_size")
        self.pins = Pins(THINGS_MAX, limits.pinned, account.key)
        self.share = share
        self.doorman = limits.doorman
        self._user_key: Hashable = (peer.uid, peer.is_unlimited)
        self.user = limits.doorman.interpreter.user(self._user_key)
        self._peer = peer
        self._tier = limits.volume.tier
        self._desk = limits.desk
        self._calls = calls
        self._fail = fail
        self._token = trio.lowlevel.current_trio_token()

    def start(self, ring: RingThread, calls: list[Call]) -> None:
        self._desk.put(self._user_key, ring, calls, self._calls.start)

    def cancel(self, ring: RingThread, call: Call) -> None:
        self._desk.put(self._user_key, ring, [call], self._calls.cancel)

    def in_loop(self, function: Callable[[], object]) -> None:
        with suppress(trio.RunFinishedError):  # the daemon has ended: nobody waits for an answer
            self._token.run_sync_soon(function)

    def allocate(self, namespace: Namespace, size: int) -> TierBlock | None:
        """Not where the user's calls under way could hold too much of the tier: their blocks cannot be evicted."""
        if self.share.user_size > TIER_PART * self._tier.capacity:
            return None
        read_class = ReadClass(namespace.ino, self._peer.uid, namespace.gid, namespace.mode & 0o444)
        return self._tier.allocate(size, read_class) if size else None

    def failed(self, reason: str) -> None:
        log.info("a client is disconnected: %s", reason)
        self.in_loop(self._fail)

    def counts(self) -> dict[str, int]:
        """How much of what is registered."""
        return {
            "files": len(self.files),
            "iovs": len(self.iovs),
            "namespaces": len(self.namespaces),
            "rings": len(self.rings),
            "pins": len(self.pins),
        }
