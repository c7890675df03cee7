"""RDMA of one mount: its open devices, what memory of it they may use, and queue pairs.

Memory that lives for long (arenas of the tier, mapped memory of clients) is registered where it lies, piece by piece
when it is first needed; what goes to other memory is read into `rdma_staging` first, and copied.
"""

from __future__ import annotations

import logging
import mmap
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import trio

from kvfuse.options.options import PeerOptions
from kvfuse.peer.devices import ANYWHERE, DeviceInfo, nearest, node_of
from kvfuse.peer.queue_pair import LARGE_BLOCKS, SMALL_BLOCKS, QueuePair, QueuePairCounters, QueuePairOptions
from kvfuse.peer.rdma_staging import RdmaStaging
from kvfuse.peer.registrations import Bytes, Registrations
from kvfuse.peer.verbs import PIECE, MemoryPart, NoDevice, RdmaDevice, VerbsError, active_devices, pyverbs

REFUSED_SECONDS = 10.0
"""for which nothing is registered after that failed: most likely this process may lock no more memory"""
COMING_MAX = 64
"""ranges that wait to be registered: others may be asked for again"""
SLACK = 256 << 20
"""bytes that may be registered beyond the tier: pieces are larger than what was touched of some arenas"""

log = logging.getLogger(__name__)


class Span(NamedTuple):
    """Bytes of a memory that lives for long."""

    memory: Bytes
    start: int
    size: int


def span_of(view: memoryview) -> Span | None:
    """Where a view lies; None where it is of memory that may be gone soon, or that this process can only read."""
    if not isinstance(view.obj, np.ndarray):
        return None
    memory: Bytes = view.obj
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    owner = memory.base.obj if isinstance(memory.base, memoryview) else memory.base
    # Blocks of the tier are arrays of their own: their owner says which arena they lie in.
    root: Bytes | None = getattr(owner, "root", memory if isinstance(owner, mmap.mmap) else None)
    if root is None or not root.flags.writeable or not len(view):
        return None
    return Span(root, _address(np.frombuffer(view, np.uint8)) - _address(root), len(view))


def _address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])


class Adapter:
    """An open device, and the memory that it may use. Event loop only."""

    def __init__(self, device: RdmaDevice, bytes_max: int, *, remote: bool) -> None:
        """``remote``: other hosts may read what is registered."""
        self.device = device
        self.registrations = Registrations(device, bytes_max, remote=remote)
        self.staging = RdmaStaging(device)
        self._coming: deque[Span] = deque()
        self._has_coming = trio.Event()
        self._refused_until = 0.0

    def parts(self, view: memoryview) -> list[MemoryPart] | None:
        """Registered memory in which a view lies; None where it does not, or not all of it yet."""
        span = span_of(view)
        return self.registrations.parts(*span) if span is not None else None

    async def cover(self, span: Span) -> bool:
        """Have memory registered, a piece at a time: with turns for others, in about a millisecond each."""
        if self.registrations.parts(*span) is not None:
            return True
        if trio.current_time() < self._refused_until:
            return False
        try:
            await self.registrations.cover(*span)
        except VerbsError as error:
            level = logging.INFO if self._refused_until else logging.WARNING
            self._refused_until = trio.current_time() + REFUSED_SECONDS
            log.log(level, "memory goes to other hosts, and comes from them, by TCP: %s", error)
            return False
        return True

    def lend(self, view: memoryview) -> list[MemoryPart] | None:
        """As `parts`; what is not registered is meanwhile, by `run`, and so is the piece behind it.

        That one is where the next blocks will be, which others may want as soon as they are there.
        """
        span = span_of(view)
        if span is None:
            return None
        found = self.registrations.parts(*span)
        if found is None:
            self._cover_soon(span)
        ahead = (span.start + span.size - 1) // PIECE * PIECE + PIECE
        if ahead < span.memory.nbytes and self.registrations.parts(span.memory, ahead, 1) is None:
            self._cover_soon(Span(span.memory, ahead, 1))
        return found

    def _cover_soon(self, span: Span) -> None:
        if len(self._coming) < COMING_MAX:
            self._coming.append(span)
            self._has_coming.set()

    async def run(self) -> None:
        """Until cancelled; then nothing is registered any more."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.registrations.run)
            while True:
                await self._has_coming.wait()
                await self.cover(self._coming.popleft())
                if not self._coming:
                    self._has_coming = trio.Event()

    def close(self) -> None:
        """After `run`, and its queue pairs."""
        self.staging.close()
        self.device.close()


@dataclass
class Rdma:
    """Of one mount. ``counters``, ``errors``: of all its queue pairs."""

    adapters: Sequence[Adapter]
    pair_options: QueuePairOptions
    counters: QueuePairCounters = field(default_factory=QueuePairCounters)
    errors: Counter[str] = field(default_factory=Counter)
    pairs: int = 0
    """that were made"""

    @property
    def gids(self) -> tuple[str, ...]:
        return tuple(adapter.device.gid.octets.hex() for adapter in self.adapters)

    def of_number(self, number: int) -> Adapter:
        """For a connection: these are spread over all devices."""
        return self.adapters[number % len(self.adapters)]

    def towards(self, gid: bytes) -> Adapter:
        """The device whose address is most like that of another host: likely of the same network."""
        far = int.from_bytes(gid, "big")
        return min(self.adapters, key=lambda adapter: int.from_bytes(adapter.device.gid.octets, "big") ^ far)

    def make_pair(self, adapter: Adapter, *, reads: bool = True) -> QueuePair:
        """Not ``reads``: only the other side will. VerbsError."""
        options = self.pair_options if reads else replace(self.pair_options, depth=1)
        pair = QueuePair(adapter.device, options)
        pair.counters, pair.errors = self.counters, self.errors
        self.pairs += 1
        return pair

    def statistics(self) -> dict[str, Any]:
        longest: Counter[str] = Counter()
        for adapter in self.adapters:
            longest |= Counter(adapter.device.calls.longest)
        return {
            "devices": [str(adapter.device.info) for adapter in self.adapters], "pairs": self.pairs,
            **asdict(self.counters), "errors": dict(self.errors),
            "registered_bytes": sum(adapter.registrations.bytes for adapter in self.adapters),
            "longest_call_ms": {kind: round(1e3 * seconds, 3) for kind, seconds in longest.items()},
        }  # fmt: skip

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            for adapter in self.adapters:
                nursery.start_soon(adapter.run)


def pair_options(options: PeerOptions) -> QueuePairOptions:
    """As a mount's options say."""
    defaults = SMALL_BLOCKS if options.rdma_blocks == "small" else LARGE_BLOCKS
    names = ("depth", "parallel_reads", "timeout", "retries", "traffic_class")
    given = {name: getattr(options, f"rdma_{name}") for name in names}
    if options.rdma_mtu is not None:
        given["mtu"] = options.rdma_mtu.bit_length() - 8
    return replace(defaults, **{name: value for name, value in given.items() if value is not None})


