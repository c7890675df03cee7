"""Mounts for tests of adapters, and engines that use them."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

from engine_host import Engine, EngineHost
from interruptions import KINDS, run_beside
from mounting import KvfuseMount, temporary_mount
from scale import scaled

T = TypeVar("T")

WORDS = ["capacity=256MiB,cache,admission=all"]
"""options of such a mount"""
ROUNDS = {"killed": 3, "upgraded": 1}


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


class Known:
    """What an engine stored last, to be loaded again. ``is_lossy``: it may be missing after a kill."""

    def __init__(self, *, is_lossy: bool) -> None:
        self._is_lossy = is_lossy
        self._stored: dict[object, bool] = {}
        """what -> it may be missing"""

    def store_and_load(
        self, what: T, load: Callable[[T], bool], chance: random.Random, may_miss: bool, count: int = 5
    ) -> None:
        """``what`` was stored. Load it, and another of the last ``count``."""
        self._stored[what] = may_miss and self._is_lossy
        last = list(self._stored)[-count:]
        for one in (what, chance.choice(last)):
            if not load(cast(T, one)):
                assert self._stored[one] or (may_miss and self._is_lossy), f"{one} is missing"


@contextmanager
def outliving_mount() -> Iterator[KvfuseMount]:
    """One that outlives its daemon. At the end nothing is in the folder below it, where engines may make folders."""
    with temporary_mount([*WORDS, "outlive", "standby"]) as mount:
        yield mount
        mount.check_unexpected_errors()
        mount.unmount()
        assert os.listdir(mount.point) == []


EngineWork = Callable[[random.Random, bool], object]
"""a `Work` of an engine. The flag: what rings stored just now may be missing, which a daemon had not stored yet"""


def run_beside_all(mount: KvfuseMount, seed: int, works: Mapping[str, EngineWork]) -> None:
    """Side by side while the daemon is killed, and then replaced, again and again; at last without any of it."""
    for kind in KINDS:
        beside = {name: partial(_beside, work, kind == "killed") for name, work in works.items()}
        run_beside(kind, [mount], seed, beside, scaled(ROUNDS[kind]))
    for name, work in works.items():
        work(random.Random(f"{seed} {name} at last"), False)


def _beside(work: EngineWork, may_miss: bool, chance: random.Random) -> None:
    work(chance, may_miss)


def facts_of(mount: KvfuseMount, namespace: str, name: bytes | str) -> dict[str, Any]:
    """What ``kvfuse info`` says of a block: ``expires``, ``priority``, ``in_memory``, ..."""
    return dict(json.loads(os.getxattr(mount.point / namespace / os.fsdecode(name), "kvfuse.info")))


def make_namespace(mount: KvfuseMount, name: str, settings: str) -> None:
    """A namespace of blocks with other settings than adapters give theirs."""
    folder = mount.point / name
    folder.mkdir()
    os.setxattr(folder, "user.kvfuse.namespace", f"kind=blocks admission=all {settings}".encode())
