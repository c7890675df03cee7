"""Hosts whose membership, blocks or slots change while others read from them."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from pathlib import Path

from mounting import KvfuseMount, stopped, wait_until
from peer_lab import asked, listening, mounted, states, stats, wait_for_peers

from kvfuse.usrbio.client import BlockStore
from kvfuse_cluster.etcd import EtcdServers

FOLDER = "blocks"
BLOCK_SIZE = 96 << 10
SMALL_TIER = ("cache.tier_size=16MiB", "cache.staging_size=16MiB")


def put(writer: KvfuseMount, reader: KvfuseMount, prefix: str, count: int = 20) -> dict[bytes, bytes]:
    """New blocks, of which the reader knows then; each is compressible, and begins otherwise."""
    blocks = {b"%s%d" % (prefix.encode(), number): b"%8d" % number * (BLOCK_SIZE // 8) for number in range(count)}
    with BlockStore(writer.point, FOLDER) as store:
        assert store.put_many(list(blocks), list(blocks.values())).all()
    with BlockStore(reader.point, FOLDER) as store:
        wait_until(lambda: bool(store.exists(list(blocks)).all()), "the names on the other host")
    return blocks


def get(reader: KvfuseMount, blocks: dict[bytes, bytes]) -> None:
    """All of them, right."""
    with BlockStore(reader.point, FOLDER) as store:
        assert [bytes(found or b"") for found in store.get_many(list(blocks))] == list(blocks.values())


def are_served(writer: KvfuseMount, reader: KvfuseMount, prefix: str) -> bool:
    """New blocks come from the host that put them; not if it was late."""
    before = asked(reader)["right"]
    get(reader, put(writer, reader, prefix))
    return asked(reader)["right"] > before


def clients(mount: KvfuseMount) -> list[str]:
    return [host["client"] for host in stats(mount)["peers"]["hosts"]]


def test_a_host_that_lost_its_lease_is_another_one_then(etcd: EtcdServers) -> None:
    """Both read from each other again, by new connections."""
    with mounted(etcd, [listening(), listening()]) as (one, two):
        wait_for_peers([one, two])
        former, blocks = clients(two), put(one, two, "before")
        with stopped(one.pid):
            wait_until(lambda: not clients(two), "the end of its lease")
            get(two, blocks)
        wait_until(lambda: states(two) == ["connected"], "the connection to the new client")
        assert clients(two) != former
        wait_until(lambda: states(one) == ["connected"], "the new client's own connection")
        for number, (writer, reader) in enumerate(((one, two), (two, one))):
            tries = iter(range(100))
            wait_until(
                lambda writer=writer, reader=reader, number=number, tries=tries: are_served(
                    writer, reader, f"{number}-{next(tries)}-"
                ),
                "blocks from the other host",
            )
        for mount in (one, two):
            wait_until(
                lambda mount=mount: stats(mount)["peers"]["served"]["callers"] == 1, "the end of old connections"
            )


def content(rng: random.Random, key: bytes) -> bytes:
    """Of a block: any bytes, with the key and a digest before them."""
    data = key.ljust(32) + rng.randbytes(rng.choice((4096, BLOCK_SIZE)))
    return hashlib.sha256(data).digest() + data


def is_of(key: bytes, block: memoryview) -> bool:
    data = block[32:]
    return hashlib.sha256(data).digest() == block[:32] and bytes(data[:32]) == key.ljust(32)


def test_blocks_that_change_and_go_while_they_are_read(etcd: EtcdServers, rng: random.Random) -> None:
    """Their writer's memory holds a part of them, and it overwrites and deletes them: each is whole, or absent."""
    keys = [b"%d" % number for number in range(400)]
    with mounted(etcd, [(*listening(), *SMALL_TIER), SMALL_TIER]) as (writer, reader):
        wait_until(lambda: states(reader) == ["connected"], "the connection")
        with BlockStore(writer.point, FOLDER) as store:
            assert store.put_many(keys, [content(rng, key) for key in keys]).all()
        is_over = threading.Event()
        problems: list[str] = []
        counts: list[dict[str, int]] = []

        def read(number: int) -> None:
            own = random.Random(number)
            with BlockStore(reader.point, FOLDER) as store:
                while not is_over.is_set():
                    chosen = own.sample(keys, 8)
                    for key, block in zip(chosen, store.get_many(chosen), strict=True):
                        if block is not None and not is_of(key, block):
                            problems.append(f"{key!r}: {len(block)} bytes")

        threads = [threading.Thread(target=read, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        try:
            with BlockStore(writer.point, FOLDER) as store:

                def all_has_happened() -> bool:
                    chosen = rng.sample(keys, 8)
                    store.put_many(chosen, [content(rng, key) for key in chosen])
                    store.delete_many(rng.sample(keys, 2))
                    counts.append(asked(reader))
                    return bool(problems) or (counts[-1]["right"] > 50 and counts[-1]["absent"] > 50)

                wait_until(all_has_happened, "blocks that came, and others that had gone")
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
            print(counts[-1:])
        assert problems == []
        assert asked(reader)["wrong"] == 0


def is_compressed(mount: KvfuseMount) -> bool:
    return any(row["settings"]["compression"] == "zstd" for row in stats(mount)["namespaces"])


def test_compressed_blocks_come_from_disk_tiers_of_others(etcd: EtcdServers, tmp_path: Path) -> None:
    """Of files: as their slots have them; memory has them only as they were put."""
    disk = (f"cache.disk_path={tmp_path}", "cache.disk_size=64MiB", "cache.disk_keep=all")
    with mounted(etcd, [listening(), (*listening(), *disk), ()]) as (plain, stored, reader):
        (plain.point / FOLDER).mkdir()
        os.setxattr(plain.point / FOLDER, "user.kvfuse.namespace", b"kind=files compression=zstd")
        wait_until(lambda: is_compressed(stored), "the setting on the other host")
        wait_until(lambda: states(reader) == ["connected"] * 2, "the connections")
        get(reader, put(plain, reader, "plain"))
        assert asked(reader)["right"] == 0
        tries = iter(range(100))
        wait_until(lambda: are_served(stored, reader, f"stored{next(tries)}-"), "blocks from the other host's disk")
        assert asked(reader)["wrong"] == 0


def test_blocks_that_left_memory_come_from_the_disk_tier_of_their_host(etcd: EtcdServers, tmp_path: Path) -> None:
    """Compressed as they are there."""
    disk = (f"cache.disk_path={tmp_path}", "cache.disk_size=256MiB", "cache.disk_keep=all", *SMALL_TIER)
    with mounted(etcd, [(*listening(), *disk), ()]) as (stored, reader):
        BlockStore(stored.point, FOLDER).close()
        os.setxattr(stored.point / FOLDER, "user.kvfuse.namespace", b"compression=zstd")
        wait_until(lambda: is_compressed(reader), "the setting on the other host")
        wait_until(lambda: states(reader) == ["connected"], "the connection")
        tries = iter(range(20))

        def all_came() -> bool:
            blocks = put(stored, reader, f"{next(tries)}-", 300)
            wait_until(lambda: stats(stored)["store"]["resident"] < stats(stored)["store"]["blocks"] - 50, "evictions")
            oldest = dict(list(blocks.items())[:20])
            before, hits = asked(reader)["bytes"], stats(stored)["disk"]["hits"]
            get(reader, oldest)
            came = asked(reader)["bytes"] - before
            return stats(stored)["disk"]["hits"] > hits and came >= BLOCK_SIZE * len(oldest)

        wait_until(all_came, "blocks from the other host's disk")
        assert asked(reader)["wrong"] == 0


def test_blocks_that_move_to_other_slots_meanwhile_are_found(etcd: EtcdServers) -> None:
    """Their host compresses them when it writes them, and the reader knows where they were before that."""
    with mounted(etcd, [listening(), ()]) as (writer, reader):
        BlockStore(writer.point, FOLDER).close()
        os.setxattr(writer.point / FOLDER, "user.kvfuse.namespace", b"compression=zstd")
        wait_until(lambda: is_compressed(reader), "the setting on the other host")
        wait_until(lambda: states(reader) == ["connected"], "the connection")
        for number in range(20):
            blocks = put(writer, reader, f"{number}-")
            wait_until(lambda: stats(writer)["store"]["dirty_bytes"] == 0, "blocks on the medium")
            get(reader, blocks)
