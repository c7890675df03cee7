"""What chunks of LMCache are: descriptors of namespaces, and keys."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

Facts = dict[str, str | int]

KEY_SIZE = 32
"""bytes of a digest; keys are its hexadecimal digits"""
FORM_MAX = 300
"""characters; a descriptor has little room"""
HASHERS = 4096
"""that are kept"""
PARAMS = ("mount", "namespace", "deadline", "token", "model", "weights", "chunk_size", "hash")


def object_key(key: Any) -> bytes:
    """Of an ``ObjectKey``: its content's hash, model, rank, group of objects and salt."""
    hasher = _hasher(
        key.model_name, key.kv_rank, getattr(key, "object_group_id", 0), getattr(key, "cache_salt", "")
    ).copy()  # fmt: skip
    hasher.update(key.chunk_hash)
    digits: bytes = hasher.hexdigest().encode()
    return digits


def engine_key(key: Any) -> bytes:
    """Of a ``CacheEngineKey`` or ``LayerCacheEngineKey``, its rank, tags and layer included.

    Not of its own text, in which tags of a request can look like other ones.
    """
    parts = (
        key.model_name, key.world_size, key.worker_id, key.chunk_hash_hex, str(key.dtype), key.tags,
        getattr(key, "layer_id", None),
    )  # fmt: skip
    return digest(json.dumps(parts, default=str))


def digest(text: str) -> bytes:
    """All have one length."""
    return hashlib.blake2b(text.encode(), digest_size=KEY_SIZE).hexdigest().encode()


@lru_cache(HASHERS)
def _hasher(*parts: str | int) -> Any:
    """Of what chunks have in common: JSON, so that the end of it cannot be mistaken."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=KEY_SIZE)


def form_of(shapes: Sequence[Any], dtypes: Sequence[Any]) -> str:
    """How bytes stand in a chunk."""
    text = "; ".join(
        f"{str(dtype).removeprefix('torch.')}[{','.join(str(int(length)) for length in shape)}]"
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    return text if len(text) <= FORM_MAX else f"{text[:FORM_MAX]}... {digest(text).decode()}"


def form_of_object(one: Any) -> str:
    """Of a ``MemoryObj``."""
    meta = one.metadata
    return form_of(meta.shapes or [meta.shape], meta.dtypes or [meta.dtype])


def server_descriptor(params: Mapping[str, Any]) -> Facts:
    """Of the namespace of a server, which keeps chunks of any models: they are in the keys."""
    chunk_size = params.get("chunk_size") or _argument("--chunk-size") or 256
    algorithm = str(params.get("hash") or _argument("--hash-algorithm") or "blake3")
    return {
        "engine": "lmcache server",
        "model": str(params.get("model", "")),
        "weights": str(params.get("weights", "")),
        "chunk_tokens": int(chunk_size),
        "hash": algorithm,
        "hash_seed": _seed(algorithm),
    }


def engine_descriptor(config: Any, metadata: Any, params: Mapping[str, Any]) -> Facts:
    """Of the namespace of engines that have LMCache in their process."""
    algorithm = str(getattr(config, "pre_caching_hash_algorithm", "builtin"))
    return {
        "engine": "lmcache",
        "model": str(metadata.model_name),
        "weights": str(params.get("weights", "")),
        "dtype": str(metadata.kv_dtype).removeprefix("torch."),
        "layout": "MLA" if metadata.use_mla else "KV",
        "layers": "one by one" if config.use_layerwise else "together",
        "chunk_tokens": int(metadata.chunk_size),
        "world_size": int(metadata.world_size),
        "serde": str(config.remote_serde),
        "hash": algorithm,
        "hash_seed": _seed(algorithm),
    }


def _seed(algorithm: str) -> str:
    """Only Python's own hash has one that is not said by its name."""
    return os.environ.get("PYTHONHASHSEED", "") if algorithm == "builtin" else ""


def _argument(name: str) -> str | None:
    """What the command line of LMCache's server says: adapters are not told."""
    words = sys.argv[1:]
    for number, word in enumerate(words):
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
        if word == name and number + 1 < len(words):
            return words[number + 1]
    return None
