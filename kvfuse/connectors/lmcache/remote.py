"""The remote connector of engines that have LMCache in their own process. See `KvfuseConnector`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from time import monotonic
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import numpy as np
from lmcache.logging import init_logger
from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.storage_backend.connector import ConnectorAdapter
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvfuse.connectors.lmcache import identity
from kvfuse.connectors.lmcache.chunk_formats import ChunkFormat, ChunksWithHeader, RawChunks
from kvfuse.connectors.lmcache.config import PLUGIN
from kvfuse.connectors.lmcache.layouts import Layouts
from kvfuse.connectors.lmcache.memory import ObjectPool
from kvfuse.connectors.request_hints import NOTHING, WORD, RequestHints, hints_of
from kvfuse.connectors.staging import Doubtful, GatherMemory
from kvfuse.connectors.steady_store import DEADLINE_S, DescriptorMismatch, SteadyStore

log = init_logger(__name__)

T = TypeVar("T")

THREADS = 4
SCHEME = "kvfuse"
HINT = f"lmcache.{WORD}."


class KvfuseConnectorAdapter(ConnectorAdapter):  # type: ignore[misc]
    """Makes the connector of ``remote_storage_plugins: [kvfuse]``, or of ``remote_url: kvfuse:///mnt/kv?namespace=...``."""

    def __init__(self) -> None:
        super().__init__(f"{SCHEME}://")

    def can_parse(self, url: str) -> bool:
        scheme, _, rest = url.partition("://")
        return scheme == SCHEME or (scheme == "plugin" and rest.split(".")[0] == SCHEME)

    def create_connector(self, context: Any) -> RemoteConnector:
        return KvfuseConnector(
            context.loop, context.local_cpu_backend, context.config, metadata=context.metadata,
            params=_params(context.config, context.plugin_name, context.url),
        )  # fmt: skip