def usable_devices(options: PeerOptions) -> list[DeviceInfo]:
    """Those that are near this process, or as the options say. NoDevice, which says what is missing."""
    active = active_devices()
    pyverbs()
    return nearest(active, own_node(), device_table(options.rdma_devices, active))


def own_node() -> int:
    """The NUMA node on which this process runs now."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return node_of(int(fields[36]))


def device_table(rules: Sequence[str], devices: Sequence[DeviceInfo]) -> dict[int, list[str]]:
    """node -> devices, of "NODE=DEVICE" for one node, and "DEVICE" for those that have none of their own. NoDevice."""
    table: dict[int, list[str]] = {}
    for rule in rules:
        node, _, name = rule.rpartition("=")
        if not any(name in (str(info), info.name) for info in devices):
            raise NoDevice(f"peer.rdma_devices: {name} is no active RDMA device")
        table.setdefault(int(node) if node else ANYWHERE, []).append(name)
    others = table.pop(ANYWHERE, None)
    if others is not None:
        table[own_node()] = table.get(own_node()) or others
    return table


@asynccontextmanager
async def open_rdma(options: PeerOptions, tier_bytes: int) -> AsyncIterator[Rdma | None]:
    """For longer than any queue pair of it. None, and a line in the log that says why: TCP carries all."""
    with ExitStack() as stack:
        try:
            rdma = await _opened(options, tier_bytes, stack) if options.transport != "tcp" else None
        except NoDevice as error:
            level = logging.WARNING if options.transport == "rdma" else logging.INFO
            log.log(level, "other hosts are read by TCP alone: %s", error)
            rdma = None
        async with trio.open_nursery() as nursery:
            if rdma is not None:
                nursery.start_soon(rdma.run)
            yield rdma
            nursery.cancel_scope.cancel()


async def _opened(options: PeerOptions, tier_bytes: int, stack: ExitStack) -> Rdma:
    """NoDevice."""
    adapters = []
    for info in await trio.to_thread.run_sync(usable_devices, options):
        device = await trio.to_thread.run_sync(RdmaDevice, info)
        adapters.append(Adapter(device, 2 * tier_bytes + SLACK, remote=options.listen is not None))
        stack.callback(adapters[-1].close)
    return Rdma(adapters, pair_options(options))
