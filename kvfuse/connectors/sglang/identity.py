"""What blocks of SGLang are: the descriptor of their namespace, and the keys of pages."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

TAG_SIZE = 6
HASH_DIGITS = 64
PAGES_KEPT = 1 << 15
"""names of pages that are kept from a look-up to what follows it"""
_PAGE_HASH = re.compile(rf"[0-9a-f]{{{HASH_DIGITS}}}")
_SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})(?:/|$)")

RAW_DTYPES = frozenset({"uint8", "int8"})
"""pools of these hold several kinds of numbers: the engine's own configuration says which"""


@lru_cache(PAGES_KEPT)
def page_name(page_hash: str) -> bytes:
    """What the keys of a page's blocks begin with; a tag follows. All have one length.

    The look-up of a page makes it, and its load or store uses the same.
    """
    if _PAGE_HASH.fullmatch(page_hash) is None:
        page_hash = hashlib.sha256(page_hash.encode()).hexdigest()
    return page_hash.encode()


def part_tag(pool: str, form: str, part: str, shard: str) -> bytes:
    """What a key has behind the page's hash: which ``part`` of a page of which ``pool`` it is, in which ``form`` its
    bytes are, and which ``shard`` of the model they belong to."""
    text = "|".join((pool, form, part, shard))
    return b"-" + hashlib.blake2b(text.encode(), digest_size=TAG_SIZE).hexdigest().encode()


def shard_name(config: Any, *, is_replicated: bool, heads: tuple[int, int] | None = None) -> str:
    """Of the rank of a ``HiCacheStorageConfig``: ranks with the same bytes have the same.

    ``is_replicated``: all tensor-parallel ranks have the same bytes. ``heads``: (rank, ranks) of finer tensor-parallel
    ranks, into which pages are split so that engines of several sizes share them.
    """
    rank, size = heads or (config.tp_rank, config.tp_size)
    names = [] if is_replicated else [f"tp{rank}/{size}"]
    for kind in ("pp", "attn_cp", "dcp"):
        size = getattr(config, f"{kind}_size", 1)
        if size > 1:
            names.append(f"{kind}{getattr(config, f'{kind}_rank')}/{size}")
    return ",".join(names)


def descriptor(config: Any, pool: Any) -> dict[str, str | int]:
    """Of the namespace: what all ranks of an engine agree on, and engines that share blocks must.

    ``pool``: the anchor, the pool of the KV pages.
    """
    settings = engine_settings()
    extra: Mapping[str, Any] = config.extra_config or {}
    is_replicated = bool(config.is_mla_model)
    ranks = getattr(config, "tp_lcm_size", None) if getattr(config, "should_split_heads", False) else config.tp_size
    return {
        "engine": "sglang",
        "model": config.model_name or settings.get("model_path") or "",
        "weights": str(extra.get("weights") or _weights(settings)),
        "dtype": _dtype(pool, settings),
        "layout": pool.layout,
        "page_tokens": int(getattr(config, "logical_page_size", None) or pool.page_size),
        "mla": int(is_replicated),
        "tp_size": "any" if is_replicated else int(ranks or config.tp_size),
        "pp_size": int(config.pp_size),
        "hash": "sha256 of tokens, chained",
        "hash_seed": "extra_key, cache_salt",
    }


def engine_settings() -> dict[str, str]:
    """Of the model, as the engine resolved them; {} where it has none (yet)."""
    names = ("model_path", "revision", "quantization", "kv_cache_dtype")
    settings: Any = None
    with suppress(Exception):  # versions differ, and offline uses have no arguments of a server
        from sglang.srt import runtime_context

        settings = runtime_context.get_model()
    if settings is None:
        with suppress(Exception):
            from sglang.srt import server_args

            settings = server_args.get_global_server_args()
    return {name: str(value) for name in names if (value := getattr(settings, name, None)) is not None}


def _weights(settings: Mapping[str, str]) -> str:
    """The revision and quantization of the weights."""
    snapshot = _SNAPSHOT.search(settings.get("model_path", ""))
    revision = settings.get("revision") or (snapshot[1] if snapshot else "default")
    return "/".join(filter(None, (revision, settings.get("quantization"))))


def _dtype(pool: Any, settings: Mapping[str, str]) -> str:
    stored = str(pool.dtype).removeprefix("torch.")
    return f"{stored}/{settings.get('kv_cache_dtype', 'auto')}" if stored in RAW_DTYPES else stored