class KvfuseConnector(RemoteConnector):  # type: ignore[misc]
    """Chunks of LMCache as blocks of a namespace of a kvfuse mount. No call raises or takes longer than the deadline.

    Without a daemon nothing is found and nothing stored, at once, until it is back.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, local_cpu_backend: Any, config: Any, *, metadata: Any = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """``params``: what ``extra_config`` has for the plug-in, see docs/engines-lmcache.md.

        IrrecoverableException, which ends the engine's start: the namespace has other blocks, or none is named.
        """
        metadata = metadata if metadata is not None else local_cpu_backend.metadata
        super().__init__(config, metadata)
        self.loop = loop
        params = _params(config, None, "") if params is None else params
        if missing := [name for name in ("mount", "namespace") if not params.get(name)]:
            raise IrrecoverableException(f"extra_config lacks {' and '.join(f'{PLUGIN}.{name}' for name in missing)}")
        self._deadline = float(params.get("deadline") or DEADLINE_S)
        self._layouts = Layouts(params["mount"], params["namespace"], self._deadline, params.get("token"))
        self._kind, self._form = self._layout_of(metadata)
        descriptor = identity.engine_descriptor(config, metadata, params)
        try:
            self.store = SteadyStore(
                params["mount"], params["namespace"], descriptor=descriptor, deadline=self._deadline,
                token=params.get("token"),
            )  # fmt: skip
            if self.store.is_up and metadata.role != "scheduler":
                self._layouts.require(self._kind, self._form)
        except DescriptorMismatch as error:
            raise IrrecoverableException(f"kvfuse: {error}") from error
        buffer = getattr(getattr(local_cpu_backend, "memory_allocator", None), "buffer", None)
        self._pool = ObjectPool(self.store, *((buffer.data_ptr(), buffer.numel()) if buffer is not None else (0, 0)))
        self._staging, self._doubtful = GatherMemory(self.store), Doubtful()
        self._chunks = self._make_chunks(local_cpu_backend)
        self._threads = ThreadPoolExecutor(THREADS, "kvfuse-lmcache")
        state = "connected" if self.store.is_up else f"away: {self.store.reason}"
        log.info("kvfuse: chunks in %s, %s; %s", params["namespace"], self._chunks.advice, state)

    def _make_chunks(self, local_cpu_backend: Any) -> ChunkFormat:
        if self.save_chunk_meta:
            size = self.full_chunk_size_bytes
            return ChunksWithHeader(self.store, local_cpu_backend, self._staging, size, self.remote_metadata_bytes)
        return RawChunks(self._pool, local_cpu_backend, self)

    def _layout_of(self, metadata: Any) -> tuple[str, str]:
        """(kind, form) of the chunks of this rank."""
        kind = f"{metadata.model_name}, rank {metadata.worker_id} of {metadata.world_size}"
        form = identity.form_of(self.meta_shapes, self.meta_dtypes)
        return kind, f"{form}, {'with' if self.save_chunk_meta else 'without'} save_chunk_meta"

    # -- look-ups ------------------------------------------------------------------------------------

    def exists_sync(self, key: Any) -> bool:
        return bool(self.store.exists([identity.engine_key(key)])[0])

    async def exists(self, key: Any) -> bool:
        return await self._run(lambda: self.exists_sync(key))

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: list[Any]) -> int:
        """How many are there from the first on without a gap."""
        names = [identity.engine_key(key) for key in keys]
        count = self.store.longest_prefix(names)
        if count and request_hints(keys[0]).is_prefetch:
            self._threads.submit(copy_context().run, self.store.prefetch, names[:count])
        return count

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        """``pin``: a look-up is a use, so what is found goes last until it is loaded; nothing more is done."""
        return await self._run(lambda: self.batched_contains(keys))

    # -- loads ---------------------------------------------------------------------------------------

    async def get(self, key: Any) -> Any | None:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: list[Any]) -> list[Any | None]:
        """A MemoryObj each, None for a miss."""
        give_up = monotonic() + self._deadline
        return await self._run(lambda: self._get(keys, give_up), discard=_release)

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[Any]) -> list[Any]:
        """Those from the first on without a gap."""
        got = await self.batched_get(keys)
        count = got.index(None) if None in got else len(got)
        _release(got[count:])
        return got[:count]

    def _get(self, keys: Sequence[Any], give_up: float) -> list[Any | None]:
        names = [identity.engine_key(key) for key in keys]
        got: list[Any | None] = [None] * len(keys)
        if not self._is_allowed():
            return got
        rows = np.flatnonzero(self.store.exists(names)).tolist()
        for row, one in zip(rows, self._chunks.get([names[row] for row in rows], give_up), strict=True):
            got[row] = one
        if self.store.is_up:
            self._doubtful.add([names[row] for row in rows if got[row] is None])
        return got

    # -- stores --------------------------------------------------------------------------------------

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: list[Any], memory_objs: list[Any]) -> None:
        """What is there is not stored again, unless it could not be got."""
        give_up = monotonic() + self._deadline
        await self._run(lambda: self._put(keys, memory_objs, give_up))

    def _put(self, keys: Sequence[Any], objects: Sequence[Any], give_up: float) -> None:
        names = [identity.engine_key(key) for key in keys]
        if not self._is_allowed():
            return
        rows = np.flatnonzero(~self.store.exists(names) | self._doubtful.among(names)).tolist()
        if rows:
            new = [names[row] for row in rows]
            hints = request_hints(keys[0]).put  # LMCache stores the chunks of one request in a batch
            stored = self._chunks.put(new, [objects[row] for row in rows], give_up, hints)
            self._keep([objects[row] for row in rows])
            self._doubtful.forget([name for name, is_stored in zip(new, stored, strict=True) if is_stored])

    def _keep(self, objects: Sequence[Any]) -> None:
        """As long as a daemon that hangs may still read them."""
        if not self.store.is_silent:
            for one in objects:
                one.ref_count_up()
                self._pool.held.release(one.ref_count_down)

    # -- the rest ------------------------------------------------------------------------------------

    def remove_sync(self, key: Any) -> bool:
        return bool(self.store.delete([identity.engine_key(key)])[0])

    async def list(self) -> list[str]:
        """Keys cannot be told from their digests."""
        return []

    async def close(self) -> None:
        """After the calls under way."""
        await self.loop.run_in_executor(None, self._threads.shutdown)
        self._pool.close()
        self._layouts.close()
        self.store.close()
        self._staging.close()
        log.info("kvfuse: %s", self.store.counters)

    def _is_allowed(self) -> bool:
        """There is a daemon, and its blocks are known to be in the form of this rank."""
        return self.store.is_up and self._layouts.allows(self._kind, self._form)

    async def _run(self, call: Callable[[], T], discard: Callable[[T], None] | None = None) -> T:
        """In a thread. ``discard``: what to do with the result if nobody waits for it any more."""
        future = self._threads.submit(copy_context().run, call)  # its span is the caller's
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            if discard is not None:
                future.add_done_callback(lambda done: discard(done.result()))
            raise


def request_hints(key: Any) -> RequestHints:
    """From the ``lmcache.kvfuse.*`` of the request that the key of a chunk has."""
    configs = getattr(key, "request_configs", None)
    if not configs:
        return NOTHING
    words = {name.removeprefix(HINT): value for name, value in configs.items() if name.startswith(HINT)}
    return hints_of(words, "LMCache") if words else NOTHING


def _release(objects: Sequence[Any | None]) -> None:
    for one in objects:
        if one is not None:
            one.ref_count_down()


def _params(config: Any, plugin: str | None, url: str) -> dict[str, Any]:
    """From ``extra_config``, and the URL if there is one."""
    prefix = f"remote_storage_plugin.{plugin or SCHEME}."
    extra: Mapping[str, Any] = (config.extra_config if config is not None else None) or {}
    params = {name.removeprefix(prefix): value for name, value in extra.items() if name.startswith(prefix)}
    if url.startswith(f"{SCHEME}://"):
        parts = urlsplit(url)
        params |= {"mount": parts.path} | dict(parse_qsl(parts.query))
    return params
