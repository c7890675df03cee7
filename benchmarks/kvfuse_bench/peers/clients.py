"""A client of one host, in a process of its own: puts blocks, gets them, compares every byte. A program, too.

It takes one JSON request a line on stdin, {"operation": NAME, ...}, and answers each with one line on stdout.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvfuse.errors import KvfuseError
from kvfuse.usrbio.client import BlockStore
from kvfuse_bench.content import BlockContent, block_key
from kvfuse_bench.references import memcpy
from kvfuse_bench.ringwork import connect_when_open
from kvfuse_bench.timing import time_batches
from kvfuse_bench.workers import WorkerProcess
from kvfuse_cluster.process import wait_until

NAMESPACE = "bench-peers"
DEADLINE_S = 20.0
SEEN_SECONDS_MAX = 30.0
PUT_BLOCKS = 64


class Blocks(NamedTuple):
    """``total`` blocks of ``size`` bytes, asked for ``depth`` at once. ``label`` makes them differ from others."""

    label: str
    size: int
    depth: int
    total: int

    def keys(self) -> list[bytes]:
        return [block_key(self.label, number).hex().encode() for number in range(self.total)]


class Answer(NamedTuple):
    """Seconds of each batch, and of the processor for all of them."""

    seconds: list[float]
    processor: float


class Client:
    """The process."""

    def __init__(self, process: WorkerProcess) -> None:
        self._process = process

    def begin(self, operation: str, **words: Any) -> None:
        self._process.ask({"operation": operation, **words})

    def end(self) -> Answer:
        """KvfuseError where it failed, or found wrong bytes."""
        answer = self._process.answer()
        if "error" in answer:
            raise KvfuseError(f"a client of a host: {answer['error']}")
        return Answer(answer["seconds"], answer["processor"])

    def ask(self, operation: str, **words: Any) -> Answer:
        self.begin(operation, **words)
        return self.end()


@contextlib.contextmanager
def client_of(mountpoint: Path, room: int) -> Iterator[Client]:
    """It gets up to ``room`` bytes at once. Ended with the block."""
    with contextlib.ExitStack() as stack:
        words = str(mountpoint), str(room)
        client = Client(WorkerProcess(stack, "a client of a host", "kvfuse_bench.peers.clients", *words))
        client.end()  # the first says that it is ready
        yield client


# -- the program ---------------------------------------------------------------------------------------


class Worker:
    """What it is asked for. ``room``: bytes of the memory that blocks are got into, which is touched beforehand."""

    def __init__(self, store: BlockStore, room: int) -> None:
        self._store = store
        self._memory = store.client.iov(room).array
        self._memory[:] = 0xFF

    def put(self, blocks: Blocks) -> Answer:
        content, keys = BlockContent(blocks.size), blocks.keys()
        step = max(1, min(PUT_BLOCKS, len(self._memory) // blocks.size))
        for start in range(0, blocks.total, step):
            some = keys[start : start + step]
            rows = self._memory[: len(some) * blocks.size].reshape(len(some), blocks.size)
            for row, key in zip(rows, some, strict=True):
                row[:] = np.frombuffer(content.fill(bytes.fromhex(key.decode())), np.uint8)
            if not self._store.put_many(some, list(rows)).all():
                raise KvfuseError("not all blocks are stored")
        return Answer([], 0.0)

    def see(self, blocks: Blocks) -> Answer:
        keys = blocks.keys()
        if not wait_until(lambda: bool(self._store.exists(keys).all()), SEEN_SECONDS_MAX):
            raise KvfuseError("what another host stored is not seen: are these mounts of one shared volume?")
        return Answer([], 0.0)

    def get(self, blocks: Blocks, seed: int | None = None) -> Answer:
        """Each block once, in a random order if there is a ``seed``. Compared when the time is taken."""
        keys = blocks.keys()
        if seed is not None:
            random.Random(seed).shuffle(keys)
        rows = list(self._memory[: blocks.total * blocks.size].reshape(blocks.total, blocks.size))
        self._memory[: blocks.total * blocks.size] = 0xFF
        seconds, before = [], time.process_time()
        for start in range(0, blocks.total, blocks.depth):
            began = time.perf_counter()
            sizes = self._get(keys[start : start + blocks.depth], rows[start : start + blocks.depth])
            seconds.append(time.perf_counter() - began)
            if any(size != blocks.size for size in sizes):
                raise KvfuseError(f"blocks of {blocks.size} bytes have the sizes {sizes[:8]}")
        processor = time.process_time() - before
        content = BlockContent(blocks.size)
        for key, row in zip(keys, rows, strict=True):
            difference = content.difference(bytes.fromhex(key.decode()), row.data)
            if difference is not None:
                raise KvfuseError(f"wrong bytes: {key.decode()} {difference}")
        return Answer(seconds, processor)

    def _get(self, keys: list[bytes], rows: Sequence[object]) -> list[int | None]:
        if len(keys) == 1:
            return [self._store.get_into(keys[0], rows[0])]
        return list(self._store.get_many_into(keys, rows).tolist())

    def copy(self, blocks: Blocks) -> Answer:
        """As many bytes from memory to memory."""
        size = blocks.total * blocks.size
        source = np.ones(size, np.uint8)
        batch, before = memcpy(source, self._memory[:size], blocks.size, blocks.depth), time.process_time()
        return Answer(time_batches(batch, inf, blocks.total // blocks.depth), time.process_time() - before)

    def delete(self, blocks: Blocks) -> Answer:
        self._store.delete_many(blocks.keys())
        return Answer([], 0.0)


def main() -> None:
    mountpoint, room = sys.argv[1:]
    with connect_when_open(Path(mountpoint)) as client, BlockStore(client, NAMESPACE, deadline=DEADLINE_S) as store:
        worker = Worker(store, int(room))
        print(json.dumps(Answer([], 0.0)._asdict()), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            operation, blocks = request.pop("operation"), Blocks(*request.pop("blocks"))
            try:
                answer = getattr(worker, operation)(blocks, **request)._asdict()
            except (KvfuseError, OSError) as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
