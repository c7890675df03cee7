"""Holds the registered things of one client, for its ring threads and for its calls in the event loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, Protocol

import trio

from kvfuse.access.client_process import ClientProcess
from kvfuse.access.namespace_handle import NamespaceHandle
from kvfuse.usrbio.daemon import kept_records
from kvfuse.usrbio.daemon.bell_watcher import BellWatcher
from kvfuse.usrbio.daemon.call import Call
from kvfuse.usrbio.daemon.call_memory import Share
from kvfuse.usrbio.daemon.connection_keeping import ConnectionKeeping, KeptConnection
from kvfuse.usrbio.daemon.device_iovs import MEMORIES_MAX
from kvfuse.usrbio.daemon.limits import Limits
from kvfuse.usrbio.daemon.pins import Pins
from kvfuse.usrbio.daemon.registered_things import HandleMap
from kvfuse.usrbio.daemon.user_accounts import UserAccount
from kvfuse.usrbio.daemon.write_batches import WriteBatch, WriteBatches
from kvfuse.volume.tier.shared_tier import ReadClass, TierBlock

log = logging.getLogger(__name__)

THINGS_MAX = 65536
"""files, iovs, namespaces and pins of one connection"""
RINGS_MAX = 256
"""rings of one connection: each has a thread"""
TIER_PART = 0.5
"""part of the tier's capacity for calls in flight of one user"""


class StartsCalls(Protocol):
    """Executes calls in the event loop; its methods are for there alone."""

    batches: WriteBatches

    def start(self, calls: list[Call]) -> None: ...
    def cancel(self, cancels: list[Call]) -> None: ...


class ClientRegistry:
    """The connection owns it. Any thread may look and call; the event loop alone adds and removes.

    ``fail``: ends the connection.
    """

    def __init__(
        self, limits: Limits, peer: ClientProcess, account: UserAccount, share: Share, calls: StartsCalls,
        fail: Callable[[], None], left: KeptConnection | None = None,
    ) -> None:  # fmt: skip
        """``left``: the connection, from the former daemon."""
        keeping = self.keeping = ConnectionKeeping(limits.keeper, left, limits.kept_files)
        self.files = HandleMap("file", THINGS_MAX, keeping, account, "user_files", keep=kept_records.pack_file)
        self.iovs = HandleMap("iov", THINGS_MAX, keeping, account, "user_iovs", "user_iov_size", kept_records.pack_iov)
        self.devices = HandleMap(
            "device", MEMORIES_MAX, keeping, account, "user_iovs", "user_iov_size", kept_records.pack_device
        )
        self.namespaces = HandleMap(
            "namespace", THINGS_MAX, keeping, account, "user_files", keep=kept_records.pack_namespace
        )
        self.rings: HandleMap[Any] = HandleMap(
            "ring", RINGS_MAX, keeping, account, "user_rings", "user_ring_size", lambda ring: ring.describe()
        )
        pins_max = THINGS_MAX if limits.volume.tier.may_show(is_unlimited=peer.is_unlimited) else 0
        self.pins = Pins(pins_max, limits.pinned, account.key, keeping, left.pins if left else None)
        self.share = share
        self._user_key: Hashable = (peer.uid, peer.is_unlimited)
        self.user = limits.bell_watcher.interpreter.get_user(self._user_key)
        self._peer = peer
        self.pid = peer.pid
        self._limits = limits
        self._calls = calls
        self._fail = fail
        self._token = trio.lowlevel.current_trio_token()

    @property
    def bell_watcher(self) -> BellWatcher:
        return self._limits.bell_watcher

    def start(self, calls: list[Call]) -> None:
        """Have the event loop execute calls of a ring."""
        self._limits.call_queue.put(self._user_key, calls, self._calls.start)

    def start_writes(self, batch: WriteBatch) -> None:
        """Have the event loop execute a batch of writes."""
        self._limits.call_queue.put(self._user_key, [batch], lambda _: self._calls.batches.start(batch))

    def cancel(self, call: Call) -> None:
        """Have the event loop cancel the call that ``call`` names."""
        self._limits.call_queue.put(self._user_key, [call], self._calls.cancel)

    def run_in_loop(self, function: Callable[[], object]) -> None:
        """Call a function in the event loop soon, unless that has ended."""
        with suppress(trio.RunFinishedError):  # the daemon has ended: nobody waits for an answer
            self._token.run_sync_soon(function)

    def allocate(self, namespace: NamespaceHandle, size: int) -> TierBlock | None:
        """A block of the tier for a new file of the namespace.

        None where the user's calls in flight could hold too much of the tier: their blocks cannot be evicted. Also
        where the directory may give new files another group by now, until the event loop has looked at it.
        """
        tier = self._limits.volume.tier
        if not size or self.share.user_size > TIER_PART * tier.capacity or namespace.blocks is not None:
            return None
        group = namespace.group
        readers = ReadClass(namespace.ino, self._peer.uid, group.gid, namespace.mode & 0o444)
        block = tier.allocate(size, readers)
        return block if group.is_current else None  # else users who may not read the files could map the arena

    def disconnect(self, reason: str) -> None:
        """Disconnect the client, which broke its ring."""
        log.info("disconnecting a client: %s", reason)
        self.run_in_loop(self._fail)

    def count_things(self) -> dict[str, int]:
        """Count registered things, by kind."""
        counts = {name: len(getattr(self, name)) for name in ("files", "iovs", "namespaces", "rings", "pins")}
        counts["iovs"] += len(self.devices)
        return counts
