"""Clients find and copy blocks in shared memory by themselves: never wrong ones, nor any that they may not see."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cli_lab import kvfuse
from mounting import KvfuseMount, stopped, temporary_mount, wait_until
from posix_calls import as_user

from kvfuse import blockindex
from kvfuse.usrbio.client import BlockStore

SIZE = 4096


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(
        ["capacity=256MiB,kind=evicted-files,admission=all,allow_other,cache.tier_size=128MiB"]
    ) as mount:
        yield mount


@pytest.fixture
def name(mount: KvfuseMount, tmp_path: Path) -> str:
    """Of a cache whose blocks are files."""
    folder = mount.point / tmp_path.name
    folder.mkdir(exist_ok=True)
    os.setxattr(folder, "user.kvfuse.namespace", b"kind=evicted-files admission=all")
    return folder.name


@pytest.fixture(params=["native", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the native part, and without it."""
    if request.param == "numpy":
        monkeypatch.setattr(blockindex, "native", None)
    else:
        assert blockindex.native is not None, "the native part was not built"
    return str(request.param)


def found(store: BlockStore, keys: list[bytes], sizes: int = SIZE) -> list[bytes | None]:
    """The bytes of the blocks that the client finds by itself."""
    memory = np.zeros((len(keys), sizes), np.uint8)
    targets = np.arange(len(keys), dtype=np.uint64) * np.uint64(sizes) + np.uint64(memory.ctypes.data)
    results = store._resident.get(keys, targets, np.full(len(keys), sizes, np.int64))
    if results is None:
        return [None] * len(keys)
    return [memory[row, :size].tobytes() if size >= 0 else None for row, size in enumerate(results.tolist())]


def wait_for_index(store: BlockStore, key: bytes) -> None:
    """Tables that ended are mapped again soon."""
    wait_until(lambda: found(store, [key])[0] is not None, f"{key!r} to be found")


KEYS = [b"a", b"with/slash", b"\0\1\2", b"%percent", b".", bytes(range(1, 128)), b"k" * 255]


def test_any_key_is_found_and_none_that_is_not_there(mount: KvfuseMount, name: str, way: str) -> None:
    with BlockStore(mount.point, name) as store:
        data = [os.urandom(100 + number) for number in range(len(KEYS))]
        assert store.put_many(KEYS, data).all()
        assert found(store, KEYS) == data
        assert found(store, [b"b", b"%", b"a\0", b"aa", b"k" * 254]) == [None] * 5
        assert store.exists([*KEYS, b"b"]).tolist() == [True] * len(KEYS) + [False]
        assert store.longest_prefix([*KEYS, b"b", b"a"]) == len(KEYS)
        too_long = bytes(range(200))  # its file's name is a hash, from which nobody finds the key
        store.put(too_long, b"long")
        assert found(store, [too_long]) == [None]
        assert bytes(store.get(too_long) or b"") == b"long"


def test_a_block_that_was_replaced_renamed_or_removed_is_not_found(mount: KvfuseMount, name: str, way: str) -> None:
    folder = mount.point / name
    with BlockStore(mount.point, name) as store:
        store.put_many([b"a", b"b", b"c", b"d", b"e"], [b"1"] * 5)
        store.put(b"a", b"2")
        assert found(store, [b"a"]) == [b"2"]
        (folder / "a").write_bytes(b"3")
        assert found(store, [b"a"]) == [None]
        os.rename(folder / "b", folder / "new")
        assert found(store, [b"b", b"new"]) == [None, None]
        os.rename(folder / "new", folder / "c")
        assert found(store, [b"c"]) == [None]
        os.unlink(folder / "d")
        assert found(store, [b"d"]) == [None]
        os.link(folder / "e", folder / "other")
        assert found(store, [b"e"]) == [None]
        assert [bytes(store.get(key) or b"") for key in (b"a", b"c", b"e")] == [b"3", b"1", b"1"]
        store.put(b"e", b"4")
        with (folder / "e").open("r+b") as file:
            file.write(b"5")
        assert found(store, [b"e"]) == [None]
        store.put(b"e", b"6")
        os.truncate(folder / "e", 0)
        assert found(store, [b"e"]) == [None]
        store.put(b"e", b"7")
        assert store.delete(b"e")
        assert found(store, [b"e"]) == [None]


def test_a_block_that_comes_back_to_memory_is_found(mount: KvfuseMount, name: str) -> None:
    with BlockStore(mount.point, name) as store:
        (mount.point / name / "file").write_bytes(b"x" * SIZE)
        assert found(store, [b"file"]) == [None]
        assert store.prefetch([b"file"]).all()
        assert found(store, [b"file"]) == [b"x" * SIZE]


