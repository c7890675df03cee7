"""A namespace as engines want it: a fault is a miss, at once, and the store comes back by itself. See `SteadyStore`."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from errno import EMSGSIZE, errorcode
from functools import partial
from time import monotonic
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvfuse.connectors.link import DAEMON_SHARE, DescriptorMismatch, Link, LinkTarget, Region
from kvfuse.usrbio.client import NO_HINTS, BlockStore, Costs, Disconnected, PutHints

__all__ = ["Counters", "DescriptorMismatch", "Region", "SteadyStore"]

log = logging.getLogger(__name__)

T = TypeVar("T")
Found = npt.NDArray[np.bool_]
Sizes = npt.NDArray[np.int64]

MISS = -1
DEADLINE_S = 2.0


@dataclass
class Counters:
    """What a store did since it was made. Blocks, unless said otherwise."""

    asked: int = 0
    """keys of `exists` and `longest_prefix`"""
    found: int = 0
    got: int = 0
    missed: int = 0
    got_bytes: int = 0
    stored: int = 0
    stored_bytes: int = 0
    not_stored: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """blocks that were not got, stored or asked for, by reason: ``away`` (no daemon), ``deadline``, an errno's name"""


class SteadyStore:
    """Blocks of one namespace of a mount, for one engine. Safe to use from any number of threads.

    No call raises or waits longer than ``deadline`` seconds: blocks that cannot be had by then are misses. Without a
    daemon every call is a miss at once, while a thread connects again; registered memory stays registered. A child of
    a fork connects by itself.
    """

    def __init__(
        self, mount: str | os.PathLike[str], namespace: str, *, descriptor: Mapping[str, str | int],
        deadline: float = DEADLINE_S, token: str | None = None, entries: int = 256,
    ) -> None:  # fmt: skip
        """``descriptor``: what the blocks are, see `Client.namespace`. ``entries``: blocks under way in one call.

        DescriptorMismatch where the namespace has others. A mount that is not there yet is no error.
        """
        self.counters = Counters()
        self._lock = threading.Lock()
        self._link = Link(LinkTarget(os.fspath(mount), namespace, dict(descriptor), deadline, token, entries))
        self._link.tried.wait(deadline)
        if self._link.mismatch is not None:
            self.close()
            raise self._link.mismatch

    @property
    def is_up(self) -> bool:
        """A daemon answered last time."""
        return self._link.store is not None and self._link.pid == os.getpid()

    @property
    def reason(self) -> str:
        """Why the store is away, or was the last time."""
        return self._link.reason

    @property
    def is_silent(self) -> bool:
        """Nobody writes into registered memory any more, or stores from it, on account of calls that are over.

        False after a daemon left a `get` or `put` unanswered, until it, or the next one, has answered, or no process is
        left that could: one that hung in the middle of copying goes on where it was. See `BlockStore.is_silent`.
        """
        return self._link.is_silent

    @property
    def mismatch(self) -> DescriptorMismatch | None:
        """Why the namespace must not be used, where the mount came after the start."""
        return self._link.mismatch

    def register(self, memory: object) -> Region:
        """Memory that blocks are to be got into or put from: an array, a CPU tensor, a SharedMemory, the descriptor of
        shared memory. The daemon copies straight into shared memory of which this process has a descriptor."""
        region = Region(memory)
        self._link.add(region)
        return region

    def forget(self, region: Region) -> None:
        """Returns when the daemon touches the memory no more."""
        self._link.remove(region)

    # -- what engines ask ----------------------------------------------------------------------------

    def exists(self, keys: Sequence[bytes]) -> Found:
        """Which blocks are there."""
        found = self._call(len(keys), lambda store: store.exists(keys), np.zeros(len(keys), np.bool_))
        self._count(asked=len(keys), found=int(found.sum()))
        return found

    def longest_prefix(self, keys: Sequence[bytes]) -> int:
        """How many blocks from the first on are there without a gap."""
        count = self._call(len(keys), lambda store: store.longest_prefix(keys), 0)
        self._count(asked=len(keys), found=count)
        return count

    def costs(self, keys: Sequence[bytes]) -> Costs | None:
        """Where blocks are and when they are expected, see `BlockStore.costs`. None: nobody answers."""
        return self._call(len(keys), lambda store: store.costs(keys), None)

    def get(
        self, keys: Sequence[bytes], region: Region, offsets: Sequence[int], sizes: Sequence[int],
        *, deadline: float | None = None,
    ) -> Sizes:  # fmt: skip
        """Have each block copied to ``region.array[offset:]``, where it has room for ``size`` bytes.

        The size of each block, `MISS` for those that are not there whole. Of a miss the room may have any bytes; but
        nobody writes there any more, unless the daemon went away meanwhile: see `is_silent`. ``deadline``: seconds,
        where less than that of the store is left.
        """
        results = self._move(BlockStore.get_at, keys, region, offsets, sizes, deadline)
        is_got = results >= 0
        got = int(is_got.sum())
        self._count(got=got, missed=len(keys) - got, got_bytes=int(results[is_got].sum()))
        return np.maximum(results, MISS)

    def put(
        self, keys: Sequence[bytes], region: Region, offsets: Sequence[int], sizes: Sequence[int],
        *, deadline: float | None = None, hints: PutHints = NO_HINTS,
    ) -> Found:  # fmt: skip
        """Store each block from ``region.array[offset:][:size]``. Which are stored. ``deadline`` as of `get`."""
        stored: Found = self._move(partial(BlockStore.put_at, hints=hints), keys, region, offsets, sizes, deadline) >= 0
        count = int(stored.sum())
        self._count(
            stored=count, not_stored=len(keys) - count, stored_bytes=int(np.asarray(sizes, np.int64)[stored].sum())
        )
        return stored

    def delete(self, keys: Sequence[bytes]) -> Found:
        """Which blocks were there, and are gone. After a failure (see ``counters``) none, though any of them may be."""
        return self._call(len(keys), lambda store: store.delete_many(keys), np.zeros(len(keys), np.bool_))

    def prefetch(self, keys: Sequence[bytes]) -> Found:
        """Which blocks are in shared memory now, brought there if need be."""
        return self._call(len(keys), lambda store: store.prefetch(keys), np.zeros(len(keys), np.bool_))

    def touch(self, keys: Sequence[bytes]) -> None:
        """Blocks were used that nobody had to ask for: evict them later. A question is a use, so one is asked."""
        self._call(len(keys), lambda store: store.exists(keys), None)

    def close(self) -> None:
        """Every call is a miss from here on."""
        self._link.close()

    # -- how -----------------------------------------------------------------------------------------

    def _move(
        self, move: Callable[..., Sizes], keys: Sequence[bytes], region: Region,
        offsets: Sequence[int], sizes: Sequence[int], deadline: float | None,
    ) -> Sizes:  # fmt: skip
        """Put or get as many at a time as a ring has entries; results as of `BlockStore.get_at`."""
        target = self._link.target
        give_up, entries = monotonic() + (target.deadline if deadline is None else deadline), target.entries
        results: Sizes = np.full(len(keys), MISS, np.int64)
        for start in range(0, len(keys), entries):
            left = give_up - monotonic()
            window = slice(start, start + entries)
            count = len(keys[window])
            if left <= 0:
                self._fail("deadline", len(keys) - start)
                break

            def move_window(store: BlockStore, window: slice = window, left: float = left) -> Sizes:
                where = region.array if region.iov is None else region.iov
                return move(store, keys[window], where, offsets[window], sizes[window], deadline=left * DAEMON_SHARE)

            nothing: Sizes = np.full(count, MISS, np.int64)
            results[window] = self._call(count, move_window, nothing)
        for result, count in Counter(results[results < MISS].tolist()).items():
            self._fail(errorcode.get(-result, str(-result)), 0 if -result == EMSGSIZE else count)
        return results

    def _call(self, count: int, call: Callable[[BlockStore], T], nothing: T) -> T:
        """What ``call`` answers, or ``nothing``."""
        link = self._link
        if link.pid != os.getpid():
            self._lock = threading.Lock()
            link.begin()
        store = link.store
        if store is None:
            self._fail("away", count)
            return nothing
        try:
            late = store.lanes.late_calls
            answer = call(store)
            if store.lanes.late_calls != late:
                link.lose(store, "it left calls unanswered beyond their deadline")
        except Disconnected as error:
            link.lose(store, str(error))
            self._fail("away", count)
        except OSError as error:
            self._fail(errorcode.get(error.errno or 0, "error"), count)
        except Exception:  # whatever it is, the engine goes on: for it the blocks are not there
            log.exception("a call to %s failed", link.target.namespace)
            self._fail("error", count)
        else:
            return answer
        return nothing

    def _count(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self.counters, name, getattr(self.counters, name) + count)

    def _fail(self, reason: str, count: int) -> None:
        with self._lock:
            self.counters.failures[reason] += count
