"""The memory of LMCache's objects: a pool that the daemon maps, and whatever lies elsewhere."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfuse.connectors.steady_store import Region, SteadyStore
from kvfuse.usrbio.client import NO_HINTS, PutHints
from kvfuse.usrbio.client.iov import address_of

SHM = "/dev/shm/"
PAUSE_S = 0.05
"""between looks at whether a daemon is silent"""


class _AddressedBytes:
    """Bytes at an address, for numpy."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


class ObjectPool:
    """LMCache's pool in the processor's memory, and blocks moved between its objects and a store."""

    def __init__(self, store: SteadyStore, address: int, size: int) -> None:
        """``size`` 0: there is no pool."""
        self._store = store
        self._descriptor = _descriptor_of(address) if size else None
        self._region = store.register(memory_at(address, size)) if size else None
        self.held = QuarantinedMemory(store)

    @property
    def is_shared(self) -> bool:
        """The daemon copies from and to it."""
        return self._region is not None and self._region.iov is not None

    def get(self, keys: Sequence[bytes], objects: Sequence[Any], deadline: float) -> npt.NDArray[np.int64]:
        """Fill objects. Bytes of each, -1: a miss; a block may be smaller than the object that it is to fill."""
        results: npt.NDArray[np.int64] = self._move(self._store.get, keys, objects, deadline)
        return results

    def put(
        self, keys: Sequence[bytes], objects: Sequence[Any], deadline: float, hints: PutHints = NO_HINTS
    ) -> npt.NDArray[np.bool_]:
        """Which objects are stored."""
        put = partial(self._store.put, hints=hints)
        stored: npt.NDArray[np.bool_] = self._move(put, keys, objects, deadline)
        return stored

    def close(self) -> None:
        self.held.close()
        if self._region is not None:
            self._store.forget(self._region)
            self._region = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _move(self, move: Callable[..., Any], keys: Sequence[bytes], objects: Sequence[Any], deadline: float) -> Any:
        sizes = sizes_of(objects)
        addresses = np.fromiter((one.data_ptr for one in objects), np.int64, len(objects))
        region = self._around(int(addresses.min()), int((addresses + sizes).max()))
        offsets = addresses - address_of(region.array)
        return move(keys, region, offsets.tolist(), sizes.tolist(), deadline=max(deadline, 0))

    def _around(self, start: int, end: int) -> Region:
        """What has all bytes from ``start`` to ``end``: the pool, or memory that is copied once more."""
        pool = self._region
        if pool is not None and address_of(pool.array) <= start and end <= address_of(pool.array) + len(pool.array):
            return pool
        return Region(memory_at(start, end - start))


class QuarantinedMemory:
    """Memory that a hung daemon may still write into: it is given back when that cannot be any more."""

    def __init__(self, store: SteadyStore) -> None:
        self._store = store
        self._releases: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._releases)

    def release(self, release: Callable[[], None]) -> None:
        """Call it at once, or as soon as the store is silent."""
        if self._store.is_silent:
            release()
            return
        with self._changed:
            self._releases.append(release)
            if self._thread is None:
                self._thread = threading.Thread(target=self._wait, name="kvfuse-held", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """What is held stays held."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _wait(self) -> None:
        with self._changed:
            while not (self._store.is_silent or self._closed):
                self._changed.wait(PAUSE_S)
            self._thread = None
            releases, self._releases = self._releases, []
        if not self._closed:
            for release in releases:
                release()


def sizes_of(objects: Sequence[Any]) -> npt.NDArray[np.int64]:
    """Bytes of each."""
    return np.fromiter((one.get_size() for one in objects), np.int64, len(objects))


def memory_at(address: int, size: int) -> npt.NDArray[np.uint8]:
    """The bytes there, which must live as long."""
    return np.asarray(_AddressedBytes(address, size))


def _descriptor_of(address: int) -> int | None:
    """Of the shared memory that is mapped there, for the daemon to get; LMCache keeps none. None: it is not shared."""
    with suppress(OSError), open("/proc/self/maps", newline="\n", errors="surrogateescape") as rows:
        for row in rows:
            words = row.split(maxsplit=5)
            start, end = (int(bound, 16) for bound in words[0].split("-"))
            if start <= address < end:
                path = words[5].rstrip("\n") if len(words) > 5 else ""
                if not path.startswith(SHM):
                    return None
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                if os.fstat(descriptor).st_ino == int(words[4]):
                    return descriptor
                os.close(descriptor)
    return None
