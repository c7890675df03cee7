"""Work that threads do with rings and stores while daemons come and go: every byte and every entry is looked at."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from mounting import wait_until
from ring_calls import PATIENCE_S, SIZE

from kvfuse.usrbio.client import BlockStore, Client, Iov, Ring
from kvfuse.usrbio.client.files import File

BLOCK = 8192
BATCH = 64
PART = BATCH * 4096
"""bytes of an iov that a ring reads into"""


class Load:
    """Does ``work`` again and again, in a thread, while it is entered."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.count = 0
        self._work = work
        self._failures: list[BaseException] = []
        self._end = False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._end:
                self._work()
                self.count += 1
        except BaseException as failure:
            self._failures.append(failure)

    def goes_on(self, times: int = 2) -> None:
        """Return when the work was done some times more. Raises what it raised."""
        before = self.count
        wait_until(lambda: self.count >= before + times or bool(self._failures), "the load going on")
        for failure in self._failures:
            raise failure

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end = True
        self._thread.join(PATIENCE_S)
        for failure in self._failures:
            raise failure


def reads(ring: Ring, file: File, iov: Iov, base: int, data: bytes, rng: random.Random) -> Callable[[], None]:
    """Reads of ``data``, the file's bytes, to the iov from ``base`` on: alone, a few, and many."""

    def work() -> None:
        count = rng.choice([1, 1, 5, BATCH])
        offsets = np.array([rng.randrange(SIZE - 4096) for _ in range(count)])
        iov_offsets = base + 4096 * np.arange(count)
        ring.prep_reads(iov, iov_offsets, file, offsets, 4096, user_data=np.arange(count))
        ring.submit()
        seen: list[int] = []
        while len(seen) < count:
            rows = ring.wait(1, PATIENCE_S)
            assert len(rows), f"{count - len(seen)} of {count} completions are missing"
            assert (rows["result"] == 4096).all(), rows
            seen += rows["user_data"].tolist()
        assert sorted(seen) == list(range(count))
        for offset, iov_offset in zip(offsets.tolist(), iov_offsets.tolist(), strict=True):
            assert bytes(iov.buffer[iov_offset : iov_offset + 4096]) == data[offset : offset + 4096]
        assert not len(ring.peek())

    return work


@contextmanager
def load_of_rings(client: Client, path: Path, data: bytes, rng: random.Random) -> Iterator[list[Load]]:
    """Two rings of one client read a file that has ``data``."""
    with ExitStack() as stack:
        iov, file = stack.enter_context(client.iov(2 * PART)), stack.enter_context(client.file(path, "r"))
        rings = [stack.enter_context(client.ring(BATCH)) for _ in range(2)]
        works = [
            reads(ring, file, iov, number * PART, data, random.Random(rng.random()))
            for number, ring in enumerate(rings)
        ]
        yield [stack.enter_context(Load(work)) for work in works]


def blocks(store: BlockStore, *, is_lossy: bool = False) -> Callable[[], None]:
    """Puts, looks for, gets and views blocks. ``is_lossy``: a block may be lost, if it was put but not stored."""
    number = 0

    def work() -> None:
        nonlocal number
        keys = [b"%d-%d" % (number, row) for row in range(40)]
        values = [np.full(BLOCK, (number + row) % 251, np.uint8) for row in range(40)]
        number += 1
        store.put_many(keys, values)
        store.put(b"alone-%d" % number, values[0])
        assert is_lossy or store.exists(keys).all()
        targets = [np.zeros(BLOCK, np.uint8) for _ in keys]
        sizes = list(store.get_many_into(keys, targets))
        assert is_lossy or sizes == [BLOCK] * 40
        for size, target, value in zip(sizes, targets, values, strict=True):
            assert size == BLOCK or (is_lossy and size < 0), size
            assert size < 0 or (target == value).all()
        view = store.get(keys[3])
        assert is_lossy or view is not None
        if view is not None:
            with view:
                assert (np.frombuffer(view, np.uint8) == values[3]).all()

    return work
