"""Reads blocks and files into the tiers of this host, in several threads. See `warm`.

Work comes as batches of names of one folder. A ring prefetches the blocks of a batch, and looks at them in place: so
their bytes go from the segments into shared memory, and through no other copy. Files that are too large for the tier,
and all where the mount has no rings, are read through the mount.
"""

from __future__ import annotations

import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvfuse.cli.rate_pace import RatePace
from kvfuse.usrbio.client import BlockStore, Client, connect

BATCH_KEYS = 32
PACED_KEYS = 4
"""of a batch where there is a pace: threads begin with one each, and keep to the pace from then on"""
BATCH_BYTES = 64 << 20
LARGE = 64 << 20
"""bytes of a file from which it is read through the mount: the largest slot"""
PIECE = 1 << 20
WAITING_MAX = 64
"""batches that wait for threads"""
FAILURES_MAX = 10
"""that are kept in words"""
LOOK_SECONDS = 0.1
DEADLINE_SECONDS = 60.0
"""for a batch from segments that may be far away: past it its blocks count as misses"""


class WarmBatch(NamedTuple):
    """Names of one folder, which are its blocks' keys."""

    folder: Path
    names: Sequence[bytes]
    is_large: bool = False
    """one file that is read through the mount"""


@dataclass
class Tally:
    """What came of it so far. Threads change it under its lock."""

    asked: int = 0
    hits: int = 0
    misses: int = 0
    failed: int = 0
    size: int = 0
    """bytes that were read"""
    expected: int | None = None
    """blocks and files in all; None while folders are still being listed"""
    failures: list[str] = field(default_factory=list)
    """the first ones, in words"""
    seconds: float = 0.0
    interrupted: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, sizes: Sequence[int | None]) -> None:
        """Of a batch; None for a miss."""
        found = [size for size in sizes if size is not None]
        with self.lock:
            self.hits += len(found)
            self.misses += len(sizes) - len(found)
            self.size += sum(found)

    def fail(self, batch: WarmBatch, error: OSError) -> None:
        what = os.fsdecode(batch.names[0]) if len(batch.names) == 1 else f"{len(batch.names)} names"
        with self.lock:
            self.failed += len(batch.names)
            if len(self.failures) < FAILURES_MAX:
                self.failures.append(f"{batch.folder}: {what}: {error.strerror or error}")


def batches_of_keys(folder: Path, keys: Sequence[bytes], keys_max: int = BATCH_KEYS) -> Iterator[WarmBatch]:
    """Of blocks of ``folder``, up to ``keys_max`` in each."""
    for start in range(0, len(keys), keys_max):
        yield WarmBatch(folder, keys[start : start + keys_max])


def batches_of_paths(paths: Sequence[Path], keys_max: int = BATCH_KEYS) -> Iterator[WarmBatch]:
    """Of files, and of all files below folders. Links are not followed. OSError where a path is not there."""
    for path in paths:
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            yield from _batches_below(path, keys_max)
        elif stat.S_ISREG(mode):
            yield from _batches_of(path.parent, [(os.fsencode(path.name), path.lstat().st_size)], keys_max)


def _batches_below(top: Path, keys_max: int) -> Iterator[WarmBatch]:
    folders = [top]
    while folders:
        folder, files = folders.pop(), []
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                elif entry.is_file(follow_symlinks=False):
                    files.append((os.fsencode(entry.name), entry.stat(follow_symlinks=False).st_size))
        yield from _batches_of(folder, files, keys_max)


def _batches_of(folder: Path, files: Sequence[tuple[bytes, int]], keys_max: int) -> Iterator[WarmBatch]:
    names: list[bytes] = []
    size = 0
    for name, length in files:
        if length > LARGE:
            yield WarmBatch(folder, [name], is_large=True)
            continue
        if names and (len(names) == keys_max or size + length > BATCH_BYTES):
            yield WarmBatch(folder, names)
            names, size = [], 0
        names.append(name)
        size += length
    if names:
        yield WarmBatch(folder, names)


