"""Holds state that all clients of a mount share, and the limits of all together."""

from __future__ import annotations

from kvfuse.kept.keeper import NO_KEEPER, Keeper
from kvfuse.options.options import UsrbioOptions
from kvfuse.usrbio.daemon.bell_watcher import BellWatcher
from kvfuse.usrbio.daemon.call_memory import SharedPool, UnderWay
from kvfuse.usrbio.daemon.call_queue import CallQueue
from kvfuse.usrbio.daemon.charges import Charges
from kvfuse.usrbio.daemon.connection_keeping import KeptFiles
from kvfuse.usrbio.daemon.device_memory import DeviceMemories, DeviceStaging, NoDeviceMemories
from kvfuse.usrbio.daemon.pins import Pinned
from kvfuse.usrbio.daemon.user_accounts import UserAccounts
from kvfuse.usrbio.protocol.wire import LENGTH_MAX
from kvfuse.volume.api import RingApi
from kvfuse.volume.views.kernel_cache import KernelCache

MEMORY_SIZE = LENGTH_MAX + (64 << 20)
"""Bytes that calls in flight may hold."""


class Limits:
    """The shared state of one mount; the listener owns it. Event loop only, but for members that say otherwise."""

    def __init__(
        self, volume: RingApi, kernel: KernelCache, device: int, bell_watcher: BellWatcher, options: UsrbioOptions,
        device_memories: DeviceMemories | None = None, keeper: Keeper = NO_KEEPER,
    ) -> None:  # fmt: skip
        """``device``: st_dev of the mount's files. ``device_memories``: None: clients can register none.

        ``keeper``: keeps what outlives the daemon."""
        self.keeper = keeper
        self.kept_files = KeptFiles()
        self.hands_over = False
        """the next daemon takes the clients over: what ends here stays kept"""
        self.volume = volume
        self.kernel = kernel
        self.device = device
        self.bell_watcher = bell_watcher
        self.call_queue = CallQueue()
        self.accounts = UserAccounts(options)
        self.pool = SharedPool(MEMORY_SIZE)
        self.under_way = UnderWay()
        self.pinned = Pinned(volume.tier.capacity)
        self.device_memories = device_memories or NoDeviceMemories()
        self.device_staging = DeviceStaging()
        self.charges = Charges(options, lambda: volume.tier.statistics().used_bytes)
