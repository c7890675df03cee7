"""Loaded by schemathesis: paths that often exist, and bodies of blocks that often are some."""

from __future__ import annotations

import hashlib
from typing import Any

import schemathesis

from kvfuse.http.block_bodies import CONTENT_TYPE, build_body

PATHS = ("folder", "folder/file", "folder/other", "blocks", "blocks/key", "folder/link", "made", "made/below")


def choose(text: str, many: Any) -> Any:
    """One of many, the same for the same text; None now and then."""
    number = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=2).digest()[0]
    return many[number % len(many)] if number < 200 else None


@schemathesis.hook  # type: ignore[untyped-decorator]
def map_path_parameters(ctx: Any, path_parameters: dict[str, Any]) -> dict[str, Any]:
    if path_parameters and (path := choose(str(path_parameters.get("path")), PATHS)):
        return {**path_parameters, "path": path}
    return path_parameters


@schemathesis.hook  # type: ignore[untyped-decorator]
def map_query(ctx: Any, query: dict[str, Any] | None) -> dict[str, Any] | None:
    if query and "to" in query and (path := choose(str(query["to"]), PATHS)):
        return {**query, "to": f"/{path}"}
    return query


@schemathesis.serializer(CONTENT_TYPE)  # type: ignore[untyped-decorator]
def pack_blocks(ctx: Any, value: Any) -> bytes:
    data = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogateescape")
    if not 1 <= len(data) <= 255 or data[0] % 4 == 0:
        return data
    return build_body([data, b"key"], [data * 3, b""] if data[0] % 2 else ())