class Warmer:
    """Threads that read what they get, at one pace. ``mount``: its mount point."""

    def __init__(self, mount: Path, pace: RatePace, thread_count: int) -> None:
        self.tally = Tally()
        self._pace = pace
        self._stopping = threading.Event()
        self._waiting: queue.Queue[WarmBatch | None] = queue.Queue(WAITING_MAX)
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(thread_count)]
        self._stores: dict[Path, BlockStore] = {}
        self._stores_lock = threading.Lock()
        self._client = _connected(mount)

    def warm(self, batches: Iterator[WarmBatch], expected: int | None, show: Callable[[Tally], None]) -> Tally:
        """Read all batches; ``show`` is called now and then. KeyboardInterrupt ends it after the batches in hand."""
        begun, tally = time.monotonic(), self.tally
        tally.expected = expected
        lister = threading.Thread(target=self._feed, args=(batches,), daemon=True)
        try:
            for thread in (lister, *self._threads):
                thread.start()
            while any(thread.is_alive() for thread in self._threads):
                self._threads[0].join(LOOK_SECONDS)
                tally.seconds = time.monotonic() - begun
                show(tally)
        except KeyboardInterrupt:
            tally.interrupted = True
            self._stopping.set()
            for thread in self._threads:
                thread.join()
        tally.seconds = time.monotonic() - begun
        self._close()
        return tally

    def _feed(self, batches: Iterator[WarmBatch]) -> None:
        """The lister's thread. It ends as the last one that adds to what is asked for."""
        try:
            for batch in batches:
                with self.tally.lock:
                    self.tally.asked += len(batch.names)
                if not self._hand_over(batch):
                    return
            self.tally.expected = self.tally.asked
        except OSError as error:
            self.tally.fail(WarmBatch(Path(error.filename or ""), [b""]), error)
        finally:
            for _ in self._threads:
                self._hand_over(None)

    def _hand_over(self, batch: WarmBatch | None) -> bool:
        while not self._stopping.is_set():
            with suppress(queue.Full):
                self._waiting.put(batch, timeout=LOOK_SECONDS)
                return True
        return False

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                batch = self._waiting.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                continue
            if batch is None:
                return
            self._stopping.wait(self._pace.take(0))
            try:
                sizes = self._read(batch)
            except OSError as error:
                self.tally.fail(batch, error)
            else:
                self.tally.add(sizes)
                if not self._goes_through(batch):
                    self._stopping.wait(self._pace.take(sum(size or 0 for size in sizes)))

    # -- one batch ---------------------------------------------------------------------------------------

    def _read(self, batch: WarmBatch) -> list[int | None]:
        """The size of each block, None where there is none. OSError."""
        if self._goes_through(batch):
            return [self._read_through(batch.folder / os.fsdecode(name)) for name in batch.names]
        store = self._store(batch.folder)
        store.prefetch(batch.names)
        sizes: list[int | None] = []
        for found in store.get_many(batch.names):
            sizes.append(None if found is None else found.nbytes)
            if found is not None:
                found.release()
        return sizes

    def _goes_through(self, batch: WarmBatch) -> bool:
        """It is read through the mount, a piece at a time."""
        return batch.is_large or self._client is None

    def _read_through(self, path: Path) -> int | None:
        """Pieces of a file, each at the pace."""
        buffer, offset = bytearray(PIECE), 0
        try:
            with path.open("rb", buffering=0) as file:
                while not self._stopping.is_set() and (count := os.preadv(file.fileno(), [buffer], offset)):
                    offset += count
                    self._stopping.wait(self._pace.take(count))
        except FileNotFoundError:
            return None
        return offset

    def _store(self, folder: Path) -> BlockStore:
        with self._stores_lock:
            if folder not in self._stores:
                assert self._client is not None
                self._stores[folder] = BlockStore(self._client, folder, create=False, deadline=DEADLINE_SECONDS)
            return self._stores[folder]

    def _close(self) -> None:
        for store in self._stores.values():
            store.close()
        if self._client is not None:
            self._client.close()


def _connected(mount: Path) -> Client | None:
    """None: the mount has no rings."""
    try:
        return connect(mount)
    except (FileNotFoundError, ConnectionError):
        return None
