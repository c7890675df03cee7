"""A connection that comes back by itself: what `SteadyStore` calls, where there is a daemon. See `Link`."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from errno import ETIMEDOUT

import numpy as np
import numpy.typing as npt

from kvfuse.errors import KvfuseError
from kvfuse.usrbio.client import BlockStore, Disconnected, Iov, connect
from kvfuse.usrbio.client.iov import bytes_of
from kvfuse.usrbio.client.session import Session

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

RETRY_S, RETRY_S_MAX = 0.02, 1.0
"""between attempts to connect"""
DAEMON_SHARE = 0.8
"""of a deadline: the rest is for the daemon to say that it passed"""


class DescriptorMismatch(KvfuseError):
    """The namespace has blocks of another model, layout or hash: the engine must not use it."""


class Region:
    """Memory of the engine that blocks are got into and put from. Made by `SteadyStore.register`."""

    def __init__(self, memory: object) -> None:
        self.memory = memory
        self.array: Bytes = np.empty(0, np.uint8) if isinstance(memory, int) else bytes_of(memory)
        """the memory as bytes; of a descriptor once the store has connected"""
        self.iov: Iov | None = None
        """as the daemon knows it, where it can be mapped; else blocks are copied once more"""

    def part(self, offset: int, size: int) -> Bytes:
        return self.array[offset : offset + size]


@dataclass(frozen=True)
class LinkTarget:
    """What a link connects to."""

    mount: str
    namespace: str
    descriptor: Mapping[str, str | int]
    """what the blocks are, see `Client.namespace`"""
    deadline: float
    """seconds, of each call and request"""
    token: str | None
    entries: int
    """blocks under way in one call"""


class Link:
    """A `BlockStore` while there is a daemon. A thread connects, again and again where it must.

    `begin` starts it, also in the child of a fork. ``store`` is None while there is no connection.
    """

    def __init__(self, target: LinkTarget) -> None:
        self.target = target
        self.reason = "it has not connected yet"
        """why there is no connection"""
        self.connections = 0
        """times that it connected"""
        self._regions: list[Region] = []
        self._closed = False
        self.begin()

    def begin(self) -> None:
        """In the process that made the link, and in each child that uses it."""
        self.pid = os.getpid()
        self.store: BlockStore | None = None
        self.mismatch: DescriptorMismatch | None = None
        self._last: BlockStore | None = None
        """what connected last, with all that is registered"""
        self._lock = threading.Lock()
        self.tried, self._lost = threading.Event(), threading.Event()
        threading.Thread(target=self._keep_connected, name="kvfuse-connect", daemon=True).start()

    def add(self, region: Region) -> None:
        with self._lock:
            self._regions.append(region)
            if self.store is not None:
                _register(self.store, region)

    def remove(self, region: Region) -> None:
        with self._lock:
            self._regions.remove(region)
        if region.iov is not None:
            region.iov.close()

    def lose(self, store: BlockStore, reason: str) -> None:
        """A call found that the daemon is gone, or answers nothing."""
        if self.store is store:
            self.store, self.reason = None, reason
            log.warning("%s: no daemon answers (%s): misses until one does", self.target.mount, reason)
            self._lost.set()

    @property
    def is_silent(self) -> bool:
        """See `SteadyStore.is_silent`."""
        store = self._last
        return store is None or store.is_silent

    @property
    def _daemon(self) -> Session | None:
        """The connection to it, whichever process it is now."""
        return None if self._last is None else self._last.client.session

    def close(self) -> None:
        self._closed = True
        self._lost.set()
        with self._lock:
            store, self.store = self._last, None
        if store is not None:
            store.client.close()  # ends the calls under way
            store.close()

    # -- the thread ----------------------------------------------------------------------------------

    def _keep_connected(self) -> None:
        pause, lost = RETRY_S, self._lost
        while not self._closed:
            lost.clear()
            try:
                self._connect()
                pause = RETRY_S
            except DescriptorMismatch as error:
                self.mismatch, self.reason = error, str(error)
                pause = RETRY_S_MAX
            except Exception as error:  # whatever it is, the engine goes on without a cache
                self.reason = str(error)
            self.tried.set()
            if self.store is not None:
                lost.wait()
            elif not self._closed:
                lost.wait(pause)
                pause = min(2 * pause, RETRY_S_MAX)

    def _connect(self) -> None:
        """Have a connection with all memory registered, whose daemon answers, or raise."""
        store, daemon = self._last, self._daemon
        is_new = daemon is None or daemon.has_ended
        try:
            if store is None:
                store = self._new_store()
            else:
                _reconnect(store)
        except FileExistsError as error:
            target = self.target
            raise DescriptorMismatch(f"{target.mount}/{target.namespace}: {error.strerror or error}") from None
        with self._lock:
            if self._closed:
                store.client.close()
                return
            self._last = store
            self.connections += is_new
        late = store.lanes.late_calls
        store.prefetch([b"\0"])  # has a ring ready, and sees that it is served
        if store.lanes.late_calls != late:
            raise TimeoutError(ETIMEDOUT, f"{self.target.mount}: the daemon left calls unanswered")
        with self._lock:
            for region in self._regions:
                _register(store, region)
            self.mismatch = None
            self.store = None if self._closed else store

    def _new_store(self) -> BlockStore:
        target = self.target
        client = connect(target.mount, deadline=target.deadline, token=target.token)
        for region in self._regions:
            region.iov = None
        try:
            return BlockStore(
                client, target.namespace, deadline=target.deadline * DAEMON_SHARE,
                grace=target.deadline * (1 - DAEMON_SHARE), entries=target.entries,
                descriptor=target.descriptor,
            )  # fmt: skip
        except BaseException:
            client.close()
            raise


def _reconnect(store: BlockStore) -> None:
    """With everything that was registered, unless the connection stands. FileExistsError: the namespace has others."""
    store.client.reconnect()
    if not store.namespace.handle:
        store.namespace.register(store.client.session)


def _register(store: BlockStore, region: Region) -> None:
    """Let the daemon map the memory, where it can. Memory that it cannot map is copied once more."""
    if region.iov is not None:
        return
    with suppress(OSError, Disconnected):
        region.iov = store.client.share(region.memory)
        if region.iov is not None and isinstance(region.memory, int):
            region.array = region.iov.array
