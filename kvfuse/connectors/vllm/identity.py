"""What the blocks of an engine are, from its own configuration: the descriptor of a namespace. See `identify`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

DEFAULT_HASH = "sha256"
PARALLEL_SIZES = ("tp_size", "pp_size", "pcp_size", "dcp_size")
LONG_SIZES = {
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "pcp_size": "prefill_context_parallel_size",
    "dcp_size": "decode_context_parallel_size",
}
"""as vLLM's own configuration calls them"""


class Identity(NamedTuple):
    """Of the blocks of one engine."""

    descriptor: Mapping[str, str | int]
    """the same for all engines that may use each other's blocks"""
    rank: int
    """of those whose bytes this engine has"""
    chunk_tokens: int
    """tokens in a block of the first group"""


def identify(spec: Any, chunk_bytes: int, given: Mapping[str, str | None]) -> Identity:
    """``spec``: vLLM's OffloadingSpec, of any version from 0.25 on. ``given``: what the operator says; it wins.

    Sizes and ranks are left out where vLLM says that bytes do not depend on them.
    """
    engine = getattr(spec, "vllm_config", None) or _current_configuration()
    config = getattr(spec, "config", None)
    facts = _facts(config) if config is not None else _old_facts(spec)
    model, cache = getattr(engine, "model_config", None), getattr(engine, "cache_config", None)
    descriptor: dict[str, str | int] = {
        "engine": "vllm",
        "model": facts["model"],
        "revision": getattr(model, "revision", None) or "",
        "dtype": facts["dtype"],
        "layout": facts["layout"],
        "chunk_bytes": chunk_bytes,
        "chunk_tokens": facts["chunk_tokens"],
        "hash_tokens": facts["hash_tokens"],
        "groups": facts["groups"],
        "hash": str(getattr(cache, "prefix_caching_hash_algo", DEFAULT_HASH)),
        "hash_seed": os.environ.get("PYTHONHASHSEED") or "default",
    }
    rank = 0
    if not facts["is_parallelism_agnostic"]:
        descriptor |= facts["sizes"]
        rank = facts["rank"]
    descriptor |= {name: value for name, value in given.items() if value is not None}
    return Identity(descriptor, rank, facts["chunk_tokens"])


def _facts(config: Any) -> dict[str, Any]:
    """From an OffloadingConfig (0.26 and newer)."""
    parallel = config.parallel
    is_canonical = getattr(config, "canonical_layout", False)
    is_replicated = getattr(config, "replicated_layout", False)
    kinds = {"canonical": is_canonical, "replicated": is_replicated}
    layout = [getattr(config, "kv_cache_layout", None) or "", *(kind for kind, holds in kinds.items() if holds)]
    return {
        "model": config.model.name,
        "dtype": str(config.model.dtype),
        "layout": "+".join(filter(None, layout)) or "direct",
        "chunk_tokens": config.groups[0].tokens_per_block * config.cache.blocks_per_chunk,
        "hash_tokens": config.cache.tokens_per_hash,
        "groups": _digest([(group.tokens_per_block, list(group.layer_names)) for group in config.groups]),
        "sizes": {name: getattr(parallel, name, 1) for name in PARALLEL_SIZES},
        "rank": parallel.rank,
        "is_parallelism_agnostic": getattr(parallel, "is_parallelism_agnostic", False) or is_replicated,
    }


def _old_facts(spec: Any) -> dict[str, Any]:
    """From the configurations that a spec of 0.25 has."""
    engine, groups = spec.vllm_config, spec.kv_cache_config.kv_cache_groups
    parallel, cache = engine.parallel_config, engine.cache_config
    dtype = engine.model_config.dtype if cache.cache_dtype == "auto" else cache.cache_dtype
    tokens = spec.gpu_block_size
    return {
        "model": engine.model_config.model,
        "dtype": str(dtype).removeprefix("torch."),
        "layout": "direct",
        "chunk_tokens": tokens[0] * spec.block_size_factor,
        "hash_tokens": spec.hash_block_size,
        "groups": _digest([(count, list(group.layer_names)) for count, group in zip(tokens, groups, strict=True)]),
        "sizes": {name: getattr(parallel, LONG_SIZES[name], 1) for name in PARALLEL_SIZES},
        "rank": parallel.rank,
        "is_parallelism_agnostic": False,
    }


def _digest(groups: list[tuple[int, list[str]]]) -> str:
    """Layers of large models have many names, and a descriptor has 1000 bytes."""
    return f"{len(groups)}:{hashlib.sha256(repr(groups).encode()).hexdigest()[:16]}"


def _current_configuration() -> Any:
    """vLLM's configuration where it says which is in force; since 0.26 a tier is not given it."""
    try:
        return import_module("vllm.config").get_current_vllm_config_or_none()
    except Exception:  # versions differ, and it is a detail of the descriptor
        return None
