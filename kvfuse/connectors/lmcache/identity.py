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
KINDS = 4096
"""whose marks are kept"""
PARAMS = ("mount", "namespace", "deadline", "token", "model", "weights", "chunk_size", "hash", "salts")
NAMES_KEPT = 1 << 15
"""names of chunks that are kept from a look-up to what follows it"""
MARK_SIZE = 16
HASH_MAX = 64
"""bytes of a chunk's hash, up to which it stands in the name"""


def object_key(key: Any) -> bytes:
    """Of an ``ObjectKey``: its content's hash in hexadecimal digits, and the mark of its kind."""
    content: bytes = key.chunk_hash
    digits = content.hex().encode() if len(content) <= HASH_MAX else digest(content.hex())
    return digits + b"." + kind_mark(*kind_of(key))


def kind_of(key: Any) -> tuple[str, int, int, str]:
    """(model, rank, group of objects, salt) of an ``ObjectKey``."""
    return key.model_name, key.kv_rank, getattr(key, "object_group_id", 0), getattr(key, "cache_salt", "")


@lru_cache(KINDS)
def kind_mark(*kind: str | int) -> bytes:
    """A digest, so that a tenant cannot choose a salt with the mark of another one's."""
    return hashlib.blake2b(json.dumps(kind).encode(), digest_size=MARK_SIZE).hexdigest().encode()


def engine_key(key: Any) -> bytes:
    """Of a ``CacheEngineKey`` or ``LayerCacheEngineKey``, its rank, tags and layer included.

    Not of its own text, in which tags of a request can look like other ones.
    """
    return _engine_name(
        key.model_name, key.world_size, key.worker_id, key.chunk_hash_hex, str(key.dtype), key.tags,
        getattr(key, "layer_id", None),
    )  # fmt: skip


@lru_cache(NAMES_KEPT)
def _engine_name(*parts: Any) -> bytes:
    return digest(json.dumps(parts, default=str))


def digest(text: str) -> bytes:
    """All have one length."""
    return hashlib.blake2b(text.encode(), digest_size=KEY_SIZE).hexdigest().encode()


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
