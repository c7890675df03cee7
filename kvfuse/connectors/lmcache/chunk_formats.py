"""Chunks as a remote connector stores them: raw, in place, or behind a header that says their shape."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any, Protocol

import numpy as np
from lmcache.logging import init_logger
from lmcache.v1.protocol import RemoteMetadata

from kvfuse.connectors.lmcache.memory import ObjectPool, memory_at, sizes_of
from kvfuse.connectors.staging import GatherMemory
from kvfuse.connectors.steady_store import SteadyStore
from kvfuse.usrbio.client import PutHints

log = init_logger(__name__)


class ChunkFormat(Protocol):
    """Moves chunks. ``give_up``: when, on the monotonic clock."""

    @property
    def advice(self) -> str:
        """How they are moved, for the log."""

    def get(self, names: Sequence[bytes], give_up: float) -> list[Any | None]:
        """A MemoryObj for each, None for a miss."""

    def put(self, names: Sequence[bytes], objects: Sequence[Any], give_up: float, hints: PutHints) -> list[bool]:
        """Which are stored."""


class RawChunks:
    """All have the shape of the model's chunks, but for fewer tokens: ``save_chunk_meta: false``."""

    def __init__(self, pool: ObjectPool, backend: Any, connector: Any) -> None:
        self._pool, self._backend, self._connector = pool, backend, connector

    @property
    def advice(self) -> str:
        return "in place" if self._pool.is_shared else "copied once more (shm_name in extra_config spares that)"

    def get(self, names: Sequence[bytes], give_up: float) -> list[Any | None]:
        found: list[Any | None] = [None] * len(names)
        connector, objects = self._connector, []
        for _ in names:
            one = self._backend.allocate(
                connector.meta_shapes, connector.meta_dtypes, connector.meta_fmt, busy_loop=False
            )
            if one is None:
                break  # the pool is full
            objects.append(one)
        if objects:
            results = self._pool.get(names[: len(objects)], objects, give_up - monotonic())
            for row, (one, size) in enumerate(zip(objects, results.tolist(), strict=True)):
                found[row] = self._cut(one, size)
        return found

    def _cut(self, one: Any, size: int) -> Any | None:
        """The object with as many tokens as were got."""
        try:
            if size > 0:
                return self._connector.reshape_partial_chunk(one, size)
        except ValueError as error:
            log.warning("kvfuse: a chunk is no chunk: %s", error)
        self._pool.held.release(one.ref_count_down)
        return None

    def put(self, names: Sequence[bytes], objects: Sequence[Any], give_up: float, hints: PutHints) -> list[bool]:
        stored: list[bool] = self._pool.put(names, objects, give_up - monotonic(), hints).tolist()
        return stored


class ChunksWithHeader:
    """Of any shape. They are put together in shared memory: one copy more."""

    advice = "with headers (save_chunk_meta: false in extra_config spares a copy)"

    def __init__(self, store: SteadyStore, backend: Any, staging: GatherMemory, size_max: int, header: int) -> None:
        """``size_max``: bytes of the largest chunk. ``header``: bytes of LMCache's own."""
        self._store, self._backend, self._staging = store, backend, staging
        self._room, self._header = header + size_max, header

    def get(self, names: Sequence[bytes], give_up: float) -> list[Any | None]:
        found: list[Any | None] = []
        with self._staging.taken(self._room) as region:
            step = len(region.array) // self._room
            for start in range(0, len(names), step):
                some = names[start : start + step]
                offsets = [self._room * place for place in range(len(some))]
                sizes = self._store.get(
                    some, region, offsets, [self._room] * len(some), deadline=max(give_up - monotonic(), 0)
                ).tolist()
                found += [
                    self._unpack(region.part(offset, max(size, 0))) for offset, size in zip(offsets, sizes, strict=True)
                ]
        return found

    def _unpack(self, block: Any) -> Any | None:
        """A copy; None for what is no chunk."""
        if len(block) <= self._header:
            return None
        one = None
        try:
            meta = RemoteMetadata.deserialize(block[: self._header].tobytes())
            one = self._backend.allocate(meta.shapes, meta.dtypes, meta.fmt, busy_loop=False)
            if one is None:
                return None
            if one.get_size() == len(block) - self._header:
                memory_at(one.data_ptr, one.get_size())[:] = block[self._header :]
                return one
        except (ValueError, KeyError, RuntimeError) as error:
            log.warning("kvfuse: a chunk is no chunk: %s", error)
        if one is not None:
            one.ref_count_down()
        return None

    def put(self, names: Sequence[bytes], objects: Sequence[Any], give_up: float, hints: PutHints) -> list[bool]:
        stored: list[bool] = []
        sizes = sizes_of(objects) + self._header
        room = int(sizes.max())
        with self._staging.taken(room) as region:
            step = len(region.array) // room
            for start in range(0, len(names), step):
                window = slice(start, start + step)
                offsets = [room * place for place in range(len(names[window]))]
                for offset, one in zip(offsets, objects[window], strict=True):
                    self._pack(one, region.part(offset, one.get_size() + self._header))
                done = self._store.put(
                    names[window], region, offsets, sizes[window].tolist(), deadline=max(give_up - monotonic(), 0),
                    hints=hints,
                )  # fmt: skip
                stored += done.tolist()
        return stored

    def _pack(self, one: Any, block: Any) -> None:
        size = one.get_size()
        meta = RemoteMetadata(size, one.get_shapes(), one.get_dtypes(), one.get_memory_format())
        block[: self._header] = np.frombuffer(meta.serialize(), np.uint8)
        block[self._header :] = memory_at(one.data_ptr, size)
