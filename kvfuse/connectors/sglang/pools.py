"""How pages of a host pool of SGLang become blocks: in place or gathered, with which keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kvfuse.connectors.sglang.identity import part_tag, shard_name
from kvfuse.connectors.sglang.pool_pages import (
    PIECES_MAX,
    GatheredPages,
    PagesInPlace,
    PoolPages,
    lie_within,
    pool_buffers,
    registered,
)
from kvfuse.connectors.staging import GatherMemory
from kvfuse.connectors.steady_store import SteadyStore

MHA_POOL = "MHATokenToKVPoolHost"


def is_replicated(config: Any, name: str, pool: Any) -> bool:
    """Whether all tensor-parallel ranks have the same bytes in this pool, so that one of them stores them."""
    if not config.is_mla_model or name == "mamba":
        return False
    is_draft = name in ("draft", "draft_swa")  # of a model of its own, perhaps another kind
    return not (is_draft and any(kind.__name__ == MHA_POOL for kind in type(pool).__mro__))


class PoolForm:
    """One pool, of a rank with a ``HiCacheStorageConfig``."""

    def __init__(self, config: Any, name: str, pool: Any) -> None:
        self.config, self.name, self.pool = config, name, pool
        self.layout = str(getattr(pool, "layout", ""))
        self._is_replicated = is_replicated(config, name, pool)
        split = getattr(config, "should_split_heads", False) and name == "kv"
        self._split = int(config.tp_lcm_size) // int(config.tp_size) if split else 1

    def pages(self, store: SteadyStore, staging: GatherMemory, *, gathered: bool) -> PoolPages:
        """``gathered``: even if pages could be moved in place. ValueError: the pool shows no pages."""
        meta = self._meta()
        pieces = None if gathered else self._pieces(meta)
        buffers = pool_buffers(self.pool)
        fits = pieces is not None and lie_within(*pieces, buffers)
        if pieces is not None and fits and len(pieces[0]) <= PIECES_MAX * self._split:
            tags = [self._tag(f"{number}", size, number) for number, size in enumerate(pieces[1])]
            return PagesInPlace(store, self.pool, tags, meta, registered(store, buffers))
        empty = self.pool.get_dummy_flat_data_page()
        size = empty.numel() * empty.element_size()
        return GatheredPages(store, self.pool, self._tag("page", size, 0), staging)

    def advice(self, pages: PoolPages) -> str:
        """How the pages are moved, for the log."""
        if isinstance(pages, PagesInPlace):
            return ", in place" if pages.is_copied_once else ', copied once more ("allocator": "shm" spares that)'
        return ", gathered (--hicache-mem-layout page_first spares that)"

    def _meta(self) -> Callable[[torch.Tensor], Any]:
        if self._split > 1:
            return partial(self.pool.get_split_heads_page_buffer_meta, split_factor=self._split)
        meta: Callable[[torch.Tensor], Any] = self.pool.get_page_buffer_meta
        return meta

    def _pieces(self, meta: Callable[[torch.Tensor], Any]) -> tuple[list[int], list[int]] | None:
        """Addresses and sizes of the first page's; None where the pool does not tell."""
        tokens = int(getattr(self.pool, "page_size", 1) or 1)
        try:
            addresses, sizes = meta(torch.arange(tokens, dtype=torch.int64))
        except (ValueError, AttributeError, NotImplementedError, RuntimeError):
            return None
        return list(addresses), list(sizes)

    def _tag(self, part: str, size: int, number: int) -> bytes:
        heads = None
        if self._split > 1:
            per_rank = number // 2  # keys and values of each finer rank in turn
            heads = (int(self.config.tp_rank) * self._split + per_rank, int(self.config.tp_lcm_size))
            part = f"{number % 2}"
        shard = shard_name(self.config, is_replicated=self._is_replicated, heads=heads)
        dtype = str(getattr(self.pool, "dtype", "")).removeprefix("torch.")
        return part_tag(self.name, f"{self.layout} {dtype} {size}", part, shard)
