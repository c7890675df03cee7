"""Mounts for tests of adapters, and engines that use them."""

from __future__ import annotations

import json
import os

from engine_host import Engine, EngineHost
from mounting import KvfuseMount

WORDS = ["capacity=256MiB,cache,admission=all"]
"""options of such a mount"""


def started(host: EngineHost, mount: KvfuseMount, namespace: str, **options: object) -> Engine:
    """An engine whose adapter has a namespace of a mount."""
    engine = host.engine()
    engine.start(str(mount.point), namespace, **options)
    return engine


def damage(mount: KvfuseMount, namespace: str, name: bytes | str) -> None:
    """Change bytes of a block below the volume, which is unmounted then."""
    path = mount.point / namespace / os.fsdecode(name)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    place = json.loads(os.getxattr(path, "kvfuse.info"))["extents"][0]
    mount.unmount()
    with (mount.volume / "segments" / f"{place['segment']:08x}.seg").open("r+b") as segment:
        segment.seek(place["offset"] + 100)
        segment.write(b"damaged bytes")
