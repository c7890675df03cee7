"""A mount with a cold tier in a real bucket, its block store beside a dict, and what its daemon says of it."""

from __future__ import annotations

import json
import os
import random
import secrets
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bucket_lab import BucketServer
from mounting import KvfuseMount, shared_conf, temporary_mount, wait_until

from kvfuse.usrbio.client.block_store import BlockStore
from kvfuse_cluster.ceph import CephServers
from kvfuse_cluster.etcd import EtcdServers
from kvfuse_cluster.seaweed import SeaweedServer

SHARED_WORDS = (
    *("namespace.kind=blocks", "namespace.admission=all", "namespace.eviction=lru", "namespace.high_water=0.8"),
    *("namespace.low_water=0.6", "namespace.cold=all", "tier_size=16MiB", "volume.capacity=32MiB"),
    *("volume.segment_size=16MiB", "records.deadline=5", "publish=strict"),
)
"""of a small volume, on which what one host was told counts for all at once"""
KIB, MIB = 1 << 10, 1 << 20
POLICY = ("kind=blocks", "namespace.admission=all", "namespace.eviction=lru", "namespace.high_water=0.8")
"""of a volume that evicts early, so that blocks wait for nothing but the bucket"""
FREE_SHARE = 0.15
WORDS = (*POLICY, "namespace.low_water=0.6", "namespace.cold=all", "tier_size=16MiB")


def cold_keys(server: BucketServer, *, cold_capacity: str = "256MiB", **more: Any) -> dict[str, Any]:
    """The section `[cold]`. ``more``: keys of it."""
    return {
        "engine": "s3",
        "endpoint": server.endpoint,
        "bucket": server.bucket,
        "capacity": cold_capacity,
        "credentials_file": server.credentials_file,
        "object_size": "1MiB",
        "deadline": 10,
        **more,
    }


@contextmanager
def cold_mount(server: BucketServer, *words: str, capacity: str = "16MiB", **more: Any) -> Iterator[KvfuseMount]:
    """With an empty volume, which is checked with its bucket at the end. ``more``: keys of the section."""
    with TemporaryDirectory(prefix="kvfuse-cold-") as folder:
        conf, volume = Path(folder, "mount.conf"), Path(folder, secrets.token_hex(4))
        lines = [f"cold.{key} = {json.dumps(value, default=str)}" for key, value in cold_keys(server, **more).items()]
        conf.write_text("\n".join([f'volume.path = "{volume}"', *lines]) + "\n")
        with temporary_mount((*WORDS, f"capacity={capacity}", *words), source=conf) as mount:
            yield mount


@contextmanager
def shared_cold_mounts(
    server: BucketServer, etcd: EtcdServers, count: int, *words: str, ceph: CephServers | None = None, **more: Any
) -> Iterator[list[KvfuseMount]]:
    """So many hosts with one empty volume, which is checked with its bucket at the end. ``more``: keys of `[cold]`."""
    with TemporaryDirectory(prefix="kvfuse-cold-") as folder:
        base = Path(folder)
        keys = cold_keys(server, prefix=f"{secrets.token_hex(6)}/", **more)
        lines = [f"cold.{key} = {json.dumps(value, default=str)}" for key, value in keys.items()]
        conf = shared_conf(base, etcd, ceph, lines=lines)
        mounts: list[KvfuseMount] = []
        try:
            for number in range(count):
                (base / str(number)).mkdir()
                mounts.append(KvfuseMount(base / str(number), (*SHARED_WORDS, *words), source=conf))
                mounts[-1].mount()
            yield mounts
            for mount in mounts:
                if mount.is_mounted:
                    mount.check_unexpected_errors()
                    mount.unmount()
            mounts[0].fsck(verify=True)
        finally:
            for mount in mounts:
                mount.remove()


def cold_figures(mount: KvfuseMount) -> dict[str, Any]:
    """What the daemon says of its cold tier."""
    stats = json.loads((mount.point / ".kvfuse" / "stats").read_text())
    found = _find(stats)
    assert found is not None, "the volume has no cold tier"
    return found


def _find(tree: Any) -> dict[str, Any] | None:
    if isinstance(tree, dict):
        if "stored_objects" in tree:
            return tree
        return next((found for inner in tree.values() if (found := _find(inner)) is not None), None)
    return None


def settle(mount: KvfuseMount) -> dict[str, Any]:
    """Wait until objects are known, the volume is below its water mark, and no block is on its way to the bucket. The
    figures then."""

    def has_settled() -> bool:
        found, room = cold_figures(mount), os.statvfs(mount.point)
        return found["is_loaded"] and not found["leaving_bytes"] and room.f_bavail > FREE_SHARE * room.f_blocks

    wait_until(has_settled, "the cold tier")
    return cold_figures(mount)


class Beside:
    """A block store beside a dict: what is there has to be what was put last; it may be absent.

    After a kill of the daemon it may be any former version, until it was seen, put or removed.
    """

    def __init__(self, mount: KvfuseMount, folder: str, rng: random.Random) -> None:
        self.mount, self.folder, self.rng = mount, folder, rng
        self.known: dict[bytes, bytes] = {}
        self.versions: defaultdict[bytes, list[bytes]] = defaultdict(list)
        self.in_doubt: set[bytes] = set()
        self.hits = 0
        (mount.point / folder).mkdir(exist_ok=True)
        self.store = BlockStore(mount.point, folder)

    def reopen(self) -> None:
        self.store.close()
        self.store = BlockStore(self.mount.point, self.folder)

    def put(self, keys: Sequence[bytes], size: int | None = None) -> None:
        """New bytes under each key."""
        blocks = [self.rng.randbytes(size or self.rng.randrange(1, 200 * KIB)) for _ in keys]
        stored = self.store.put_many(keys, blocks)
        for key, block, was_stored in zip(keys, blocks, stored, strict=True):
            self.versions[key].append(block)
            if was_stored:
                self.known[key] = block
                self.in_doubt.discard(key)

    def note_kill(self) -> None:
        """The daemon was killed, with what it had not synced."""
        self.in_doubt |= self.versions.keys()

    def delete(self, keys: Sequence[bytes]) -> None:
        self.store.delete_many(keys)
        for key in keys:
            self.known.pop(key, None)
            self.in_doubt.discard(key)
        found = self.store.exists(keys)
        assert not any(found), f"{sum(found)} of {len(keys)} blocks are there that were removed"

    def find(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those that are there, hot or cold."""
        return {key for key, is_there in zip(keys, self.store.exists(keys), strict=True) if is_there}

    def check(self, keys: Sequence[bytes]) -> int:
        """Get blocks. How many were there."""
        found = self.store.get_many(keys)
        for key, block in zip(keys, found, strict=True):
            if block is not None and key in self.in_doubt:
                assert bytes(block) in self.versions[key], f"{key!r} has bytes that nobody put"
                self.known[key] = bytes(block)
                self.in_doubt.discard(key)
            elif block is not None:
                assert key in self.known, f"{key!r} was removed, and is there"
                assert bytes(block) == self.known[key], f"{key!r} has other bytes"
        hits = sum(block is not None for block in found)
        self.hits += hits
        return hits


def object_paths(server: SeaweedServer) -> list[Path]:
    return sorted(server.folder.glob("*.dat"))
