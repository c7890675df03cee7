"""A rados store of a test, opened anew with other settings, and what it reads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from cluster_lab import changed

from kvfuse.remote.segments.api import Transfer
from kvfuse.remote.segments.rados.librados import PoolPlace
from kvfuse.remote.segments.rados.store import RadosSegments

KIB = 1 << 10
MIB = 1 << 20
SIZE = 64 * MIB
"""of segment 1"""
OBJECT_SIZE = 4 * MIB
PATIENCE_S = 30.0
"""a deadline that a busy machine does not try"""


@asynccontextmanager
async def opened(
    place: PoolPlace, namespace: str = "", pool: str = "", **changes: object
) -> AsyncIterator[RadosSegments]:
    place = replace(changed(place, **changes), namespace=namespace or place.namespace, pool=pool or place.pool)
    store = await RadosSegments.open(place)
    try:
        yield store
    finally:
        await store.aclose()


async def read(store: RadosSegments, offset: int, length: int, segment: int = 1) -> bytes:
    buffer = bytearray(b"\xaa" * length)
    await store.read([Transfer(segment, offset, buffer)])
    return bytes(buffer)
