"""Mooncake's store doing what the ring benchmarks do: a program of its own, for the interpreter of its environment.

Arguments: the address of a running mooncake_master, bytes of the store's segment (0: other clients keep
the blocks, in their memory), bytes of the caller's buffer, this host's address. Takes one JSON request a line on stdin
and answers each with one JSON line on stdout: {"seconds": [...]} or {"error": "..."}.

    {"operation": "load", "size": S, "count": N}          blocks 0..N-1 of S bytes
    {"operation": "get", "size": S, "count": N, "depth": D, "seconds": T}     of those, in batches
    {"operation": "put", "size": S, "depth": D, "seconds": T, "count": N}     at most N new ones, removed afterwards
    {"operation": "exists", "size": S, "count": N, "depth": D, "seconds": T}  D names a call
    {"operation": "drop"}                                 all blocks
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import mmap
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# By path: the package is not on this interpreter's path, and need not work under its version.
time_batches: Callable[[Callable[[int], None], float, int], list[float]] = runpy.run_path(
    str(Path(__file__).with_name("timing.py"))
)["time_batches"]


class Failed(Exception):
    """The store did not do what it was asked."""


class Store:
    """A client. One that keeps its blocks in a segment of its own memory has the shortest way that there is."""

    def __init__(self, master: str, segment_size: int, buffer_size: int, address: str) -> None:
        self.store: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        check(self.store.setup(address, "P2PHANDSHAKE", segment_size, buffer_size, "tcp", "", master))
        self.buffer = mmap.mmap(-1, buffer_size)
        self.buffer.write(os.urandom(1 << 20) * (buffer_size >> 20))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        check(self.store.register_buffer(self.address, buffer_size))
        self.buffer_size = buffer_size
        self.numbers = itertools.count()
        self.warm_up(segment_size)

    def warm_up(self, segment_size: int) -> None:
        """Touch the segment: memory handed out for the first time is slow, and no figure is about that."""
        self.load(4 << 20, segment_size // (4 << 20) * 3 // 4)
        self.drop()

    def places(self, size: int, depth: int, number: int) -> list[int]:
        """Addresses in the buffer, rolling over it."""
        count = self.buffer_size // size // depth
        first = number % count * depth
        return [self.address + index * size for index in range(first, first + depth)]

    def load(self, size: int, count: int) -> list[float]:
        for index in range(count):
            check(self.store.put_from(name(size, index), self.places(size, 1, index)[0], size))
        return []

    def get(self, size: int, count: int, depth: int, seconds: float) -> list[float]:
        def batch(number: int) -> None:
            first = number % (count // depth) * depth
            names = [name(size, index) for index in range(first, first + depth)]
            found = self.store.batch_get_into(names, self.places(size, depth, number), [size] * depth)
            if any(length != size for length in found):
                raise Failed(f"batch_get_into answers {found[:8]}")

        return time_batches(batch, seconds, sys.maxsize)

    def put(self, size: int, depth: int, seconds: float, count: int) -> list[float]:
        names: list[str] = []

        def batch(number: int) -> None:
            some = [name(size, f"new-{next(self.numbers)}") for _ in range(depth)]
            names.extend(some)
            results = self.store.batch_put_from(some, self.places(size, depth, number), [size] * depth)
            check(*results)

        times = time_batches(batch, seconds, max(1, count // depth))
        check(*self.store.batch_remove(names, True))
        return times

    def exists(self, size: int, count: int, depth: int, seconds: float) -> list[float]:
        names = [name(size, index % count) for index in range(depth)]

        def batch(_: int) -> None:
            if any(found != 1 for found in self.store.batch_is_exist(names)):
                raise Failed("batch_is_exist does not find what is there")

        return time_batches(batch, seconds, sys.maxsize)

    def drop(self) -> list[float]:
        self.store.remove_all(True)
        return []


def name(size: int, index: object) -> str:
    return f"bench-{size}-{index}"


def check(*results: int) -> None:
    if any(result != 0 for result in results):
        raise Failed(f"the store answers {[result for result in results if result != 0][:8]}")


def answer(store: Store, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"seconds": getattr(store, request.pop("operation"))(**request)}
    except (Failed, RuntimeError) as error:
        return {"error": str(error)}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library may print
    try:
        store = Store(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    except (Failed, ImportError) as error:
        print(json.dumps({"error": str(error)}), file=replies, flush=True)
        return
    print(json.dumps({"seconds": []}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(store, json.loads(line))), file=replies, flush=True)
    store.store.close()


if __name__ == "__main__":
    main()
