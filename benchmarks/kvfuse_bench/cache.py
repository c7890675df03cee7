"""A folder of blocks used as an engine uses it: look up by name, read whole, write a temporary name and rename.

One file a block, ``blocks/ab/cdef...`` by the key in hexadecimal. The folder is a cache: the least recently used
blocks are removed to make room, and a block that finds none is not stored.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from kvfuse_bench.content import BlockContent

FOLDER = "blocks"
_TEMPORARY = ".part"


class Outcome(Enum):
    """The outcome of a request for a block."""

    HIT = "hit"
    STORED = "stored"
    NO_ROOM = "no room"
    WRONG = "wrong"


class Answer(NamedTuple):
    """One block's outcome; ``detail`` says what is wrong with a wrong one."""

    key: bytes
    outcome: Outcome
    seconds: float
    detail: str = ""


class BlockFolder:
    """Blocks of one size below a folder, served by ``worker_count`` threads. Use as a context manager.

    Capacity is in bytes of block content; blocks that an earlier run left count from the start.
    """

    def __init__(self, target: Path, block_size: int, worker_count: int, capacity: int | None = None) -> None:
        self._root = target / FOLDER
        self._block_size = block_size
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(worker_count, "block")
        self._make_folders()
        self._sizes = self._left_by_earlier_runs()
        self.used = sum(self._sizes.values())
        self.found_count = len(self._sizes)
        self.removed_count = 0
        space = os.statvfs(target)
        # a little stays free: what the folder itself needs, and slots that are released but not yet reusable
        self.capacity = capacity or self.used + int(0.9 * space.f_bavail * space.f_frsize)

    def __enter__(self) -> BlockFolder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def ask(self, keys: Sequence[bytes]) -> list[Answer]:
        """Each block read and verified where it is there, else stored; different ``keys`` only."""
        absent_count = 0
        for key in keys:
            if key in self._sizes:
                self._sizes.move_to_end(key)
            else:
                absent_count += 1
        self._remove(self._choose_victims(absent_count * self._block_size, set(keys)))
        answers = list(self._pool.map(self._ask_one, keys))
        for answer in answers:
            self._account(answer)
        if any(answer.outcome is Outcome.NO_ROOM for answer in answers):
            # the folder is full below its capacity: the next blocks find the room of as many old ones
            self._remove([key for _, key in zip(keys, self._sizes, strict=False)])
        return answers

    def _account(self, answer: Answer) -> None:
        if answer.outcome in (Outcome.STORED, Outcome.HIT) and answer.key not in self._sizes:
            self._sizes[answer.key] = self._block_size
            self.used += self._block_size

    # -- room

    def _choose_victims(self, wanted: int, kept: set[bytes]) -> list[bytes]:
        """The oldest blocks whose removal makes ``wanted`` bytes fit; none of ``kept``."""
        excess = self.used + wanted - self.capacity
        victims = []
        for key, size in self._sizes.items():
            if excess <= 0:
                break
            if key not in kept:
                victims.append(key)
                excess -= size
        return victims

    def _remove(self, victims: Iterable[bytes]) -> None:
        removed = list(victims)
        for _ in self._pool.map(lambda key: self._path(key).unlink(missing_ok=True), removed):
            pass
        self.used -= sum(self._sizes.pop(key) for key in removed)
        self.removed_count += len(removed)

    def _make_folders(self) -> None:
        for shard in range(256):
            (self._root / f"{shard:02x}").mkdir(parents=True, exist_ok=True)

    def _left_by_earlier_runs(self) -> OrderedDict[bytes, int]:
        """Key and size of the blocks that are there, oldest first. Unfinished ones are removed."""
        rows: list[tuple[int, bytes, int]] = []
        for shard in self._root.iterdir():
            for entry in os.scandir(shard):
                if entry.name.endswith(_TEMPORARY):
                    os.unlink(entry.path)
                else:
                    status = entry.stat()
                    rows.append((status.st_mtime_ns, bytes.fromhex(shard.name + entry.name), status.st_size))
        return OrderedDict((key, size) for _, key, size in sorted(rows))

    # -- one block, in a thread of the pool

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._root / name[:2] / name[2:]

    def _content(self) -> BlockContent:
        """This thread's buffers."""
        content: BlockContent | None = getattr(self._local, "content", None)
        if content is None:
            content = self._local.content = BlockContent(self._block_size)
        return content

    def _ask_one(self, key: bytes) -> Answer:
        content = self._content()
        path = str(self._path(key))
        start = time.perf_counter()
        try:
            size = read_whole(path, content.buffer)
        except FileNotFoundError:
            return self._store(key, path, content.fill(key))
        except OSError as error:
            return Answer(key, Outcome.WRONG, time.perf_counter() - start, f"{path} cannot be read: {error.strerror}")
        seconds = time.perf_counter() - start
        difference = content.difference(key, content.buffer[:size])
        if difference is not None:
            return Answer(key, Outcome.WRONG, seconds, f"{path} {difference}")
        return Answer(key, Outcome.HIT, seconds)

    def _store(self, key: bytes, path: str, data: memoryview) -> Answer:
        start = time.perf_counter()
        try:
            write_and_rename(path + _TEMPORARY, path, data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            Path(path + _TEMPORARY).unlink(missing_ok=True)
            return Answer(key, Outcome.NO_ROOM, time.perf_counter() - start)
        return Answer(key, Outcome.STORED, time.perf_counter() - start)


def read_whole(path: str, buffer: memoryview) -> int:
    """Bytes of the file at ``path``, put into ``buffer``; no more than fit."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = 0
        while part := os.readv(descriptor, [buffer[size:]]):
            size += part
        return size
    finally:
        os.close(descriptor)


def write_and_rename(temporary: str, path: str, data: memoryview | bytes, *, fsync: bool = False) -> None:
    """Store ``data`` at ``path`` as engines do: nobody sees the name before the bytes are whole (``fsync``: safe)."""
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        if fsync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(temporary, path)
