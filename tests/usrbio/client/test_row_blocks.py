"""Blocks that are rows (`kind=blocks`) through rings of a real mount: as a dictionary, over kills, and when full."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from mounting import KvfuseMount, temporary_mount, wait_until
from packing_lab import compressible
from ring_lab import stats

from kvfuse.usrbio.client import BlockStore

NAMESPACE = "user.kvfuse.namespace"
ODD_KEYS = [b".", b"..", b"%", b"%61", b"a/b", b"\0", b"/" * 200, b"x" * 255, b"\xff" * 30, b"a b\n", b"~", b"-rf"]
WORDS = ("outlive=true", "tier_size=64MiB", "capacity=200MiB")
MIB = 1 << 20


@pytest.fixture
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(WORDS) as mounted:
        yield mounted


def make_namespace(mount: KvfuseMount, name: str = "kv", **settings: object) -> Path:
    folder = mount.point / name
    folder.mkdir()
    words = " ".join(f"{key}={value}" for key, value in {"kind": "blocks", **settings}.items())
    os.setxattr(folder, NAMESPACE, words.encode())
    return folder


def value_of(key: bytes | str, version: int = 0, size: int | None = None) -> bytes:
    rng = random.Random(f"{key!r} {version}")
    return rng.randbytes(size if size is not None else rng.choice([1, 100, 4096, 4097, 70_000, 300_000]))


def store_of(mount: KvfuseMount) -> dict[str, int]:
    return dict(stats(mount)["store"])


def kill(mount: KvfuseMount) -> None:
    """Kill the daemon, and return when the next one answers."""
    former = stats(mount)["pid"]
    os.kill(former, signal.SIGKILL)
    wait_until(lambda: bool(stats(mount)["pid"] != former), "the next daemon")


def test_a_store_does_what_a_dictionary_does(mount: KvfuseMount, rng: random.Random) -> None:
    make_namespace(mount)
    keys: list[bytes | str] = [*ODD_KEYS, "ключ", *(f"key-{number}" for number in range(20))]
    model: dict[bytes | str, bytes] = {}
    with BlockStore(str(mount.point), "kv", entries=16) as store:
        pool = store.client.iov(1 << 20).array
        for turn in range(500):
            some = rng.sample(keys, rng.randint(1, 5))
            action = rng.choice(
                ["put", "put_many", "put in place", "get", "get_many_into", "delete", "exists", "prefix"]
            )
            if action == "put":
                store.put(some[0], value_of(some[0], turn))
                model[some[0]] = value_of(some[0], turn)
            elif action == "put_many":
                values = [value_of(key, turn) for key in some]
                assert store.put_many(some, values).all()
                model.update(zip(some, values, strict=True))
            elif action == "put in place":
                data = value_of(some[0], turn)
                pool[100 : 100 + len(data)] = np.frombuffer(data, np.uint8)
                store.put(some[0], pool[100 : 100 + len(data)])
                model[some[0]] = data
            elif action == "get":
                view = store.get(some[0])
                assert (None if view is None else bytes(view)) == model.get(some[0])
            elif action == "get_many_into":
                targets = [np.zeros(300_000, np.uint8) for _ in some]
                sizes = store.get_many_into(some, targets).tolist()
                for key, target, size in zip(some, targets, sizes, strict=True):
                    assert (None if size < 0 else target[:size].tobytes()) == model.get(key)
            elif action == "delete":
                assert store.delete_many(some).tolist() == [key in model for key in some]
                for key in some:
                    model.pop(key, None)
            elif action == "exists":
                assert store.exists(some).tolist() == [key in model for key in some]
            else:
                wanted = next((n for n, key in enumerate(some) if key not in model), len(some))
                assert store.longest_prefix(some) == wanted
        found = store_of(mount)
        assert found["blocks"] == len(model)
    assert not any(name for name in os.listdir(mount.point) if name not in ("kv",))


def test_nothing_acknowledged_is_lost_by_kills(mount: KvfuseMount, rng: random.Random) -> None:
    make_namespace(mount)
    versions: dict[str, int] = {}
    with BlockStore(str(mount.point), "kv", deadline=20) as store:
        for turn in range(6):
            keys = [f"key-{rng.randrange(200)}" for _ in range(60)]
            for key in keys:
                store.put(key, value_of(key, turn))
                versions[key] = turn
            kill(mount)
            for key, version in versions.items():
                view = store.get(key)
                assert view is not None, key
                assert bytes(view) == value_of(key, version)


def test_kills_at_any_moment_under_load(mount: KvfuseMount, rng: random.Random) -> None:
    make_namespace(mount)
    is_over, wrong, versions = threading.Event(), list[str](), dict[str, int]()

    def put_and_get(seed: int) -> None:
        own = random.Random(seed)
        try:
            with BlockStore(str(mount.point), "kv", deadline=20) as store:
                while not is_over.is_set():
                    key = f"{seed}-{own.randrange(40)}"
                    version = own.randrange(1 << 30)
                    store.put(key, value_of(key, version, own.choice([100, 5000, 100_000])))
                    versions[key] = version
                    view = store.get(key)
                    if view is None or bytes(view) != value_of(key, version, len(view)):
                        wrong.append(f"{key} after its put: {view is None}")
        except Exception as error:
            wrong.append(f"{seed}: {error!r}")

    threads = [threading.Thread(target=put_and_get, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(8):
        before = len(versions), store_of(mount)["puts"]
        wait_until(lambda before=before: store_of(mount)["puts"] > 20 and before is not None, "some puts")
        kill(mount)
    is_over.set()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:5]
    with BlockStore(str(mount.point), "kv") as store:
        for key, version in versions.items():
            view = store.get(key)
            assert view is not None
            assert bytes(view) == value_of(key, version, len(view))


def test_blocks_are_there_after_the_next_mount(mount: KvfuseMount) -> None:
    folder = make_namespace(mount)
    keys = [f"key-{number}" for number in range(300)]
    with BlockStore(str(mount.point), "kv") as store:
        assert store.put_many(keys, [value_of(key) for key in keys]).all()
        assert store.delete_many(keys[:50]).all()
    for is_cleared in (False, True):
        mount.unmount()
        mount.fsck(verify=True)
        mount.mount()
        wait_until(lambda: not store_of(mount)["loading_slabs"], "the heads of all slabs")
        with BlockStore(str(mount.point), "kv") as store:
            assert not store.exists(keys[:50]).any()
            for key in keys[50:]:
                view = store.get(key)
                assert (view is None) == is_cleared
                assert view is None or bytes(view) == value_of(key)
        os.setxattr(folder, "user.kvfuse.clear", b"1")


def test_a_full_namespace_stays_within_its_quotas(mount: KvfuseMount) -> None:
    capacity = 24 * MIB
    make_namespace(mount, capacity=capacity, admission="all", eviction="lru")
    keys = [f"key-{number}" for number in range(400)]
    with BlockStore(str(mount.point), "kv") as store:
        for start in range(0, 400, 8):
            some = keys[start : start + 8]
            assert store.put_many(some, [value_of(key, size=130_000) for key in some]).all(), start
            (row,) = [one for one in stats(mount)["namespaces"] if one["settings"]["kind"] == "blocks"]
            assert row["used"]["bytes"] <= capacity, row["used"]
        found = [store.get(key) for key in keys]
        there = [number for number, view in enumerate(found) if view is not None]
        assert 100 < len(there) < 200
        assert min(there) > 150  # those that were stored last
        assert all(bytes(found[number] or b"") == value_of(keys[number], size=130_000) for number in there)
    assert store_of(mount)["blocks"] <= len(there)


def test_sizes_mixed_in_a_full_volume(mount: KvfuseMount, rng: random.Random) -> None:
    make_namespace(mount, admission="all")
    capacity = stats(mount)["capacity"]
    stored: dict[str, int] = {}
    with BlockStore(str(mount.point), "kv") as store:
        for size in (60_000, 700_000, 4096, 200_000):
            total = 0
            while total < capacity * 1.2:
                count = max(1, min(64, (8 * MIB) // size))
                keys = [f"{size}-{total}-{number}" for number in range(count)]
                assert store.put_many(keys, [value_of(key, size=size) for key in keys]).all(), (size, total)
                stored.update(dict.fromkeys(keys, size))
                total += count * max(size, 65536)
        last = list(stored)[-20:]
        found = {key: store.get(key) for key in rng.sample(list(stored), 400) + last}
        assert all(view is None or bytes(view) == value_of(key, size=stored[key]) for key, view in found.items())
        assert all(found[key] is not None for key in last)


def test_compressed_blocks_take_less_room(mount: KvfuseMount, rng: random.Random) -> None:
    """At every door, out of memory, over a kill and the next mount."""
    folder = make_namespace(mount, compression="zstd")
    blocks = {f"key-{number}": compressible(rng, 700_000) for number in range(40)}

    def room() -> int:
        (row,) = [one for one in stats(mount)["namespaces"] if one["settings"]["kind"] == "blocks"]
        return int(row["used"]["bytes"])

    def read_all() -> None:
        with BlockStore(str(mount.point), "kv", deadline=20) as store:
            for key, data in blocks.items():
                view = store.get(key)
                assert view is not None
                assert bytes(view) == data
        some = rng.choice(list(blocks))
        assert (folder / some).read_bytes() == blocks[some]

    with BlockStore(str(mount.point), "kv", deadline=20) as store:
        for key, data in blocks.items():
            store.put(key, data)
        os.sync()
    size = sum(map(len, blocks.values()))
    wait_until(lambda: room() < size // 2, "all blocks to be written")
    read_all()
    kill(mount)
    read_all()
    mount.unmount()
    mount.fsck(verify=True)
    mount.mount()
    wait_until(lambda: not store_of(mount)["loading_slabs"], "the heads of all slabs")
    assert room() < size // 2
    read_all()


def test_blocks_above_a_slab_are_files_for_rings(mount: KvfuseMount) -> None:
    """Stored, found, replaced and removed as others, beside them; never evicted, and counted."""
    capacity = 40 * MIB
    folder = make_namespace(mount, capacity=capacity, admission="all", eviction="lru")
    size = 2 * stats(mount)["slab_size"] + 4097
    large = {f"large-{number}": value_of(f"large-{number}", size=size) for number in range(3)}
    small = [f"small-{number}" for number in range(600)]
    with BlockStore(str(mount.point), "kv", deadline=20) as store:
        store.put(small[0], value_of(small[0], size=100_000))
        store.put("large-0", large["large-0"])
        assert store.put_many(list(large)[1:], list(large.values())[1:]).all()
        for start in range(0, len(small), 8):  # much more than there is room for
            some = small[start : start + 8]
            assert store.put_many(some, [value_of(key, size=100_000) for key in some]).all(), start
        assert store.exists(list(large)).all()
        for _ in range(2):
            for key, data in large.items():
                view = store.get(key)
                assert view is not None
                assert bytes(view) == data
                assert (folder / key).read_bytes() == data
            targets = [np.zeros(size, np.uint8) for _ in large]
            assert store.get_many_into(list(large), targets).tolist() == [size] * len(large)
            assert [target.tobytes() for target in targets] == list(large.values())
            kill(mount)
        (row,) = [one for one in stats(mount)["namespaces"] if one["settings"]["kind"] == "blocks"]
        assert len(large) * size <= row["used"]["bytes"] <= capacity
        with pytest.raises(OSError, match=r"quota|EDQUOT|122") as refused:
            for number in range(100):
                store.put(f"more-{number}", large["large-0"])
        assert refused.value.errno == errno.EDQUOT
        assert store.exists(list(large)).all()
        store.put("large-0", b"small now")
        assert bytes(store.get("large-0") or b"") == b"small now"
        store.put(small[0], large["large-1"])
        assert bytes(store.get(small[0]) or b"") == large["large-1"]
        assert store.delete_many([small[0], "large-0", "large-1", "nothing"]).tolist() == [True, True, True, False]
        assert not store.exists([small[0], "large-0", "large-1"]).any()


def test_blocks_expire(mount: KvfuseMount) -> None:
    make_namespace(mount, ttl=1)
    with BlockStore(str(mount.point), "kv") as store:
        store.put("key", b"value")
        assert store.exists(["key"]).all()
        wait_until(lambda: not store.exists(["key"]).any(), "the end of its time")
        assert store.get("key") is None
        wait_until(lambda: store_of(mount)["blocks"] == 0, "its slot")


def test_no_other_kind_is_changed(mount: KvfuseMount) -> None:
    folder = make_namespace(mount)
    (mount.point / "file").write_bytes(b"ordinary")
    with BlockStore(str(mount.point), "plain") as store:
        store.put("key", b"value")
    assert (mount.point / "plain" / "key").read_bytes() == b"value"
    assert subprocess.run(["ls", folder], capture_output=True, check=True).stdout == b""


def test_blocks_come_from_any_memory_and_go_into_any(mount: KvfuseMount, rng: random.Random) -> None:
    """One iov, several, none: in batches that are larger than the ring, and in those that mix them."""
    make_namespace(mount)
    with BlockStore(str(mount.point), "kv", entries=16) as store:
        iovs = [store.client.iov(1 << 20).array for _ in range(2)]
        number = 0
        for turn in range(12):
            kinds = [["first"], ["first", "second"], ["first", "plain"], ["plain"]][turn % 4]
            keys, buffers, targets, values = list[bytes](), list[object](), list[object](), list[bytes]()
            for place in range(rng.choice([1, 2, 50])):
                keys.append(b"key-%d" % number)
                values.append(value_of(keys[-1], turn, rng.choice([1, 4096, 9000])))
                kind, start, size = rng.choice(kinds), 10_000 * place + rng.randrange(900), len(values[-1])
                if kind == "plain":
                    buffers.append(rng.choice([bytes, bytearray, memoryview])(values[-1]))
                    targets.append(bytearray(size))
                else:
                    part = iovs[kind == "second"][start : start + size]
                    part[:] = np.frombuffer(values[-1], np.uint8)
                    buffers.append(part)
                    targets.append(part)
                number += 1
            assert store.put_many(keys, buffers).all()
            for iov in iovs:
                iov[:] = 0
            assert store.get_many_into(keys, targets).tolist() == list(map(len, values))
            assert [bytes(memoryview(target)) for target in targets] == values  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="2 keys and 1 buffers"):
            store.put_many([b"a", b"b"], [iovs[0][:5]])
        with pytest.raises(ValueError, match="not contiguous"):
            store.put_many([b"a", b"b"], [iovs[0][:5], iovs[0][:8:2]])
        sizes = store.put_many([b"a", b"b"], [iovs[0][:5], iovs[0][-7:]])
        assert sizes.all()


def test_a_put_does_not_hide_a_directory(mount: KvfuseMount) -> None:
    folder = make_namespace(mount)
    (folder / "before").mkdir()
    with BlockStore(mount.point, "kv") as store:
        store.put(b"key", b"value")
        (folder / "after").mkdir()
        for name in (b"before", b"after"):
            with pytest.raises(IsADirectoryError):
                store.put(name, b"value")
            with pytest.raises(IsADirectoryError):
                store.put_many([b"one", name, b"two"], [b"1", b"2", b"3"])
            assert (store.get(b"one"), store.get(b"two")) == (b"1", b"3")
            store.delete(b"one")
            store.delete(b"two")
            assert (folder / os.fsdecode(name)).is_dir()
            assert store.get(name) is None
        (folder / "after").rmdir()
        store.put(b"after", b"value")
        assert (folder / "after").read_bytes() == b"value"


def test_rings_find_blocks_whose_keys_are_no_names(mount: KvfuseMount) -> None:
    make_namespace(mount)
    with BlockStore(str(mount.point), "kv") as store, store.client.iov(1 << 16) as iov, store.client.ring(32) as ring:
        for number, key in enumerate([b"plain", *ODD_KEYS]):
            store.put(key, b"x" * (number + 1))
            for is_alone in (True, False):
                ring.prep_get(iov, 0, store.namespace, key, 100)
                if not is_alone:
                    ring.prep_get(iov, 100, store.namespace, b"absent", 100)
                ring.submit()
                results = ring.wait(2 - is_alone)["result"].tolist()
                assert sorted(results) == [*([] if is_alone else [-errno.ENOENT]), number + 1]
            found = ring.prep_exists(store.namespace, [key, b"absent"])
            ring.submit()
            ring.wait()
            assert found.tolist() == [True, False]
