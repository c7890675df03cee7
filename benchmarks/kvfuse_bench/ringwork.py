"""The ring benchmarks as clients of a mount: sessions, and each operation in batches.

Data is the same everywhere: piece i of a file, and block i of a folder, is piece i of one array of random bytes. What
an operation moves is compared with it once, before anything is timed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvfuse.errors import KvfuseError
from kvfuse.usrbio.client import Client, Disconnected, File, Iov, Namespace, Ring, connect
from kvfuse_bench.references import Bytes, write_whole
from kvfuse_bench.timing import Batch

DEPTH_MAX = 256
ENTRIES = 2 * DEPTH_MAX
"""of the ring: a batch, and the pins of the views of the batch before it that go back with it"""
KEYS_PER_CALL = 1000
COMPLETION_SECONDS_MAX = 60.0
LOADS_MAX, LOAD_SECONDS = 100, 0.1
"""attempts to have all blocks of a call in memory, and the pause between them"""
OPEN_SECONDS_MAX = 10.0

BLOCK_COUNT_MAX = 1 << 14
"""of a folder: small blocks are not as many as would fill the pattern"""
ORDER_SEED = 0x5EED

Completions = npt.NDArray[np.void]
Indices = npt.NDArray[np.uint64]


@dataclass
class Session:
    """A client of one mount with one ring, and the bytes that it moves."""

    mountpoint: Path
    client: Client
    ring: Ring
    iov: Iov
    """as large as ``pattern``"""
    pattern: Bytes

    def finish(self, count: int, expected: int) -> Completions:
        """Submit what is prepared and wait for it. KvfuseError unless each of ``count`` results is ``expected``."""
        self.ring.submit()
        done = self.ring.wait(count, COMPLETION_SECONDS_MAX)
        if len(done) != count:
            raise KvfuseError(f"{len(done)} of {count} operations ended within {COMPLETION_SECONDS_MAX:.0f} s")
        wrong = done["result"] != expected
        if wrong.any():
            result = int(done["result"][wrong][0])
            raise KvfuseError(f"an operation on a ring ended with {_reason(result)} instead of {expected}")
        return done


def _reason(result: int) -> str:
    return f"{result} ({os.strerror(-result)})" if result < 0 else str(result)


def connect_when_open(mountpoint: Path) -> Client:
    """A client of a mount that has just answered: its control socket follows in a moment."""
    deadline = time.monotonic() + OPEN_SECONDS_MAX
    while True:
        try:
            return connect(mountpoint)
        except (FileNotFoundError, Disconnected):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.002)


@contextlib.contextmanager
def ring_session(mountpoint: Path, pattern: Bytes) -> Iterator[Session]:
    """A client connected to the mount, its iov and ring; everything is given back."""
    with connect_when_open(mountpoint) as client, client.iov(len(pattern)) as iov, client.ring(ENTRIES) as ring:
        yield Session(mountpoint, client, ring, iov, pattern)


class Work(ABC):
    """One operation on pieces of one size. Subclasses say what a batch is."""

    round_bytes_max = 1 << 62
    """moved in one round at the most, for what must be settled after it"""

    def __init__(self, session: Session, size: int, piece_count: int) -> None:
        self.session = session
        self.size = size
        self.piece_count = piece_count
        self.order = np.random.default_rng(ORDER_SEED).permutation(piece_count)

    @abstractmethod
    def batch(self, depth: int) -> Batch:
        """A function that does batch number n."""

    @abstractmethod
    def check(self, depth: int) -> None:
        """Do batch 0. KvfuseError unless it moved the right bytes."""

    def settle(self) -> None:  # noqa: B027  # most have nothing to do
        """After a round, not timed: undo what would change the next."""

    def batch_count_max(self, depth: int) -> int:
        """Of a round."""
        return max(1, self.round_bytes_max // (depth * self.size))

    def rows(self, depth: int) -> tuple[Indices, Indices]:
        """(pieces, places in the iov) of each batch: pieces in random order, places rolling over the iov."""
        shape = self.piece_count // depth, depth
        places = np.arange(shape[0] * depth, dtype=np.uint64)
        return self.order[: len(places)].astype(np.uint64).reshape(shape), places.reshape(shape)

    def offsets(self, depth: int) -> tuple[Indices, Indices]:
        """``rows`` as byte offsets."""
        pieces, places = self.rows(depth)
        return pieces * np.uint64(self.size), places * np.uint64(self.size)

    def expect(self, found: Bytes | bytes | memoryview, piece: int) -> None:
        """KvfuseError unless these are the bytes of ``piece``."""
        if not np.array_equal(np.frombuffer(found, np.uint8), self.session.pattern.reshape(-1, self.size)[piece]):
            raise KvfuseError(f"piece {piece} of {self.size} bytes is not what was written")

    def check_in_iov(self, depth: int) -> None:
        """``check`` of what moves bytes into the iov."""
        self.session.iov.array[:] = 0
        self.batch(depth)(0)
        pieces, places = self.rows(depth)
        found = self.session.iov.array.reshape(-1, self.size)
        for piece, place in zip(pieces[0].tolist(), places[0].tolist(), strict=True):
            self.expect(found[place], piece)


class FileWork(Work):
    """Pieces of one file."""

    def __init__(self, session: Session, size: int, file: File, path: Path) -> None:
        super().__init__(session, size, len(session.pattern) // size)
        self.file = file
        self.path = path


class Reads(FileWork):
    def batch(self, depth: int) -> Batch:
        session, size, file = self.session, self.size, self.file
        pieces, places = self.offsets(depth)

        def single(number: int) -> None:
            row = number % len(pieces)
            session.ring.prep_read(session.iov, int(places[row, 0]), file, int(pieces[row, 0]), size)
            session.finish(1, size)

        def batch(number: int) -> None:
            row = number % len(pieces)
            session.ring.prep_reads(session.iov, places[row], file, pieces[row], size)
            session.finish(depth, size)

        return single if depth == 1 else batch

    def check(self, depth: int) -> None:
        self.check_in_iov(depth)


class Writes(FileWork):
    """Over bytes that are there, with the same bytes."""

    def batch(self, depth: int) -> Batch:
        session, size, file = self.session, self.size, self.file
        pieces, _ = self.offsets(depth)

        def batch(number: int) -> None:
            row = pieces[number % len(pieces)]
            session.ring.prep_writes(session.iov, row, file, row, size)
            session.finish(depth, size)

        return batch

    def check(self, depth: int) -> None:
        pieces = self.rows(depth)[0][0].tolist()
        with self.path.open("r+b", buffering=0) as file:
            for piece in pieces:
                os.pwrite(file.fileno(), bytes(self.size), piece * self.size)
            self.batch(depth)(0)
            for piece in pieces:
                self.expect(os.pread(file.fileno(), self.size, piece * self.size), piece)


class BlockWork(Work):
    """Blocks of one folder."""

    def __init__(self, session: Session, size: int, namespace: Namespace, folder: Path) -> None:
        super().__init__(session, size, min(BLOCK_COUNT_MAX, len(session.pattern) // size))
        self.namespace = namespace
        self.folder = folder
        self.keys = block_keys("block", self.piece_count)

    def key_rows(self, depth: int) -> list[list[bytes]]:
        return [[self.keys[piece] for piece in row] for row in self.rows(depth)[0].tolist()]

    def store_all(self) -> None:
        """Every block; then all of them in the shared-memory tier, or nothing here is about rings."""
        places = np.arange(self.piece_count, dtype=np.uint64)
        for first in range(0, self.piece_count, DEPTH_MAX):
            some = slice(first, first + DEPTH_MAX)
            self.put(self.keys[some], places[some])
        for keys in _calls(self.keys):
            self._load(keys)

    def _load(self, keys: Sequence[bytes]) -> None:
        """Bring blocks into memory; those that others took the place of meanwhile, again: memory grows behind puts."""
        ring = self.session.ring
        for _ in range(LOADS_MAX):
            ring.prep_prefetch(self.namespace, keys)
            ring.submit()
            if ring.wait(1, COMPLETION_SECONDS_MAX)["result"].tolist() == [len(keys)]:
                return
            time.sleep(LOAD_SECONDS)  # nothing tells a client that the daemon has more memory by now
        raise KvfuseError(f"{len(keys)} blocks of {self.size} bytes do not stay in memory")

    def put(self, keys: Sequence[bytes], places: Indices) -> None:
        """From these places of the iov."""
        session = self.session
        session.ring.prep_puts(
            [session.iov] * len(keys), places * np.uint64(self.size), self.namespace, keys, self.size
        )  # fmt: skip
        session.finish(len(keys), self.size)

    def delete(self, keys: Sequence[bytes]) -> None:
        for some in _calls(keys):
            self.session.ring.prep_delete(self.namespace, some)
            self.session.finish(1, len(some))


class Gets(BlockWork):
    """Into the iov."""

    def batch(self, depth: int) -> Batch:
        session, size, namespace = self.session, self.size, self.namespace
        key_rows, iovs = self.key_rows(depth), [session.iov] * depth
        _, places = self.offsets(depth)

        def batch(number: int) -> None:
            row = number % len(key_rows)
            session.ring.prep_gets(iovs, places[row], namespace, key_rows[row], size)
            session.finish(depth, size)

        return batch

    def check(self, depth: int) -> None:
        self.check_in_iov(depth)


class Views(BlockWork):
    """No byte is moved: mapped, looked at, given back."""

    def batch(self, depth: int) -> Batch:
        key_rows = self.key_rows(depth)

        def batch(number: int) -> None:
            for view in self.views(key_rows[number % len(key_rows)]):
                view[0]
                view.release()

        return batch

    def views(self, keys: Sequence[bytes]) -> list[memoryview]:
        """Of blocks in this order, whatever the order of their completions."""
        ring, depth = self.session.ring, len(keys)
        ring.prep_gets([None] * depth, 0, self.namespace, keys, 0, np.arange(depth, dtype=np.uint64), view=True)
        done = self.session.finish(depth, self.size)
        found = {int(completion["user_data"]): ring.view(completion) for completion in done}
        return [found[index] for index in range(depth)]

    def check(self, depth: int) -> None:
        views = self.views(self.key_rows(depth)[0])
        for piece, view in zip(self.rows(depth)[0][0].tolist(), views, strict=True):
            self.expect(view, piece)


class Puts(BlockWork):
    """New blocks; after a round they are written through and removed."""

    round_bytes_max = 128 << 20

    def __init__(self, session: Session, size: int, namespace: Namespace, folder: Path) -> None:
        super().__init__(session, size, namespace, folder)
        self.numbers = itertools.count()
        self.stored: list[list[bytes]] = []

    def batch(self, depth: int) -> Batch:
        _, places = self.rows(depth)

        def batch(number: int) -> None:
            keys = block_keys(f"new-{next(self.numbers)}", depth)
            self.put(keys, places[number % len(places)])
            self.stored.append(keys)

        return batch

    def check(self, depth: int) -> None:
        self.batch(depth)(0)
        for place, key in enumerate(self.stored[0]):
            self.expect((self.folder / key.decode()).read_bytes(), place)
        self.settle()

    def settle(self) -> None:
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self.delete([key for keys in self.stored for key in keys])
        self.stored.clear()


class Exists(BlockWork):
    """All keys of a batch in one call; all are there."""

    def batch(self, depth: int) -> Batch:
        return self.asking(self.keys[:depth], depth)

    def asking(self, keys: Sequence[bytes], expected: int) -> Batch:
        """One call about ``keys``, of which ``expected`` are there."""
        ring, namespace, finish = self.session.ring, self.namespace, self.session.finish

        def batch(_number: int) -> None:
            ring.prep_exists(namespace, keys)
            finish(1, expected)

        return batch

    def check(self, depth: int) -> None:
        """The result of a call, which every batch looks at, is all there is."""


class Absent(Exists):
    """As ``Exists``, of keys that nobody stored."""

    def batch(self, depth: int) -> Batch:
        return self.asking(block_keys("absent", depth), 0)


def block_keys(prefix: str, count: int) -> list[bytes]:
    """As long as an engine's: a hash in hexadecimal."""
    return [f"{prefix}-{index:x}".rjust(32, "0").encode() for index in range(count)]


