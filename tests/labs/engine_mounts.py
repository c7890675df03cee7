"""Mounts for tests of adapters, and engines that use them."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from engine_host import Engine, EngineHost
from interruptions import KINDS, Work, run_beside
from mounting import KvfuseMount, temporary_mount
from scale import scaled

WORDS = ["capacity=256MiB,cache,admission=all"]
"""options of such a mount"""
ROUNDS = 2
"""kills, and then upgrades"""


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


@contextmanager
def outliving_mount() -> Iterator[KvfuseMount]:
    """One that outlives its daemon. At the end nothing is in the folder below it, where engines may make folders."""
    with temporary_mount([*WORDS, "outlive"]) as mount:
        yield mount
        mount.check_unexpected_errors()
        mount.unmount()
        assert os.listdir(mount.point) == []


def run_beside_all(mount: KvfuseMount, seed: int, works: Mapping[str, Work]) -> None:
    """Side by side while the daemon is killed, and then replaced, again and again; at last without any of it."""
    for kind in KINDS:
        run_beside(kind, [mount], seed, works, scaled(ROUNDS))
    for name, work in works.items():
        work(random.Random(f"{seed} {name} at last"))
