"""What blocks of UCM are: descriptors of their namespaces, and keys of their shards."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

ID_SIZE = 16
"""bytes of UCM's block ids"""
TAG_SIZE = 6
_GROUP = re.compile(r"_fawa_(.+)$")


def group_of(config: Mapping[str, Any]) -> str:
    """Which of several stores of an engine this is: hybrid models have one for each kind of attention; else ""."""
    found = _GROUP.search(str(config.get("unique_id", "")))
    return found[1] if found else ""


def shard_key(block_id: bytes, group: str, shard: int) -> bytes:
    """The key of one shard of a block. All have one length."""
    if len(block_id) != ID_SIZE:
        block_id = hashlib.blake2b(block_id, digest_size=ID_SIZE).digest()
    return block_id.hex().encode() + _tag(group, f"shard {shard}")


def shape_key(group: str) -> bytes:
    """Of the note that says how many shards the blocks of a group have."""
    return bytes(ID_SIZE).hex().encode() + _tag(group, "shape")


@cache
def _tag(group: str, part: str) -> bytes:
    return b"-" + hashlib.blake2b(f"{group}|{part}".encode(), digest_size=TAG_SIZE).hexdigest().encode()


def descriptor(config: Mapping[str, Any]) -> dict[str, str | int]:
    """Of the namespace: what UCM's scheduler and workers both know."""
    return {
        "engine": "ucm",
        "model": str(config.get("model", "")),
        "weights": str(config.get("weights", "")),
        "mla": int(bool(config.get("share_buffer_enable"))),
        "hash": "md5 of model, tp size, dtype, rank, tokens, chained",
        "hash_seed": "UCM_HASH_SEED",
    }


def layout_descriptor(config: Mapping[str, Any]) -> dict[str, str | int]:
    """What workers know beside that: how bytes stand in a block, and vLLM's own configuration."""
    tensors = json.dumps([int(size) for size in config.get("tensor_size_list") or ()]).encode()
    return {
        "engine": "ucm, layout",
        "block_size": int(config.get("block_size") or 0),
        "shard_size": int(config.get("shard_size") or 0),
        "tensors": hashlib.blake2b(tensors, digest_size=TAG_SIZE).hexdigest(),
        **_vllm_facts(),
    }


def shards_of(config: Mapping[str, Any]) -> int:
    """How many shards a block of a worker has."""
    block_size, shard_size = int(config.get("block_size") or 0), int(config.get("shard_size") or 0)
    return max(block_size // shard_size, 1) if shard_size else 1


def _vllm_facts() -> dict[str, str | int]:
    """Of the engine that is being started in this process; {} where it does not say."""
    facts: dict[str, str | int] = {}
    with suppress(Exception):  # there is none, or of a version that has it elsewhere
        from vllm.config import get_current_vllm_config

        engine = get_current_vllm_config()
        for name, path in (
            ("model", "model_config.model"),
            ("revision", "model_config.revision"),
            ("quantization", "model_config.quantization"),
            ("dtype", "model_config.dtype"),
            ("kv_dtype", "cache_config.cache_dtype"),
            ("block_tokens", "cache_config.block_size"),
            ("tp_size", "parallel_config.tensor_parallel_size"),
            ("pp_size", "parallel_config.pipeline_parallel_size"),
        ):
            value: Any = engine
            for part in path.split("."):
                value = getattr(value, part, None)
            if value is not None:
                facts[name] = value if isinstance(value, int) else str(value)
    return facts
