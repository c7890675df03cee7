"""A folder in a cache of a kvfuse mount, used as an engine uses it, over rings; and namespaces made to be tried.

Of the chain of a prompt the engine asks which blocks are there, gets those before the first gap, and puts those that
are absent. What goes to make room is the volume's own decision.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvfuse.errors import ConfigError
from kvfuse.usrbio.client import BlockStore
from kvfuse_bench.content import BlockContent
from kvfuse_bench.mountpoint import mount_of
from kvfuse_bench.ringwork import connect_when_open
from kvfuse_bench.simulate import Setup

WINDOW_BLOCKS = 64
WINDOW_SIZE_MAX = 64 << 20
"""bytes that are got or put at once"""
_NAMESPACE = "user.kvfuse.namespace"
_REMOVE_SECONDS = 30.0


@dataclass
class ChainAnswer:
    """What became of the blocks of one chain."""

    hits: int = 0
    """read and right, from the first one on without a gap"""
    stored: int = 0
    refused: int = 0
    """not admitted, or no room"""
    wrong: list[str] = field(default_factory=list)
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    done: int = 0
    """blocks of the chain, from the first one on, that were served or stored: all, unless the run ended"""


class CacheFolder(AbstractContextManager["CacheFolder"]):
    """Blocks of one size in ``folder``, which is made if need be."""

    def __init__(self, folder: Path, block_size: int) -> None:
        folder = folder.absolute()  # a path that is not is below the mount, for a store
        self._folder = folder
        self._mount = mount_of(folder.parent)
        self._content = BlockContent(block_size)
        self._client = connect_when_open(self._mount)
        self._store = BlockStore(self._client, folder)
        self._namespace = self._mount / str(self.statistics()["path"]).lstrip("/")
        self._window = max(1, min(WINDOW_BLOCKS, WINDOW_SIZE_MAX // block_size))
        memory = self._client.iov(self._window * block_size).array
        self._places = [memory[start : start + block_size] for start in range(0, len(memory), block_size)]
        self._seconds = 0.0
        """that the cache's clock was advanced"""
        self._start = time.monotonic()

    def __exit__(self, *exc_info: object) -> None:
        self._store.close()
        self._client.close()

    # -- blocks

    def ask(self, keys: Sequence[bytes], goes_on: Callable[[], bool] = lambda: True) -> ChainAnswer:
        """One chain. Once ``goes_on`` is false, no further blocks are moved."""
        answer = ChainAnswer(done=len(keys))
        names = [key.hex() for key in keys]
        there = self._store.exists(names)
        self._advance(0)  # an engine computes before it stores: by then the cache has heard what was asked for
        prefix = len(keys) if there.all() else int(there.argmin())
        found = self._get(keys[:prefix], names[:prefix], answer, goes_on)
        absent = np.flatnonzero(~there).tolist()
        moved = self._put([keys[place] for place in absent], answer, goes_on)
        if moved < len(absent):
            answer.done = min(answer.done, absent[moved])
        answer.hits = found
        return answer

    def _get(self, keys: Sequence[bytes], names: list[str], answer: ChainAnswer, goes_on: Callable[[], bool]) -> int:
        """How many were there until the first gap."""
        for start in range(0, len(keys), self._window):
            if not goes_on():
                answer.done = start
                return start
            part = keys[start : start + self._window]
            begin = time.perf_counter()
            sizes = self._store.get_many_into(names[start : start + len(part)], self._places[: len(part)]).tolist()
            answer.read_seconds += time.perf_counter() - begin
            for place, (key, size) in enumerate(zip(part, sizes, strict=True)):
                if size < 0:
                    return start + place
                difference = self._content.difference(key, self._places[place].data[:size])
                if difference is not None:
                    answer.wrong.append(f"{self._folder / key.hex()} {difference}")
        return len(keys)

    def _put(self, keys: Sequence[bytes], answer: ChainAnswer, goes_on: Callable[[], bool]) -> int:
        """How many were put, or refused."""
        for start in range(0, len(keys), self._window):
            if not goes_on():
                return start
            part = keys[start : start + self._window]
            for key, place in zip(part, self._places, strict=False):
                place[:] = np.frombuffer(self._content.fill(key), np.uint8)
            begin = time.perf_counter()
            stored = int(self._store.put_many([key.hex() for key in part], self._places[: len(part)]).sum())
            answer.write_seconds += time.perf_counter() - begin
            answer.stored += stored
            answer.refused += len(part) - stored
        return len(keys)

    # -- the cache

    def advance_to(self, seconds: float) -> None:
        """At least so much time has passed for the cache since this was made: its clock is advanced by what lacks."""
        lacking = seconds - self._seconds - (time.monotonic() - self._start)
        if lacking > 0:
            self._advance(lacking)
            self._seconds += lacking

    def _advance(self, seconds: float) -> None:
        os.setxattr(self._namespace, f"{_NAMESPACE}.advance", f"{seconds:.6f}".encode())

    def statistics(self) -> dict[str, Any]:
        """Of the namespace that the folder is in."""
        return namespace_of(self._folder)


def namespace_of(folder: Path) -> dict[str, Any]:
    """What the statistics of a mount say of the namespace that ``folder`` is in. ConfigError: no kvfuse mount."""
    mount = mount_of(folder)
    try:
        rows = json.loads((mount / ".kvfuse" / "stats").read_bytes())["namespaces"]
    except OSError as error:
        raise ConfigError(f"{folder} is in no kvfuse mount") from error
    except KeyError as error:
        raise ConfigError(f"only root and the user who mounted {mount} see its namespaces") from error
    path = folder.resolve()
    found = [row for row in rows if path.is_relative_to(mount / row["path"].lstrip("/"))]
    return dict(max(found, key=lambda row: len(row["path"])))


def is_in_cache(folder: Path) -> bool:
    """The folder is in a cache of a kvfuse mount."""
    try:
        return namespace_of(folder)["cache"] is not None
    except ConfigError:
        return False


@contextmanager
def namespace_for(target: Path, setup: Setup) -> Iterator[Path]:
    """A new namespace in the folder ``target``, gone afterwards. OSError."""
    path = target / f"replay-{setup.policy}-{setup.admission}-{setup.capacity}"
    _remove(path)
    path.mkdir()
    words = f"kind=blocks eviction={setup.policy} admission={setup.admission} blocks={setup.capacity}"
    try:
        os.setxattr(path, _NAMESPACE, words.encode())
    except OSError as error:
        path.rmdir()
        raise ConfigError(f"{path} cannot be made a namespace: {error.strerror}") from error
    try:
        yield path
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    if not path.exists():
        return None
    with suppress(OSError):  # it is no namespace yet
        os.setxattr(path, "user.kvfuse.clear", b"now")
    deadline = time.monotonic() + _REMOVE_SECONDS
    while True:
        try:
            with suppress(FileNotFoundError):
                (path / "blocks").rmdir()
            return path.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EBUSY) or time.monotonic() > deadline:
                raise
            time.sleep(0.1)  # the daemon frees what was cleared in the background, and tells nobody
