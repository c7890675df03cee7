"""A pattern's phases: how long its calls take, what they move, and the processor time of both sides."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import numpy as np

from kvfuse.errors import KvfuseError
from kvfuse.usrbio.client.iov import new_memory
from kvfuse_bench.daemons import cpu_seconds_of_all

RATE = "GB/s"
OPERATIONS = "operations/s"
MEDIAN = "p50 ms"
TAIL = "p99 ms"
PROCESSOR = "CPU s/GB"
DAEMON = "daemon CPU s/GB"
METRICS = (RATE, OPERATIONS, MEDIAN, TAIL, PROCESSOR, DAEMON)
"""what each phase is measured in; those with bytes only where it moves some"""
PER_CALL = "CPU us a call"
DAEMON_PER_CALL = "daemon CPU us a call"


@dataclass
class Phase:
    """One phase of a pattern, as it was measured: times in seconds, sizes in bytes."""

    name: str
    size: int = 0
    """moved by all calls"""
    operations: int = 0
    """blocks, or whatever the calls are about"""
    calls: list[float] = field(default_factory=list)
    seconds: float = 0.0
    """from the start of the first call to the end of the last"""
    client_seconds: float = 0.0
    """of processors, by this process and those that it says it has"""
    daemon_seconds: float = 0.0
    """of processors"""

    def add(self, seconds: float, size: int, operations: int = 1) -> None:
        """A call that is over. From any thread."""
        self.calls.append(seconds)
        self._sizes.append((size, operations))

    def run(self, call: Callable[[], int], operations: int = 1) -> None:
        """Time ``call``, which answers how many bytes it moved."""
        start = time.perf_counter()
        size = call()
        self.add(time.perf_counter() - start, size, operations)

    def spread(self, pool: ThreadPoolExecutor, calls: Sequence[Callable[[], int]], operations: int = 1) -> None:
        """`run` each by the threads of ``pool``, and wait for all."""
        for _ in pool.map(lambda call: self.run(call, operations), calls):
            pass

    def __post_init__(self) -> None:
        self._sizes: list[tuple[int, int]] = []

    def close(self) -> None:
        """No call follows."""
        self.size += sum(size for size, _ in self._sizes)
        self.operations += sum(count for _, count in self._sizes)
        self._sizes.clear()

    def metrics(self) -> dict[str, float]:
        """By the names of `METRICS`. Processor time is for each GB, or where nothing is moved for each call."""
        median, tail = (1000 * float(value) for value in np.percentile(self.calls, (50, 99)))
        found = {OPERATIONS: self.operations / self.seconds, MEDIAN: median, TAIL: tail}
        both = self.client_seconds + self.daemon_seconds
        if self.size:
            gigabytes = self.size / 1e9
            found[RATE] = gigabytes / self.seconds
            found |= {PROCESSOR: both / gigabytes, DAEMON: self.daemon_seconds / gigabytes}
        else:
            count = len(self.calls) / 1e6
            found |= {PER_CALL: both / count, DAEMON_PER_CALL: self.daemon_seconds / count}
        return found


class Meter:
    """Measures the phases of one run of a pattern."""

    def __init__(self, daemon: int | None = None) -> None:
        """``daemon``: the process that serves the other side, and those that it started; None: the kernel does."""
        self.phases: list[Phase] = []
        self._daemon = daemon

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """All that happens in the body counts."""
        phase = Phase(name)
        client, daemon = time.process_time(), self._daemon_seconds()
        start = time.perf_counter()
        yield phase
        phase.seconds = time.perf_counter() - start
        phase.daemon_seconds = self._daemon_seconds() - daemon
        phase.client_seconds += time.process_time() - client
        phase.close()
        self.phases.append(phase)

    def _daemon_seconds(self) -> float:
        return 0.0 if self._daemon is None else cpu_seconds_of_all(self._daemon)


class Memory(AbstractContextManager["Memory"]):
    """An engine's own memory: what its blocks hold, and where they come back to.

    It is shared memory, as pools of engines are, and so aligned to pages.
    """

    def __init__(self, block_size: int, count: int, seed: int = 0) -> None:
        """Of ``count`` blocks."""
        self.block_size = block_size
        self.count = count
        self.source, source = new_memory(block_size * count)
        self.target, target = new_memory(block_size * count)
        self._descriptors = source.descriptor, target.descriptor
        self.source[:] = np.random.default_rng(seed).integers(0, 256, len(self.source), np.uint8)

    @property
    def size(self) -> int:
        return len(self.source)

    def stored(self, index: int) -> memoryview:
        """What block ``index`` holds."""
        return self.source.data[index * self.block_size : (index + 1) * self.block_size]

    def loaded(self, index: int) -> memoryview:
        """Where block ``index`` comes back to."""
        return self.target.data[index * self.block_size : (index + 1) * self.block_size]

    def forget(self) -> None:
        """Nothing came back yet."""
        self.target[:] = 0

    def check(self) -> None:
        """KvfuseError unless all came back."""
        if not np.array_equal(self.source, self.target):
            wrong = int(np.flatnonzero(self.source != self.target)[0])
            raise KvfuseError(f"block {wrong // self.block_size} of {self.block_size} bytes is not what was written")

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
