"""Several processes that get blocks at once, each with a store of its own. A program, too: one such process.

It takes one JSON request a line on stdin, {"operation": "get" or "memcpy", "seconds": S}, and answers each with one
line on stdout: the seconds of each batch, and those of the processor.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvfuse.connectors.steady_store import SteadyStore
from kvfuse.errors import KvfuseError
from kvfuse.usrbio.client.iov import new_memory
from kvfuse_bench.engines.measuring import Phase
from kvfuse_bench.references import memcpy
from kvfuse_bench.timing import Batch, time_batches
from kvfuse_bench.workers import WorkerProcess

READER_COUNT = 4
DEADLINE_S = 60.0


class Readers(contextlib.AbstractContextManager["Readers"]):
    """The processes, ended with the block."""

    def __init__(self, mountpoint: Path, namespace: str, size: int, depth: int, keys: Sequence[bytes]) -> None:
        """They get ``keys``, each a block of ``size`` bytes, ``depth`` in a call."""
        self._size, self._depth = size, depth
        words = [str(mountpoint), namespace, str(size), str(depth)]
        with contextlib.ExitStack() as stack:
            self._processes = [
                WorkerProcess(stack, "a process that reads blocks", "kvfuse_bench.engines.readers", *words)
                for _ in range(READER_COUNT)
            ]
            for process in self._processes:
                process.ask([key.decode() for key in keys])
            for process in self._processes:
                process.answer()
            self._stack = stack.pop_all()

    def run(self, operation: str, seconds: float, phase: Phase) -> None:
        """All at once, for ``seconds``. KvfuseError where one fails."""
        for process in self._processes:
            process.ask({"operation": operation, "seconds": seconds})
        for process in self._processes:
            answer = process.answer()
            phase.client_seconds += answer["processor"]
            for batch in answer["seconds"]:
                phase.add(batch, self._size * self._depth, self._depth)

    def __exit__(self, *_: object) -> None:
        self._stack.close()


# -- the program ---------------------------------------------------------------------------------------


def batches(store: SteadyStore, keys: Sequence[bytes], size: int, depth: int) -> dict[str, Batch]:
    """What it is asked for: batches from and to memory of its own."""
    count = len(keys) // depth * depth
    memory, _part = new_memory(count * size)
    region = store.register(memory)
    order = np.random.default_rng().permutation(len(keys))[:count].reshape(-1, depth)
    rows = [[keys[index] for index in row] for row in order.tolist()]
    offsets = (np.arange(count) * size).reshape(-1, depth).tolist()
    sizes = [size] * depth

    def get(number: int) -> None:
        row = number % len(rows)
        if not (store.get(rows[row], region, offsets[row], sizes) == size).all():
            raise KvfuseError("a block is not there")

    source = np.ones(count * size, np.uint8)
    return {"get": get, "memcpy": memcpy(source, region.array, size, depth)}


def main() -> None:
    mountpoint, namespace, size, depth = sys.argv[1:]
    keys = [key.encode() for key in json.loads(sys.stdin.readline())]
    store = SteadyStore(mountpoint, namespace, descriptor={"made by": "bench engines"}, deadline=DEADLINE_S)
    known = batches(store, keys, int(size), int(depth))
    known["get"](0)
    print("{}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        before = time.process_time()
        times = time_batches(known[request["operation"]], request["seconds"], sys.maxsize)
        print(json.dumps({"seconds": times, "processor": time.process_time() - before}), flush=True)
    store.close()


if __name__ == "__main__":
    main()