def test_what_is_there_before_the_client_is_found(mount: KvfuseMount, name: str) -> None:
    with BlockStore(mount.point, name) as first:
        keys = [b"%08d" % number for number in range(3000)]  # more than the first table holds
        assert first.put_many(keys, [key * 8 for key in keys]).all()
        with BlockStore(mount.point, name) as second:
            assert found(second, keys, 64) == [key * 8 for key in keys]
        wait_for_index(first, keys[-1])
        assert found(first, keys, 64) == [key * 8 for key in keys]


def test_a_table_that_is_full_gives_way_to_a_larger_one(mount: KvfuseMount, name: str, way: str) -> None:
    with BlockStore(mount.point, name) as store:
        keys = [b"%08d" % number for number in range(5000)]
        for start in range(0, len(keys), 1000):
            part = keys[start : start + 1000]
            assert store.put_many(part, part).all()
            wait_for_index(store, part[0])
            assert [data or key for key, data in zip(part, found(store, part), strict=True)] == part
        wait_until(lambda: found(store, keys) == keys, "all to be found")


def test_evicted_blocks_are_not_found_and_others_are_never_mixed_up(seed: int) -> None:
    """Many times the tier's memory goes through it while readers copy. A copy that counts is whole and of its key."""
    with (
        temporary_mount(["capacity=256MiB,kind=evicted-files,admission=all,cache.tier_size=16MiB"]) as mount,
        BlockStore(mount.point, "blocks") as store,
        BlockStore(mount.point, "blocks") as other,
    ):
        size, keys = 64 << 10, [b"%08d" % number for number in range(600)]
        is_over = threading.Event()
        wrong: list[bytes] = []
        counts = [0, 0]

        def read(place: int) -> None:
            rng = np.random.default_rng([seed, place])
            while not is_over.is_set():
                asked = [keys[number] for number in rng.integers(0, len(keys), 16).tolist()]
                for key, data in zip(asked, found(other, asked, size), strict=True):
                    if data is not None:
                        counts[place] += 1
                        if data != key * (size // 8):
                            wrong.append(key)

        readers = [threading.Thread(target=read, args=(place,)) for place in range(2)]
        for reader in readers:
            reader.start()
        for _ in range(4):
            for start in range(0, len(keys), 32):
                part = keys[start : start + 32]
                store.put_many(part, [key * (size // 8) for key in part])
        is_over.set()
        for reader in readers:
            reader.join()
        assert not wrong
        assert min(counts), "nothing was read"
        assert None in found(other, keys, size), "nothing was evicted"


def test_a_stopped_daemon_does_not_stop_readers_and_a_dead_one_does(mount: KvfuseMount, tmp_path: Path) -> None:
    with (
        temporary_mount(["capacity=64MiB,kind=evicted-files,admission=all"]) as own,
        BlockStore(own.point, "blocks") as store,
    ):
        store.put(b"a", b"x" * SIZE)
        assert found(store, [b"a"]) == [b"x" * SIZE]
        with stopped(own.pid):
            assert found(store, [b"a"]) == [b"x" * SIZE]
            assert store.get_into(b"a", bytearray(SIZE)) == SIZE
            assert store.exists([b"a"]).all()
        own.kill()
        assert found(store, [b"a"]) == [None]
        own.mount()
        store.client.reconnect()
        store.put(b"a", b"y" * SIZE)
        wait_for_index(store, b"a")
        assert found(store, [b"a"]) == [b"y" * SIZE]


def test_a_cleared_namespace_shows_nothing(mount: KvfuseMount, name: str) -> None:
    with BlockStore(mount.point, name, descriptor={"model": "m", "version": 1}) as store:
        store.put(b"a", b"1")
        assert found(store, [b"a"]) == [b"1"]
        kvfuse("namespace", "clear", mount.point / name)
        assert found(store, [b"a"]) == [None]
        with BlockStore(mount.point, name) as other:
            assert found(other, [b"a"]) == [None]
            other.put(b"a", b"2")
            assert found(other, [b"a"]) == [b"2"]


def test_a_limited_namespace_has_no_index(mount: KvfuseMount, name: str) -> None:
    with BlockStore(mount.point, name, descriptor={"model": "m"}) as store:
        store.put(b"a", b"1")
        kvfuse("namespace", "set", mount.point / name, "bandwidth=1GiB")
        assert found(store, [b"a"]) == [None]
        assert bytes(store.get(b"a") or b"") == b"1"
        with BlockStore(mount.point, name) as other:
            assert other._resident._mapped[1] == []
        kvfuse("namespace", "set", mount.point / name, "bandwidth=0")
        with BlockStore(mount.point, name) as other:
            assert found(other, [b"a"]) == [b"1"]


def test_a_client_loses_the_index_with_the_permission(mount: KvfuseMount, name: str) -> None:
    folder = mount.point / name
    with BlockStore(mount.point, name) as own:
        folder.chmod(0o755)
        own.put_many([b"a", b"b"], [b"1", b"2"])
        with as_user():
            other = BlockStore(mount.point, name, create=False)
        with other:
            assert found(other, [b"a", b"b"]) == [b"1", b"2"]
            folder.chmod(0o711)
            assert found(other, [b"a", b"b"]) == [None, None]


def test_blocks_that_the_client_may_not_read_are_in_no_index_of_it(mount: KvfuseMount, name: str) -> None:
    folder = mount.point / name
    with BlockStore(mount.point, name) as own:
        folder.chmod(0o777)
        own.put(b"open", b"1")
        private = own.client.namespace(folder, mode=0o600)
        memory = own.client.iov(SIZE)
        with own.client.ring(8) as ring:
            ring.prep_put(memory, 0, private, b"private", 100)
            ring.submit()
            assert ring.wait(1, 10)["result"].tolist() == [100]
        with as_user(), BlockStore(mount.point, name, create=False) as other:
            other.put(b"own", b"2")
            assert found(other, [b"open", b"own", b"private"]) == [b"1", b"2", None]
            assert not any(mapped.table.find([b"private"])[0] >= 0 for mapped in other._resident._mapped[1])


def test_reads_by_clients_are_uses(mount: KvfuseMount, name: str) -> None:
    def stats() -> dict[str, object]:
        rows = json.loads((mount.point / ".kvfuse" / "stats").read_text())["namespaces"]
        row: dict[str, object] = next(row for row in rows if row["path"] == f"/{name}")
        return row

    with BlockStore(mount.point, name, descriptor={"model": "m"}) as store:
        keys = [b"%04d" % number for number in range(50)]
        store.put_many(keys, [b"x" * 100] * 50)
        assert found(store, keys) == [b"x" * 100] * 50
        before = stats()["cache"]
        assert isinstance(before, dict)

        def asked() -> int:
            store.exists([b"absent"])  # the daemon looks at what clients read before it answers
            now = stats()["cache"]
            assert isinstance(now, dict)
            return int(now["asked"]) - int(before["asked"])

        wait_until(lambda: asked() >= len(keys), "the reads to be known")


@pytest.mark.parametrize("count", [0, 1, 1 << 32, (1 << 63) + 5, (1 << 64) - 1])
def test_a_client_may_write_anything_into_its_page(mount: KvfuseMount, name: str, count: int) -> None:
    with BlockStore(mount.point, name) as store:
        store.put(b"a", b"1")
        assert found(store, [b"a"]) == [b"1"]
        mapped = store._resident._mapped[1][0].touches
        mapped._touched[:] = np.random.default_rng(count & 0xFF).integers(0, 1 << 32, len(mapped._touched))
        mapped._count[0] = count
        (mount.point / ".kvfuse" / "stats").read_text()  # the daemon looks at the page
        assert not store.exists([b"absent"]).any()
        assert store.exists([b"a"]).all()
        mount.check_unexpected_errors()


def test_a_damaged_header_is_no_table() -> None:
    memory = np.zeros(blockindex.HEADER_SIZE, np.uint8)
    with pytest.raises(Exception, match="no index of blocks"):
        blockindex.Table(memory)


def test_the_native_part_and_numpy_agree(seed: int) -> None:
    rng = np.random.default_rng(seed)
    multipliers = rng.integers(0, 1 << 64, (blockindex.WORDS_MAX, blockindex.SUMS), np.uint64)
    keys = [rng.bytes(int(size)) for size in rng.integers(1, 256, 500)]
    assert blockindex.native is not None
    by_native = blockindex.fingerprints_of(multipliers, keys)
    native, blockindex.native = blockindex.native, None
    try:
        assert (blockindex.fingerprints_of(multipliers, keys) == by_native).all()
    finally:
        blockindex.native = native
    assert len(np.unique(by_native, axis=0)) == len(set(keys))


# -- absent blocks ---------------------------------------------------------------------------------


def knows_absent(store: BlockStore, keys: list[bytes]) -> bool:
    """The client answers by itself that these blocks are not there."""
    answer = store._resident.exists(keys)
    assert answer is None or not answer.any()
    return answer is not None


def test_what_is_absent_is_known_without_the_daemon(mount: KvfuseMount, name: str, way: str) -> None:
    keys = [b"%07d" % number for number in range(100)]
    with BlockStore(mount.point, name) as store:
        wait_until(lambda: knows_absent(store, keys), "the names of the folder")
        assert store.put_many(keys[:40], [b"x"] * 40).all()
        with stopped(mount.pid):
            assert store._resident.exists(keys) is not None
            assert store.exists(keys).tolist() == [True] * 40 + [False] * 60
            assert store.longest_prefix(keys) == 40
            assert store.longest_prefix(keys[40:]) == 0
            assert store.longest_prefix(keys[:40]) == 40


def test_names_of_any_door_and_of_before_are_not_absent(mount: KvfuseMount, name: str, way: str) -> None:
    folder = mount.point / name
    folder.mkdir(exist_ok=True)
    (folder / "before").write_bytes(b"1")
    with BlockStore(mount.point, name) as store:
        wait_until(lambda: knows_absent(store, [b"other"]), "the names of the folder")
        (folder / "file").write_bytes(b"2")
        (folder / "old").write_bytes(b"3")
        os.rename(folder / "old", folder / "renamed")
        os.link(folder / "file", folder / "link")
        for key in (b"before", b"file", b"renamed", b"link"):
            assert not knows_absent(store, [key]), key
            assert store.exists([key]).all()
        assert store.delete(b"file")
        assert not store.exists([b"file"]).any()


def test_a_name_that_hides_its_key_makes_the_index_ask(mount: KvfuseMount, name: str) -> None:
    long = bytes(range(200))
    with BlockStore(mount.point, name) as first:
        first.put(long, b"x")
        with BlockStore(mount.point, name) as store:
            assert store.exists([long]).all()
            assert not knows_absent(store, [b"other"])


def test_more_names_than_a_filter_has_room_for(mount: KvfuseMount, name: str) -> None:
    keys = [b"%06d" % number for number in range(12_000)]
    absent = [b"no%06d" % number for number in range(1000)]
    with BlockStore(mount.point, name) as store:
        for start in range(0, len(keys), 1000):
            part = keys[start : start + 1000]
            assert store.put_many(part, [b"x"] * len(part)).all()
        assert store.exists(keys).all()
        assert not store.exists(absent).any()
        wait_until(lambda: store._resident.exists(absent[:1]) is not None, "a larger filter")
        kept = [key for key in absent if store._resident.exists([key]) is None]
        assert len(kept) < len(absent) // 10


def test_what_a_client_missed_is_in_the_books(mount: KvfuseMount, name: str) -> None:
    def figures() -> int:
        rows = json.loads((mount.point / ".kvfuse/stats").read_text())["namespaces"]
        return int(next(row for row in rows if row["path"] == f"/{name}")["cache"]["absent"])

    keys = [b"%05d" % number for number in range(500)] + [b"of another length"]
    with BlockStore(mount.point, name, descriptor={"model": "m"}) as store:
        wait_until(lambda: knows_absent(store, [b"first"]), "the names of the folder")
        before = figures()
        assert knows_absent(store, keys)
        assert figures() - before == len(keys)


def test_the_page_of_what_was_asked_may_have_anything(mount: KvfuseMount, name: str) -> None:
    """A client writes what it likes: the daemon goes on, and counts no more than it looks at."""
    with BlockStore(mount.point, name) as store:
        wait_until(lambda: knows_absent(store, [b"first"]), "the names of the folder")
        mapped = store._resident._mapped[1][0].touches
        mapped._asked[:] = np.frombuffer(os.urandom(mapped._asked.size), np.uint8).reshape(mapped._asked.shape)
        mapped._asked_count[0] = (1 << 64) - 5
        json.loads((mount.point / ".kvfuse/stats").read_text())
        store.put(b"key", b"value")
        assert bytes(store.get(b"key") or b"") == b"value"


def test_what_was_acknowledged_is_never_absent(mount: KvfuseMount, name: str) -> None:
    """Names come while the index is made, while the folder's names are read for it, and later."""
    for folder in (f"{name}{number}" for number in range(6)):
        with BlockStore(mount.point, folder) as writer:
            keys = [b"%04d" % number for number in range(300)]
            writer.put_many(keys[:100], [b"x"] * 100)
            acknowledged: list[bytes] = []

            def put(writer: BlockStore = writer, keys: list[bytes] = keys, done: list[bytes] = acknowledged) -> None:
                for key in keys[100:]:
                    writer.put(key, b"x")
                    done.append(key)

            thread = threading.Thread(target=put)
            thread.start()
            with BlockStore(mount.point, folder) as reader:
                while thread.is_alive():
                    known = acknowledged[-3:]
                    assert reader.exists([*known, b"absent"]).tolist() == [*[True] * len(known), False]
                thread.join()
                assert reader.exists(keys).all()
