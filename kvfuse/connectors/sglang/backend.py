"""The backend that SGLang's factory makes. See `KvfuseHiCache`."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, TypeVar

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from kvfuse.connectors.request_hints import WORD, RequestHints, hints_of
from kvfuse.connectors.sglang import policies
from kvfuse.connectors.sglang.identity import descriptor
from kvfuse.connectors.sglang.metrics import TransferMetrics
from kvfuse.connectors.sglang.pool_pages import GatheredPages, PoolPages
from kvfuse.connectors.sglang.pools import PoolForm, is_replicated
from kvfuse.connectors.staging import GatherMemory
from kvfuse.connectors.steady_store import DEADLINE_S, SteadyStore

log = logging.getLogger(__name__)

T = TypeVar("T")

KV = "kv"
CLEAR = "user.kvfuse.clear"


class KvfuseHiCache(HiCacheStorage):  # type: ignore[misc]
    """Pages of the host pools as blocks of a namespace of a kvfuse mount.

    It begins with the host pool of the KV pages (`register_mem_pool_host`), which says what the pages are; a namespace
    that has others is refused there. After that no call raises or takes longer than the deadline: what cannot be had is
    a miss. Without a daemon every call is a miss at once, until it is back.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """``storage_config``: a ``HiCacheStorageConfig``; its ``extra_config`` has ``mount``, ``namespace`` and
        optionally ``deadline`` (seconds), ``token`` and ``weights``. ValueError: one is missing."""
        extra = storage_config.extra_config or {}
        if missing := [name for name in ("mount", "namespace") if not extra.get(name)]:
            raise ValueError(f"--hicache-storage-backend-extra-config of kvfuse lacks {' and '.join(missing)}")
        self._config, self._extra = storage_config, extra
        self._deadline = float(extra.get("deadline") or DEADLINE_S)
        self._pools: dict[str, PoolPages] = {}
        self._transfers = TransferMetrics()
        self.store: SteadyStore | None = None

    # -- the pools -----------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of the KV pages. DescriptorMismatch: the namespace has other blocks."""
        self.mem_pool_host = mem_pool_host
        if self.store is None:
            self.store = SteadyStore(
                self._extra["mount"], self._extra["namespace"], descriptor=descriptor(self._config, mem_pool_host),
                deadline=self._deadline, token=self._extra.get("token"),
            )  # fmt: skip
            self._staging = GatherMemory(self.store)
        if getattr(mem_pool_host, "kv_buffer", None) is not None:  # else it has indices alone, and side pools the bytes
            self._add_pool(KV, mem_pool_host, gathered=not self._extra.get("interface_v1"))

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """A side pool."""
        name = _text(host_pool_name)
        if name != KV:
            self._add_pool(name, host_pool)

    def _add_pool(self, name: str, pool: Any, *, gathered: bool = False) -> None:
        assert self.store is not None, "the pool of the KV pages comes first"
        form = PoolForm(self._config, name, pool)
        self._pools[name] = pages = form.pages(self.store, self._staging, gathered=gathered)
        log.info(
            "kvfuse: pages of %s are %d blocks of %d bytes together, %s%s; %s", name, len(pages.tags), pages.page_size,
            form.layout, form.advice(pages), "connected" if self.store.is_up else f"away: {self.store.reason}",
        )  # fmt: skip

    # -- pages of the KV pool: v1 --------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages are there from the first on without a gap."""
        pages = self._pools.get(KV)
        count = self._safely(lambda: pages.leading(keys, _before(extra_info)) if pages else len(keys), 0)
        self._prefetch(pages, keys[:count], extra_info)
        return count

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._get(KV, keys, host_indices, self._give_up())

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._put(KV, keys, host_indices, self._give_up(), extra_info)

    # -- pages of all pools: v2 ----------------------------------------------------------------------

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """The longest prefix that all pools have what they must have for, and all such prefixes."""
        before = _before(extra_info)
        result = self._safely(lambda: self._hits(keys, pool_transfers or (), before), PoolTransferResult(0, {}))
        self._prefetch(self._pools.get(KV), keys[: result.kv_hit_pages], extra_info)
        return result

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        give_up = self._give_up()
        return {one.name: self._get(_text(one.name), one.keys or [], one.host_indices, give_up) for one in transfers}

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        give_up = self._give_up()
        return {
            one.name: self._put(_text(one.name), one.keys or [], one.host_indices, give_up, extra_info)
            for one in transfers
        }

    def _hits(self, keys: Sequence[str], transfers: Sequence[Any], before: Sequence[str]) -> Any:
        """One question for the blocks of all pools. ``before``: see `PoolPages.keys_before`."""
        assert self.store is not None
        asked: list[tuple[PoolPages, Sequence[str]]] = []
        if kv := self._pools.get(KV):
            asked.append((kv, keys))
        for transfer in transfers:
            own = (transfer.keys or ()) if transfer.hit_policy == policies.BLOCK_GROUPS else keys
            asked.append((self._pools[_text(transfer.name)], own))
        ahead = kv.keys_before(before) if kv else []
        found = self.store.exists([*ahead, *(key for pages, hashes in asked for key in pages.keys(hashes))])
        found = found[len(ahead) :]
        ends = np.cumsum([len(hashes) * len(pages.tags) for pages, hashes in asked])[:-1]
        there = [pages.of_pages(part) for (pages, _), part in zip(asked, np.split(found, ends), strict=True)]
        kv_pages = policies.leading(there.pop(0)) if kv else len(keys)
        hits: dict[Any, int] = {KV: kv_pages} if kv_pages else {}
        lengths = np.ones(kv_pages, np.bool_)
        for transfer, own_pages in zip(transfers, there, strict=True):
            if transfer.hit_policy == policies.BLOCK_GROUPS:
                covered = policies.group_pages(own_pages, transfer)
            else:
                own = policies.restorable_lengths(
                    own_pages[:kv_pages], _text(transfer.hit_policy), len(transfer.keys or ())
                )
                covered = policies.longest(own)
                lengths &= own
            if covered:
                hits[transfer.name] = covered
        return _result(policies.longest(lengths), hits, (np.flatnonzero(lengths) + 1).tolist())

    # -- how both move -------------------------------------------------------------------------------

    def _get(self, name: str, keys: Sequence[str], indices: torch.Tensor, give_up: float) -> list[bool]:
        pages = self._pools.get(name)
        if pages is None:  # no bytes of its own
            return [name == KV] * len(keys)
        with self._transfers.prefetch.timed(pages.page_size) as done:
            got = self._safely(lambda: pages.get(keys, indices, give_up).tolist(), [False] * len(keys))
            done(sum(got))
        return got

    def _put(
        self, name: str, keys: Sequence[str], indices: torch.Tensor, give_up: float, extra_info: Any
    ) -> list[bool]:
        pages = self._pools.get(name)
        if pages is None:
            return [name == KV] * len(keys)
        is_writer = getattr(self._config, "is_storage_writer", self._config.tp_rank == 0)
        if is_replicated(self._config, name, pages.pool) and not is_writer:
            return [True] * len(keys)  # another rank stores the same bytes
        with self._transfers.backup.timed(pages.page_size) as done:
            hints, before = request_hints(extra_info).put, _before(extra_info)
            stored = self._safely(
                lambda: pages.put(keys, indices, give_up, hints, before).tolist(), [False] * len(keys)
            )  # fmt: skip
            done(sum(stored))
        return stored

    def _prefetch(self, pages: PoolPages | None, keys: Sequence[str], extra_info: Any) -> None:
        """Bring pages into shared memory, if the request says so, while SGLang goes on."""
        store = self.store
        if store is not None and pages is not None and keys and request_hints(extra_info).is_prefetch:
            names = pages.keys(keys)
            threading.Thread(target=store.prefetch, args=(names,), name="kvfuse-prefetch", daemon=True).start()

    def _give_up(self) -> float:
        return monotonic() + self._deadline

    def _safely(self, call: Callable[[], T], nothing: T) -> T:
        """What ``call`` answers, or ``nothing``: the engine goes on without a cache, whatever it is."""
        try:
            return call()
        except Exception:  # whatever it is, the engine goes on without these pages
            log.exception("kvfuse: a call failed, as if nothing were there")
            return nothing

    # -- pages as tensors, for engines without interface_v1 ------------------------------------------

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        """The tensors of ``target_locations`` that have their page now; None for the others."""
        pages = self._gathered()

        def tensors() -> list[torch.Tensor | None]:
            got = pages.get_to(keys, target_locations, self._give_up()).tolist()
            return [target if is_got else None for target, is_got in zip(target_locations, got, strict=True)]

        return self._safely(tensors, [None] * len(keys))

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Whether all these tensors are stored."""
        pages = self._gathered()
        return self._safely(lambda: bool(pages.put_from(keys, values, self._give_up()).all()), False)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        found: torch.Tensor | None = self.batch_get([key], [target_location])[0]
        return found

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def _gathered(self) -> GatheredPages:
        pages = self._pools[KV]
        assert isinstance(pages, GatheredPages), "with interface_v1 SGLang uses batch_get_v1 and batch_set_v1"
        return pages

    # -- the rest ------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove all blocks of the namespace, also those of other ranks and engines."""
        folder = os.path.join(self._extra["mount"], self._extra["namespace"])

        def remove() -> None:
            try:
                os.setxattr(folder, CLEAR, b"now")
            except OSError as error:
                log.error("kvfuse: %s is not cleared: %s", folder, error)

        thread = threading.Thread(target=remove, name="kvfuse-clear", daemon=True)
        thread.start()
        thread.join(self._deadline)

    def get_stats(self) -> Any:
        """What was moved since the last question, as SGLang's metrics have it; None where they are off."""
        return self._transfers.stats() if self._config.enable_storage_metrics else None

    def close(self) -> None:
        if self.store is not None:
            log.info("kvfuse: %s", self.store.counters)
            self.store.close()
            self._staging.close()


def request_hints(extra_info: Any) -> RequestHints:
    """From the dictionary of a ``HiCacheStorageExtraInfo``."""
    words = getattr(extra_info, "extra_info", None)
    return hints_of(words.get(WORD) if isinstance(words, dict) else None, "SGLang")


def _before(extra_info: Any) -> Sequence[str]:
    """Hashes of the pages ahead of those of a call, where SGLang passes them."""
    return getattr(extra_info, "prefix_keys", None) or ()


def _text(name: Any) -> str:
    """Of a name that is text or an enumeration's."""
    return str(getattr(name, "value", name))


def _result(kv_pages: int, hits: dict[Any, int], lengths: list[int]) -> Any:
    result = PoolTransferResult(kv_pages, hits)
    result.restorable_prefix_pages = lengths
    return result