def _calls(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """As many as one call takes."""
    return (keys[start : start + KEYS_PER_CALL] for start in range(0, len(keys), KEYS_PER_CALL))


def _settle(descriptor: int) -> None:
    """Wait until the prepared bytes are on the disk: the writing would take a core from the measurement."""
    os.fsync(descriptor)
    os.sync()


@contextlib.contextmanager
def _file_work(session: Session, size: int, kind: type[FileWork], mode: str) -> Iterator[Work]:
    path = session.mountpoint / f"file-{size}"
    with path.open("wb", buffering=0) as made:
        write_whole(made.fileno(), session.pattern)
        _settle(made.fileno())
    with session.client.file(path, mode) as file:
        yield kind(session, size, file, path)
    path.unlink()


@contextlib.contextmanager
def _block_work(session: Session, size: int, kind: type[BlockWork], stored: bool) -> Iterator[Work]:
    folder = session.mountpoint / f"blocks-{size}"
    namespace = session.client.namespace(folder)
    try:
        work = kind(session, size, namespace, folder)
        if stored:
            work.store_all()
            directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            _settle(directory)
            os.close(directory)
        yield work
        if stored:
            work.delete(work.keys)
    finally:
        namespace.close()


OPERATIONS: dict[str, Callable[[Session, int], AbstractContextManager[Work]]] = {
    "read": partial(_file_work, kind=Reads, mode="r"),
    "write": partial(_file_work, kind=Writes, mode="w"),
    "get": partial(_block_work, kind=Gets, stored=True),
    "view": partial(_block_work, kind=Views, stored=True),
    "put": partial(_block_work, kind=Puts, stored=False),
    "exists": partial(_block_work, kind=Exists, stored=True),
    "absent": partial(_block_work, kind=Absent, stored=True),
}
"""operation -> its work on pieces of a size, with all there that it needs; the session's iov holds the pattern"""
